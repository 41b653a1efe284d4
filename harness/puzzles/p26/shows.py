"""`p26 --rewrites` and `p26 --symptoms`: the solution's rewrites before and after, and the check that catches
each wrong backend."""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from torch.fx import GraphModule, Node

from harness.check import zoo
from harness.check.python_files import load
from harness.console import print_lines
from harness.nn.compile.match import shape
from harness.nn.compile.purity import call_name
from harness.puzzles.p26 import matching, models
from harness.puzzles.p26.checker import fault_of
from harness.puzzles.p26.spec import PUZZLE
from harness.puzzles.p26.trying import X, capture_graph
from harness.toolchain import roots

SHOWN = 150
"""Characters of a symptom at most."""


def solution(rung: str) -> dict:
    return load(roots.solutions() / PUZZLE.name / PUZZLE.rung(rung).file)


def compare_graphs(title: str, gm: GraphModule, change: Callable[[GraphModule], object]) -> Iterator[str]:
    """Yield a graph before and after a change: "-" marks a removed node, "+" a new one."""
    before = describe_nodes(gm)
    change(gm)
    after = describe_nodes(gm)
    yield title
    for head, here, there, mark in (("before", before, after, "-"), ("after", after, before, "+")):
        yield f"  {head}"
        for name, words in here.items():
            changed = there.get(name) != words and not words.startswith("output")
            yield f"   {mark if changed else ' '} {name} = {words}"
    yield ""


def describe_nodes(gm: GraphModule) -> dict[str, str]:
    """Return each node's target, shape and arguments, by its name, in order."""
    lines = {}
    for node in gm.graph.nodes:
        words = {"placeholder": "input", "output": "output"}.get(node.op) or call_name(node)
        if node.op != "placeholder" and (
            numbers := [repr(a) for a in node.args if isinstance(a, int | float | str)]
        ):
            words += f"({', '.join(numbers)})"
        size = f" {list(shape(node))}" if shape(node) else ""
        reads = ", ".join(map(short, node.all_input_nodes))
        lines[short(node)] = words + size + (f" <- {reads}" if reads else "")
    return lines


def short(node: Node) -> str:
    """Return a node's name; of an input or a parameter what the model calls it, as "ln.weight"."""
    if node.op != "placeholder":
        return node.name
    name = re.sub(r"modules_|parameters_|buffers_|self_", "", node.name.removeprefix("l_"))
    return name.strip("_").replace("_", ".")


def rewrites() -> Iterator[str]:
    """Yield the lines of one rewrite per rung, by its solution."""
    fold, match, swap = (solution(rung) for rung in ("fold", "match", "swap"))
    yield from compare_graphs(
        "fold: x * 2.0 * 3.0 * 4.0", capture_graph(lambda x: x * 2.0 * 3.0 * 4.0, X), fold["fold"]
    )
    yield from compare_graphs(
        "silu: sigmoid(x) * x + x", capture_graph(lambda x: x.sigmoid() * x + x, X), match["silu"]
    )
    spelled = matching.GELUS[0]
    yield from compare_graphs(
        f"gelu: {spelled.words}", capture_graph(spelled.function, *spelled.inputs), match["gelu"]
    )
    model = models.Pieces(models.conv1d)

    def put_in(gm: GraphModule) -> None:
        for pair in swap["find"](gm):
            swap["swap"](gm, pair)

    yield from compare_graphs(
        "swap: GPT-2's Conv1D after a LayerNorm", capture_graph(model, models.rows(2, 3)), put_in
    )


def show_rewrites(console: Console) -> int:
    """Print graphs before and after each of the solution's rewrites. Return 0."""
    print_lines(console, rewrites())
    return 0


def show_symptoms(console: Console) -> int:
    """Print a line for each wrong backend of the zoo: its name, and its gate's message. Return 1 if one
    passes."""
    passed = 0
    for wrong in zoo.load(PUZZLE.name):
        path = wrong.target()
        fault = fault_of(wrong.gate, load(path), path)
        passed += fault is None
        print_lines(
            console, [symptom(wrong.name, "passes" if fault is None else f"{fault.kind}: {fault}", path)]
        )
    return int(passed > 0)


def symptom(name: str, words: str, path: Path) -> str:
    """Return the message of a wrong backend's gate, without the graph and cut after a word."""
    text = words.split(" graph(): ")[0].replace(str(path), path.name)
    return f"{name:<28} {textwrap.shorten(text, SHOWN, placeholder=' ...')}"
