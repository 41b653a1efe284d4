"""The losses of training runs with a wrong solution beside the right one's, from the records of curves."""

from book.figures.charts import Axis, LogChart
from book.measure import record
from harness.check import zoo

RECORDS = {"p21": "hunt_curves", "p22": "museum_curves"}
POINTS = 30
"""A curve has at most so many points: the means of the steps between."""
Curve = list[tuple[int, float]]


def runs(puzzle: str) -> dict[str, tuple[Curve, Curve]]:
    """Wrong solution -> the right run's losses and its own, each at its step; of a puzzle that was not trained, none."""
    if puzzle not in RECORDS:
        return {}
    by_bug: dict[str, list[tuple[int, float, float]]] = {}
    for row in record.rows(RECORDS[puzzle]):
        point = int(row["step"]), float(row["right"]), float(row["wrong"])
        by_bug.setdefault(row["bug"], []).append(point)
    for name, run in by_bug.items():
        if run[0][0] == 0:  # steps are counted from 1 here
            by_bug[name] = [(step + 1, right, own) for step, right, own in run]
    return {
        name: (
            thinned([(step, right) for step, right, _ in run]),
            thinned([(step, own) for step, _, own in run]),
        )
        for name, run in by_bug.items()
    }


def thinned(curve: Curve, window: int = 0) -> Curve:
    """Means of neighbouring points, by `window`, or so many that POINTS are left; each stands at the last of its steps."""
    each = window or -(-len(curve) // POINTS)
    parts = (curve[start : start + each] for start in range(0, len(curve), each))
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]


def of(wrong: zoo.WrongKernel) -> tuple[str, str]:
    """A small picture of a wrong solution's loss beside the right one's, and a sentence about it; "" where there is none."""
    if wrong.name not in runs(wrong.puzzle):
        return "", wrong.curve
    right, own = runs(wrong.puzzle)[wrong.name]
    return drawn(right, own), wrong.curve or sentence(right[-1][1], own[-1][1])


def sentence(right: float, own: float) -> str:
    """How a run ends beside the right one."""
    if 0.95 < own / right < 1.05:
        return "it falls as the right one's does, and ends within 5% of it."
    ratio = own / right
    return (
        f"it ends at {own:.2g}, {ratio:,.2g} times the right one's {right:.2g}."
        if ratio < 100
        else "it rises."
    )


def drawn(right: Curve, own: Curve) -> str:
    """Both curves, the right one dashed; the axis of losses is logarithmic."""
    low, high = min(loss for _, loss in right + own), max(loss for _, loss in right + own)
    first, last = own[0][0], own[-1][0]
    drawing = LogChart(
        170,
        f"Losses: the right run ends at {right[-1][1]:.2g}, the wrong one at {own[-1][1]:.2g}.",
        Axis("step", float(first), float(last), {float(first): f"{first}", float(last): f"{last}"}),
        Axis("loss", low / 1.5, high * 1.5),
        width=420,
    )
    drawing.curve(right, dash="3 3")
    drawing.curve(own, thick=2)
    return drawing.svg().strip()


WINNER = "dx_means_over_output"
"""A wrong kernel of puzzle 22 whose run ends below the right one's."""


def one_is_wrong() -> str:
    """The right run and the one of WINNER, without saying which is which."""
    curves = runs("p22")[WINNER]
    (first, *_), (*_, last) = curves[0], curves[0]
    losses = [loss for curve in curves for _, loss in curve]
    drawing = LogChart(
        300,
        "Two falling losses, A and B: "
        + "; ".join(f"{name} ends at {curve[-1][1]:.2g}" for name, curve in zip("AB", curves, strict=True)),
        Axis(
            "step",
            float(first[0]),
            float(last[0]) * 1.15,
            {float(step): str(step) for step in (10, 20, 50, 100, 200, 300)},
        ),
        Axis("loss", min(losses) / 1.3, max(losses) * 1.3),
    )
    for name, curve, dash in zip("AB", curves, ("", "6 4"), strict=True):
        drawing.curve(curve, dash=dash, thick=2)
        drawing.note(*curve[-1], name, dx=6)
    return drawing.svg()


def together() -> str:
    """The losses of all wrong runs of puzzle 22 in one picture, thin, and the right one's, thick. What leaves it is cut off."""
    every = runs("p22")
    rows, (right, _) = [own for _, own in every.values()], next(iter(every.values()))
    first, last = right[0][0], right[-1][0]
    fall, below = (sum(own[-1][1] < end for own in rows) for end in (right[0][1], right[-1][1]))
    label = f"Losses of {len(rows)} runs with a wrong kernel each: {fall} fall, and {below} end below the right run's."
    ticks = {float(step): str(step) for step in (10, 20, 50, 100, 200, 300)}
    high = 2.0
    drawing = LogChart(330, label, Axis("step", float(first), float(last), ticks), Axis("loss", 0.003, high))
    for own in rows:
        kept = [point for point in own if point[1] < high]
        drawing.polyline((drawing.place(*point) for point in kept), opacity=0.5)
    drawing.curve(right, thick=4)
    return drawing.svg()
