"""What the mistakes of a museum do: a mark for each, at the size of its error, in the row of what it spoils; each mark is a link."""

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from book.figures.figures import NARROW, Drawing

LEFT, DECADE, RIGHT = 126, 36, 370
"""Where the axis begins, a factor of ten, and where the column of mistakes without a size begins; in pixels."""
BIN = 12
"""Errors that are so many pixels apart lie on one pile."""
LOW, HIGH = -4, 2
"""The axis, in powers of ten; what is further out stands at its ends."""
TOP = 40
TICKS = {-4: "10⁻⁴", -3: "10⁻³", -2: "10⁻²", -1: "10⁻¹", 0: "1", 1: "10", 2: "more"}
TOLERATED = 1e-2
"""A relative tolerance in common use."""
CHECKS = {
    "formula": "its values fit a known mistake",
    "values": "its values are wrong otherwise",
    "machine": "the virtual GPU reports it",
    "rule": "it breaks a rule of its gate",
}
"""What catches a mistake, and why, as the legend says; theme/workbook.css has their colours."""


@dataclass(frozen=True)
class Mark:
    """A wrong solution: where its exhibit is, its story, what catches it, and its relative error on the hardest inputs.

    `size` is None where what is wrong has no size; `hidden`: in the puzzle's first, easy case nothing is wrong.
    """

    link: str
    story: str
    check: str
    size: float | None
    hidden: bool = False


def draw_mark(drawing: Drawing, x: float, y: float, cell: int, mark: Mark) -> None:
    """A square of its check's colour in a place as wide as `cell`, hollow where easy inputs hide the mistake."""
    side, quiet = cell - 3, " quiet" if mark.hidden else ""
    drawing.parts.append(
        f'<a href="{mark.link}" aria-label="{html.escape(mark.story)}"><rect x="{x:g}" y="{y:g}" width="{cell}" height="{cell}" '
        f'fill-opacity="0"/><rect class="{mark.check}{quiet}" x="{x + 1.5:g}" y="{y + 1.5:g}" width="{side}" height="{side}" rx="2" '
        f'stroke-width="{2 if cell > 8 else 1}"/></a>'
    )


def piles(marks: Sequence[Mark]) -> dict[float, list[Mark]]:
    """Left edge -> the marks that lie there; at RIGHT those without a size."""
    lying: dict[float, list[Mark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda each: (list(CHECKS).index(each.check), each.hidden)):
        power = math.log10(mark.size) if mark.size and mark.size < math.inf else HIGH
        at = LEFT + BIN * round((min(max(power, LOW), HIGH) - LOW) * DECADE / BIN) - BIN / 2
        lying[RIGHT if mark.size is None else at].append(mark)
    return lying


def label(marks: Sequence[Mark], first: str = "") -> str:
    """What the chart shows, in numbers; `first` describes the first test case."""
    sized = [mark.size for mark in marks if mark.size is not None]
    small, hidden = sum(size < TOLERATED for size in sized), sum(mark.hidden for mark in marks)
    facts = f"{len(sized)} of {len(marks)} mistakes leave a measurable error, shown here for the hardest inputs of their gate."
    if small:
        facts += f" Of these, {small} stay{'s' * (small == 1)} below 10⁻², in the grey band, where a loose tolerance lets {'it' if small == 1 else 'them'} pass."
    if hidden:
        case = f"first test case ({first})" if first else "puzzle's first test case"
        facts += f" In the {case}, {hidden} of them {'gives' if hidden == 1 else 'give'} correct numbers; {'its mark is' if hidden == 1 else 'their marks are'} hollow."
    return facts


def figure(
    rows: Mapping[str, Sequence[Mark]], cell: int = BIN, first: str = "", left_out: Sequence[str] = ()
) -> str:
    """The chart, what to see in it, and a place for the story of the mark that the reader is at; rows `left_out` are only counted."""
    words = label([mark for marks in rows.values() for mark in marks], first)
    if left_out:
        names = " and ".join([", ".join(left_out[:-1]), left_out[-1]] if left_out[1:] else left_out)
        words += f" The chart leaves out the {sum(len(rows[name]) for name in left_out)} mistakes of {names}, which break a rule of their gate."
    drawn = {name: marks for name, marks in rows.items() if name not in left_out}
    return (
        f'<figure class="marks">{chart(drawn, cell).strip()}<figcaption>{html.escape(words)} Each mark links to its exhibit.'
        "<output></output></figcaption></figure>\n"
    )


def chart(rows: Mapping[str, Sequence[Mark]], cell: int = BIN) -> str:
    """A row for each name; marks of nearly the same size are piled up, those without a size fill lines."""
    every = [mark for marks in rows.values() for mark in marks]
    lying = {name: piles(marks) for name, marks in rows.items()}

    def across(x: float) -> int:
        return int((NARROW - RIGHT if x == RIGHT else BIN) // cell)

    heights = {
        name: cell * max(-(-len(pile) // across(x)) for x, pile in of.items()) + 7
        for name, of in lying.items()
    }
    bottom = TOP + sum(heights.values())
    used = [(name, words) for name, words in CHECKS.items() if any(mark.check == name for mark in every)]
    if any(mark.hidden for mark in every):
        used.append(("quiet", "hollow: right in the first case"))
    drawing = Drawing(bottom + 40 + 20 * -(-len(used) // 2), label(every))
    edge = LEFT + DECADE * (math.log10(TOLERATED) - LOW)
    if any(mark.size is not None and mark.size < TOLERATED for mark in every):
        drawing.box(LEFT - 8, TOP - 4, edge - LEFT + 8, bottom - TOP + 4, shade=0.09, thick=0)
    drawing.text(LEFT + DECADE * (HIGH - LOW) / 2, 14, "error, relative to the largest element")
    drawing.text((RIGHT + NARROW) / 2, 14, "not measurable")
    for power, words in TICKS.items():
        x = LEFT + DECADE * (power - LOW)
        drawing.text(x, 32, words)
        drawing.segment(x, TOP - 4, x, bottom, opacity=0.18)
    drawing.segment(RIGHT - 8, TOP - 4, RIGHT - 8, bottom, opacity=0.5)
    y = TOP
    for name in rows:
        floor = y + heights[name] - 7
        drawing.text(LEFT - 14, floor - cell / 2 + 4, name, anchor="end", code=True)
        drawing.segment(4, floor + 3, NARROW - 4, floor + 3, opacity=0.18)
        for x, pile in lying[name].items():
            for number, mark in enumerate(pile):
                up, aside = divmod(number, across(x))
                draw_mark(drawing, x + cell * aside, floor - cell * (up + 1), cell, mark)
        y += heights[name]
    drawing.text(4, bottom + 24, "A wrong solution is rejected because", anchor="start")
    for number, (name, words) in enumerate(used):
        x, y = 4 + 240 * (number % 2), bottom + 36 + 20 * (number // 2)
        drawing.parts.append(
            f'<rect class="{name}" x="{x}" y="{y}" width="9" height="9" rx="2" stroke-width="2"/>'
        )
        drawing.text(x + 15, y + 10, words, anchor="start")
    return drawing.svg()
