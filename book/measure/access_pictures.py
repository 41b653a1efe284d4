"""Records the runs that the book's access pictures are drawn from: `python -m book.measure.access_pictures`.

Both come from the tool behind `--show`: the accesses of the solution's fused backward pass at the chapter's sizes, as
ranges (book/pictures/fused_backward.json, drawn by figures.py), and the whole run of a wrong kernel at small sizes
(book/pictures/bug.json), of which the build makes a page.
"""

import json
from collections.abc import Iterable

import numpy as np

from book.figures.recorded_pictures import FOLDER
from harness.check import picture, zoo
from harness.check.accesses import Accesses
from harness.puzzles.p22.spec import PUZZLE
from harness.screens import picture_page
from harness.toolchain import roots

GATE, LAUNCH = "dW", "minimal_fused_backward"
BUG, SMALL = "dw_batch_sequence_swapped", (2, 3, 4, 3)


def take(package, gate: str, dims: tuple[int, ...]) -> picture.Picture:
    """The picture of a gate of puzzle 22."""
    chosen = next(g for g in PUZZLE.gates if g.id == gate)
    return picture.take(PUZZLE, package, chosen, cases=PUZZLE.cases(dims))


def solution() -> dict:
    """What the blocks of the solution's launch access: tensor -> shape, and kind -> block -> ranges of elements."""
    taken = take(roots.op_package(roots.solutions(), PUZZLE.name), GATE, PUZZLE.dims)
    run = taken.mine.accesses
    number = next(n for n, launch in enumerate(run.launches) if launch.name == LAUNCH)
    launch = run.launches[number]
    shapes = {name: list(taken.shapes.get(name) or [t.size]) for name, t in launch.events.tensors.items()}
    return {"launch": LAUNCH, "grid": launch.grid, "block": launch.block, "tensors": {
        name: {"shape": shape, **by_kind(run, number, name)} for name, shape in shapes.items()
    }}  # fmt: skip


def by_kind(run: Accesses, number: int, name: str) -> dict:
    """kind -> block -> ranges of the elements that it accesses in a tensor, in ascending order."""
    code = run.names.index((-1, name))
    out: dict[str, dict[str, list]] = {}
    for kind in "RWA":
        rows = (run.launch == number) & (run.tensor == code) & (run.kind == kind)
        for block in np.unique(run.block[rows]).tolist():
            elements = np.unique(run.element[rows & (run.block == block)])
            out.setdefault(kind, {})[str(block)] = ranges(elements.tolist())
    return out


def ranges(elements: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as [first, last] of what is contiguous."""
    out: list[list[int]] = []
    for element in elements:
        if out and out[-1][1] == element - 1:
            out[-1][1] = element
        else:
            out.append([element, element])
    return out


def bug() -> dict:
    """The data of the wrong kernel's page."""
    kernel = next(kernel for kernel in zoo.load(PUZZLE.name) if kernel.name == BUG)
    return picture_page.data(take(kernel.package(), kernel.gate, SMALL))


def main() -> None:
    """Writes both records."""
    for name, data in (("fused_backward", solution()), ("bug", bug())):
        (FOLDER / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"wrote {FOLDER / name}.json")


if __name__ == "__main__":
    main()
