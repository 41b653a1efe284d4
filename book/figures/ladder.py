"""The climb from the chapter's first kernel to the fast variant: what each step promised, and what it took.

Predictions come from the shapes and from what an H200 can do at most. Results come from
the record `ladder`; every launch in it needs a prediction, and every launch that is spoken of must be in it.
"""

from dataclasses import dataclass, field

from book.figures import markdown_table, roofline
from book.figures.charts import Axis, Series, plot
from book.measure import ledger, record
from book.measure.record import Row

RECORD = "ladder"
DTYPE = "bfloat16"
BARE = "bare product"

MULTIPROCESSORS = 132
CLOCK = 1.98e9  # the highest clock of the multiprocessors, in Hz
SCHEDULERS = 4  # warp instructions that a multiprocessor can start in a clock
WARP = 32

# Arithmetic of the one-thread kernels for each pair of an output and a column. Forward: subtract, scale, multiply, add
# (gamma and beta), multiply by W, and four for the compensated sum. Backward: multiply and add to dW, and three times
# a multiplication and a compensated sum for dln.
ONE_THREAD = {"minimal_fused_forward": 9, "minimal_fused_backward": 2 + 3 * 5}


@dataclass(frozen=True)
class Launch:
    """One launch: what it took in microseconds, the least time that its prediction allows, and what limits it."""

    kernel: str
    took: float
    predicted: float
    limit: str


def memory(tensors: float) -> tuple[float, str]:
    """Microseconds for bytes, and what limits them."""
    return tensors / roofline.BANDWIDTH * 1e6, "memory"


def one_lane(kernel: str, dims: tuple[int, ...]) -> tuple[float, str]:
    """An instruction of a warp takes its turn, whether one of its lanes works or all 32."""
    B, S, H, O = dims
    turns = ONE_THREAD[kernel] * B * S * H * O
    return turns / (MULTIPROCESSORS * SCHEDULERS * CLOCK) * 1e6, "one lane of a warp"


def shared_memory(dims: tuple[int, ...]) -> tuple[float, str]:
    """Every multiply-add of the tiled product loads two values, and a load of a warp takes its multiprocessor a clock."""
    B, S, H, O = dims
    return 2 * B * S * H * O / WARP / (MULTIPROCESSORS * CLOCK) * 1e6, "shared memory"


def tensor_cores(dims: tuple[int, ...]) -> tuple[float, str]:
    """A product at the peak of the tensor cores."""
    B, S, H, O = dims
    return 2 * B * S * H * O / roofline.PEAKS[DTYPE] * 1e6, "tensor cores"


# The kernels of the fast variant, and the tensors that they move; products have none here.
FAST = {
    "layernorm_rows": ("x", "ln_out"),
    "ln_backward_rows": ("dln", "x", "dx", "ln_out"),
    "column_partials": ("dy",),
    "finish_sums": ("dgamma", "dbeta", "db"),
    "gemm_hopper_kernel": (),
    "gemm_kernel": (),
}


def full_name(cut: str, step: ledger.Launch | None) -> str:
    """The name of a launch, of which the profiler shows only the beginning.

    Args:
        cut: What is left of it, maybe with the first letters of a type behind it.
        step: Its place in the ledger, for the fused and the unfused kernels.

    Raises LookupError for a name that does not fit.
    """
    known = FAST if step is None else (step.name,)
    fitting = [name for name in known if name.startswith(cut) or cut.startswith(name)]
    if len(fitting) != 1:
        raise LookupError(f"{RECORD}: no prediction for the kernel {cut} in the place of {', '.join(known)}")
    return fitting[0]


def prediction(kernel: str, step: ledger.Launch | None, dims: tuple[int, ...]) -> tuple[float, str]:
    """The least microseconds of a launch, and what limits it; `step` is its place in the ledger, if it has one."""
    if step is not None and step.name in ONE_THREAD:
        return one_lane(step.name, dims)
    if step is not None and step.name == "matmul":
        return shared_memory(dims)
    if step is not None:
        names = (*step.reads, *step.writes, *step.adds)
        return memory(sum(ledger.size(name, dims, DTYPE) for name in names))
    if kernel.startswith("gemm"):
        return tensor_cores(dims)
    return memory(sum(ledger.size(name, dims, DTYPE) for name in FAST[kernel]))


