"""What the harness says about wrong kernels: `python book/examples/wrong_kernel.py NAME ...`, names of solutions/p22/wrong/.

Only the gate that a kernel gets wrong is judged, on the virtual GPU, in all cases.
"""

import sys

from rich.console import Console

from harness.check import zoo
from harness.check.checker import Checker
from harness.learner.blanks import find_blanks
from harness.puzzles.p22.spec import PUZZLE
from harness.screens.report import format_gate

console = Console(highlight=False, emoji=False)
checker = Checker(PUZZLE)
for kernel in zoo.load_wrong_solutions("p22"):
    if kernel.name in sys.argv[1:]:
        package = kernel.build_package()
        source = package.path / kernel.file
        (result,) = checker.check(package, [kernel.gate])
        console.print(f"{kernel.name}: {kernel.story}", soft_wrap=True)
        for line in format_gate(result, PUZZLE, source, find_blanks(source.read_text())):
            console.print(line, soft_wrap=True)
        console.print()
