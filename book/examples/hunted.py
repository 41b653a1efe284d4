"""What the harness says of puzzle 21's files: `python hunted.py GATE` as they are given, `python hunted.py check` of a first test.

The first test is what many people write: gradcheck in float64.
"""

import sys
import tempfile
import textwrap
from pathlib import Path

from harness.check.results import exit_code
from harness.learner import blanks
from harness.puzzles.p21.catch import CatchChecker
from harness.puzzles.p21.hunt import HuntChecker
from harness.puzzles.p21.spec import PUZZLE
from harness.screens.report import verdict_lines
from harness.toolchain import roots

COLUMNS = 88
"""A page's column of code is not wider, and the verdict must be read whole."""

# ANCHOR: first
FIRST_TEST = """
def check(op):
    # BLANK-START check: a first test
    assert torch.autograd.gradcheck(op.function, op.inputs())
    # BLANK-END check
"""
# ANCHOR_END: first


def main(gate: str) -> int:
    """Prints the verdict on a gate; returns its exit code."""
    rung = PUZZLE.rung_of(gate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / rung.file
        if gate == "check":
            path.write_text(f"import torch\n{FIRST_TEST}")
            results = CatchChecker(PUZZLE, rung).check(path)
        else:
            path.write_text(blanks.skeleton((roots.solutions() / "p21" / rung.file).read_text()))
            results = HuntChecker(PUZZLE, rung).check(path, [gate])
        for result in results:
            for text in verdict_lines(result, PUZZLE, path, blanks.find(path.read_text())):
                print(textwrap.fill(str(text).replace(f"{folder}/", ""), COLUMNS, subsequent_indent=" " * 8))
    return exit_code(results, [result.gate.id for result in results])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
