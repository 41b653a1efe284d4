"""`p26 --rewrites` and `p26 --symptoms`: the solution's rewrites before and after, and what each wrong backend is seen by."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from torch.fx import GraphModule

from harness.check import zoo
from harness.check.python_files import load
from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.nn.compile.picture import Rewrite, Snapshot
from harness.puzzles.p26 import matching, models
from harness.puzzles.p26.checker import fault_of
from harness.puzzles.p26.spec import PUZZLE
from harness.puzzles.p26.trying import X, captured
from harness.toolchain import roots

SHOWN = 150
"""Characters of a symptom at most."""


def solution(rung: str) -> dict:
    """What the solution of a rung defines."""
    return load(roots.solutions() / PUZZLE.name / PUZZLE.rung(rung).file)


def rewritten(title: str, gm: GraphModule, change) -> Rewrite:
    """A graph before and after a change."""
    before = Snapshot.of(gm.graph)
    change(gm)
    return Rewrite(title, before, Snapshot.of(gm.graph))


def pictures() -> Iterator[Rewrite]:
    """A rewrite of each rung's, by its solution."""
    fold, match, swap = (solution(rung) for rung in ("fold", "match", "swap"))
    yield rewritten("fold: x * 2.0 * 3.0 * 4.0", captured(lambda x: x * 2.0 * 3.0 * 4.0, X), fold["fold"])
    yield rewritten("silu: sigmoid(x) * x + x", captured(lambda x: x.sigmoid() * x + x, X), match["silu"])
    spelled = matching.GELUS[0]
    yield rewritten(f"gelu: {spelled.words}", captured(spelled.function, *spelled.inputs), match["gelu"])
    model = models.Pieces(models.conv1d)

    def put_in(gm: GraphModule) -> None:
        for pair in swap["find"](gm):
            swap["swap"](gm, pair)

    yield rewritten("swap: GPT-2's Conv1D after a LayerNorm", captured(model, models.rows(2, 3)), put_in)


def show_rewrites(console: Console, arguments: list[str]) -> int:
    """Print graphs before and after each of the solution's rewrites. Returns 0."""
    parser = Parser(
        prog="p26 --rewrites", description="Print graphs before and after each of the solution's rewrites."
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help="write them as SVG, into a folder that there is"
    )
    folder = parser.parse_args(arguments).svg
    if folder and not folder.is_dir():
        raise BadUse(f"--svg {folder}: no such folder")
    for rewrite in pictures():
        print_lines(console, [*rewrite.text(), ""])
        if folder:
            name = rewrite.title.split(":")[0]
            (folder / f"{name}.svg").write_text(rewrite.svg(), encoding="utf-8")
    return 0


def show_symptoms(console: Console) -> int:
    """Prints a line for each wrong backend of the zoo: its name, and what its gate says. Returns 1 where one passes."""
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
    """The line of a wrong backend: what its gate says of its file, without the graph and cut after a word."""
    said = words.split(" graph(): ")[0].replace(str(path), path.name)
    return f"{name:<28} {textwrap.shorten(said, SHOWN, placeholder=' ...')}"
