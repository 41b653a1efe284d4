"""What the book's drawings are made of: one line of SVG each, in the colour of the page's text; its label is its alternative text."""

import html
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
FONT = 13
NARROW = 480
"""Widest drawing that is shown as it is on a page and, a little smaller, on a phone, with letters that can be read."""
LEGIBLE = 0.3
"""Strongest shade behind words: the contrast is above 4.5 in every theme."""
GAMMA = '<tspan font-family="serif" font-style="italic">γ</tspan>'
"""A γ that does not look like a y, as it does without serifs."""


class Drawing:
    """A growing SVG. Coordinates are pixels of a drawing that scales with the page."""

    def __init__(self, height: int, label: str, width: int = NARROW):
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        shade: float = 0,
        thick: float = 1,
        radius: float = 2,
    ) -> None:
        """A rectangle with its upper left corner at (x, y), filled with `shade` of the text colour."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="currentColor"'
            f' fill-opacity="{shade:g}" stroke="currentColor" stroke-width="{thick:g}" rx="{radius:g}"/>'
        )

    def squares(self, x: float, y: float, shape: tuple[int, int], cell: float, shade: Callable) -> None:
        """Rows and columns of boxes, `cell` pixels apart, from the upper left corner (x, y); `shade` takes the row and the column."""
        for row, column in product(*map(range, shape)):
            self.box(x + cell * column, y + cell * row, cell - 3, cell - 3, shade=shade(row, column))

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = FONT, code=False
    ) -> None:
        """Words with their baseline at y."""
        family = ' font-family="Source Code Pro, monospace"' if code else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="currentColor"{family}>'
            f"{html.escape(words).replace('γ', GAMMA)}</text>"
        )

    def labelled(
        self, x: float, y: float, width: float, height: float, *lines: str, shade: float = 0.06, size: int = FONT,
        code: bool = False, thick: float = 1,
    ) -> None:  # fmt: skip
        """A box with lines of words in its middle; one that is to stand out more than words allow has a thick line."""
        self.box(x, y, width, height, shade=min(shade, LEGIBLE), thick=2 if shade > LEGIBLE else thick)
        step = size + 4
        first = y + height / 2 + size * 0.36 - step * (len(lines) - 1) / 2
        for number, words in enumerate(lines):
            self.text(x + width / 2, first + step * number, words, size=size, code=code)

    def segment(
        self, x0: float, y0: float, x1: float, y1: float, *, opacity: float = 1, dash: str = "", thick: float = 1
    ) -> None:  # fmt: skip
        """A line between two pixels; `dash` as in SVG."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="currentColor"'
            f' stroke-opacity="{opacity:g}" stroke-width="{thick:g}"{dashes}/>'
        )

    def polyline(
        self, points: Iterable[tuple[float, float]], *, opacity: float = 1, dash: str = "", thick: float = 1
    ) -> None:
        """Straight lines from pixel to pixel; `dash` as in SVG."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-opacity="{opacity:g}"'
            f' stroke-width="{thick:g}"{dashes}/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, faint: bool = False) -> None:
        """A line with a small head at (x1, y1)."""
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        head = " ".join(
            f"{x1 - 7 * ux + side * 3.5 * uy:.1f},{y1 - 7 * uy - side * 3.5 * ux:.1f}" for side in (1, -1)
        )
        opacity = 0.45 if faint else 1
        self.parts.append(
            f'<g opacity="{opacity}"><line x1="{x0:g}" y1="{y0:g}" x2="{x1 - 5 * ux:.1f}" y2="{y1 - 5 * uy:.1f}"'
            f' stroke="currentColor"/><polygon points="{x1:g},{y1:g} {head}" fill="currentColor"/></g>'
        )

    def svg(self) -> str:
        """The finished figure on one line."""
        narrow = ' class="narrow"' if self.width <= NARROW else ""
        return (
            f'<svg{narrow} xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img" aria-label="{html.escape(self.label)}">'
            f"{''.join(self.parts)}</svg>\n"
        )


wide = partial(Drawing, width=720)
"""A drawing as wide as a page; a phone shows it small, and larger at a tap."""


class Steps(Drawing):
    """A drawing whose parts are there at some steps; `words` are one sentence or two for each step.

    Args:
        still: The step that is shown without scripts and on paper: the one that says most. With scripts the first step is.
    """

    def __init__(self, height: int, label: str, *, still: int):
        super().__init__(height, label)
        self.still = still
        self.words: list[str] = []

    @contextmanager
    def during(self, first: int, last: int | None = None) -> Iterator[None]:
        """What is drawn inside is there from step `first` to step `last`, or at `first` alone."""
        last = first if last is None else last
        shown = "visible" if first <= self.still <= last else "hidden"
        self.parts.append(f'<g data-from="{first}" data-to="{last}" visibility="{shown}">')
        yield
        self.parts.append("</g>")

    def hero(self, caption: str, opening: str = "", kind: str = "hero") -> str:
        """The box: the drawing, the words of all steps, and a caption. `opening` says in the first step what one looks at."""
        self.words[0] = f"{opening} {self.words[0]}".strip()
        steps = "".join(f"<li>{html.escape(words)}</li>" for words in self.words)
        return (
            f'<div class="{kind}" data-still="{self.still}"><figure>{self.svg().strip()}<figcaption>{html.escape(caption)}</figcaption></figure>'
            f'<ol class="hero-steps">{steps}</ol></div>\n'
        )


def svgs(*drawn: Callable[[], str]) -> dict[str, Callable[[], str]]:
    """Files of the build, each with the name of the function that draws it."""
    return {f"{draw.__name__}.svg": draw for draw in drawn}


def two_digits(value: float) -> str:
    """A number with two digits after the point, and a minus as wide as a plus."""
    return f"{round(float(value), 2) + 0.0:.2f}".replace("-", "−")


def kernel_constant(name: str, puzzle: str = "p22") -> int:
    """A compile-time constant of a solution's kernels, read from their source."""
    folder = ROOT / "solutions" / puzzle / "op"
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.mojo")))
    matched = re.search(rf"^comptime {name} = (\d+)$", source, re.M)
    assert matched, name
    return int(matched[1])


def player_start() -> dict[str, list[float]]:
    """The row and the gradient with which the page's player begins; the still picture shows the same."""
    script = (ROOT / "book" / "theme" / "players.js").read_text(encoding="utf-8")
    return {
        name: [float(value) for value in values.split(",")]
        for name, values in re.findall(r"(\w): \[([-\d., ]+)\]", script.split("START =")[1].split(";")[0])
    }
