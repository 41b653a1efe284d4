"""What puzzle 20's check says of a walk that counts one of the two paths back to x: `python one_path.py`."""

import sys
import tempfile
import textwrap
from pathlib import Path

from harness.check.results import compute_exit_code
from harness.learner import blanks
from harness.puzzles.p20.graph import GraphChecker
from harness.puzzles.p20.spec import PUZZLE
from harness.screens.report import format_gate
from harness.toolchain import roots

COLUMNS = 88
"""A page's column of code is not wider, and the verdict must be read whole."""
TWO, ONE = 'grad["a"] * d["x->a"] + grad["b"] * d["x->b"]', 'grad["b"] * d["x->b"]'


def main() -> int:
    """Prints the verdict on the walk; returns its exit code."""
    rung = PUZZLE.find_gate_rung("backward")
    text = (roots.get_solutions() / "p20" / rung.file).read_text()
    assert text.count(TWO) == 1, f"{rung.file} does not have {TWO}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / rung.file
        path.write_text(text.replace(TWO, ONE))
        results = GraphChecker(PUZZLE, rung).check(path, ["backward"])
        for result in results:
            for line in format_gate(result, PUZZLE, path, blanks.find_blanks(path.read_text())):
                if "next: " not in str(line):  # a command, which is another one under another runner
                    print(textwrap.fill(str(line), COLUMNS, subsequent_indent=" " * 8))
    return compute_exit_code(results, ["backward"])


if __name__ == "__main__":
    sys.exit(main())
