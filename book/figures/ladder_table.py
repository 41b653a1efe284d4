"""The ladder as one table for each pass: what a step changes, who reads what, the prediction with its arithmetic, what it took.

Times come from the record `ladder`, the benchmark's from the record `bench` where it has the same size,
the counter from the recorded runs of `--profile`.
"""

import html
from collections.abc import Callable
from dataclasses import dataclass

from book.figures.figures import Drawing
from book.figures.ladder import (
    CLOCK,
    MULTIPROCESSORS,
    ONE_THREAD,
    SCHEDULERS,
    WARP,
    Ladder,
    Launch,
    duration,
    totals,
)
from book.figures.roofline import BANDWIDTH, PEAKS
from book.measure import outputs, record

GHZ, TB = CLOCK / 1e9, BANDWIDTH / 1e12
RUN, SUM = "a run", "a sum: its launches come from two runs"


@dataclass(frozen=True)
class Step:
    """A column of the table.

    Attributes:
        name: What the step is called.
        code: What is different in the code.
        picture: What one instruction of a warp touches.
        arithmetic: The prediction of the launch that takes longest, as a calculation.
        launches: Those of the pass after this step.
        made_of: A run, or a sum of launches of two.
        counted: Launches of the recorded profiles: variant, first and last place among its launches.
        flags: How its kernels are checked.
        overlap: Whether the launches overlap, so that only the benchmark knows the time of the pass.
    """

    name: str
    code: str
    picture: str
    arithmetic: str
    launches: list[Launch]
    made_of: str
    counted: tuple[tuple[str, int, int], ...]
    flags: str
    overlap: bool = False


def forward(ladder: Ladder) -> list[Step]:
    """The steps of the forward pass."""
    unfused = ladder.of("unfused", "forward")
    plain = [launch for launch in unfused if launch.kernel not in ("row_statistics", "layernorm")]
    rows = ladder.of("fast", "forward", "layernorm_rows")
    bias = [launch for launch in unfused if launch.kernel == "add_bias"]
    M, H, O = sizes(ladder)
    tensor = f"2 × {M} × {H} × {O} ÷ {PEAKS['bfloat16'] / 1e12:.0f} T/s"
    return [
        Step(
            "1 minimal fused", "one thread does a row: statistics, normalisation, all outputs", lanes(1, 1),
            f"{ONE_THREAD['minimal_fused_forward']} × {M} × {H} × {O} turns {turns()}",
            ladder.of("fused", "forward"), RUN, (("fused", 0, 1),), "--fused",
        ),
        Step(
            "2 one block for a row", "128 threads for a row; the product by tiles of shared memory, five launches", lanes(32, 1),
            f"2 × {M} × {H} × {O} ÷ {WARP} loads ÷ ({MULTIPROCESSORS} × {GHZ:g} GHz)",
            unfused, RUN, (("unfused", 0, 5),), "--unfused",
        ),
        Step(
            "3 vectorised rows", "16 bytes a load, the row stays in registers; one launch for two", lanes(32, 8),
            f"rows: 2 × {M} × {H} × 2 B ÷ {TB:g} TB/s; the product as before",
            [*rows, *plain], SUM, (("fast", 0, 1), ("unfused", 2, 5)), "--fast",
        ),
        Step(
            "4 tensor cores", "wgmma multiplies, the tensor memory accelerator fetches; no transpose", tile(bias=False),
            tensor, [*rows, ladder.product(), *bias], SUM, (("fast", 0, 2), ("unfused", 4, 5)), "--fast",
        ),
        Step(
            "5 epilogue", "the bias is added before a tile is rounded and stored; one launch less", tile(bias=True),
            tensor, ladder.of("fast", "forward"), RUN, (("fast", 0, 2),), "--fast",
        ),
    ]  # fmt: skip


def backward(ladder: Ladder) -> list[Step]:
    """The steps of the backward pass, which has the same ideas in three kernels' worth of code."""
    M, H, O = sizes(ladder)
    unfused = ladder.of("unfused", "backward")
    fused = ladder.of("fused", "backward")
    return [
        Step(
            "1 minimal fused", "one thread does a row; what rows share is added by atomics", lanes(1, 1),
            f"{ONE_THREAD['minimal_fused_backward']} × {M} × {H} × {O} turns {turns()}",
            fused, RUN, (("fused", 1, 4),), "--backward --fused",
        ),
        Step(
            "2 one block for a row", "eight launches; sums over rows by one block for some columns, no atomics", lanes(32, 1),
            f"2 products: 2 × 2 × {M} × {H} × {O} ÷ {WARP} loads ÷ ({MULTIPROCESSORS} × {GHZ:g} GHz)",
            unfused, RUN, (("unfused", 5, 13),), "--backward --unfused",
        ),
        Step(
            "6 two stages", "two products and one kernel for all that rows need; partial sums, added in a fixed order", tile(bias=False),
            f"2 products: 2 × 2 × {M} × {H} × {O} ÷ {PEAKS['bfloat16'] / 1e12:.0f} T/s; rows: 4 × {M} × {H} × 2 B ÷ {TB:g} TB/s",
            ladder.of("fast", "backward"), "the benchmark's graph, in two branches", (("fast", 2, 6),),
            "--backward --fast", overlap=True,
        ),
    ]  # fmt: skip


def sizes(ladder: Ladder) -> tuple[str, str, str]:
    """Rows, H and O as they are printed."""
    B, S, H, O = ladder.dims
    return f"{B * S:,}", f"{H:,}", f"{O:,}"


def turns() -> str:
    """What the turns of a warp are divided by."""
    return f"÷ ({MULTIPROCESSORS} × {SCHEDULERS} × {GHZ:g} GHz)"


# ---- Pictures: one instruction of a warp --------------------------------------------------------------------


