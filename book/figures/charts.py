"""Charts with logarithmic axes, on the same drawing as the figures: everything in the text colour, one line of SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from book.figures.figures import NARROW, Drawing

LEFT, RIGHT, TOP, BOTTOM = 76, 20, 16, 52  # margins, in pixels
FAINT = 0.25


class Axis(NamedTuple):
    """What an axis says, its ends, and what to write at which numbers of it: None for powers of ten."""

    name: str
    low: float
    high: float
    ticks: dict[float, str] | None = None

    @property
    def marks(self) -> dict[float, str]:
        """Its ticks."""
        return powers(self.low, self.high) if self.ticks is None else self.ticks

    def share(self, value: float) -> float:
        """How far along the axis a number stands."""
        return math.log(value / self.low) / math.log(self.high / self.low)


class LogChart(Drawing):
    """Points and lines over two logarithmic axes; `label` says in words what the picture shows."""

    def __init__(self, height: int, label: str, x: Axis, y: Axis, width: int = NARROW):
        super().__init__(height, label, width)
        self.x, self.y = x, y
        self.small = 13 if self.width <= NARROW else 11
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        for value, words in y.marks.items():
            _, at = self.place(x.low, value)
            self.segment(LEFT, at, right, at, opacity=FAINT)
            self.text(LEFT - 8, at + 4, words, anchor="end", size=self.small)
        for value, words in x.marks.items():
            at, _ = self.place(value, y.low)
            self.segment(at, TOP, at, bottom, opacity=FAINT)
            self.text(at, bottom + 18, words, size=self.small)
        self.text((LEFT + right) / 2, self.height - 8, x.name, size=self.small + 1)
        self.parts.append(
            f'<g transform="translate(14 {(TOP + bottom) / 2:g}) rotate(-90)"><text text-anchor="middle"'
            f' font-size="{self.small + 1}" fill="currentColor">{y.name}</text></g>'
        )

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        return (
            LEFT + self.x.share(x) * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - self.y.share(y) * (self.height - TOP - BOTTOM),
        )

    def curve(
        self, points: Iterable[tuple[float, float]], *, dash: str = "", thick: float = 1.6, shape: str = ""
    ) -> None:
        """Straight lines from point to point, and a marker at each where it has a shape."""
        points = list(points)
        self.polyline((self.place(*point) for point in points), dash=dash, thick=thick)
        for point in points if shape else ():
            self.marker(*point, shape)

    def marker(self, x: float, y: float, shape: str, *, hollow: bool = False) -> None:
        """A "circle", "square", "triangle", "diamond", "bar" or "wedge" (a triangle on its tip) at a point."""
        cx, cy = self.place(x, y)
        corners = {
            "square": [(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)],
            "triangle": [(0, -5.5), (5.5, 4.5), (-5.5, 4.5)],
            "bar": [(-6, -2), (6, -2), (6, 2), (-6, 2)],
            "wedge": [(0, 5.5), (5.5, -4.5), (-5.5, -4.5)],
            "diamond": [(0, -6), (6, 0), (0, 6), (-6, 0)],
        }
        paint = f'fill="currentColor" fill-opacity="{0 if hollow else 1:g}" stroke="currentColor" stroke-width="1.6"'
        if shape == "circle":
            self.parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.8" {paint}/>')
        else:
            points = " ".join(f"{cx + dx:.1f},{cy + dy:.1f}" for dx, dy in corners[shape])
            self.parts.append(f'<polygon points="{points}" {paint}/>')

    def note(
        self, x: float, y: float, words: str, *, dx: float = 9, dy: float = 4, anchor: str = "start"
    ) -> None:
        """Words beside a point."""
        cx, cy = self.place(x, y)
        self.text(cx + dx, cy + dy, words, anchor=anchor, size=self.small)


def powers(low: float, high: float) -> dict[float, str]:
    """The powers of ten between two numbers, and how they are written."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return {10.0**power: f"{10.0**power:g}" for power in range(first, last + 1)}


WORK = "multiply-adds of a product"


def ratio_dots(
    label: str, y_name: str, points: list[tuple[float, float, str, bool]], x_name: str = WORK
) -> str:
    """Ratios, by default over the work of a product, with a broken line at 1; of each point the marker, and whether it is hollow."""
    work, ratios = [x for x, *_ in points], [y for _, y, *_ in points]
    x, y = (min(work) / 2, max(work) * 2), (min(ratios) / 1.06, max(*ratios, 1) * 1.06)
    drawing = LogChart(
        310,
        label,
        Axis(
            x_name,
            *x,
            {10.0**power: f"1e{power}" for power in range(2, 14, 2) if x[0] < 10.0**power < x[1]}
            if x_name == WORK
            else None,
        ),
        Axis(
            y_name,
            *y,
            {
                tick / 10: f"{tick / 10:g}"
                for tick in (3, 5, 7, 8, 9, 10, 11, 12, 15)
                if y[0] < tick / 10 < y[1]
            },
        ),
    )
    drawing.curve([(x[0], 1.0), (x[1], 1.0)], dash="6 4", thick=1.5)
    for across, up, shape, hollow in points:
        drawing.marker(across, up, shape, hollow=hollow)
    return drawing.svg()


DASHES = ("", "6 4", "2 3", "8 3 2 3")
"""Of the curves of a chart, in their order; the first is thick."""


def over_steps(
    label: str,
    y_name: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    y: tuple[float, float],
    legend: tuple[float, float],
    y_ticks: dict[float, str] | None = None,
) -> str:
    """Curves over the steps of a training run. `legend` is the height of the first name, and over how much of it the next one stands."""
    first, last = (edge(step for points in curves.values() for step, _ in points) for edge in (min, max))
    shown = {float(step): str(step) for step in (1, 2, 5, 10, 20, 50, 100, 200, 300) if first <= step <= last}
    drawing = LogChart(300, label, Axis("step", first, last, shown), Axis(y_name, *y, y_ticks))
    for number, ((name, points), dash) in enumerate(zip(curves.items(), DASHES, strict=False)):
        at, thick = legend[0] / legend[1] ** number, 1.6 if number else 2.6
        drawing.curve(points, dash=dash, thick=thick)
        drawing.curve([(1.3 * first, at), (2 * first, at)], dash=dash, thick=thick)
        drawing.note(2 * first, at, name)
    return drawing.svg()
