"""`p26 --rewrites` prints graphs before and after rewrites, `p26 --symptoms` the message for each wrong backend."""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from torch.fx import GraphModule, Node

from harness.check import zoo
from harness.check.python_files import load_module
from harness.console import print_lines
from harness.nn.compile.match import shape
from harness.nn.compile.purity import call_name
from harness.puzzles.p26 import matching, models
from harness.puzzles.p26.checker import find_error
from harness.puzzles.p26.compile_cases import X, capture_graph
from harness.puzzles.p26.spec import PUZZLE
from harness.toolchain import roots

MAX_CHARACTERS = 150
"""Maximum number of characters of a symptom."""


def load_solution(rung: str) -> dict:
    return load_module(roots.get_solutions() / PUZZLE.name / PUZZLE.find_rung(rung).file)


def compare_graphs(title: str, gm: GraphModule, change: Callable[[GraphModule], object]) -> Iterator[str]:
    """Yield the lines of a graph before and after a change: "-" marks a removed node, "+" a new one."""
    before = describe_nodes(gm)
    change(gm)
    after = describe_nodes(gm)
    yield title
    for heading, nodes, other_nodes, mark in (("before", before, after, "-"), ("after", after, before, "+")):
        yield f"  {heading}"
        for name, text in nodes.items():
            changed = other_nodes.get(name) != text and not text.startswith("output")
            yield f"   {mark if changed else ' '} {name} = {text}"
    yield ""


def describe_nodes(gm: GraphModule) -> dict[str, str]:
    """Return each node's target, shape and arguments by name, in graph order."""
    lines = {}
    for node in gm.graph.nodes:
        target = {"placeholder": "input", "output": "output"}.get(node.op) or call_name(node)
        numbers = [repr(a) for a in node.args if isinstance(a, int | float | str)]
        if node.op != "placeholder" and numbers:
            target += f"({', '.join(numbers)})"
        size = f" {list(shape(node))}" if shape(node) else ""
        reads = ", ".join(map(shorten_name, node.all_input_nodes))
        lines[shorten_name(node)] = target + size + (f" <- {reads}" if reads else "")
    return lines


def shorten_name(node: Node) -> str:
    """Return a node's name or, for an input or parameter, its name in the model, such as "ln.weight"."""
    if node.op != "placeholder":
        return node.name
    name = re.sub(r"modules_|parameters_|buffers_|self_", "", node.name.removeprefix("l_"))
    return name.strip("_").replace("_", ".")


def list_rewrites() -> Iterator[str]:
    """Yield lines that show the rewrites of the solution's three rungs."""
    fold, match, swap = (load_solution(rung) for rung in ("fold", "match", "swap"))
    gelu_case, conv1d = matching.GELU_CASES[0], models.PatternModel(models.conv1d)

    def swap_pairs(gm: GraphModule) -> None:
        for pair in swap["find"](gm):
            swap["swap"](gm, pair)

    for title, function, inputs, change in (
        ("fold: x * 2.0 * 3.0 * 4.0", lambda x: x * 2.0 * 3.0 * 4.0, (X,), fold["fold"]),
        ("silu: sigmoid(x) * x + x", lambda x: x.sigmoid() * x + x, (X,), match["silu"]),
        (f"gelu: {gelu_case.label}", gelu_case.function, gelu_case.inputs, match["gelu"]),
        ("swap: GPT-2's Conv1D after a LayerNorm", conv1d, (models.make_rows(2, 3),), swap_pairs),
    ):
        yield from compare_graphs(title, capture_graph(function, *inputs), change)


def show_rewrites(console: Console) -> int:
    print_lines(console, list_rewrites())
    return 0


def show_symptoms(console: Console) -> int:
    """Print the message for each wrong backend of the zoo; return 1 if any backend passes."""
    num_passed = 0
    for wrong in zoo.load_wrong_solutions(PUZZLE.name):
        path = wrong.build_target()
        error = find_error(wrong.gate, load_module(path), path)
        num_passed += error is None
        message = "passes" if error is None else f"{error.kind}: {error}"
        print_lines(console, [format_symptom(wrong.name, message, path)])
    return int(num_passed > 0)


def format_symptom(name: str, message: str, path: Path) -> str:
    """Return a wrong backend's name and its message, shortened and without the graph."""
    error = message.split(" graph(): ")[0].replace(str(path), path.name)
    return f"{name:<28} {textwrap.shorten(error, MAX_CHARACTERS, placeholder=' ...')}"
