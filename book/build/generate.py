"""Writes what the pages include but nobody should type: tables and figures made from the harness's own numbers.

The strict build runs it first. Everything goes to book/.cache/generated/, so it can never be older than the code.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from book.build import museum
from book.figures import (
    attention_times,
    bench_results,
    claims_chart,
    data_charts,
    drawings,
    every_size,
    gradcheck_matrix,
    heroes,
    ladder,
    model_charts,
    online_steps,
    order_figures,
    ring_results,
    roofline,
    six_runs,
    speed_table,
    timing_pages,
    unlearning,
)
from book.figures.charts import Axis, Series, plot
from book.figures.markdown_table import table
from book.measure import ledger, record
from book.measure.ledger import GPT2_SMALL
from harness.check import options
from harness.puzzles.p22 import spec as p22

BOOK = Path(__file__).absolute().parent.parent

FUSION_SIZES = ((4, 4, 8, 16), (4, 64, 64, 64), (8, 128, 256, 256), (8, 512, 768, 768), GPT2_SMALL)
SIZES = {"chapter": p22.PUZZLE.dims, "GPT-2 small": GPT2_SMALL}
STEP_CASE = "hard values"
PROSE = ("after", "all", "rows", "times")  # in the labels of the stepper


def configuration() -> str:
    """The table of the chapter's constants."""
    rows = [
        ["Batch size", "`BATCH_SIZE`", str(p22.BATCH_SIZE), "B"],
        ["Sequence length", "`SEQ_LEN`", str(p22.SEQ_LEN), "S"],
        ["Hidden dimension", "`HIDDEN_DIM`", str(p22.HIDDEN_DIM), "H"],
        ["Output dimension", "`OUTPUT_DIM`", str(p22.OUTPUT_DIM), "O"],
        ["Epsilon", "`EPS`", np.format_float_scientific(p22.EPS, trim="-", exp_digits=1), "ε"],
        ["Data type", "", "float32", ""],
    ]
    return table(["what", "name", "value", "sign"], rows)


def dims_text(dims: tuple[int, ...]) -> str:
    """B = 4, S = 4, ..."""
    return ", ".join(
        f"{name}&nbsp;=&nbsp;{size:,}" for name, size in zip(p22.PUZZLE.dim_names, dims, strict=True)
    )


def short_dims(dims: tuple[int, ...]) -> str:
    """4 × 4, 8 → 16, on one line."""
    return "{:,} × {:,}, {:,} → {:,}".format(*dims).replace(" ", "&nbsp;")


def amount(count: float) -> str:
    """A number of bytes, as it is while small, in megabytes when large."""
    return f"{count:,} B" if count < 100_000 else f"{count / 1e6:,.1f} MB"


def count_text(count: int) -> str:
    """A count, in millions or billions when large."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} billion"
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:,.1f} million"


def moved_table() -> str:
    """The floor of bytes moved, unfused and fused, at the chapter's sizes and at GPT-2 small's."""
    rows = []
    for dims in (p22.PUZZLE.dims, GPT2_SMALL):
        for direction in ("forward", "backward"):
            unfused, fused = (ledger.moved(direction, variant, dims) for variant in ("unfused", "fused"))
            launches = "{} → {}".format(*(len(ledger.LAUNCHES[direction, v]) for v in ("unfused", "fused")))
            rows.append(
                [
                    dims_text(dims), direction, launches, amount(unfused), amount(fused),
                    f"{unfused / fused:.2f}",
                ]
            )  # fmt: skip
    return table(["sizes", "pass", "launches", "unfused", "fused", "ratio"], rows, "lllrrr")


def saved_table() -> str:
    """The bytes kept for the backward pass, by eager PyTorch and by the workbook's layer."""
    rows = []
    for dims in (p22.PUZZLE.dims, GPT2_SMALL):
        account = p22.ledger(dims, "float32")
        eager, ours = sum(account.saved_eager.values()), sum(account.saved_ours.values())
        rows.append([dims_text(dims), amount(eager), amount(ours), f"{eager / ours:.2f}"])
    return table(["sizes", "two PyTorch operations", "the workbook's layer", "ratio"], rows, "lrrr")


