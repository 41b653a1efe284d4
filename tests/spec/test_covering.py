"""Cases by construction: every two axes meet in all ways, every size comes, and cases are few, named and always the same."""

from itertools import combinations, product

import numpy as np
import pytest

from harness.puzzles.p19 import spec as p19
from harness.puzzles.p20 import spec as p20
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p24 import spec as p24
from harness.spec.cases import (
    cancelling,
    covering,
    is_not_finite,
    listed_axis,
    not_finite,
    tiled_axis,
    with_not_finite,
)
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rounding import round_to_dtype

FOUR = (tiled_axis("a", 4), tiled_axis("b", 8, 100, 200, 300), listed_axis("c", 1, 2), tiled_axis("d", 16))
AXES = {"p19": p19.AXES, "p20": p20.AXES, "p23": p23.AXES, "p24": p24.AXES, "four": FOUR}


def classes_of(axis, size: int) -> list[str]:
    """The classes of an axis that have a size, looked up from the outside."""
    return [name for name, sizes in axis.classes.items() if size in sizes]


@pytest.mark.parametrize("name", AXES)
def test_every_two_axes_meet_in_all_ways_and_every_size_comes(name):
    axes = AXES[name]
    cases = covering(axes, ("hard",), lambda *sizes: sizes)
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        met = {
            pair
            for case in cases
            for pair in product(classes_of(first, case.dims[i]), classes_of(second, case.dims[j]))
        }
        assert met == set(product(first.classes, second.classes)), (first.name, second.name)
    for i, axis in enumerate(axes):
        assert {case.dims[i] for case in cases} == {size for sizes in axis.classes.values() for size in sizes}


def test_cases_are_few_small_first_and_always_the_same():
    cases = covering(p23.AXES, ("hard", "unmasked"), lambda *sizes: sizes)
    assert len(cases) == 9, "as few as three axes of three classes can have"
    assert cases == covering(p23.AXES, ("hard", "unmasked"), lambda *sizes: sizes)
    assert [np.prod(case.dims) for case in cases] == sorted(np.prod(case.dims) for case in cases)
    assert {case.values for case in cases} == {"hard", "unmasked"}
    assert (33, 33, 33) in {case.dims for case in cases}, "several tiles along all axes together"
    first = cases[0]
    assert first.name == "1 x 16 x 17" and first.why == (
        "S below the size of a tile, T at the size of a tile, d above the size of a tile"
    )
    (one,) = covering([listed_axis("n", 7)], ("hard",), lambda n: (n,))
    assert (one.name, one.why, one.dims) == ("7", "n = 7", (7,))


def test_one_tile_gives_the_sizes_around_it():
    sizes = {case.dims[0] for case in covering([tiled_axis("n", 16)], ("hard",), lambda n: (n,))}
    assert sizes == {1, 15, 16, 17, 33}


@pytest.mark.parametrize("name", puzzle_names())
def test_no_puzzle_has_two_cases_of_one_name_and_the_chapter_s_comes_first(name):
    names = [case.name for case in find_puzzle(name).cases(None)]
    assert len(set(names)) == len(names) and names[:1] in ([], ["chapter"])


def test_one_element_becomes_no_number():
    cases = not_finite({"x": ("x", "NaN", "-inf"), "grad": ("dy", "inf")}, (2, 3))
    assert [case.name for case in cases] == ["NaN in x", "-inf in x", "inf in dy"]
    for case, tensor, value in zip(cases, ("x", "x", "grad"), (np.nan, -np.inf, np.inf), strict=True):
        arrays = {"x": np.zeros((2, 3)), "grad": np.zeros((2, 3))}
        with_not_finite(arrays, case.values)
        assert is_not_finite(case.values) and case.dims == (2, 3)
        wild = {name: array[~np.isfinite(array)] for name, array in arrays.items()}
        np.testing.assert_array_equal(wild.pop(tensor), [value])
        assert not next(iter(wild.values())).size
    assert not is_not_finite("hard") and not is_not_finite("large in x")


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_sums_that_cancel_show_a_sum_kept_in_16_bits(dtype, step):
    """Times a number that is not exact, terms add up in float32 to the last row's; rounded one by one, to something else."""
    random = np.random.default_rng(0)
    dy, group = cancelling(66, 20, random, cancel=True)
    assert np.array_equal(round_to_dtype(dy, dtype), dy)
    terms = dy * random.standard_normal(66)[group][:, None]
    right, narrow = terms.sum(0), np.zeros(20)
    for term in terms:
        narrow = round_to_dtype(narrow + term, dtype)
    np.testing.assert_allclose(right, terms[-1], rtol=1e-12)
    assert np.abs(narrow - right).max() > 4 * step * np.abs(right).max()
