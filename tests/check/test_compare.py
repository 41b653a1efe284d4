"""Comparison of a tensor with its reference: manual examples, properties, and correct formulas."""

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
    compare,
    compute_relative_error,
    compute_spread_in_ulps,
    compute_tolerance_factor,
    describe_wrong_bits,
    format_distinct,
    format_got_and_expected,
)
from harness.check.reference import Reference
from harness.devices import poison
from harness.devices.targets import make_cpu_target
from harness.spec.puzzle import Case
from harness.spec.rounding import as_array, as_tensor, convert_to_stored, get_dtype_name, to_float64

DTYPES = ("float32", "bfloat16", "float16", "float64")
NAN, INF = float("nan"), float("inf")
SEEDS = [pytest.param([0], id="seed 0"), pytest.param([1, 2, 3], id="other seeds", marks=pytest.mark.slow)]


def compare_lists(got, truth, baseline=None, dtype="float32", **options):
    """Call compare() on lists and raise on NumPy warnings; by default the baseline is exact."""
    got, truth = np.array(got, np.float64), np.array(truth, np.float64)
    baseline = truth if baseline is None else np.array(baseline, np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compare(got, truth, baseline, dtype, **options)


# ---- The limit ----------------------------------------------------------------------------------------------


def test_epsilon_matches_finfo():
    for dtype in ("float64", "float32", "float16"):
        assert EPSILON[dtype] == np.finfo(dtype).eps
    assert EPSILON["bfloat16"] == 1 / 128


SMALLEST_LIMITS = {"float32": 2.0**-21, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-46}


@pytest.mark.parametrize(("dtype", "smallest"), SMALLEST_LIMITS.items())
def test_limit_is_minimal_if_torch_is_exact(dtype, smallest):
    assert compare_lists([1.0 + smallest], [1.0], dtype=dtype).ok
    above = compare_lists([1.0 + 1.01 * smallest], [1.0], dtype=dtype)
    assert not above.ok and above.limit == smallest


def test_error_limit_ratio_and_difference():
    # The largest reference value is 4: PyTorch's error is 0.5 / 4, ours is 1 / 4.
    result = compare_lists([2.0, -5.0], [2.0, -4.0], baseline=[2.0, -4.5])
    assert (result.error, result.baseline, result.ratio, result.difference) == (0.25, 0.125, 2.0, 0.5)
    assert result.limit == 0.25 + 2.0**-21 and result.ok
    assert result.worst == (1,)
    assert not compare_lists([2.0, -5.1], [2.0, -4.0], baseline=[2.0, -4.5]).ok


def test_error_is_relative_to_the_largest_element():
    assert compare_lists([1e-6, 8.0], [0.0, 8.0]).error == 1.25e-7


def test_tolerance_factor_scales_only_the_baseline_error():
    result = compare_lists([5.5], [4.0], baseline=[4.5], tolerance_factor=3.0)
    assert result.limit == 0.75 + 2.0**-21 and result.ok
    assert not compare_lists([5.5], [4.0], baseline=[4.5]).ok
    assert not compare_lists([4.1], [4.0], tolerance_factor=8.0).ok


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (64, 1), (256, 2), (1024, 4), (4096, 8), (70000, 8)])
def test_tolerance_factor_grows_with_square_root_of_rows(rows, expected):
    assert compute_tolerance_factor(True, rows) == expected
    assert compute_tolerance_factor(False, rows) == 1
    result = compare_lists([2.0], [1.0], tolerance_factor=compute_tolerance_factor(True, rows))
    assert json.dumps([result.ok, result.limit]) == f"[false, {result.limit}]"


def test_ratio_if_torch_is_exact():
    assert compare_lists([1.5], [1.0]).ratio == INF
    assert compare_lists([1.0], [1.0]).ratio == 0


# ---- Terms that cancel ---------------------------------------------------------------------------------------


def test_error_is_relative_to_terms_if_they_cancel():
    """16-bit kernels compute in float32, so the limit is a float32 ulp."""
    for dtype in DTYPES:
        smallest = 2.0**-46 if dtype == "float64" else 2.0**-21
        result = compare_lists([0.0, 50 * smallest], [0.0, 0.0], dtype=dtype, term_magnitude=50.0)
        assert result.ok and result.error == smallest
        assert not compare_lists([0.0, 51 * smallest], [0.0, 0.0], dtype=dtype, term_magnitude=50.0).ok
        # Smaller terms have a smaller limit.
        assert not compare_lists([0.0, smallest], [0.0, 0.0], dtype=dtype, term_magnitude=0.5).ok