def recomputed_table() -> str:
    """How often an element of x_hat is computed, and the multiply-adds that go into dln."""
    rows = []
    for dims in (p22.PUZZLE.dims, GPT2_SMALL):
        B, S, H, O = dims
        for direction in ("forward", "backward"):
            counts = [ledger.normalisations(direction, variant, dims) for variant in ("unfused", "fused")]
            products = {"forward": (0, 0), "backward": (B * S * H * O, 3 * B * S * H * O)}[direction]
            rows.append([dims_text(dims), direction, *(count_text(n) for n in (*counts, *products))])
    head = ["sizes", "pass", "`x_hat`, unfused", "`x_hat`, fused", "`dln`, unfused", "`dln`, fused"]
    return table(head, rows, "llrrrr")


def measured(dtype: str) -> dict[tuple, dict[str, float]]:
    """The medians of the record `fusion`, in microseconds: (sizes, pass) -> who -> median."""
    batches = {(B * S, H, O): (B, S, H, O) for B, S, H, O in FUSION_SIZES}
    return {
        (batches[size], direction): times
        for (size, direction), times in bench_results.waited_passes(dtype).items()
    }


def duration(microseconds: float) -> str:
    """Microseconds, or milliseconds from a thousand on."""
    return f"{microseconds:,.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:,.1f} ms"


def times_table() -> str:
    """What a call took on a real GPU: fused, unfused and PyTorch's own operations."""
    rows = [
        [
            dtype,
            short_dims(dims),
            direction,
            *(duration(times[who]) for who in ("fused", "unfused", "eager")),
            f"{times['unfused'] / times['fused']:.2g}",
            f"{times['unfused'] / times['eager']:.2g}",
        ]
        for dtype in roofline.PEAKS
        for (dims, direction), times in measured(dtype).items()
    ]
    head = [
        "dtype", "B × S, H → O", "pass", "fused", "unfused", "PyTorch", "unfused / fused",
        "unfused / PyTorch",
    ]  # fmt: skip
    return table(head, rows, "lllrrrrr")


def roofline_table() -> str:
    """Operations, bytes and the least time of each pass on an H200."""
    rows = []
    for size, dims in SIZES.items():
        for dtype in roofline.PEAKS:
            works = {
                "LayerNorm alone": roofline.layernorm(dims, dtype),
                "both, forward": roofline.pair(dims, dtype, "forward"),
                "both, backward": roofline.pair(dims, dtype, "backward"),
            }
            for name, work in works.items():
                memory, arithmetic = work.least_seconds(dtype)
                rows.append(
                    [
                        size,
                        dtype,
                        name,
                        count_text(int(work.operations)),
                        amount(int(work.bytes)),
                        f"{work.intensity:.3g}",
                        "memory" if memory > arithmetic else "arithmetic",
                        short_time(max(memory, arithmetic)),
                    ]
                )
    head = ["sizes", "dtype", "pass", "operations", "bytes", "for each byte", "limited by", "at least"]
    return table(head, rows, "lllrrrlr")


def short_time(seconds: float) -> str:
    """A time with three digits, from nanoseconds on."""
    for unit, scale in (("ns", 1e-6), ("µs", 1e-3)):
        if seconds < 0.9995 * scale:
            return f"{seconds / scale * 1e3:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def roofline_chart() -> str:
    """The roofline with the measured forward passes."""
    times = {dtype: measured(dtype) for dtype in roofline.PEAKS}
    return roofline.chart(times, SIZES)


def ratio_chart() -> str:
    """How many times faster or slower the fused kernels are than the unfused ones, over the size of the product, in float32."""
    times = measured("float32")
    sizes = list(dict.fromkeys(dims for dims, _ in times))
    series = []
    for direction, marker, dash in (("forward", "o", "-"), ("backward", "s", "--")):
        both = [times[dims, direction] for dims in sizes]
        points = [
            (float(math.prod(d)), at["unfused"] / at["fused"]) for d, at in zip(sizes, both, strict=True)
        ]
        series.append(Series(direction, points, dash, marker))
    return plot(
        "Time of the unfused kernels divided by the time of the fused ones, over the size. The curves begin a little above 1 "
        "and fall far below it: the fused kernels become slower and slower.",
        series,
        Axis("size of the product in multiply-adds"),
        Axis("unfused time / fused time"),
        height=340,
        level=1,
    )


