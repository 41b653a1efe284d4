"""Construct a few cases that cover every pair of the sizes at which kernels fail.

Kernels handle a single tile, the last tile and the step between tiles differently, so each axis is smaller
than a tile, equal to one, or larger. A bug in two nested loops shows only if both axes vary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, product

import numpy as np

from harness.spec.puzzle import Arrays, Case, Dims

SIZE_CLASSES = ("below", "at", "above")


@dataclass(frozen=True)
class Axis:
    """An axis of the cases: its name, and its size classes, class name -> equivalent sizes."""

    name: str
    classes: Mapping[str, tuple[int, ...]]


def make_basic_cases(dims: Dims, default_purpose: str, adversarial_purpose: str) -> list[Case]:
    """Return the default case and one with adversarial inputs, each with its purpose."""
    return [
        Case("chapter", default_purpose, dims, "plain"),
        Case("hard values", adversarial_purpose, dims, "hard", in_16_bits=True),
    ]


def make_cases_function(
    dims: Dims, default_purpose: str, adversarial_purpose: str, other_cases: Sequence[Case]
) -> Callable[..., list[Case]]:
    """Return a puzzle's `list_cases`: the basic cases and, unless --dims sets the sizes, `other_cases`."""

    def list_cases(requested_dims: Dims | None = None) -> list[Case]:
        basic_cases = make_basic_cases(requested_dims or dims, default_purpose, adversarial_purpose)
        return basic_cases if requested_dims else [*basic_cases, *other_cases]

    return list_cases


def make_tiled_axis(name: str, tile: int, *larger: int) -> Axis:
    """Return an axis processed in tiles; `larger` adds sizes, such as one above the threads of a block."""
    sizes = ((tile - 1, 1), (tile,), (2 * tile + 1, tile + 1, *larger))
    return Axis(name, dict(zip(SIZE_CLASSES, sizes, strict=True)))


def make_listed_axis(name: str, *sizes: int) -> Axis:
    """Return an axis without tiles; each size is its own class."""
    return Axis(name, {str(size): (size,) for size in sizes})


def make_covering_cases(axes: Sequence[Axis], values: Sequence[str], dims: Callable[..., Dims]) -> list[Case]:
    """Return cases in which every two axes have every combination of their classes, and every size occurs.

    One case has all axes in their first class, another in their second, and so on, for mistakes that many
    loops share. `dims` maps the axes' sizes, in order, to the puzzle's dims.
    """
    class_names = [list(axis.classes) for axis in axes]
    diagonal_rows = [
        tuple(names[min(k, len(names) - 1)] for names in class_names)
        for k in range(max(map(len, class_names)))
    ]
    rows = list(dict.fromkeys(diagonal_rows))
    missing = {pair for row in product(*class_names) for pair in list_pairs(row)} - {
        p for r in rows for p in list_pairs(r)
    }
    while missing:
        best = max(product(*class_names), key=lambda row: len(missing & list_pairs(row)))
        rows.append(best)
        missing -= list_pairs(best)
    # Repeat a row if one of its classes has more sizes than rows.
    for number, axis in enumerate(axes):
        for name, sizes in axis.classes.items():
            matching = [row for row in rows if row[number] == name]
            rows += matching[:1] * (len(sizes) - len(matching))
    size_cycles = [{name: cycle(sizes) for name, sizes in axis.classes.items()} for axis in axes]
    value_cycle = cycle(values)
    cases: list[Case] = []
    for row in rows:
        sizes = [next(turn[name]) for turn, name in zip(size_cycles, row, strict=True)]
        purpose = ", ".join(
            f"{axis.name} {describe_class(name)}" for axis, name in zip(axes, row, strict=True)
        )
        cases.append(Case(" x ".join(map(str, sizes)), purpose, dims(*sizes), next(value_cycle)))
    return sorted(cases, key=lambda case: math.prod(case.dims))


def list_pairs(row: Sequence[str]) -> set[tuple[tuple[int, str], ...]]:
    """Return every pair of a row's (axis, class) entries; with a single axis, the entry alone."""
    entries = list(enumerate(row))
    return set(combinations(entries, min(2, len(entries))))


def describe_class(name: str) -> str:
    return f"{name} the size of a tile" if name in SIZE_CLASSES else f"= {name}"


# ---- Values -------------------------------------------------------------------------------------------------


def make_nonfinite_cases(values_by_tensor: Mapping[str, tuple[str, ...]], dims: Dims) -> list[Case]:
    """Return a case for each value in `values_by_tensor`: tensor -> (symbol in the book, "NaN", "inf", ...).

    A case's `values` are "NaN in input", for example; `write_nonfinite` writes the NaN.
    """
    purpose = "goes where PyTorch's goes: no comparison may swallow it"
    return [
        Case(f"{number} in {symbol}", purpose, dims, f"{number} in {tensor}")
        for tensor, (symbol, *numbers) in values_by_tensor.items()
        for number in numbers
    ]


def is_nonfinite(values: str) -> bool:
    return values.split(" ")[0] in ("NaN", "inf", "-inf")


def write_nonfinite(arrays: Arrays, values: str) -> None:
    """Write the NaN or infinity named by a case's `values` into its tensor; do nothing for other `values`."""
    if is_nonfinite(values):
        number, _, tensor = values.split(" ")
        arrays[tensor].flat[choose_index(arrays[tensor])] = float(number)


def choose_index(array: np.ndarray) -> int:
    """Return the flat index of the element that becomes non-finite: two thirds into the array."""
    return array.size * 2 // 3


CANCELLING = "cancelling"
"""`Case.values` for inputs from `draw_cancelling`."""


def draw_cancelling(
    rows: int, columns: int, rng: np.random.Generator, cancel: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Draw dy [rows, columns], whose column sums expose rounding to 16 bits, and the group of each row.

    The three rows of a group, which a spec multiplies by the same factor, are dy, dy / 2 and -3/2 dy, so that
    they sum to 0; the last row, about an eighth as large, determines the result. Values have few significant
    bits, so that both PyTorch and a kernel round only terms and sums. Without `cancel` the third row is
    3/2 dy: in float32, rounding to 16 bits shows anyway, and the error of cancelling sums would be arbitrary.
    """
    groups = max(1, (rows - 1) // 3)
    group, member = np.arange(rows) % groups, np.arange(rows) // groups
    factor = np.array([1, 0.5, -1.5 if cancel else 1.5, 0])[member, None]
    dy = (2 * rng.integers(16, 32, (rows, columns)) + 1)[group] * factor
    dy[-1] = rng.integers(33, 64, columns) / 8
    return dy, group
