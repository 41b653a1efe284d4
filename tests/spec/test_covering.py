"""Pairwise covering cases: all pairs of size classes occur, and cases are few, named and deterministic."""

from itertools import combinations, product

import numpy as np
import pytest

from harness.puzzles.p19 import spec as p19
from harness.puzzles.p20 import spec as p20
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p24 import spec as p24
from harness.spec.cases import (
    draw_cancelling,
    is_nonfinite,
    make_covering_cases,
    make_listed_axis,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rounding import round_to_dtype

FOUR_AXES = (
    make_tiled_axis("a", 4),
    make_tiled_axis("b", 8, 100, 200, 300),
    make_listed_axis("c", 1, 2),
    make_tiled_axis("d", 16),
)
AXES = {"p19": p19.AXES, "p20": p20.AXES, "p23": p23.AXES, "p24": p24.AXES, "four": FOUR_AXES}


def list_classes(axis, size: int) -> list[str]:
    """Return the size classes of an axis that contain a size."""
    return [name for name, sizes in axis.classes.items() if size in sizes]


@pytest.mark.parametrize("name", AXES)
def test_cases_cover_all_pairs_of_sizes(name):
    axes = AXES[name]
    cases = make_covering_cases(axes, ("hard",), lambda *sizes: sizes)
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        covered = {
            pair
            for case in cases
            for pair in product(list_classes(first, case.dims[i]), list_classes(second, case.dims[j]))
        }
        assert covered == set(product(first.classes, second.classes)), (first.name, second.name)
    for i, axis in enumerate(axes):
        assert {case.dims[i] for case in cases} == {size for sizes in axis.classes.values() for size in sizes}


def test_cases_are_few_sorted_and_deterministic():
    cases = make_covering_cases(p23.AXES, ("hard", "unmasked"), lambda *sizes: sizes)
    assert len(cases) == 9, "the minimum for three axes of three classes"
    assert cases == make_covering_cases(p23.AXES, ("hard", "unmasked"), lambda *sizes: sizes)
    assert [np.prod(case.dims) for case in cases] == sorted(np.prod(case.dims) for case in cases)
    assert {case.values for case in cases} == {"hard", "unmasked"}
    assert (33, 33, 33) in {case.dims for case in cases}, "several tiles along all axes together"
    first = cases[0]
    assert first.name == "1 x 16 x 17" and first.purpose == (
        "S below the size of a tile, T at the size of a tile, d above the size of a tile"
    )
    (one,) = make_covering_cases([make_listed_axis("n", 7)], ("hard",), lambda n: (n,))
    assert (one.name, one.purpose, one.dims) == ("7", "n = 7", (7,))


def test_sizes_surround_a_tile():
    sizes = {
        case.dims[0] for case in make_covering_cases([make_tiled_axis("n", 16)], ("hard",), lambda n: (n,))
    }
    assert sizes == {1, 15, 16, 17, 33}


@pytest.mark.parametrize("name", list_puzzle_names())
def test_case_names_are_unique_and_the_default_is_first(name):
    names = [case.name for case in find_puzzle(name).list_cases(None)]
    assert len(set(names)) == len(names) and names[:1] in ([], ["chapter"])


def test_one_element_becomes_nonfinite():
    cases = make_nonfinite_cases({"x": ("x", "NaN", "-inf"), "grad": ("dy", "inf")}, (2, 3))
    assert [case.name for case in cases] == ["NaN in x", "-inf in x", "inf in dy"]
    for case, tensor, value in zip(cases, ("x", "x", "grad"), (np.nan, -np.inf, np.inf), strict=True):
        arrays = {"x": np.zeros((2, 3)), "grad": np.zeros((2, 3))}
        write_nonfinite(arrays, case.values)
        assert is_nonfinite(case.values) and case.dims == (2, 3)
        nonfinite = {name: array[~np.isfinite(array)] for name, array in arrays.items()}
        np.testing.assert_array_equal(nonfinite.pop(tensor), [value])
        assert not next(iter(nonfinite.values())).size
    assert not is_nonfinite("hard") and not is_nonfinite("large in x")


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_cancelling_sums_expose_16_bit_accumulation(dtype, step):
    """The exact sum of all rows equals the last row; rounding after each row changes it."""
    random = np.random.default_rng(0)
    dy, group = draw_cancelling(66, 20, random, cancel=True)
    assert np.array_equal(round_to_dtype(dy, dtype), dy)
    terms = dy * random.standard_normal(66)[group][:, None]
    expected, narrow = terms.sum(0), np.zeros(20)
    for term in terms:
        narrow = round_to_dtype(narrow + term, dtype)
    np.testing.assert_allclose(expected, terms[-1], rtol=1e-12)
    assert np.abs(narrow - expected).max() > 4 * step * np.abs(expected).max()
