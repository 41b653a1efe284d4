"""The verdict, by hand-made numbers and properties, and of right formulas."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.check.compare import (
    EPSILON,
    allowance,
    compare,
    describe_wrong_bits,
    distinct_digits,
    got_and_expected,
    relative_error,
    spread_in_ulps,
)
from harness.check.reference import Reference
from harness.devices import poison
from harness.devices.targets import cpu
from harness.spec.puzzle import Case
from harness.spec.rounding import as_array, as_tensor, name_of_dtype, to_stored, values

DTYPES = ("float32", "bfloat16", "float16", "float64")
NAN, INF = float("nan"), float("inf")


def verdict(got, truth, baseline=None, dtype="float32", **options):
    """compare() on lists; PyTorch is exact unless said otherwise. A warning of NumPy is a failure."""
    got, truth = np.array(got, np.float64), np.array(truth, np.float64)
    baseline = truth if baseline is None else np.array(baseline, np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compare(got, truth, baseline, dtype, **options)


# ---- The limit ----------------------------------------------------------------------------------------------


def test_epsilon_is_the_spacing_above_one():
    for dtype in ("float64", "float32", "float16"):
        assert EPSILON[dtype] == np.finfo(dtype).eps
    assert EPSILON["bfloat16"] == 1 / 128


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [("float32", 4.76837158203125e-07), ("bfloat16", 1 / 256), ("float16", 1 / 2048), ("float64", 2.0**-46)],
)
def test_the_floor_alone_where_torch_is_exact(dtype, floor):
    assert verdict([1.0 + floor], [1.0], dtype=dtype).ok
    above = verdict([1.0 + 1.01 * floor], [1.0], dtype=dtype)
    assert not above.ok and above.limit == floor


def test_error_limit_ratio_and_difference_by_hand():
    # The largest truth is 4: PyTorch errs by 0.5 / 4, we err by 1 / 4.
    judged = verdict([2.0, -5.0], [2.0, -4.0], baseline=[2.0, -4.5])
    assert (judged.error, judged.baseline, judged.ratio, judged.difference) == (0.25, 0.125, 2.0, 0.5)
    assert judged.limit == 0.25 + 2.0**-21 and judged.ok
    assert judged.worst == (1,)
    assert not verdict([2.0, -5.1], [2.0, -4.0], baseline=[2.0, -4.5]).ok


def test_an_error_counts_against_the_largest_truth_and_not_its_own():
    assert verdict([1e-6, 8.0], [0.0, 8.0]).error == 1.25e-7


def test_allowance_widens_the_share_of_the_baseline_only():
    judged = verdict([5.5], [4.0], baseline=[4.5], allowance=3.0)
    assert judged.limit == 0.75 + 2.0**-21 and judged.ok
    assert not verdict([5.5], [4.0], baseline=[4.5]).ok
    assert not verdict([4.1], [4.0], allowance=8.0).ok


@pytest.mark.parametrize(("rows", "s"), [(1, 1), (64, 1), (256, 2), (1024, 4), (4096, 8), (70000, 8)])
def test_allowance_grows_with_the_root_of_the_rows(rows, s):
    assert allowance(True, rows) == s
    assert allowance(False, rows) == 1
    judged = verdict([2.0], [1.0], allowance=allowance(True, rows))
    assert json.loads(json.dumps({"ok": judged.ok, "limit": judged.limit})) == {
        "ok": False,
        "limit": judged.limit,
    }


def test_the_ratio_where_torch_makes_no_error():
    assert verdict([1.5], [1.0]).ratio == INF
    assert verdict([1.0], [1.0]).ratio == 0


# ---- Terms that cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_all_cancels_the_terms_are_the_measure(dtype):
    """16-bit kernels compute in float32, and are held to its last place."""
    floor = 2.0**-46 if dtype == "float64" else 2.0**-21
    judged = verdict([0.0, 50 * floor], [0.0, 0.0], dtype=dtype, terms=50.0)
    assert judged.ok and judged.error == floor
    assert not verdict([0.0, 51 * floor], [0.0, 0.0], dtype=dtype, terms=50.0).ok
    # What is too much for large terms is too much for small ones at a smaller size.
    assert not verdict([0.0, floor], [0.0, 0.0], dtype=dtype, terms=0.5).ok


def test_torch_is_measured_by_the_terms_too():
    judged = verdict([0.75], [0.0], baseline=[0.25], terms=8.0)
    assert (judged.error, judged.baseline, judged.limit) == (0.09375, 0.03125, 0.0625 + 2.0**-21)
    assert not judged.ok and verdict([-0.5], [0.0], baseline=[0.25], terms=8.0).ok


def test_a_truth_that_rounding_of_the_terms_leaves_counts_as_none():
    assert verdict([3e-14], [1e-14], terms=10.0).ok
    assert not verdict([3e-5], [1e-14], terms=10.0).ok


@settings(deadline=None)  # a busy machine
@given(st.floats(1e-6, 1e3), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.sampled_from(DTYPES))
def test_terms_change_nothing_where_the_truth_can_be_told_from_their_rounding(truth, got, terms, dtype):
    assume(truth >= terms * 2.0**-23)
    assert verdict([got], [truth], dtype=dtype, terms=terms) == verdict([got], [truth], dtype=dtype)


@pytest.mark.parametrize("terms", [NAN, INF, 0.0])
def test_terms_of_no_size_change_nothing(terms):
    assert verdict([1e-6], [0.0], terms=terms) == verdict([1e-6], [0.0])


ONE_COLUMN = Case("one column", "", (2, 3, 1, 4), "hard")


@pytest.mark.parametrize("seed", range(4))
def test_dx_of_one_column_is_right_with_and_without_a_fused_multiplication(puzzle, seed):
    """g - c2 is 0 where g is rounded before it is subtracted, and the rounding error of g where it is not."""
    reference = Reference(puzzle, "float32", seed)
    t = correct(reference.arrays(ONE_COLUMN))
    unrounded = t["dln"].astype(np.float64) * t["gamma"]
    contracted = t["rstd"] * (unrounded - t["g"]).astype(F)
    truth = reference.truth(ONE_COLUMN, cpu())["grad_input"]
    baseline = reference.baseline(ONE_COLUMN, cpu())["grad_input"]
    terms = reference.terms(ONE_COLUMN)["grad_input"]
    assert np.abs(truth).max() < 1e-10 and terms == pytest.approx(
        2 * np.abs(t["rstd"] * t["g"]).max(), rel=1e-5
    )
    assert np.any(contracted)
    for got in (t["grad_input"], contracted):
        assert compare(got.astype(np.float64), truth, baseline, "float32", terms=terms).ok
    wrong = correct(reference.arrays(ONE_COLUMN), c2=lambda t: F(0))["grad_input"]
    assert not compare(wrong.astype(np.float64), truth, baseline, "float32", terms=terms).ok


@pytest.mark.parametrize("factor", [1 + 2.0**-16, 0.999, 2.0])
def test_dx_of_one_column_with_slightly_wrong_means_is_rejected(puzzle, factor):
    reference = Reference(puzzle, "float32", 0)
    wrong = correct(reference.arrays(ONE_COLUMN), c2=lambda t: F(factor) * t["g"])["grad_input"]
    truth = reference.truth(ONE_COLUMN, cpu())["grad_input"]
    baseline = reference.baseline(ONE_COLUMN, cpu())["grad_input"]
    terms = reference.terms(ONE_COLUMN)["grad_input"]
    assert not compare(wrong.astype(np.float64), truth, baseline, "float32", terms=terms).ok


def test_no_case_of_the_puzzle_cancels(puzzle):
    """So that every wrong kernel is judged by the truth's own size."""
    reference = Reference(puzzle, "float32", 0)
    for case in puzzle.cases(None):
        truth = reference.truth(case, cpu())["grad_input"]
        if np.isfinite(truth).all():
            assert np.abs(truth).max() > 1e-3 * reference.terms(case)["grad_input"], case.name
        else:
            assert not reference.terms(case), case.name