def test_baseline_error_is_relative_to_terms():
    result = compare_lists([0.75], [0.0], baseline=[0.25], term_magnitude=8.0)
    assert (result.error, result.baseline, result.limit) == (0.09375, 0.03125, 0.0625 + 2.0**-21)
    assert not result.ok and compare_lists([-0.5], [0.0], baseline=[0.25], term_magnitude=8.0).ok


def test_truth_below_rounding_of_the_terms_counts_as_zero():
    assert compare_lists([3e-14], [1e-14], term_magnitude=10.0).ok
    assert not compare_lists([3e-5], [1e-14], term_magnitude=10.0).ok


@settings(deadline=None)  # a busy machine
@given(st.floats(1e-6, 1e3), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.sampled_from(DTYPES))
def test_terms_are_ignored_if_truth_exceeds_their_rounding(truth, got, terms, dtype):
    assume(truth >= terms * 2.0**-23)
    assert compare_lists([got], [truth], dtype=dtype, term_magnitude=terms) == compare_lists(
        [got], [truth], dtype=dtype
    )


@pytest.mark.parametrize("terms", [NAN, INF, 0.0])
def test_invalid_terms_are_ignored(terms):
    assert compare_lists([1e-6], [0.0], term_magnitude=terms) == compare_lists([1e-6], [0.0])


SINGLE_COLUMN = Case("one column", "", (2, 3, 1, 4), "hard")


@pytest.mark.parametrize("seeds", SEEDS)
def test_dx_of_one_column_passes_with_and_without_fma(puzzle, seeds):
    """Without FMA, g - c2 is 0; with FMA it is the rounding error of g."""
    for seed in seeds:
        reference = Reference(puzzle, "float32", seed)
        values = compute_float32(reference.get_arrays(SINGLE_COLUMN))
        unrounded = values["dln"].astype(np.float64) * values["gamma"]
        contracted = values["rstd"] * (unrounded - values["g"]).astype(float32)
        truth = reference.get_truth(SINGLE_COLUMN, make_cpu_target())["grad_input"]
        baseline = reference.get_baseline(SINGLE_COLUMN, make_cpu_target())["grad_input"]
        terms = reference.get_term_magnitudes(SINGLE_COLUMN)["grad_input"]
        assert np.abs(truth).max() < 1e-10 and terms == pytest.approx(
            2 * np.abs(values["rstd"] * values["g"]).max(), rel=1e-5
        )
        assert np.any(contracted)
        for got in (values["grad_input"], contracted):
            assert compare(got.astype(np.float64), truth, baseline, "float32", term_magnitude=terms).ok
        for factor in (0, 1 + 2.0**-16, 0.999, 2.0):  # a wrong mean c2, even by a small factor
            values = compute_float32(
                reference.get_arrays(SINGLE_COLUMN), c2=lambda values, k=factor: float32(k) * values["g"]
            )
            assert not compare(
                values["grad_input"].astype(np.float64), truth, baseline, "float32", term_magnitude=terms
            ).ok


def test_puzzle_has_no_cancelling_case(puzzle):
    """Otherwise the limit would be relative to the terms and too large."""
    reference = Reference(puzzle, "float32", 0)
    for case in puzzle.list_cases(None):
        truth = reference.get_truth(case, make_cpu_target())["grad_input"]
        if np.isfinite(truth).all():
            assert np.abs(truth).max() > 1e-3 * reference.get_term_magnitudes(case)["grad_input"], case.name
        else:
            assert not reference.get_term_magnitudes(case), case.name


# ---- Edges --------------------------------------------------------------------------------------------------


def test_limit_is_absolute_if_truth_is_zero():
    smallest = 4 * EPSILON["float32"]
    assert compare_lists([0.0, smallest], [0.0, 0.0]).ok
    assert not compare_lists([0.0, 2 * smallest], [0.0, 0.0]).ok
    # PyTorch's error does not raise the limit.
    assert not compare_lists([0.0, 2 * smallest], [0.0, 0.0], baseline=[1.0, 1.0]).ok


def test_empty_tensors_pass():
    empty = np.empty((0, 3))
    result = compare(empty, empty, empty, "float32")
    assert result.ok and result.error == 0 and result.worst == ()
    assert compute_relative_error(empty, empty) == 0
    assert compute_spread_in_ulps(empty, empty, "float32") == 0