@dataclass(frozen=True)
class Ladder:
    """All launches by algorithm and pass, and a row that says where they were measured."""

    launches: dict[tuple[str, str], list[Launch]]
    dims: tuple[int, ...]
    facts: Row
    bare: dict[str, float] = field(default_factory=dict)
    """Pass -> microseconds of its matrix products alone, PyTorch's own, where they were measured."""

    def of(self, algorithm: str, direction: str, *kernels: str) -> list[Launch]:
        """Some launches of a pass, all without names. Raises LookupError for what the file does not have."""
        launches = self.launches.get((algorithm, direction))
        if not launches:
            raise LookupError(f"{RECORD} has no rows of {algorithm}, {direction}")
        missing = [kernel for kernel in kernels if not any(launch.kernel == kernel for launch in launches)]
        if missing:
            raise LookupError(f"{RECORD}: {algorithm}, {direction}: no row of {', '.join(missing)}")
        return [launch for launch in launches if not kernels or launch.kernel in kernels]

    def product(self) -> Launch:
        """The one matrix product of the fast forward pass. Raises LookupError where there is none."""
        products = [x for x in self.of("fast", "forward") if x.kernel.startswith("gemm")]
        if len(products) != 1:
            raise LookupError(f"{RECORD}: fast, forward: {len(products)} matrix products")
        return products[0]

    def took(self, algorithm: str, direction: str, *kernels: str) -> float:
        """The microseconds of some launches together."""
        return sum(launch.took for launch in self.of(algorithm, direction, *kernels))


def load(rows: list[Row]) -> Ladder:
    """Of the rows of a record. Raises LookupError where they lack a launch of the ledger or have one without a prediction."""
    dims = tuple(int(rows[0][letter]) for letter in "BSHO")
    launches = {}
    for algorithm in ("fused", "unfused", "fast"):
        for direction in ("forward", "backward"):
            chosen = [row for row in rows if (row["algorithm"], row["pass"]) == (algorithm, direction)]
            ours = without_others(chosen)
            steps = ledger.LAUNCHES.get((direction, algorithm), [None] * len(ours))
            if len(steps) != len(ours) or not ours:
                raise LookupError(f"{RECORD}: {algorithm}, {direction}: {len(ours)} rows")
            timed = []
            for row, step in zip(ours, steps, strict=True):
                name = full_name(row["kernel"], step)
                timed.append(Launch(name, float(row["median_us"]), *prediction(name, step, dims)))
            launches[algorithm, direction] = timed
    bare: dict[str, float] = {}
    for row in rows:
        if row["algorithm"] == BARE:
            bare[row["pass"]] = bare.get(row["pass"], 0) + float(row["median_us"])
    return Ladder(launches, dims, rows[0], bare)