# ---- Edges --------------------------------------------------------------------------------------------------


def test_an_all_zero_truth_wants_the_floor_absolutely():
    floor = 4 * EPSILON["float32"]
    assert verdict([0.0, floor], [0.0, 0.0]).ok
    assert not verdict([0.0, 2 * floor], [0.0, 0.0]).ok
    # What PyTorch makes of it widens nothing.
    assert not verdict([0.0, 2 * floor], [0.0, 0.0], baseline=[1.0, 1.0]).ok


def test_empty_tensors_are_right():
    empty = np.empty((0, 3))
    judged = compare(empty, empty, empty, "float32")
    assert judged.ok and judged.error == 0 and judged.worst == ()
    assert relative_error(empty, empty) == 0
    assert spread_in_ulps(empty, empty, "float32") == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_none_where_the_truth_has_one(bad):
    judged = verdict([1.0, bad, 3.0], [1.0, 2.0, 3.0])
    assert not judged.ok and judged.nonfinite == 1 and judged.worst == (1,)
    assert judged.error == 0, "the finite elements are right"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_where_the_truth_has_none(bad):
    judged = verdict([1.0, 2.0, 3.0], [1.0, bad, 3.0])
    assert not judged.ok and judged.nonfinite == 1 and judged.worst == (1,)


