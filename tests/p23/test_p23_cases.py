"""Puzzle 23's spec: the reference matches independent computations, and the cases expose every mistake."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from known_mistakes import diagnose_values
from typed import unwrap

from harness.check.gradient_checks import count_saved_bytes
from harness.check.reference import add_strides
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p23.mistakes import BLOCK, MISTAKES, TILE
from harness.spec.cases import is_nonfinite
from harness.spec.puzzle import Case
from harness.toolchain import roots

CASES = p23.cases()
ALL_CASES = [*CASES, *p23.GATE_CASES]
FINITE = [case for case in CASES if not is_nonfinite(case.values)]
DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTITIES = [quantity for call in p23.PUZZLE.calls for quantity in call.op.writes]
DIFFERENTIATED = {"grad_query": "query", "grad_key": "key", "grad_value": "value", "grad_mask": "mask"}


GRADIENTS = ("grad_query", "grad_key", "grad_value")


def parametrize_cases(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def compute_reference(arrays) -> dict:
    return p23.reference({name: add_strides(array) for name, array in arrays.items()})


# ---- The reference ------------------------------------------------------------------------------------------


@parametrize_cases([*FINITE, *p23.GATE_CASES])
def test_reference_matches_scaled_dot_product_attention(case):
    """Compare the output and all gradients; rows without a visible key are 0."""
    arrays = p23.inputs(case, "float64", 0)
    leaves = [add_strides(arrays[name]).requires_grad_() for name in DIFFERENTIATED.values()]
    output = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3], enable_gqa=True)
    gradients = torch.autograd.grad(output, leaves, add_strides(arrays["grad_output"]))
    expected = dict(zip(("output", *DIFFERENTIATED), (output.detach(), *gradients), strict=True))
    for name, tensor in expected.items():
        torch.testing.assert_close(compute_reference(arrays)[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_computes_scores_in_float32(dtype):
    kind = getattr(torch, dtype)
    accum_dtype = torch.float64 if dtype == "float64" else torch.float32
    arrays = p23.inputs(CASES[1], dtype, 0)
    outputs = p23.reference({name: add_strides(array, kind) for name, array in arrays.items()})
    for name, tensor in outputs.items():
        is_rounded = name.split(".")[-1] in ("output", *GRADIENTS)
        assert tensor.dtype == (kind if is_rounded else accum_dtype), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_baseline_rounds_only_saved_tensors(dtype):
    """For one row: P has the error of the rounded lse, and dS that of the rounded output."""
    arrays = p23.inputs(Case("row", "", (1, 1, 1, 5, 4), "unmasked"), dtype, 0)
    kind, double = getattr(torch, dtype), compute_reference(arrays)
    outputs = p23.reference({name: add_strides(array, kind) for name, array in arrays.items()})
    lse, output = (double[name].to(t).double() for name, t in (("lse", torch.float32), ("output", kind)))
    query, key, value, dO = (add_strides(arrays[name]) for name in ("query", "key", "value", "grad_output"))
    P = torch.exp(query @ key.mT / 2 - lse[..., None])
    dS = P * (dO @ value.mT - (dO * output).sum(-1, keepdim=True))
    expected = {"grad_query": dS @ key / 2, "grad_key": dS.mT @ query / 2, "grad_value": P.mT @ dO}
    unit = torch.finfo(kind).eps + 64 * torch.finfo(torch.float32).eps
    for name, tensor in expected.items():
        torch.testing.assert_close(
            outputs[f"fused.{name}"].double(), tensor, rtol=unit, atol=unit * float(tensor.abs().max())
        )


# ---- Identities without a reference -------------------------------------------------------------------------


@parametrize_cases([case for case in FINITE if case.values != "large"])
def test_gradients_satisfy_identities(case):
    """Every correct backward pass satisfies these identities."""
    arrays = p23.inputs(case, "float64", 3)
    exact = p23.PUZZLE.compute_exact(arrays)
    P, dS, dK, dV, dQ = (
        exact[name] for name in ("probabilities", "grad_scores", "grad_key", "grad_value", "grad_query")
    )
    size = np.abs(dS).max() + 1
    empty = np.isneginf(arrays["mask"]).all(-1)
    nonempty = ~np.broadcast_to(empty, P.shape[:3])
    # Softmax is invariant to adding a constant to a row's scores.
    assert np.abs(P.sum(-1) - nonempty).max() < 1e-12
    assert np.abs(dS.sum(-1)).max() < 1e-12 * size
    # Each query with a visible key distributes its dO over the values.
    assert np.allclose(dV.sum(-2), (arrays["grad_output"] * nonempty[..., None]).sum(-2), rtol=1e-10)
    # Scores are bilinear, so scaling Q by a factor and K by its inverse has no effect.
    in_query, in_key = (arrays["query"] * dQ).sum((-1, -2)), (arrays["key"] * dK).sum((-1, -2))
    assert np.abs(in_query - in_key).max() < 1e-10 * (np.abs(in_query).max() + 1)


def test_softmax_is_invariant_to_an_offset_of_all_keys():
    """An offset of all keys shifts a row's scores equally, so dK sums to 0 over the keys."""
    arrays = p23.inputs(Case("common", "", (1, 2, 6, 7, 4), "unmasked"), "float64", 0)
    shifted = {**arrays, "key": arrays["key"] + np.array([0.5, -1.0, 2.0, 0.25])}
    assert np.allclose(
        p23.PUZZLE.compute_exact(arrays)["output"], p23.PUZZLE.compute_exact(shifted)["output"], rtol=1e-12
    )
    assert np.abs(p23.PUZZLE.compute_exact(arrays)["grad_key"].sum(-2)).max() < 1e-12