@pytest.mark.parametrize(
    ("got", "truth"),
    [(NAN, 2.0), (INF, 2.0), (-INF, 2.0), (2.0, NAN), (2.0, INF), (2.0, -INF), (INF, -INF), (-INF, INF)],
)
def test_nonfinite_difference_fails(got, truth):
    result = compare_lists([1.0, got, 3.0], [1.0, truth, 3.0])
    assert not result.ok and result.num_nonfinite == 1 and result.worst == (1,)
    assert result.error == 0, "finite elements are equal"


@pytest.mark.parametrize(
    ("got", "truth"), [(NAN, NAN), (NAN, INF), (NAN, -INF), (INF, NAN), (-INF, NAN), (INF, INF), (-INF, -INF)]
)
def test_nan_and_infinity_are_interchangeable(got, truth):
    """After an overflow a simple sum is inf, and a compensated sum is inf - inf = NaN."""
    for baseline in ([1.0, truth], [1.0, 5.0]):
        assert compare_lists([1.0, got], [1.0, truth], baseline).ok
        assert not compare_lists([2.0, got], [1.0, truth], baseline).ok, "finite elements are still compared"


def test_nan_in_baseline_does_not_raise_the_limit():
    result = compare_lists([1.0, 2.5], [1.0, 2.0], baseline=[1.0, NAN])
    assert not result.ok and np.isfinite(result.limit) and result.baseline == 0


def test_unwritten_element_fails_for_any_value():
    result = compare_lists([1.0, 2.0], [1.0, 2.0], unwritten_mask=np.array([False, True]))
    assert not result.ok and result.num_unwritten == 1
    assert compare_lists([1.0, 2.0], [1.0, 2.0], unwritten_mask=np.array([False, False])).ok


def test_poison_is_a_nan_and_is_detected():
    for dtype in DTYPES:
        buffer = poison.make_poisoned((3, 2), dtype)
        assert np.isnan(to_float64(buffer)).all() and get_dtype_name(buffer) == dtype
        buffer[1, 1] = convert_to_stored(np.array(0.0), dtype)
        assert poison.find_unwritten(buffer).tolist() == [[True, True], [True, False], [True, True]]


def test_arithmetic_does_not_produce_poison():
    """NaN from 0 / 0 or inf - inf must not be reported as unwritten."""
    for dtype in DTYPES:
        zero = torch.zeros(1, dtype=getattr(torch, dtype))
        infinity = zero + INF
        for result in (zero / zero, infinity - infinity, infinity * zero, zero + NAN):
            assert result.isnan().all() and not poison.find_unwritten(as_array(result)).any()


def test_stored_arrays_round_like_pytorch():
    for dtype in DTYPES:
        random = np.random.default_rng(0)
        wide = random.standard_normal(10_000) * 10.0 ** random.integers(-45, 40, 10_000)
        wide = np.append(wide, [INF, -INF, NAN, 0.0, -0.0])
        tensor = torch.tensor(wide).to(getattr(torch, dtype))
        assert np.array_equal(
            to_float64(convert_to_stored(wide, dtype)), tensor.double().numpy(), equal_nan=True
        )
        assert torch.equal(as_tensor(convert_to_stored(wide, dtype)).nan_to_num(), tensor.nan_to_num())
        assert get_dtype_name(as_array(tensor)) == dtype


def test_spread_in_ulps():
    low, high = np.array([1.0, -3.0, 0.0]), np.array([1.0 + 2 * 2.0**-23, -3.0, 0.0])
    assert compute_spread_in_ulps(low, high, "float32") == 2
    # Between 2 and 4 an ulp is twice as large.
    assert compute_spread_in_ulps(np.array([2.0]), np.array([2.0 + 2.0**-22]), "float32") == 1
    assert compute_spread_in_ulps(low, low, "bfloat16") == 0


# ---- Properties ---------------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
arrays = hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=4), elements=numbers)


@st.composite
def draw_tensors(draw):
    """Draw got, truth and baseline with equal shapes."""
    truth = draw(arrays)
    same = hnp.arrays(np.float64, truth.shape, elements=numbers)
    return draw(same), truth, draw(same)


