"""Draws charts with axes by matplotlib: one line of SVG each, in the page's text colour; letters stay text."""

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from book.figures.figures import two_digits

WIDTH, SIZE = 480, 14  # pixels of a chart, and of its letters: a phone shows four fifths
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
OURS, OTHERS = 0.75, 0.3
"""Shades of bars: of the workbook's own, and of the others."""
mpl.rcParams.update({
    "font.size": SIZE, "axes.titlesize": SIZE, "xtick.labelsize": SIZE, "ytick.labelsize": SIZE,
    "legend.fontsize": SIZE, "legend.frameon": False, "svg.fonttype": "none", "axes.spines.top": False,
    "axes.spines.right": False, "grid.color": "k", "grid.alpha": 0.2, "lines.linewidth": 1.6, "figure.dpi": 72,
})  # fmt: skip
Point = tuple[float, float]
Vector = Sequence[float] | np.ndarray


class Series(NamedTuple):
    """Points of a plot, in words for the legend; "" has no line in it. Without a dash there are markers alone.

    The colour is "k", the text's, or "b", the links'."""

    name: str
    points: Iterable[Point]
    dash: str = "-"
    marker: str = ""
    hollow: bool = False
    width: float = 1.6
    shade: float = 1.0
    colour: str = "k"


class Axis(NamedTuple):
    """What an axis says, whether it is logarithmic, its ends and its ticks; None leaves them to the data."""

    name: str
    log: bool = True
    ends: Point | None = None
    ticks: Mapping[float, str] | None = None