def options_table() -> str:
    """The options of `pNN`, in the words of its own help."""
    rows = []
    for action in options.parser(p22.PUZZLE)._actions:
        names = [name for name in action.option_strings if name.startswith("--") and name != "--help"]
        if not names:
            continue
        values = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
        if values is None:
            values = "" if action.nargs == 0 else action.dest.upper()
        meaning = action.help or ""
        if action.choices:
            meaning = ", ".join(f"`{choice}`" for choice in action.choices) + (
                f". {meaning}" if meaning else ""
            )
        rows.append([f"`{' '.join([*names, values]).strip()}`", meaning.replace("|", "\\|")])
    return table(["option", "meaning"], rows)


def steps() -> dict[str, str]:
    """The data of the stepper: every quantity of a hard case's row of least variance, from the exact reference."""
    case = next(case for case in p22.cases() if case.name == STEP_CASE)
    arrays = p22.inputs(case, "float32", 0)
    truth = {name: np.asarray(value, np.float64) for name, value in p22.PUZZLE.exact(arrays).items()}
    row = np.unravel_index(truth["rstd"].argmax(), truth["rstd"].shape)
    x, dy = arrays["input"][row], arrays["grad_output"][row]
    gamma, beta, W = arrays["ln_weight"], arrays["ln_bias"], arrays["linear_weight"]
    mean, rstd = truth["mean"][row], truth["rstd"][row]
    x_hat = (x - mean) * rstd
    ln_out, dln = x_hat * gamma + beta, dy @ W
    g = dln * gamma
    c1, c2 = (g * x_hat).mean(), g.mean()
    return {
        "statistics": numbers({"input": x, "x_hat": x_hat}, f"mean = {mean:.4f}, rstd = {rstd:.4f}"),
        "db": numbers({"dy": dy, "grad_bias after all rows": truth["grad_bias"]}),
        "dW": numbers({"ln_out": ln_out, f"dy[0] = {dy[0]:.3f} times ln_out": dy[0] * ln_out}),
        "dgamma": numbers({"dln": dln, "x_hat": x_hat, "dln * x_hat": dln * x_hat}),
        "dx": numbers(
            {"g": g, "g - c2": g - c2, "x_hat * c1": x_hat * c1, "dx": truth["grad_input"][row]},
            f"c1 = {c1:.4f}, c2 = {c2:.4f}",
        ),
    }


def numbers(rows: dict[str, np.ndarray], note: str = "") -> str:
    """A table of vectors for the stepper."""
    return online_steps.table(rows, note, code_names)


def code_names(label: str) -> list[str]:
    """The variables of the kernel that a label of the stepper speaks of, each once."""
    words = re.findall(r"[A-Za-z_]\w*", label)
    return list(dict.fromkeys("x" if word == "input" else word for word in words if word not in PROSE))


FILES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "options.md": options_table,
    "moved.md": moved_table,
    "saved.md": saved_table,
    "recomputed.md": recomputed_table,
    "times.md": times_table,
    "roofline.md": roofline_table,
    "ratio.svg": ratio_chart,
    "roofline.svg": roofline_chart,
    **drawings.FILES,
    **attention_times.FILES,
    **every_size.FILES,
    **ring_results.FILES,
    **data_charts.FILES,
    **model_charts.FILES,
    **order_figures.FILES,
    **heroes.FILES,
    **six_runs.FILES,
    **gradcheck_matrix.FILES,
    **unlearning.FILES,
    **{f"attention_{name}.svg": draw for name, draw in claims_chart.PICTURES.items()},
}


PAGES: tuple[Callable[[], Mapping[str, str | Callable[[], str]]], ...] = (
    lambda: {f"step_{name}.html": text for name, text in steps().items()},
    lambda: {f"online_{name}.html": text for name, text in online_steps.pages().items()},
    lambda: ladder.pages(ladder.found()),
    museum.pages,
    timing_pages.pages,
    speed_table.pages,
)
"""What makes several files at once."""


def main() -> None:
    """Writes all files, and beside them which records each was made from."""
    folder = BOOK / ".cache" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    made_from: dict[str, list[str]] = {}
    for make in (*(lambda name=name, make=make: {name: make()} for name, make in FILES.items()), *PAGES):
        record.used.clear()
        for name, text in make().items():
            text = text if isinstance(text, str) else text()
            (folder / name).write_text(text, encoding="utf-8")
            made_from[name] = sorted(record.used)
    (folder / "records.json").write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