@pytest.mark.parametrize(("got", "truth"), [(INF, -INF), (-INF, INF)])
def test_an_infinity_of_the_other_sign_is_wrong(got, truth):
    assert verdict([1.0, got], [1.0, truth]).nonfinite == 1
    assert not verdict([1.0, got], [1.0, truth]).ok


@pytest.mark.parametrize(("got", "truth"), [(NAN, INF), (NAN, -INF), (INF, NAN), (-INF, NAN)])
def test_whether_a_sum_ends_as_nan_or_infinite_is_up_to_its_order(got, truth):
    """A compensated sum makes inf - inf of a plain sum's inf; both are seen by whoever looks for overflows."""
    assert verdict([1.0, got], [1.0, truth]).ok
    assert not verdict([2.0, got], [1.0, truth]).ok, "the finite rest is judged"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_same_kind_of_none_at_the_same_place_is_right(value):
    assert verdict([1.0, value], [1.0, value]).ok
    assert verdict([1.0, value], [1.0, value], baseline=[1.0, 5.0]).ok


def test_none_in_the_baseline_does_not_widen_the_limit():
    judged = verdict([1.0, 2.5], [1.0, 2.0], baseline=[1.0, NAN])
    assert not judged.ok and np.isfinite(judged.limit) and judged.baseline == 0


def test_an_unwritten_element_is_wrong_whatever_it_holds():
    judged = verdict([1.0, 2.0], [1.0, 2.0], poison=np.array([False, True]))
    assert not judged.ok and judged.unwritten == 1
    assert verdict([1.0, 2.0], [1.0, 2.0], poison=np.array([False, False])).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_a_nan_and_is_found_again(dtype):
    buffer = poison.make_poisoned((3, 2), dtype)
    assert np.isnan(values(buffer)).all() and name_of_dtype(buffer) == dtype
    buffer[1, 1] = to_stored(np.array(0.0), dtype)
    assert poison.unwritten(buffer).tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_does_not_make_the_poison(dtype):
    """A kernel that computes 0 / 0 or inf - inf is not told that it wrote nothing."""
    zero = torch.zeros(1, dtype=getattr(torch, dtype))
    infinity = zero + INF
    for result in (zero / zero, infinity - infinity, infinity * zero, zero + NAN):
        assert result.isnan().all() and not poison.unwritten(as_array(result)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_arrays_round_as_pytorch_does(dtype):
    random = np.random.default_rng(0)
    wide = random.standard_normal(10_000) * 10.0 ** random.integers(-45, 40, 10_000)
    wide = np.append(wide, [INF, -INF, NAN, 0.0, -0.0])
    tensor = torch.tensor(wide).to(getattr(torch, dtype))
    assert np.array_equal(values(to_stored(wide, dtype)), tensor.double().numpy(), equal_nan=True)
    assert torch.equal(as_tensor(to_stored(wide, dtype)).nan_to_num(), tensor.nan_to_num())
    assert name_of_dtype(as_array(tensor)) == dtype


def test_spread_in_ulps_by_hand():
    low, high = np.array([1.0, -3.0, 0.0]), np.array([1.0 + 2 * 2.0**-23, -3.0, 0.0])
    assert spread_in_ulps(low, high, "float32") == 2
    # Between 2 and 4 one unit is twice as large.
    assert spread_in_ulps(np.array([2.0]), np.array([2.0 + 2.0**-22]), "float32") == 1
    assert spread_in_ulps(low, low, "bfloat16") == 0


# ---- Properties ---------------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
arrays = hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=4), elements=numbers)


@st.composite
def triples(draw):
    """got, truth and baseline of one shape."""
    truth = draw(arrays)
    same = hnp.arrays(np.float64, truth.shape, elements=numbers)
    return draw(same), truth, draw(same)


@settings(deadline=None)  # a busy machine
@given(triples(), st.sampled_from(DTYPES))
def test_ok_means_within_the_published_formula(tensors, dtype):
    got, truth, baseline = tensors
    judged = compare(got, truth, baseline, dtype)
    scale = np.abs(truth).max()
    assume(scale > 0)
    floor = {"float32": 2.0**-21, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-46}[dtype]
    limit = 2 * np.abs(baseline - truth).max() / scale + floor
    assert judged.ok == (np.abs(got - truth).max() / scale <= limit)


@settings(deadline=None)  # a busy machine
@given(triples())
def test_torch_itself_is_always_right(tensors):
    _, truth, baseline = tensors
    assume(np.any(truth))
    assert compare(baseline, truth, baseline, "float32").ok


@settings(deadline=None)  # a busy machine
@given(triples(), st.integers(-20, 20))
def test_the_unit_of_the_numbers_does_not_matter(tensors, exponent):
    got, truth, baseline = tensors
    assume(np.abs(truth).max() > 1e-100)
    factor = 2.0**exponent
    judged, scaled = (compare(f * got, f * truth, f * baseline, "float32") for f in (1, factor))
    assert (judged.ok, judged.worst) == (scaled.ok, scaled.worst)
    assert scaled.error == pytest.approx(judged.error) and scaled.limit == pytest.approx(judged.limit)


