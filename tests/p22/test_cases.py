"""Puzzle 22's spec: the reference, the cases, rounding, sizes and the ledger."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.check.compare import compare
from harness.check.gradient_checks import count_saved_bytes
from harness.check.reference import Reference, add_strides
from harness.devices.targets import make_cpu_target
from harness.puzzles.p22 import spec as p22
from harness.spec.cases import is_nonfinite

CASES = p22.cases()
FINITE = [case for case in CASES if not is_nonfinite(case.values)]
NOT_FINITE = [case for case in CASES if is_nonfinite(case.values)]
ADVERSARIAL = [case for case in FINITE if case.values not in ("plain", "cancelling")]
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parametrize_cases(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# ---- The reference ------------------------------------------------------------------------------------------


def test_row_sum_limit_allows_rounded_statistics_only():
    """To first order, c1 changes by -rstd * c2 * (error of mean) + c1 * (error of rstd) / rstd."""
    case = next(case for case in CASES if case.name == "wide")
    arrays = p22.inputs(case, "float32", 0)
    truth = p22.PUZZLE.compute_exact(arrays)
    saved = {name: truth[name] * (1 + error) for name, error in (("mean", 1e-7), ("rstd", -2e-7))}
    c1, c2 = truth["row_sums"].astype(float).reshape(*truth["mean"].shape, 2).transpose(2, 0, 1)
    expected_change = np.abs(-truth["rstd"] * c2 * truth["mean"] * 1e-7 - c1 * 2e-7).max()
    assert p22.propagate_rounding(arrays, {n: a.astype(np.float64) for n, a in saved.items()})[
        "row_sums"
    ] == pytest.approx(float(expected_change), rel=1e-4)
    assert p22.propagate_rounding(arrays, {n: truth[n].astype(np.float64) for n in saved})["row_sums"] < 1e-12
    got = truth["row_sums"].astype(float)
    limits = {"baseline": got, "dtype": "float32"}
    perturbed = got + 1e-5 * np.abs(got).max()
    assert not compare(perturbed, got, **limits).ok
    assert compare(perturbed, got, **limits, propagated_error=1.1e-5 * np.abs(got).max()).ok
    assert not compare(perturbed, got, **limits, propagated_error=0.5e-5 * np.abs(got).max()).ok


def test_row_sums_start_from_the_input_dln():
    """Compare c1 and c2 with a loop over rows for an independent dln."""
    arrays = p22.inputs(CASES[2], "float64", 3)
    arrays["dln"] = np.random.default_rng(0).standard_normal(arrays["input"].shape)
    B, S, H = arrays["input"].shape
    rows = p22.PUZZLE.compute_exact(arrays)["row_sums"]
    assert rows.shape == (B * S, 2)
    for row in range(B * S):
        x, dln = arrays["input"][row // S, row % S], arrays["dln"][row // S, row % S]
        x_hat = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        c1 = sum(dln[h] * arrays["ln_weight"][h] * x_hat[h] for h in range(H)) / H
        c2 = sum(dln[h] * arrays["ln_weight"][h] for h in range(H)) / H
        np.testing.assert_allclose(rows[row].astype(float), [c1, c2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_computes_statistics_in_float32(dtype):
    kind = getattr(torch, dtype)
    arrays = p22.inputs(CASES[1], dtype, 0)
    outputs = p22.reference({name: add_strides(array, kind) for name, array in arrays.items()})
    accum_dtype = torch.float64 if dtype == "float64" else torch.float32
    for name, tensor in outputs.items():
        assert tensor.dtype == (accum_dtype if name in ("mean", "rstd", "row_sums") else kind), name
        assert not tensor.requires_grad


# ---- The cases ----------------------------------------------------------------------------------------------


def test_cases_cover_common_mistakes():
    sizes = [case.dims for case in ADVERSARIAL]
    assert CASES[0].dims == (4, 4, 8, 16)
    assert any(B != S for B, S, H, O in sizes)
    assert any(B * S == 1 for B, S, H, O in sizes)
    assert any(H % 2 and O % 2 for B, S, H, O in sizes)
    assert any(H > 128 and H % 32 for B, S, H, O in sizes), "rows longer than a block of 128 threads"
    assert any(B * S > 32 and (B * S) % 32 for B, S, H, O in sizes), (
        "more rows than a tile, and a partial tile"
    )
    assert any(O > 128 and O % 32 for B, S, H, O in sizes), "the same for the output"
    assert any(O == H for B, S, H, O in sizes), "W transposed has W's shape"
    assert {case.values for case in ADVERSARIAL} == {"hard", "expanded", "transposed", "large"}


@parametrize_cases(ADVERSARIAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adversarial_cases_have_adversarial_statistics(case, dtype):
    arrays = p22.inputs(case, dtype, 0)
    x = arrays["input"]
    rows = x.shape[0] * x.shape[1]
    deviations = x.std(-1).ravel()
    median = np.median(deviations)
    assert np.all(np.abs(x.mean(-1)) > median), "the mean is far from 0 in every row"
    if case.values not in ("expanded", "large") and rows >= 4:
        tiny = deviations < 0.15 * median
        assert np.sum(tiny) == rows // 4 and np.all(tiny[3::4]), "every fourth row"
    gamma = arrays["ln_weight"]
    assert np.std(gamma) > 0.1 and np.abs(arrays["ln_bias"]).max() > 0.1
    assert np.any(gamma == 0), "division by gamma fails"
    if case.values != "expanded":
        assert np.std(arrays["grad_output"]) > 0.1 * np.abs(arrays["grad_output"]).max()


@parametrize_cases(ADVERSARIAL)
def test_both_correction_terms_of_dx_are_significant(case):
    """Each term is at least 1 % of g, a thousand times the float32 limit."""
    arrays = p22.inputs(case, "float64", 0)
    x = arrays["input"]
    x_hat = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    g = (arrays["grad_output"] @ arrays["linear_weight"]) * arrays["ln_weight"]
    size = np.abs(g).max()
    assert np.abs(g.mean(-1)).max() > 0.01 * size
    assert np.abs(x_hat * (g * x_hat).mean(-1, keepdims=True)).max() > 0.01 * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_and_transposed_grad_output_reach_torch(dtype):
    by_values = {case.values: case for case in ADVERSARIAL}
    expanded = p22.inputs(by_values["expanded"], dtype, 0)["grad_output"]
    transposed = p22.inputs(by_values["transposed"], dtype, 0)["grad_output"]
    assert add_strides(expanded, getattr(torch, dtype)).stride() == (0, 0, 0)
    tensor = add_strides(transposed, getattr(torch, dtype))
    assert not tensor.is_contiguous() and tensor.transpose(0, 1).is_contiguous()
    assert np.array_equal(tensor.double().numpy(), transposed)


@parametrize_cases(NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_elements_are_the_same_in_all_dtypes(case, dtype):
    """The nonfinite elements of truth and baseline are the same."""
    arrays = p22.inputs(case, dtype, 0)
    float64_arrays, rounded_arrays = (
        p22.reference({name: add_strides(array, kind) for name, array in arrays.items()})
        for kind in (torch.float64, getattr(torch, dtype))
    )
    for name, truth in float64_arrays.items():
        assert torch.equal(truth.isfinite(), rounded_arrays[name].isfinite()), name
    assert any(not truth.isfinite().all() for truth in float64_arrays.values())
    assert any(truth.isfinite().any() for truth in float64_arrays.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_16_bit_rounding_inside_row_sums_fails(dtype, seed):
    """Rounding each term, or each row's sum, exceeds the limit."""
    case = next(case for case in CASES if case.values == "cancelling")
    reference = Reference(p22.PUZZLE, dtype, seed)
    truth, baseline = (
        reference.get_truth(case, make_cpu_target()),
        reference.get_baseline(case, make_cpu_target()),
    )
    arrays = reference.get_arrays(case)
    x, dy = arrays["input"], arrays["grad_output"]
    x_hat = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    dln = dy @ arrays["linear_weight"]
    assert np.array_equal(p22.round_to_dtype(dln, dtype), dln), "dln itself may be in 16 bits, as in PyTorch"
    terms = {"grad_ln_weight": dln * x_hat, "grad_ln_bias": dln, "grad_bias": dy}
    for name, term in terms.items():
        sums = np.zeros(term.shape[-1])
        for row in term.reshape(-1, term.shape[-1]):
            sums = p22.round_to_dtype(sums + row, dtype)
        assert not compare(sums, truth[name], baseline[name], dtype).ok, name
        exact = p22.round_to_dtype(term.sum((0, 1)), dtype)
        assert compare(exact, truth[name], baseline[name], dtype).ok, name
    rounded = p22.round_to_dtype(p22.round_to_dtype(terms["grad_ln_weight"], dtype).sum((0, 1)), dtype)
    result = compare(rounded, truth["grad_ln_weight"], baseline["grad_ln_weight"], dtype)
    assert result.error > 5 * result.limit