def lanes(active: int, wide: int) -> str:
    """The 32 lanes of a warp, those that work filled, above the elements that one of its loads fetches."""
    drawing = Drawing(
        64,
        f"{active} of 32 lanes of a warp work; one load of the warp fetches {active * wide} elements.",
        width=132,
    )
    for lane in range(32):
        drawing.box(2 + lane * 4, 4, 3, 14, shade=0.75 if lane < active else 0, thick=0.4, radius=0)
    for element in range(32):
        share = min(wide, 8) / 8 if element < active else 0
        drawing.box(2 + element * 4, 40 - 14 * share, 3, 14 * share or 1, shade=0.35, thick=0.4, radius=0)
    drawing.text(
        66, 58, "1 lane, 1 element" if active == 1 else f"{active} lanes, {active * wide} elements", size=9
    )
    return drawing.svg().strip()


def tile(bias: bool) -> str:
    """The two factors of one wgmma and its result, with a row of the bias over it or not."""
    drawing = Drawing(
        64,
        "One wgmma: 64 rows by 256 columns, 16 deep" + ("; the bias is added to the sums." if bias else "."),
        width=132,
    )
    drawing.box(4, 18, 8, 26, shade=0.35, thick=0.6)
    drawing.box(18, 6, 110, 8, shade=0.35, thick=0.6)
    drawing.box(18, 18, 110, 26, shade=0.75, thick=0.6)
    if bias:
        drawing.box(18, 40, 110, 4, shade=0, thick=1.6)
    drawing.text(66, 58, "64 × 256 × 16, " + ("plus bias" if bias else "one wgmma"), size=9)
    return drawing.svg().strip()


# ---- Rows ---------------------------------------------------------------------------------------------------


def bench_times(ladder: Ladder, direction: str) -> dict[str, float]:
    """Candidate -> microseconds of a pass in the benchmark's graph column at the ladder's size."""
    B, S, H, O = ladder.dims
    wanted = (str(B * S), str(H), str(O), direction, "graph")
    return {
        row["candidate"]: float(row["median_us"])
        for row in record.rows("bench")
        if (row["M"], row["H"], row["O"], row["pass"], row["column"]) == wanted and row["median_us"]
    }


def moved(step: Step) -> str:
    """Bytes that the launches moved on the virtual GPU, over those that their shapes predict."""
    pairs = [pair for variant, start, stop in step.counted for pair in profiled(variant)[start:stop]]
    assert len(pairs) == sum(stop - start for _, start, stop in step.counted), step.name
    return f"{sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs):.1f}"


def profiled(variant: str) -> list[tuple[int, int]]:
    """The bytes moved and predicted of each launch of a variant, in order, from the recorded profiles."""
    text = outputs.load("profile_fast" if variant == "fast" else "profile").text
    section = text.split(f"{variant}: ")[1].split("\n\n")[0]
    # A table wider than the recorded page goes on below itself; the bytes stand in its first part.
    first = section.split("   launch ")[1].splitlines()[1:]
    cells = [line.replace(",", "").split() for line in first]
    return [(int(row[3]) + int(row[4]), int(row[5])) for row in cells]


def took(step: Step, bench: dict[str, float]) -> float:
    """Microseconds of the pass after a step; where its launches overlap, the benchmark's."""
    return bench["fast"] if step.overlap else totals(step.launches)[1]


def of_bare(step: Step, ladder: Ladder, direction: str, bench: dict[str, float]) -> str:
    """The time of the bare products as a share of the pass's, both taken in the same way."""
    share = (bench["bare GEMMs"] if step.overlap else ladder.bare[direction]) / took(step, bench) * 100
    return f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"


def table(ladder: Ladder, direction: str, steps: list[Step]) -> str:
    """One pass as an HTML table: a column for each step."""
    bench = bench_times(ladder, direction)
    rows: dict[str, Callable[[Step], str]] = {
        "in the code": lambda step: html.escape(step.code),
        "one instruction": lambda step: step.picture,
        "its arithmetic": lambda step: step.arithmetic,
        "predicted, all launches": lambda step: duration(totals(step.launches)[0]),
        "took": lambda step: duration(took(step, bench)),
        "which is": lambda step: step.made_of,
        "of the bare product": lambda step: of_bare(step, ladder, direction, bench),
        "bytes moved, times the shapes'": moved,
        "check it": lambda step: f"<code>p22 --solution {step.flags}</code>",
    }
    head = "".join(f"<th>{step.name}</th>" for step in steps)
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{cell(step)}</td>' for step in steps)}</tr>"
        for name, cell in rows.items()
    )
    return f'<div class="table-wrapper ladder-table"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'


def beside(ladder: Ladder) -> str:
    """The fast pass and the bare products in the benchmark at this size, in a sentence."""
    both = {way: bench_times(ladder, way) for way in ("forward", "backward")}
    said = [
        f"{way} {duration(by_name['fast'])}, the bare products {duration(by_name['bare GEMMs'])} "
        f"({by_name['bare GEMMs'] / by_name['fast']:.0%})".replace("%", "&nbsp;%")
        for way, by_name in both.items()
    ]
    return (
        f"The [benchmark](benchmark.md) has this size too, as CUDA graphs that are replayed: {'; '.join(said)}. "
        "A graph of the backward pass launches other kernels than [step 6](#6-two-stages-and-the-whole-backward-pass) lists, and none of this is "
        "timed by the profiler, so the numbers differ.\n"
    )


def pages(ladder: Ladder) -> dict[str, str]:
    """What the chapter includes, by file name."""
    return {
        "ladder_table_forward.html": table(ladder, "forward", forward(ladder)),
        "ladder_table_backward.html": table(ladder, "backward", backward(ladder)),
        "ladder_beside.md": beside(ladder),
    }
