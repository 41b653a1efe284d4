"""What the harness says of puzzle 21's files: `python hunted.py GATE` as they are given, `python hunted.py check` of a first test.

The first test is what many people write: gradcheck in float64. `python hunted.py dq` prints a row of a gradient, given and mended.
"""

import sys
import tempfile
import textwrap
from pathlib import Path

import torch

from harness.check.python_files import run_source
from harness.check.results import compute_exit_code
from harness.learner import blanks
from harness.puzzles.p21.catch import CatchChecker
from harness.puzzles.p21.hunt import HuntChecker
from harness.puzzles.p21.spec import PUZZLE
from harness.screens.report import format_gate
from harness.toolchain import roots

COLUMNS = 88
"""A page's column of code is not wider, and the verdict must be read whole."""

FIRST_TEST = """
def check(op):
    # BLANK-START check: a first test
    assert torch.autograd.gradcheck(op.function, op.inputs())
    # BLANK-END check
"""


def show_dq() -> None:
    """The gradient of the first query, by the code that is given and by the solution's, each run as its file has it."""
    solution = roots.get_solutions() / "p21" / "hunt.py"
    texts = {"given": blanks.make_skeleton(solution.read_text()), "mended": solution.read_text()}
    for name, text in texts.items():
        generator = torch.Generator().manual_seed(21)
        q, k, v, dout = (torch.randn(4, 6, generator=generator) for _ in range(4))
        out = run_source(text, solution)["Attention"].apply(q.requires_grad_(), k, v)
        (dq,) = torch.autograd.grad(out, q, dout)
        print(f"{name:8}" + "".join(f"{element:8.3f}" for element in dq[0].tolist()))


def main(gate: str) -> int:
    """Prints the verdict on a gate; returns its exit code."""
    rung = PUZZLE.find_gate_rung(gate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / rung.file
        if gate == "check":
            path.write_text(f"import torch\n{FIRST_TEST}")
            results = CatchChecker(PUZZLE, rung).check(path)
        else:
            path.write_text(blanks.make_skeleton((roots.get_solutions() / "p21" / rung.file).read_text()))
            results = HuntChecker(PUZZLE, rung).check(path, [gate])
        for result in results:
            for text in format_gate(result, PUZZLE, path, blanks.find_blanks(path.read_text())):
                print(textwrap.fill(str(text).replace(f"{folder}/", ""), COLUMNS, subsequent_indent=" " * 8))
    return compute_exit_code(results, [result.gate.id for result in results])


if __name__ == "__main__":
    sys.exit(show_dq() if sys.argv[1] == "dq" else main(sys.argv[1]))
