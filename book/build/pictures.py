"""Makes the pictures of the README from real runs: the report, a wrong gate with its diagnosis, and the watch screen.

`python -m book.build.pictures [FOLDER]` writes three SVG files (default: docs/). A learner's folder is made in a temporary
place, in which everything is solved but dx, whose mean term is missing. Nothing is fetched when a picture is shown.
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
from harness.check import runs
from harness.check.options import Options
from harness.learner import blanks
from harness.learner.work import Work
from harness.puzzles.p22.spec import PUZZLE
from harness.screens.report import Report
from harness.screens.watch import Terminal, Watch
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]

WIDTH = 112
# rich's own format loads a font from the network; any fixed-width font of the reader's serves as well.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace"
)


def recording() -> Console:
    """A console of fixed width that keeps what is printed."""
    return Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False, emoji=False
    )


def picture(console: Console, title: str) -> str:
    """What was printed since the last picture, as SVG."""
    return console.export_svg(title=title, code_format=FORMAT, unique_id="workbook")


def report() -> str:
    """The solution's fused kernels on the devices of this machine."""
    console = recording()
    run = runs.run(Options(PUZZLE, root="solutions", variants=("fused",)))
    Report(console).run(run)
    return picture(console, "p22 --backward --fused --solution")


def learner(folder: Path) -> Work:
    """A checkout in which everything is solved but dx."""
    blanks.generate(roots.solutions(), folder / "problems")
    work = Work(PUZZLE, PUZZLE.main_rung)
    solution = work.solution.read_text()
    wrong = solution.replace(
        "(g - c2 - x_hat * c1)).cast[dtype]()\n        # BLANK-END dx",
        "(g - x_hat * c1)).cast[dtype]()\n        # BLANK-END dx",
    )
    if wrong == solution:
        raise SystemExit("the last line of blank dx has changed: say here what a learner gets wrong")
    work.path.write_text(blanks.fill(blanks.skeleton(solution), wrong))
    return work


def wrong_gate(work: Work) -> str:
    """Every gate of the learner's kernels."""
    console = recording()
    commands.verify_work(console, work)
    return picture(console, "verify p22")


def watching(work: Work) -> str:
    """The watch screen after a save, with the hint that the diagnosis names."""
    console = recording()
    watch = Watch(work, "dx", console)
    watch.terminal = Terminal(console)
    watch.start()
    watch.current.done.wait()
    watch.finish()
    console.export_text()  # forgets the screens before the last
    watch.hint()
    return picture(console, "watch p22")


def main(folder: Path) -> None:
    """Writes the pictures."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"report": report()}
    with tempfile.TemporaryDirectory() as name:
        here = Path(name).resolve()
        os.chdir(here)  # paths are shown as from a learner's checkout
        checkout, roots.CHECKOUT = roots.CHECKOUT, here
        roots.solutions = lambda: checkout / "solutions"
        work = learner(here)
        pictures["wrong_gate"] = wrong_gate(work)
        pictures["watch"] = watching(work)
        os.chdir(checkout)
    for name, text in pictures.items():
        (folder / f"{name}.svg").write_text(text)
        Console().print(Text(f"wrote {folder / name}.svg"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