# ---- The cases ----------------------------------------------------------------------------------------------


def test_cases_cover_common_mistakes():
    sizes = [case.dims for case in FINITE]
    assert CASES[0].dims == p23.DIMS
    assert any(S != T and S % 2 and T % 2 for _, _, S, T, _ in sizes)
    assert any(T > 128 and T % 16 for *_, T, _ in sizes), "rows longer than a block of 128 threads"
    assert any(B * N > 4 and S > 16 and T > 16 for B, N, S, T, _ in sizes), (
        "more heads than a small grid is deep"
    )
    assert any(S > 16 and T > 16 and d > 16 and d % 16 for *_, S, T, d in sizes), (
        "tiles follow tiles along all axes"
    )
    assert any(d > 128 and d % 16 for *_, d in sizes), "a head wider than a block"
    assert any(S == T == d for _, _, S, T, d in sizes), "every transpose has the shape of the matrix"
    assert any(S == 1 for _, _, S, *_ in sizes) and any(T == 1 for *_, T, _ in sizes)
    assert {case.values for case in FINITE} == {
        "plain", "hard", "unmasked", "causal", "expanded", "transposed", "large", "low", "hidden", "cancelling",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_cases([case for case in FINITE if case.values == "hard"])
def test_adversarial_cases_have_adversarial_scores(case, dtype):
    arrays = p23.inputs(case, dtype, 0)
    hidden = np.isneginf(arrays["mask"])
    assert hidden.all(-1).sum() == 1, "one row has no visible key"
    assert (hidden & ~hidden.all(-1, keepdims=True)).any(), "other rows have hidden and visible keys"
    v = p23.derive(arrays)
    rows = ~hidden.all(-1)
    assert np.abs(v.dot[:, :, rows]).max() > 0.1 * np.abs(v.grad_probabilities).max(), (
        "the row sum is not small"
    )
    assert np.median(v.probabilities[:, :, rows].max(-1)) < 0.9, "no row is decided by one key"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_overflow_an_exponential(dtype):
    case = next(case for case in CASES if case.values == "large")
    with np.errstate(over="ignore"):
        assert all(np.isinf(np.exp(np.float32(scores.max()))) for scores in (
            p23.derive(p23.inputs(case, dtype, seed)).scores for seed in range(4)
        ))  # fmt: skip


@parametrize_cases([case for case in CASES if case.values in ("expanded", "transposed")])
def test_grad_output_reaches_torch_with_its_strides(case):
    grad = add_strides(p23.inputs(case, "float32", 0)["grad_output"], torch.float32)
    assert not grad.is_contiguous()
    assert (0 in grad.stride()) == (case.values == "expanded")


def test_dims_option_replaces_only_sizes():
    cases = p23.cases((1, 2, 5, 7, 3))
    assert {case.dims for case in cases} == {(1, 2, 5, 7, 3)}
    assert [case.values for case in cases] == ["plain", "hard"]


# ---- Known mistakes -----------------------------------------------------------------------------------------


def test_overwritten_sums_equal_the_last_tile():
    (case,) = p23.GATE_CASES
    arrays = p23.PUZZLE.make_inputs(case, "float64", 0)
    correct = p23.derive(arrays)
    group, last = int(correct.group), (correct.query.shape[2] - 1) // TILE * TILE
    assert group > 1 and last > 0
    summed = (slice(None), slice(group - 1, None, group), slice(last, None))
    for quantity, weights, rows in (
        ("grad_key", correct.scale * correct.grad_scores, correct.query),
        ("grad_value", correct.probabilities, correct.grad_output),
    ):
        (mistake,) = (m for m in MISTAKES if m.id == "last-queries-alone" and quantity in m.changes)
        got = getattr(p23.derive(arrays, mistake.changes), quantity)
        np.testing.assert_allclose(got, weights[summed].swapaxes(-1, -2) @ rows[summed], atol=1e-12)


def test_each_mistake_changes_a_single_step():
    """Combining two dependent changes would match neither mistake."""
    assert all(len(mistake.changes) == 1 for mistake in MISTAKES)
    assert len({(mistake.id, *mistake.changes) for mistake in MISTAKES}) == len(MISTAKES)


# ---- Sizes and bytes ----------------------------------------------------------------------------------------


def test_shapes_and_operation_counts():
    shapes = p23.PUZZLE.compute_shapes((2, 3, 5, 7, 4))
    assert shapes["output"] == shapes["grad_query"] == (2, 3, 5, 4)
    assert shapes["grad_key"] == shapes["grad_value"] == (2, 3, 7, 4)
    assert shapes["scores"] == shapes["grad_scores"] == (2, 3, 5, 7)
    assert p23.PUZZLE.count_multiply_adds((2, 3, 5, 7, 4)) == 2 * 2 * 3 * 5 * 7 * 4


def test_extra_product_is_recorded_but_not_in_graphs():
    gate = p23.PUZZLE.gates[0]
    assert gate.own_quantities == ("scores", "transposed_product")
    assert "transposed_product" in p23.PUZZLE.list_outputs("unfused")
    in_graphs = p23.PUZZLE.list_calls(p23.PUZZLE.variants)
    assert [call for call in p23.PUZZLE.calls if call not in in_graphs] == [p23.VARIANTS["unfused"][-1]]
    assert p23.PUZZLE.compute_shapes((2, 3, 5, 7, 4))["transposed_product"] == (2, 3, 4, 4)


def test_grouped_query_heads_have_expected_shapes():
    """`dims` determines the number of key heads, and reports show both shapes."""
    dims = (2, 6, 5, 7, 4, 3)
    shapes = p23.PUZZLE.compute_shapes(dims)
    assert shapes["grad_query"] == (2, 6, 5, 4) and shapes["grad_key"] == shapes["grad_value"] == (2, 3, 7, 4)
    assert p23.PUZZLE.format_dims(dims) == "query [2, 6, 5, 4], key [2, 3, 7, 4]"


@pytest.mark.parametrize(
    ("name", "file", "value"),
    [
        ("ROW_THREADS", "attention", p23.ROW_THREADS),
        ("ROW_THREADS", "attention", BLOCK),
        ("TILE", "tiles", TILE),
    ],
)
def test_kernel_constants_match_the_spec(name, file, value):
    source = (roots.get_solutions() / "p23" / "op" / f"{file}.mojo").read_text()
    assert int(unwrap(re.search(rf"^comptime {name} = (\d+)$", source, re.M))[1]) == value


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_eager_saved_bytes_match_autograd(dtype):
    B, N, S, T, d = dims = (2, 3, 5, 7, 4)
    kind = getattr(torch, dtype)
    inputs = [torch.randn(B, N, n, d, dtype=kind, requires_grad=True) for n in (S, T, T)]
    saved, _ = count_saved_bytes(lambda q, k, v: torch.softmax(q @ k.mT / d**0.5, -1) @ v, inputs)
    assert sum(p23.ledger(dims, dtype).eager_saved.values()) == saved


def test_fused_variant_stores_no_scores():
    """At twice the length the fused variant uses twice the bytes, and eager mode more than three times."""
    short, long = (p23.ledger((2, 3, S, S, 4), "bfloat16") for S in (64, 128))
    assert sum(long.saved_by_variant["fused"].values()) == 2 * sum(short.saved_by_variant["fused"].values())
    assert sum(long.temporaries["fused"].values()) == 2 * sum(short.temporaries["fused"].values())
    assert sum(long.eager_saved.values()) > 3 * sum(short.eager_saved.values())
    assert p23.ledger((2, 3, 5, 7, 4), "bfloat16").saved_by_variant["fused"] == {
        "query": 240, "key": 336, "value": 336, "output": 240, "lse": 120,
    }  # fmt: skip


def test_ledger_matches_manual_counts():
    ledger = p23.ledger((2, 3, 5, 7, 4), "bfloat16")
    assert ledger.our_saved["probabilities"] == 2 * 3 * 5 * 7 * 4, "in float32"
    assert ledger.eager_saved["probabilities"] == 2 * 3 * 5 * 7 * 2
    assert sum(ledger.temporaries["unfused"].values()) == 3 * 2 * 3 * 5 * 7 * 4


def test_infinite_lse_without_large_scores_is_named():
    def infinite(v):
        return np.where(np.isfinite(v.lse), np.inf, v.lse)

    assert (
        diagnose_values(p23.PUZZLE, "lse", infinite, ["chapter", "odd sizes"]).mistake == "infinite-at-first"
    )
    assert diagnose_values(p23.PUZZLE, "lse", infinite, ["large scores"]).mistake == "not-finite"