@settings(deadline=None)  # a busy machine
@given(triples(), st.data())
def test_one_none_anywhere_fails(tensors, data):
    _, truth, baseline = tensors
    index = data.draw(st.tuples(*(st.integers(0, size - 1) for size in truth.shape)))
    got = truth.copy()
    got[index] = data.draw(st.sampled_from([NAN, INF, -INF]))
    judged = compare(got, truth, baseline, "float32")
    assert not judged.ok and judged.nonfinite == 1 and judged.worst == index


@settings(deadline=None)  # a busy machine
@given(triples())
def test_the_worst_element_is_the_one_farthest_away(tensors):
    got, truth, baseline = tensors
    distance = np.abs(got - truth)
    assert distance[compare(got, truth, baseline, "float32").worst] == distance.max()


# ---- Right formulas -----------------------------------------------------------------------------------------

F = np.float32


def correct(arrays, **change):
    """Forward and backward in float32 by the formulas; `change` replaces one quantity by a wrong one.

    The mean is corrected by the mean of the deviations from it, as in the kernels: one float32 sum alone errs by more
    than twice PyTorch's error on some seeds, where the row's deviation is small beside its mean.
    """
    a = {name: np.array(array, F) for name, array in arrays.items()}
    x, gamma, beta, W, b = (a[n] for n in ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias"))
    t = {**a, "x": x, "gamma": gamma, "beta": beta, "W": W, "H": F(x.shape[-1])}

    def make(name, formula):
        t[name] = change.get(name, formula)(t)

    make("dy", lambda t: t["grad_output"])
    make("mean", lambda t: corrected_mean(t["x"]))
    make("variance", lambda t: ((t["x"] - t["mean"]) ** 2).mean(-1, keepdims=True))
    make("rstd", lambda t: F(1) / np.sqrt(t["variance"] + F(1e-5)))
    make("x_hat", lambda t: (t["x"] - t["mean"]) * t["rstd"])
    make("ln_out", lambda t: t["x_hat"] * t["gamma"] + t["beta"])
    make("dln", lambda t: t["dy"] @ t["W"])
    make("g", lambda t: t["dln"] * t["gamma"])
    make("c1", lambda t: (t["g"] * t["x_hat"]).mean(-1, keepdims=True))
    make("c2", lambda t: t["g"].mean(-1, keepdims=True))
    make("output", lambda t: t["ln_out"] @ t["W"].T + b)
    make("grad_input", lambda t: t["rstd"] * (t["g"] - t["c2"] - t["x_hat"] * t["c1"]))
    make("grad_ln_weight", lambda t: (t["dln"] * t["x_hat"]).sum((0, 1)))
    make("grad_ln_bias", lambda t: t["dln"].sum((0, 1)))
    make("grad_weight", lambda t: np.einsum("bso,bsh->oh", t["dy"], t["ln_out"]))
    make("grad_bias", lambda t: t["dy"].sum((0, 1)))
    return t


def corrected_mean(x):
    """The mean of every row, and the mean of what it leaves."""
    first = x.mean(-1, keepdims=True)
    return first + (x - first).mean(-1, keepdims=True)


QUANTITIES = ("output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")


@pytest.mark.parametrize("seed", range(4))
def test_right_formulas_in_float32_are_accepted(puzzle, seed):
    """Wrong ones are rejected in tests/spec/test_mistakes.py."""
    reference = Reference(puzzle, "float32", seed)
    for case in puzzle.cases(None):
        with np.errstate(all="ignore"):
            got = correct(reference.arrays(case))
        truth, baseline = reference.truth(case, cpu()), reference.baseline(case, cpu())
        for name in QUANTITIES:
            assert compare(got[name].astype(np.float64), truth[name], baseline[name], "float32").ok, (
                case,
                name,
            )


def test_two_numbers_that_an_error_shows_are_never_equal():
    assert got_and_expected(1.5, 1.25, 1e-3) == "got 1.5, expected 1.25"
    said = got_and_expected(-0.3498378312, -0.3498377728, 1.1e-9, 6)
    assert said == "got -0.34983783, expected -0.34983777: off by 5.8e-08, the limit 1.1e-09"
    assert distinct_digits(1.0, np.nextafter(1.0, 2), 6) == ("1", "1.0000000000000002")


def test_words_of_bits_are_told_by_the_bit():
    assert describe_wrong_bits(0b1011, 0b1001) == "bit 1 is 1, expected 0"
    assert describe_wrong_bits(-1, 0) == "bit 0 is 1, expected 0; 32 of its 32 bits are wrong"
