"""Construct cases: the sizes at which kernels go wrong, and few cases that cover all pairs of them.

A kernel processes an axis tile by tile, and the only tile, the last one and the step between tiles are
different code. So a case has each axis below a tile, at one, or above, and `covering` chooses cases in which
every two axes have all nine combinations, and every size occurs. A case that varies one axis alone does not
show two loops that go wrong together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, product

import numpy as np

from harness.spec.puzzle import Arrays, Case, Dims

CLASSES = ("below", "at", "above")


@dataclass(frozen=True)
class Axis:
    """An axis of the cases: its name, and its sizes in classes, each a name and the sizes that are alike."""

    name: str
    classes: Mapping[str, tuple[int, ...]]


def first_two(dims: Dims, plain: str, hard: str) -> list[Case]:
    """Return the first two cases of a puzzle, at the same sizes: the default one, and one of adversarial inputs; `plain` and `hard` say why."""
    return [Case("chapter", plain, dims, "plain"), Case("hard values", hard, dims, "hard", in_16_bits=True)]


def chapter_and(dims: Dims, plain: str, hard: str, others: Sequence[Case]) -> Callable[..., list[Case]]:
    """Return the `cases` of a puzzle: `first_two` at its default sizes and the others, or at the sizes of --dims the two alone."""

    def cases(given: Dims | None = None) -> list[Case]:
        first = first_two(given or dims, plain, hard)
        return first if given else [*first, *others]

    return cases


def tiled_axis(name: str, tile: int, *larger: int) -> Axis:
    """Return an axis that a kernel takes `tile` elements at a time; `larger` are further sizes, as more than a block has threads."""
    sizes = ((tile - 1, 1), (tile,), (2 * tile + 1, tile + 1, *larger))
    return Axis(name, dict(zip(CLASSES, sizes, strict=True)))


def listed_axis(name: str, *sizes: int) -> Axis:
    """Return an axis without a tile, whose sizes are each a class of its own."""
    return Axis(name, {str(size): (size,) for size in sizes})


def covering(axes: Sequence[Axis], values: Sequence[str], dims: Callable[..., Dims]) -> list[Case]:
    """Return cases in which every two axes have every combination of their classes, and every size occurs.

    The first cases have all axes in their first class, in their second, and so on: mistakes that many loops
    share.

    Args:
        axes: The axes to vary.
        values: Kinds of values, each in turn.
        dims: The axes' sizes in order -> the sizes of the puzzle's case.
    """
    classes = [list(axis.classes) for axis in axes]
    together = [
        tuple(names[min(k, len(names) - 1)] for names in classes) for k in range(max(map(len, classes)))
    ]
    rows = list(dict.fromkeys(together))
    missing = {pair for row in product(*classes) for pair in pairs(row)} - {p for r in rows for p in pairs(r)}
    while missing:
        best = max(product(*classes), key=lambda row: len(missing & pairs(row)))
        rows.append(best)
        missing -= pairs(best)
    # A class that has more sizes than there are rows with it comes again.
    for number, axis in enumerate(axes):
        for name, sizes in axis.classes.items():
            having = [row for row in rows if row[number] == name]
            rows += having[:1] * (len(sizes) - len(having))
    turns = [{name: cycle(sizes) for name, sizes in axis.classes.items()} for axis in axes]
    drawn = cycle(values)
    cases: list[Case] = []
    for row in rows:
        sizes = [next(turn[name]) for turn, name in zip(turns, row, strict=True)]
        words = ", ".join(f"{axis.name} {where(name)}" for axis, name in zip(axes, row, strict=True))
        cases.append(Case(" x ".join(map(str, sizes)), words, dims(*sizes), next(drawn)))
    return sorted(cases, key=lambda case: math.prod(case.dims))


def pairs(row: Sequence[str]) -> set[tuple[tuple[int, str], ...]]:
    """Return the pairs of axis and class that meet in a row; of a single axis each class by itself."""
    places = list(enumerate(row))
    return set(combinations(places, min(2, len(places))))


def where(name: str) -> str:
    """Return a class in words."""
    return f"{name} the size of a tile" if name in CLASSES else f"= {name}"


# ---- Values -------------------------------------------------------------------------------------------------


def not_finite(places: Mapping[str, tuple[str, ...]], dims: Dims) -> list[Case]:
    """Return a case for each value that is not finite: tensor -> its symbol in the book and the numbers, "NaN", "inf" or "-inf".

    `values` is "NaN in input"; `with_not_finite` puts it there.
    """
    why = "goes where PyTorch's goes: no comparison may swallow it"
    return [
        Case(f"{number} in {symbol}", why, dims, f"{number} in {tensor}")
        for tensor, (symbol, *numbers) in places.items()
        for number in numbers
    ]


def is_not_finite(values: str) -> bool:
    """Check whether the values of a case are those of `not_finite`."""
    return values.split(" ")[0] in ("NaN", "inf", "-inf")


def with_not_finite(arrays: Arrays, values: str) -> None:
    """Set an element of its tensor to the number of a case of `not_finite`; other kinds of values change
    nothing."""
    if is_not_finite(values):
        number, _, tensor = values.split(" ")
        arrays[tensor].flat[odd_place(arrays[tensor])] = float(number)


def odd_place(array: np.ndarray) -> int:
    """Return the index of the element that is not a number: two thirds on."""
    return array.size * 2 // 3


CANCELLING = "cancelling"
"""The kind of values that `cancelling` draws."""


def cancelling(
    rows: int, columns: int, random: np.random.Generator, cancel: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return dy [rows, columns] whose sums over the rows show a rounding to 16 bits inside of them, and each
    row's group [rows].

    Rows of a group, which are multiplied by the same factor, have the gradients dy, dy
    2 and -3/2 dy, so that each sum over them is 0; the last row, with an eighth of the others' gradient,
    decides the result. Values have few binary digits: only the terms and the sums themselves are rounded, in
    PyTorch as in a kernel. Without `cancel` the third gradient is 3/2 dy: in float32 a rounding to 16 bits
    shows anyway, and the error of sums that cancel would be arbitrary.
    """
    groups = max(1, (rows - 1) // 3)
    group, member = np.arange(rows) % groups, np.arange(rows) // groups
    factor = np.array([1, 0.5, -1.5 if cancel else 1.5, 0])[member, None]
    dy = (2 * random.integers(16, 32, (rows, columns)) + 1)[group] * factor
    dy[-1] = random.integers(33, 64, columns) / 8
    return dy, group