def without_others(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of our kernels. Raises LookupError where others, such as a library's, take more than a twentieth."""
    ours = [row for row in rows if not row["kernel"].startswith("other ")]
    total, mine = (sum(float(row["median_us"]) for row in some) for some in (rows, ours))
    if total - mine > total / 20:
        names = {row["kernel"] for row in rows if row not in ours}
        raise LookupError(f"{RECORD}: {', '.join(sorted(names))}: {total - mine:.0f} of {total:.0f} us")
    return ours


# ---- What the chapter shows ---------------------------------------------------------------------------------


def duration(microseconds: float) -> str:
    """Nanoseconds, microseconds or milliseconds, with three digits."""
    if microseconds < 0.9995:
        return f"{microseconds * 1000:#.3g}".rstrip(".") + " ns"
    if microseconds < 999.5:
        return f"{microseconds:#.3g}".rstrip(".") + " µs"
    return f"{microseconds / 1000:,.4g} ms" if microseconds > 99_950 else f"{microseconds / 1000:#.3g} ms"


def times(ratio: float) -> str:
    """A ratio with two digits."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"


def table(launches: list[Launch], overlap: bool = False) -> str:
    """Prediction and result of some launches, as Markdown.

    Args:
        launches: In their order.
        overlap: Whether one may begin before the one in front of it is done; their times then have no sum.
    """
    rows = [(f"`{x.kernel}`", x.limit, x.predicted, x.took) for x in launches]
    if len(launches) > 1 and not overlap:
        rows.append(("together", "", *totals(launches)))
    head = ["launch", "limited by", "predicted", "measured", "times the prediction"]
    body = [
        [name, limit, duration(floor), duration(took), times(took / floor)]
        for name, limit, floor, took in rows
    ]
    return markdown_table.table(head, body, "llrrr")


def totals(launches: list[Launch]) -> tuple[float, float]:
    """The predicted and the measured microseconds of some launches together."""
    return sum(x.predicted for x in launches), sum(x.took for x in launches)


def versions(ladder: Ladder) -> dict[str, tuple[float, float]]:
    """The forward pass after each step: its name, and predicted and measured microseconds of its launches together.

    Steps 3 and 4 exchange launches of the pass before them; their totals are sums, not runs.
    """
    unfused = ladder.of("unfused", "forward")
    rows = ("row_statistics", "layernorm")
    vectorised = [x for x in unfused if x.kernel not in rows] + ladder.of("fast", "forward", "layernorm_rows")
    product = ladder.product()
    (bias,) = ladder.of("unfused", "forward", "add_bias")
    steps = {
        "1 fused": ladder.of("fused", "forward"),
        "2 tiles": unfused,
        "3 vectors": vectorised,
        "4 wgmma": [*ladder.of("fast", "forward", "layernorm_rows"), product, bias],
        "5 epilogue": ladder.of("fast", "forward"),
    }
    return {name: totals(launches) for name, launches in steps.items()}


def climb(ladder: Ladder) -> str:
    """The forward pass after each step, predicted and measured, as a chart."""
    steps = versions(ladder)
    words = "; ".join(f"{name}: {duration(took)}" for name, (_, took) in steps.items())
    predicted, took = (
        [(number, both[which]) for number, both in enumerate(steps.values())] for which in (0, 1)
    )
    return plot(
        f"Time of the forward pass after each step, on a logarithmic axis, falling from step to step. {words}.",
        [Series("measured", took, "-", "o"), Series("predicted", predicted, "--", "o", hollow=True)],
        Axis(
            "",
            log=False,
            ends=(-0.3, len(steps) - 0.4),
            ticks={float(number): name for number, name in enumerate(steps)},
        ),
        Axis(
            "forward pass",
            ticks={10.0**n: duration(10.0**n).replace(".00", "").replace(".0", "") for n in range(1, 7)},
        ),
        height=340,
        notes=[(point, duration(point[1])) for point in took],
    )


def found() -> Ladder:
    """What was measured."""
    return load(record.rows(RECORD))


def pages(ladder: Ladder) -> dict[str, str]:
    """What the chapter includes, by file name. Raises LookupError where the measurements lack something."""
    said = results(ladder)
    tables = {
        "1": table(ladder.of("fused", "forward")) + "\n" + table(ladder.of("fused", "backward")),
        "2": table(ladder.of("unfused", "forward")),
        "3": table(ladder.of("fast", "forward", "layernorm_rows")),
        "4": table([ladder.product()]),
        "5": table(ladder.of("unfused", "forward", "add_bias")),
        "6": table(ladder.of("fast", "backward"), overlap=True),
    }
    label = "**Result.**"
    return {
        "ladder_where.md": where(ladder),
        "ladder_6_unfused.md": table(ladder.of("unfused", "backward")),
        "ladder_forward.md": table(ladder.of("fast", "forward")),
        "ladder.svg": climb(ladder),
        **{
            f"ladder_{step}.md": f"{label}\n\n{text}\n{said.get(step, '')}\n" for step, text in tables.items()
        },
    }


def where(ladder: Ladder) -> str:
    """A paragraph about what was measured."""
    sizes = ", ".join(f"{letter} = {size:,}" for letter, size in zip("BSHO", ladder.dims, strict=True))
    return (
        "The last column of each table is the measured time divided by the prediction. A number near 1 says that the "
        "prediction was right and that nothing is left to gain without another idea. A large number says that something else "
        "holds the kernel up as well, but not what it is. The times are those of single launches under PyTorch's profiler, on "
        f"an {ladder.facts['device']}, {ladder.facts['dtype']}, {sizes}, medians of several calls, {ladder.facts['date']}, PyTorch {ladder.facts['torch']}.\n"
    )


def results(ladder: Ladder) -> dict[str, str]:
    """What the measurements say of steps that replace launches of earlier ones."""
    rows = ladder.took("unfused", "forward", "row_statistics", "layernorm")
    fast = ladder.took("fast", "forward", "layernorm_rows")
    tiled = ladder.took("unfused", "forward", "transpose", "matmul")
    saved = ladder.took("unfused", "forward", "add_bias")
    return {
        "3": f"The two launches that it replaces needed {duration(rows)}, {times(rows / fast)} times as long.",
        "4": f"Transpose and tiled product needed {duration(tiled)}, {times(tiled / ladder.product().took)} times as "
        "long.",
        "5": f"That launch of {duration(saved)} is gone. The product with the bias in it is the one measured in step 4.",
    }
