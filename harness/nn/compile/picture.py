"""A rewrite of a graph to look at: the nodes before and after it, as text and as SVG, with what went and what came.

A `Snapshot` is taken before a pass and another one behind it; a `Rewrite` draws the two. Nodes stand in the
order in which they run, each with its shape and what it reads; the SVG draws an arc from a node to each that reads it.
"""

import html
import re
from dataclasses import dataclass

from torch.fx import Graph, Node

from harness.nn.compile.match import called, shape

ROW, LETTER, LEFT = 24, 6.7, 70
"""Of the SVG, in pixels: the height of a node, the width of a letter, and the room for the arcs of a column."""


@dataclass(frozen=True)
class Line:
    """One node: its name, what it calls with its shape, and the names of what it reads."""

    name: str
    words: str
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph at one time, in order."""

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, graph: Graph) -> "Snapshot":
        """What a graph holds now."""
        return cls(tuple(line_of(node) for node in graph.nodes))

    @property
    def width(self) -> int:
        """Of a column that holds its lines, in pixels."""
        return int(max((len(f"{line.name} = {line.words}") for line in self.lines), default=0) * LETTER) + 24

    @property
    def by_name(self) -> dict[str, Line]:
        """Its lines by the names of the nodes."""
        return {line.name: line for line in self.lines}


@dataclass(frozen=True)
class Rewrite:
    """Two snapshots: what one pass, or one match, has changed."""

    title: str
    before: Snapshot
    after: Snapshot

    @property
    def gone(self) -> set[str]:
        """Names of nodes that are not there any more, or read something else."""
        return changed(self.before, self.after)

    @property
    def come(self) -> set[str]:
        """Names of nodes that are new, or read something else than before."""
        return changed(self.after, self.before)

    def near(self) -> "Rewrite":
        """The changed nodes with those next to them alone: what there is to see of a large graph."""
        return Rewrite(self.title, around(self.before, self.gone), around(self.after, self.come))

    def text(self) -> list[str]:
        """Both graphs in lines of text: "-" before a node that goes, "+" before one that comes."""
        before, after = column(self.before, self.gone, "-"), column(self.after, self.come, "+")
        return [self.title, "  before", *before, "  after", *after]

    def svg(self) -> str:
        """Both columns as an SVG in the colour of the text around it; changed nodes have a border."""
        height = ROW * (max(len(self.before.lines), len(self.after.lines)) + 2)
        label = html.escape(". ".join(line.strip() for line in self.text()))
        parts = [f'<text x="4" y="16" font-size="13" fill="currentColor">{html.escape(self.title)}</text>']
        right = LEFT + self.before.width
        parts += drawn(self.before, self.gone, LEFT, "4 3")
        parts += drawn(self.after, self.come, right + LEFT, "")
        width = right + LEFT + self.after.width
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img" aria-label="{label}">{"".join(parts)}</svg>\n'
        )


def line_of(node: Node) -> Line:
    """What is drawn of one node."""
    size = f" {list(shape(node))}" if shape(node) else ""
    words = {"placeholder": "input", "output": "output"}.get(node.op) or called(node)
    constants = [repr(a) for a in node.args if isinstance(a, int | float | str) and node.op != "placeholder"]
    behind = f"({', '.join(constants)})" if constants else ""
    return Line(short(node), f"{words}{behind}{size}", tuple(short(n) for n in node.all_input_nodes))


def short(node: Node) -> str:
    """A node's name; of an input or a parameter what the model calls it, as "ln.weight"."""
    if node.op != "placeholder":
        return node.name
    return (
        re.sub(r"modules_|parameters_|buffers_|self_", "", node.name.removeprefix("l_"))
        .strip("_")
        .replace("_", ".")
    )


def changed(one: Snapshot, other: Snapshot) -> set[str]:
    """Names of the nodes of one snapshot that the other does not hold as they are; what only reads another node counts
    where that node is new."""
    there = other.by_name
    return {line.name for line in one.lines if there.get(line.name) != line and line.words != "output"}


def around(snapshot: Snapshot, names: set[str]) -> Snapshot:
    """The nodes of these names, those that they read and those that read them, as far as they stand in the graph."""
    read = {name for line in snapshot.lines if line.name in names for name in line.reads}
    kept = names | read | {line.name for line in snapshot.lines if names & {*line.reads}}
    return Snapshot(tuple(line for line in snapshot.lines if line.name in kept))


def column(snapshot: Snapshot, marked: set[str], mark: str) -> list[str]:
    """A graph in lines: name = what it calls <- what it reads."""
    return [
        f"   {mark if line.name in marked else ' '} {line.name} = {line.words}"
        + (f" <- {', '.join(line.reads)}" if line.reads else "")
        for line in snapshot.lines
    ]


def drawn(snapshot: Snapshot, marked: set[str], left: int, dashes: str) -> list[str]:
    """One column as SVG: a row for each node, an arc on its left for each thing that it reads."""
    y = {line.name: ROW * (k + 1.5) for k, line in enumerate(snapshot.lines)}
    parts = []
    for line in snapshot.lines:
        here = y[line.name]
        style = ' font-weight="bold"' if line.name in marked else ""
        words = html.escape(f"{line.name} = {line.words}")
        parts.append(f'<text x="{left + 8}" y="{here + 4:g}" font-size="11" font-family="monospace"'
                     f' fill="currentColor"{style}>{words}</text>')  # fmt: skip
        if line.name in marked:
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            parts.append(f'<rect x="{left}" y="{here - ROW / 2 + 2:g}" width="{snapshot.width - 8}" height="{ROW - 4}"'
                         f' fill="none" stroke="currentColor"{dash}/>')  # fmt: skip
        for name in line.reads:
            if name in y:
                reach = min(LEFT - 8, 12 + abs(here - y[name]) / 3)
                parts.append(f'<path d="M{left},{y[name]:g} C{left - reach:g},{y[name]:g} {left - reach:g},{here:g}'
                             f' {left},{here:g}" fill="none" stroke="currentColor" opacity="0.6"/>')  # fmt: skip
    return parts