@settings(deadline=None)  # a busy machine
@given(draw_tensors(), st.sampled_from(DTYPES))
def test_result_matches_the_documented_formula(tensors, dtype):
    got, truth, baseline = tensors
    scale, distance = np.abs(truth).max(), np.abs(got - truth)
    assume(scale > 1e-100)
    limit = 2 * np.abs(baseline - truth).max() / scale + SMALLEST_LIMITS[dtype]
    result = compare(got, truth, baseline, dtype)
    assert result.ok == (distance.max() / scale <= limit)
    assert result.error == pytest.approx(distance.max() / scale) and result.limit == pytest.approx(limit)
    assert distance[result.worst] == distance.max()


# ---- Correct formulas ---------------------------------------------------------------------------------------

float32 = np.float32


def compute_float32(arrays, **formulas):
    """Compute both passes in float32; `formulas` replaces formulas by quantity.

    The mean is corrected by the mean deviation from it, as in the kernels: a single float32 sum has more than twice
    PyTorch's error on some seeds if a row's deviation is small compared to its mean.
    """
    a = {name: np.array(array, float32) for name, array in arrays.items()}
    x, gamma, beta, W, b = (a[n] for n in ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias"))
    values = {**a, "x": x, "gamma": gamma, "beta": beta, "W": W, "H": float32(x.shape[-1])}

    def define(name, formula):
        values[name] = formulas.get(name, formula)(values)

    define("dy", lambda values: values["grad_output"])
    define("mean", lambda values: compute_corrected_mean(values["x"]))
    define("variance", lambda values: ((values["x"] - values["mean"]) ** 2).mean(-1, keepdims=True))
    define("rstd", lambda values: float32(1) / np.sqrt(values["variance"] + float32(1e-5)))
    define("x_hat", lambda values: (values["x"] - values["mean"]) * values["rstd"])
    define("ln_out", lambda values: values["x_hat"] * values["gamma"] + values["beta"])
    define("dln", lambda values: values["dy"] @ values["W"])
    define("g", lambda values: values["dln"] * values["gamma"])
    define("c1", lambda values: (values["g"] * values["x_hat"]).mean(-1, keepdims=True))
    define("c2", lambda values: values["g"].mean(-1, keepdims=True))
    define("output", lambda values: values["ln_out"] @ values["W"].T + b)
    define(
        "grad_input",
        lambda values: values["rstd"] * (values["g"] - values["c2"] - values["x_hat"] * values["c1"]),
    )
    define("grad_ln_weight", lambda values: (values["dln"] * values["x_hat"]).sum((0, 1)))
    define("grad_ln_bias", lambda values: values["dln"].sum((0, 1)))
    define("grad_weight", lambda values: np.einsum("bso,bsh->oh", values["dy"], values["ln_out"]))
    define("grad_bias", lambda values: values["dy"].sum((0, 1)))
    return values


def compute_corrected_mean(x):
    """Return each row's mean with one correction step: the mean deviation from it."""
    first = x.mean(-1, keepdims=True)
    return first + (x - first).mean(-1, keepdims=True)


QUANTITIES = ("output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")


@pytest.mark.parametrize("seeds", SEEDS)
def test_correct_formulas_in_float32_pass(puzzle, seeds):
    """Incorrect formulas are covered by tests/spec/test_mistakes.py."""
    for seed in seeds:
        reference = Reference(puzzle, "float32", seed)
        for case in puzzle.list_cases(None):
            with np.errstate(all="ignore"):
                got = compute_float32(reference.get_arrays(case))
            truth, baseline = (
                reference.get_truth(case, make_cpu_target()),
                reference.get_baseline(case, make_cpu_target()),
            )
            for name in QUANTITIES:
                assert compare(got[name].astype(np.float64), truth[name], baseline[name], "float32").ok, (
                    case,
                    name,
                )


def test_error_message_shows_enough_digits():
    assert format_got_and_expected(1.5, 1.25, 1e-3) == "got 1.5, expected 1.25"
    message = format_got_and_expected(-0.3498378312, -0.3498377728, 1.1e-9, 6)
    assert message == "got -0.34983783, expected -0.34983777: off by 5.8e-08, the limit 1.1e-09"
    assert format_distinct(1.0, np.nextafter(1.0, 2), 6) == ("1", "1.0000000000000002")


def test_wrong_bits_are_described():
    assert describe_wrong_bits(0b1011, 0b1001) == "bit 1 is 1, expected 0"
    assert describe_wrong_bits(-1, 0) == "bit 0 is 1, expected 0; 32 of its 32 bits are wrong"