def drawing(
    height: float, rows: int = 1, width: float = WIDTH, sizes: Sequence[float] | None = None
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of so many pixels and its axes, one below the other, with heights like `sizes`."""
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False, height_ratios=sizes)[:, 0])


def svg(figure: Figure, label: str) -> str:
    """Return a figure as one line of SVG; `label` says in words what it shows."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}):
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box  # matplotlib writes one
    body = text[text.index("<defs>", box.end()) : text.rindex("</svg>")]
    for pattern, put in (
        (r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", ""),  # the style would be the whole page's
        (r'<g id="[^"]*"', "<g"),
        (r" font-family: [^;\"]*;", ""),
        (r"#000000", "currentColor"),
        (r"#0000ff", "var(--links)"),
        (r"(\d+\.\d)\d+(?=[^<>]*>)", r"\1"),
        (r"\s+", " "),
    ):
        body = re.sub(pattern, put, body, flags=re.S)
    width, height = (f"{float(size):g}" for size in box.groups())
    narrow = ' class="narrow"' if float(width) <= WIDTH else ""
    return (
        f'<svg{narrow} xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}"'
        f' role="img" fill="currentColor" aria-label="{html.escape(label)}">{body.strip()}</svg>\n'
    )


def number(side: XAxis | YAxis, value: float, _: int) -> str:
    """A number at a logarithmic axis: a power of ten where the axis has very small or very large numbers."""
    low, high = sorted(side.get_view_interval())
    if low > 1e-3 and high < 1e5:
        return f"{value:g}"
    power = round(np.log10(value))
    return f"{value:g}" if power in (0, 1) else "10" + str(power).translate(RAISED)


def set_axis(axes: Axes, which: str, axis: Axis) -> None:
    """Give the axis "x" or "y" its name, scale, ends and ticks."""
    axes.set(**{f"{which}label": axis.name})
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
    if axis.ends:
        axes.set(**{f"{which}lim": axis.ends})
    side = getattr(axes, f"{which}axis")
    if axis.ticks is not None:
        side.set_major_locator(FixedLocator(list(axis.ticks)))
        side.set_major_formatter(FuncFormatter(lambda value, _: (axis.ticks or {}).get(value, "")))
        side.set_minor_locator(NullLocator())
    elif axis.log:
        side.set_major_formatter(FuncFormatter(partial(number, side)))
        side.set_minor_formatter(FuncFormatter(lambda *_: ""))


def plot(
    label: str,
    series: Iterable[Series],
    x: Axis,
    y: Axis,
    *,
    height: float = 310,
    level: float | None = None,
    notes: Iterable[tuple[Point, str]] = (),
) -> str:
    """Draw lines and points; `level` is a broken line across, `notes` are words beside points."""
    figure, (axes,) = drawing(height)
    if level is not None:
        axes.axhline(level, color="k", linestyle=(0, (6, 4)), linewidth=1.2)
    for each in series:
        xs, ys = zip(*each.points, strict=True)
        axes.plot(
            xs, ys, color=each.colour, linestyle=each.dash or "none", marker=each.marker, linewidth=each.width,
            alpha=each.shade, markerfacecolor="none" if each.hollow else each.colour, label=each.name or "_",
        )  # fmt: skip
    for (at, up), words in notes:
        axes.annotate(words, (at, up), (6, 4), textcoords="offset points", fontsize=SIZE)
    set_axis(axes, "x", x)
    set_axis(axes, "y", y)
    axes.grid(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return svg(figure, label)


Bar = tuple[str, float, str, bool]
"""Its name, its length, the words behind it, and whether it is the workbook's own."""


def bars(
    label: str,
    groups: Mapping[str, Sequence[Bar]],
    title: str = "",
    *,
    level: float | None = None,
) -> str:
    """Draw horizontal bars in groups, each below its heading, if it has one; `level` is where a broken line stands."""
    step, rows = 22, sum(len(group) + bool(heading) for heading, group in groups.items())
    figure, (axes,) = drawing(step * rows + (44 if title else 12))
    names, y = {}, 0
    longest = max(length for group in groups.values() for _, length, _, _ in group)
    for heading, group in groups.items():
        if heading:
            axes.text(0, y, heading, va="center", fontweight="bold")
            y += 1
        for name, length, words, ours in group:
            axes.barh(y, length, 0.75, color="k", alpha=OURS if ours else OTHERS)
            end = max(length, level or 0)
            axes.annotate(words, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=SIZE)
            names[y] = name
            y += 1
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(y - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(bool(title))
    set_axis(axes, "x", Axis(title, False))
    if level is not None:
        axes.axvline(level, color="k", linestyle=(0, (4, 4)), linewidth=1)
    axes.set_xlim(0, longest * 1.45)
    if not title:
        axes.set_xticks([])
    return svg(figure, label)


def rows_of_bars(
    label: str,
    rows: Mapping[str, Vector],
    chosen: Iterable[int] = (),
    height: float = 110,
    reduced: Mapping[str, float] = {},
) -> str:
    """Draw vectors as upright bars with their numbers, one below the other; `chosen` bars are darker.

    `reduced` is by how much the bars of a row are smaller than the others', by its name.
    """
    bars = {name: np.asarray(values) / reduced.get(name, 1) for name, values in rows.items()}
    most = max(float(np.abs(values).max()) for values in bars.values())
    ends = [[min(*values, 0), max(*values, 0)] for values in bars.values()]
    limits = [
        [end + np.sign(end) * most * 75 / height for end in each] for each in ends
    ]  # with room for the numbers
    figure, places = drawing(height * len(rows), len(rows), sizes=[high - low for low, high in limits])
    figure.set_layout_engine("constrained", h_pad=0.12)
    for axes, (name, values), limit in zip(places, rows.items(), limits, strict=True):
        axes.set_title(name, loc="left")
        for at, value in enumerate(values):
            axes.bar(at, bars[name][at], 0.7, color="k", alpha=OURS if at in chosen else 0.35)
            axes.annotate(
                two_digits(value), (at, bars[name][at]), (0, 3 if value >= 0 else -4), ha="center",
                textcoords="offset points", va="bottom" if value >= 0 else "top", fontsize=SIZE,
            )  # fmt: skip
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_ylim(*limit)
        axes.set_axis_off()
    return svg(figure, label)


def spans(label: str, lines: Mapping[str, Iterable[tuple[float, float, float]]], name: str) -> str:
    """Draw what happens over time, a line for each name: start, end and shade."""
    figure, (axes,) = drawing(50 + 24 * len(lines))
    for y, parts in enumerate(lines.values()):
        for start, end, shade in parts:
            axes.barh(y, end - start, 0.8, start, color="k", alpha=shade)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel(name)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return svg(figure, label)


Measures = Sequence[tuple[str, Mapping[str, float], str]]
"""Of each its title, its size by way, and its unit."""


def compared(what: str, measures: Measures, ways: Mapping[str, str]) -> str:
    """Draw measures, each beside its largest value; `ways` names the ways, the last of which is ours."""
    told = "; ".join(
        f"{title}: {', '.join(f'{ways[way]} {size:.1f} {unit}' for way, size in sizes.items())}"
        for title, sizes, unit in measures
    )
    groups = {
        title: [
            (ways[way], size / max(sizes.values()), f"{size:.1f} {unit}", way == list(ways)[-1])
            for way, size in sizes.items()
        ]
        for title, sizes, unit in measures
    }
    return bars(f"{what}{told}.", groups)
