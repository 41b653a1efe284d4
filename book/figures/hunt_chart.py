"""Losses of puzzle 21's training runs with wrong backward passes, from the record `hunt_curves`."""

from collections.abc import Iterator

from book.figures.charts import LogChart
from book.measure import record

WINDOW = 5
"""A point of a curve is the mean of so many steps."""
DASHES = {
    "softmax_probabilities_twice": ("2 3", "probabilities twice"),
    "lowrank_none_for_all": ("8 4", "None for all"),
    "attention_query_scale": ("8 3 2 3", "scale of dq missing"),
}
"""Wrong backward pass -> how its curve is dashed, and what the legend calls it."""


def losses() -> dict[str, list[float]]:
    """The losses step by step of "right" and of each wrong one."""
    by_bug: dict[str, list[float]] = {"right": []}
    for row in record.rows("hunt_curves"):
        by_bug.setdefault(row["bug"], []).append(float(row["wrong"]))
        if row["bug"] == next(iter(DASHES)):
            by_bug["right"].append(float(row["right"]))
    return by_bug


def windows(curve: list[float]) -> Iterator[tuple[float, float]]:
    """Points of a curve: the last step of each window, counted from 1, and the mean loss in it."""
    for start in range(0, len(curve), WINDOW):
        part = curve[start : start + WINDOW]
        yield float(start + len(part)), sum(part) / len(part)


def chart() -> str:
    """The four curves over the steps, both axes logarithmic."""
    curves = losses()
    steps = len(curves["right"])
    drawing = LogChart(
        (720, 340),
        "Training losses over the steps. The right model and the one without the scale of dq fall together; the one with None "
        "for all falls a little later; the one with probabilities multiplied twice falls at first, then rises and stays high.",
        x=(float(WINDOW), float(steps)),
        y=(2e-4, 4.0),
        x_name="step",
        y_name="loss",
        x_ticks={float(step): f"{step}" for step in (5, 10, 20, 50, 100, 200, 300) if step <= steps},
    )
    drawing.curve(windows(curves["right"]), thick=2.6)
    for name, (dash, _) in DASHES.items():
        drawing.curve(windows(curves[name]), dash=dash)
    legend = [("", "right", 2.6), *((dash, words, 1.6) for dash, words in DASHES.values())]
    for number, (dash, words, thick) in enumerate(legend):
        y = 0.03 / 2.6**number
        drawing.curve([(6.0, y), (9.0, y)], dash=dash, thick=thick)
        drawing.note(9.0, y, words)
    return drawing.svg()
