"""The recorded run of a wrong kernel at small sizes, of which the build makes a page.

`python -m book.figures.recorded_pictures` records it (book/pictures/bug.json), by the tool behind `--show`.
"""

import json
from pathlib import Path

from harness.screens.picture_html import fill_template

FOLDER = Path(__file__).absolute().parents[1] / "pictures"
PAGE = "bug.html"
"""The page of the wrong kernel, in the folder of the built book."""
BUG, SMALL = "dw_batch_sequence_swapped", (2, 3, 4, 3)


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def take() -> dict:
    """Run the wrong kernel, and return the data of its page."""
    # Here, because the build has no PyTorch.
    from harness.check import picture, zoo
    from harness.puzzles.p22.spec import PUZZLE
    from harness.screens import picture_page

    kernel = next(kernel for kernel in zoo.load_wrong_solutions(PUZZLE.name) if kernel.name == BUG)
    gate = next(gate for gate in PUZZLE.gates if gate.id == kernel.gate)
    taken = picture.make_picture(PUZZLE, kernel.build_package(), gate, cases=PUZZLE.list_cases(SMALL))
    return picture_page.make_data(taken)


def write_page(site: Path) -> None:
    """Writes the page of the wrong kernel into the built book."""
    page = fill_template(load("bug"))
    assert "<body>" in page  # harness/screens/picture_page.html
    back = '<p><a href="index.html">Back to the book</a></p>'
    (site / PAGE).write_text(page.replace("<body>", f"<body>\n{back}", 1), encoding="utf-8")


if __name__ == "__main__":
    text = json.dumps(take(), separators=(",", ":"))
    (FOLDER / "bug.json").write_text(text + "\n", encoding="utf-8")
