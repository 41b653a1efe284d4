"""Writes what the pages include but nobody should type: tables and figures made from the harness's own numbers.

The strict build runs it first. Everything goes to book/.cache/generated/, so it can never be older than the code.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from book.build import museum
from book.figures import (
    attention_drawings,
    attention_times,
    claims_chart,
    data_charts,
    drawings,
    every_size,
    gradcheck_matrix,
    heroes,
    kernel_drawings,
    model_charts,
    online_steps,
    order_figures,
    ring_results,
    six_runs,
    speed_table,
    timing_pages,
    unlearning,
    worklog_results,
)
from book.figures.markdown_table import table
from book.figures.online_steps import table as vectors
from book.measure import record
from harness.check import options
from harness.puzzles.p22 import spec as p22

BOOK = Path(__file__).absolute().parent.parent

STEP_CASE = "hard values"


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
    return table(["what", "name", "value", "symbol"], rows)


def options_table() -> str:
    """The options of `pNN`, in the words of its own help."""
    rows = []
    for action in options.make_parser(p22.PUZZLE)._actions:
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


@cache
def steps() -> dict[str, str]:
    """The data of the stepper: every quantity of a hard case's row of least variance, from the exact reference."""
    case = next(case for case in p22.cases() if case.name == STEP_CASE)
    arrays = p22.inputs(case, "float32", 0)
    truth = {name: np.asarray(value, np.float64) for name, value in p22.PUZZLE.compute_exact(arrays).items()}
    row = np.unravel_index(truth["rstd"].argmax(), truth["rstd"].shape)
    x, dy = arrays["input"][row], arrays["grad_output"][row]
    gamma, beta, W = arrays["ln_weight"], arrays["ln_bias"], arrays["linear_weight"]
    mean, rstd = truth["mean"][row], truth["rstd"][row]
    x_hat = (x - mean) * rstd
    ln_out, dln = x_hat * gamma + beta, dy @ W
    g = dln * gamma
    c1, c2 = (g * x_hat).mean(), g.mean()
    return {
        "statistics": vectors(
            {"input": x, "x_hat": x_hat}, f"mean = {mean:.5f}, rstd = {rstd:.4f}", {"input": 5}
        ),
        "db": vectors({"dy": dy, "grad_bias after all rows": truth["grad_bias"]}),
        "dW": vectors({"ln_out": ln_out, f"dy[0] = {dy[0]:.3f} times ln_out": dy[0] * ln_out})
        + drawings.outer_product(dy, ln_out),
        "dgamma": vectors({"dln": dln, "x_hat": x_hat, "dln * x_hat": dln * x_hat}),
        "dx": vectors(
            {"g": g, "g - c2": g - c2, "x_hat * c1": x_hat * c1, "dx": truth["grad_input"][row]},
            f"c1 = {c1:.4f}, c2 = {c2:.4f}",
        ),
    }


FIGURES = (
    attention_drawings, attention_times, claims_chart, data_charts, drawings, every_size, gradcheck_matrix, heroes, kernel_drawings,
    model_charts, online_steps, order_figures, ring_results, six_runs, speed_table, timing_pages, unlearning,
    worklog_results, museum,
)  # fmt: skip
FILES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "options.md": options_table,
    **{
        f"step_{name}.html": lambda name=name: steps()[name]
        for name in ("statistics", "db", "dW", "dgamma", "dx")
    },
    **{name: make for module in FIGURES for name, make in module.FILES.items()},
}


def main() -> None:
    """Writes all files, and beside them which records each was made from."""
    folder = BOOK / ".cache" / "generated"
    shutil.rmtree(folder, ignore_errors=True)  # a page that includes a file of an older build must fail
    folder.mkdir(parents=True)
    made_from: dict[str, list[str]] = {}
    for name, make in FILES.items():
        record.used.clear()
        (folder / name).write_text(make(), encoding="utf-8")
        made_from[name] = sorted(record.used)
    (folder / "records.json").write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