def test_dims_option_replaces_only_sizes():
    cases = p22.cases((2, 3, 5, 7))
    assert {case.dims for case in cases} == {(2, 3, 5, 7)}
    assert [case.values for case in cases] == ["plain", "hard"]


# ---- Rounding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@settings(deadline=None)  # a busy machine
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_rounding_matches_torch(dtype, values):
    """Include ties near 1 and the smallest subnormal, and values around the largest finite number."""
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}[dtype]
    ties = [sign * (1 + k * 2.0**-bits) for k in (1, 3) for sign in (1, -1)]
    close = [
        1 + 2.0**-bits + 2.0**-20,
        2.0**-25,
        65519.0,
        65520.0,
        255.4 * 2.0**120,
        255.5 * 2.0**120,
        3.0e38,
    ]
    array = np.array([*values, *ties, *close], np.float32).astype(float)
    expected = torch.tensor(array, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
    with np.errstate(over="ignore"):
        assert np.array_equal(p22.round_to_dtype(array, dtype), expected)


# ---- Sizes and bytes ----------------------------------------------------------------------------------------


def test_shapes_and_operation_counts():
    shapes = p22.PUZZLE.compute_shapes((2, 3, 5, 7))
    assert shapes["output"] == (2, 3, 7) and shapes["grad_input"] == (2, 3, 5)
    assert shapes["grad_weight"] == (7, 5) and shapes["grad_bias"] == (7,)
    assert shapes["mean"] == shapes["rstd"] == (2, 3) and shapes["row_sums"] == (6, 2)
    assert p22.PUZZLE.count_multiply_adds((2, 3, 5, 7)) == 210
    assert p22.PUZZLE.count_multiply_adds((64, 4096, 4096, 16384)) == 2**44, "larger than 32 bits"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_eager_saved_bytes_match_autograd(dtype):
    B, S, H, O = dims = (2, 3, 8, 7)
    sizes = ((B, S, H), (H,), (H,), (O, H), (O,))
    inputs = [torch.randn(size, dtype=getattr(torch, dtype), requires_grad=True) for size in sizes]

    def pair(x, gamma, beta, W, bias):
        return torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (H,), gamma, beta), W, bias)

    saved, _ = count_saved_bytes(pair, inputs)
    parameters = sum(t.numel() * t.element_size() for t in inputs[1:4])
    assert sum(p22.ledger(dims, dtype).eager_saved.values()) == saved - parameters


def test_ledger_matches_manual_counts():
    B, S, H, O = 2, 3, 8, 7
    ledger = p22.ledger((B, S, H, O), "bfloat16")
    assert sum(ledger.our_saved.values()) == 6 * 8 * 2 + 2 * 6 * 4
    assert sum(ledger.eager_saved.values()) - sum(ledger.our_saved.values()) == 6 * 8 * 2
    assert "ln_out" not in ledger.our_saved
    parameters = O * H + O + 2 * H
    assert sum(ledger.temporaries["fused"].values()) == parameters * 4, "16 bits are added up in float32"
    assert sum(p22.ledger((B, S, H, O), "float32").temporaries["fused"].values()) == parameters * 8
