"""Figures that only the two essays show."""

import re

from book.figures.charts import over_steps
from book.figures.figures import Drawing, svgs
from book.measure import outputs

POSITIONS, HEAD, TILE = 8192, 64, 128


def descents() -> list[list[float]]:
    """Step, loss and mean by the gradient, loss and mean by the tutorial's formula, from the recorded run."""
    lines = re.findall(r"^ +\d.*$", outputs.load("row_descent").text, re.M)
    return [[float(number) for number in line.split()] for line in lines]


def descent(
    column: int, name: str, y: tuple[float, float], legend: tuple[float, float], y_ticks: dict[float, str]
) -> str:
    """One quantity of both rows over the steps. Both axes are logarithmic, so step 0 is left out."""
    rows = [row for row in descents() if row[0]]
    last, ends = rows[-1][0], (rows[-1][column], rows[-1][column + 2])
    label = f"{name} over {last:.0f} steps: it ends at {ends[0]:g} by the gradient and at {ends[1]:g} by the tutorial's formula."
    curves = {
        words: [(row[0], row[at]) for row in rows]
        for words, at in (("gradient", column), ("tutorial", column + 2))
    }
    return over_steps(label, name, curves, y, legend, y_ticks)


def descent_loss() -> str:
    """The loss of both rows."""
    return descent(1, "loss", (0.5, 10), (0.87, 1.35), {0.5: "0.5", 1: "1", 2: "2", 5: "5", 10: "10"})


def descent_mean() -> str:
    """The mean of both rows."""
    ticks = {0.01: "0.01", 0.1: "0.1", 1: "1", 10: "10", 100: "100"}
    return descent(2, "mean of the row", (0.01, 100), (40, 3), ticks)


def to_scale() -> str:
    """The scores of a head of 8,192 positions, what goes in and comes out, and a tile, all to one scale."""
    side, top = 300, 40
    width, tile = side * HEAD / POSITIONS, side * TILE / POSITIONS
    drawing = Drawing(
        top + side + 12,
        f"Drawn to scale: a square of {POSITIONS:,} by {POSITIONS:,} scores; beside it Q, K, V and O, four lines as tall as the square and "
        f"{HEAD} numbers wide, which is a {POSITIONS // HEAD}th of it; and inside it a dot, a tile of {TILE} by {TILE}.",
    )
    drawing.text(side / 2 + 6, 18, f"P: {POSITIONS:,} × {POSITIONS:,}")
    drawing.box(6, top, side, side, shade=0.12, radius=0)
    x, y = 6 + side * 0.62, top + side * 0.4
    drawing.box(x, y, tile, tile, shade=1, thick=0, radius=0)
    drawing.arrow(x - 40, y + 44, x - 3, y + tile + 4)
    drawing.text(x - 44, y + 62, f"a tile: {TILE} × {TILE}")
    for number, name in enumerate("QKVO"):
        left = side + 40 + 38 * number
        drawing.box(left, top, width, side, shade=1, thick=0, radius=0)
        drawing.text(left + width / 2, 32, name)
    drawing.text(side + 98, 12, f"{HEAD} wide each")
    return drawing.svg()


FILES = svgs(descent_loss, descent_mean, to_scale)
