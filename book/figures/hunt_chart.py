"""Losses of puzzle 21's training runs with wrong backward passes, from the record `hunt_curves`."""

from book.figures.charts import over_steps
from book.figures.curve_chart import thinned
from book.measure import record

WINDOW = 5
"""A point of a curve is the mean of so many steps."""
NAMES = {
    "lowrank_none_for_all": "None for all",
    "softmax_probabilities_twice": "probabilities twice",
    "attention_query_scale": "scale of dq missing",
}
"""Wrong backward pass -> what the legend calls it."""


def chart() -> str:
    """The curves of the right model and of three wrong ones over the steps, both axes logarithmic."""
    runs: dict[str, list[tuple[int, float]]] = {"right": [], **{name: [] for name in NAMES.values()}}
    for row in record.rows("hunt_curves"):
        if row["bug"] in NAMES:
            runs[NAMES[row["bug"]]].append((int(row["step"]) + 1, float(row["wrong"])))
        if row["bug"] == next(iter(NAMES)):
            runs["right"].append((int(row["step"]) + 1, float(row["right"])))
    return over_steps(
        "Training losses over the steps. The right model and the one without the scale of dq fall together; the one with None "
        "for all falls a little later; the one with probabilities multiplied twice falls at first, then rises and stays high.",
        "loss",
        {name: thinned(run, WINDOW) for name, run in runs.items()},
        (2e-4, 4.0),
        (0.03, 2.6),
    )
