"""What `--show` says of a wrong kernel: `python book/examples/picture_of_a_bug.py NAME`, of solutions/p22/wrong/.

At small sizes, so that it fits onto a page.
"""

import sys

from rich.console import Console

from harness.check import zoo
from harness.check.picture import make_picture
from harness.puzzles.p22.spec import PUZZLE
from harness.screens.show import format_picture

DIMS = (2, 3, 4, 3)
console = Console(highlight=False, emoji=False)
kernel = next(kernel for kernel in zoo.load_wrong_solutions("p22") if kernel.name == sys.argv[1])
gate = next(gate for gate in PUZZLE.gates if gate.id == kernel.gate)
for line in format_picture(make_picture(PUZZLE, kernel.build_package(), gate, cases=PUZZLE.list_cases(DIMS))):
    console.print(line)
