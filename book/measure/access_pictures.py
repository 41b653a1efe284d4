"""Records the run of a wrong kernel at small sizes, of which the build makes a page (book/pictures/bug.json): `python -m
book.measure.access_pictures`. It comes from the tool behind `--show`.
"""

import json

from book.figures.recorded_pictures import FOLDER
from harness.check import picture, zoo
from harness.puzzles.p22.spec import PUZZLE
from harness.screens import picture_page

BUG, SMALL = "dw_batch_sequence_swapped", (2, 3, 4, 3)


def bug() -> dict:
    """Return the data of the wrong kernel's page."""
    kernel = next(kernel for kernel in zoo.load_wrong_kernels(PUZZLE.name) if kernel.name == BUG)
    gate = next(gate for gate in PUZZLE.gates if gate.id == kernel.gate)
    return picture_page.make_data(
        picture.take_picture(PUZZLE, kernel.build_package(), gate, cases=PUZZLE.cases(SMALL))
    )


if __name__ == "__main__":
    text = json.dumps(bug(), separators=(",", ":"))
    (FOLDER / "bug.json").write_text(text + "\n", encoding="utf-8")
