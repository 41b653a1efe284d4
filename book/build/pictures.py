"""Makes the picture of the README from a real run: a wrong gate with its diagnosis.

`python -m book.build.pictures [FOLDER]` writes it as SVG (default: docs/). A learner's folder is made in a temporary
place, in which everything is solved but dx, whose mean term is missing. Nothing is fetched when it is shown.
"""

import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from harness import commands
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]

WIDTH = 112
# rich's own format loads a font from the network; any fixed-width font of the reader's serves as well.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace"
)


def learner(folder: Path) -> Exercise:
    """A checkout in which everything is solved but dx."""
    blanks.generate_problems(roots.get_solutions(), folder / "problems")
    work = Exercise(PUZZLE, PUZZLE.main_rung)
    solution = work.solution.read_text()
    wrong = solution.replace(
        "(g - c2 - x_hat * c1)).cast[dtype]()\n        # BLANK-END dx",
        "(g - x_hat * c1)).cast[dtype]()\n        # BLANK-END dx",
    )
    if wrong == solution:
        raise SystemExit("the last line of blank dx has changed: say here what a learner gets wrong")
    work.path.write_text(blanks.fill_blanks(blanks.make_skeleton(solution), wrong))
    return work


def wrong_gate(work: Exercise) -> str:
    """Every gate of the learner's kernels, as SVG."""
    # No terminal, on which a line would move.
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, emoji=False)
    commands.verify_exercise(console, work)
    return console.export_svg(title="verify p22", code_format=FORMAT, unique_id="workbook")


def main(folder: Path) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name).resolve()
        os.chdir(here)  # paths are shown as from a learner's checkout
        checkout, roots.CHECKOUT = roots.CHECKOUT, here
        roots.get_solutions = lambda: checkout / "solutions"
        text = wrong_gate(learner(here))
        os.chdir(checkout)
    (folder / "wrong_gate.svg").write_text(text)
    Console().print(Text(f"wrote {folder / 'wrong_gate.svg'}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
