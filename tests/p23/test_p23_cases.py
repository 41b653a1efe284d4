"""Puzzle 23 as data: the reference is right by independent ways, the cases are hard, and no known mistake survives them."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from known_mistakes import diagnose_values
from typed import present

from harness.check.gradient_checks import saved_bytes
from harness.check.reference import add_strides
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p23.mistakes import BLOCK, MISTAKES, TILE
from harness.spec.cases import is_not_finite
from harness.spec.puzzle import Case
from harness.toolchain import roots

CASES = p23.cases()
EVERY = [*CASES, *p23.GATE_CASES]
FINITE = [case for case in CASES if not is_not_finite(case.values)]
DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTITIES = [quantity for call in p23.PUZZLE.calls for quantity in call.op.writes]
DIFFERENTIATED = {"grad_query": "query", "grad_key": "key", "grad_value": "value", "grad_mask": "mask"}


GRADIENTS = ("grad_query", "grad_key", "grad_value")


def names(cases):
    """Parametrises a test over cases."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def answers(arrays) -> dict:
    """The reference in float64."""
    return p23.reference({name: add_strides(array) for name, array in arrays.items()})


# ---- The reference ------------------------------------------------------------------------------------------


@names([*FINITE, *p23.GATE_CASES])
def test_the_reference_is_scaled_dot_product_attention(case):
    """Its output and its gradients, those of the mask among them; a row without a key gives 0."""
    arrays = p23.inputs(case, "float64", 0)
    leaves = [add_strides(arrays[name]).requires_grad_() for name in DIFFERENTIATED.values()]
    output = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3], enable_gqa=True)
    gradients = torch.autograd.grad(output, leaves, add_strides(arrays["grad_output"]))
    expected = dict(zip(("output", *DIFFERENTIATED), (output.detach(), *gradients), strict=True))
    for name, tensor in expected.items():
        torch.testing.assert_close(answers(arrays)[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_answers_in_its_own_dtype_with_wide_scores(dtype):
    kind = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    arrays = p23.inputs(CASES[1], dtype, 0)
    outputs = p23.reference({name: add_strides(array, kind) for name, array in arrays.items()})
    for name, tensor in outputs.items():
        narrow = name.split(".")[-1] in ("output", *GRADIENTS)
        assert tensor.dtype == (kind if narrow else wide), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_baseline_has_the_rounding_of_what_is_kept_and_no_other(dtype):
    """By hand for one row: P is wrong by what rounding took from lse, dS by what it took from the output."""
    arrays = p23.inputs(Case("row", "", (1, 1, 1, 5, 4), "unmasked"), dtype, 0)
    kind, double = getattr(torch, dtype), answers(arrays)
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


# ---- What holds without a reference -------------------------------------------------------------------------


@names([case for case in FINITE if case.values != "large"])
def test_identities_that_need_no_reference(case):
    """What the learner can check alone: each would catch some mistake, and a right backward pass has all of them."""
    arrays = p23.inputs(case, "float64", 3)
    exact = p23.PUZZLE.exact(arrays)
    P, dS, dK, dV, dQ = (
        exact[name] for name in ("probabilities", "grad_scores", "grad_key", "grad_value", "grad_query")
    )
    size = np.abs(dS).max() + 1
    empty = np.isneginf(arrays["mask"]).all(-1)
    nonempty = ~np.broadcast_to(empty, P.shape[:3])
    # Probabilities of a row add up to 1, so the scores of a row may all grow by the same.
    assert np.abs(P.sum(-1) - nonempty).max() < 1e-12
    assert np.abs(dS.sum(-1)).max() < 1e-12 * size
    # Every query that sees a key hands its dO on to the values.
    assert np.allclose(dV.sum(-2), (arrays["grad_output"] * nonempty[..., None]).sum(-2), rtol=1e-10)
    # Scores are bilinear: Q and K may be scaled against each other.
    in_query, in_key = (arrays["query"] * dQ).sum((-1, -2)), (arrays["key"] * dK).sum((-1, -2))
    assert np.abs(in_query - in_key).max() < 1e-10 * (np.abs(in_query).max() + 1)


def test_a_common_part_of_the_keys_changes_nothing():
    """Every score of a row grows by the same, which softmax does not see: dK adds up to nought along a common part of Q."""
    arrays = p23.inputs(Case("common", "", (1, 2, 6, 7, 4), "unmasked"), "float64", 0)
    moved = {**arrays, "key": arrays["key"] + np.array([0.5, -1.0, 2.0, 0.25])}
    assert np.allclose(p23.PUZZLE.exact(arrays)["output"], p23.PUZZLE.exact(moved)["output"], rtol=1e-12)
    assert np.abs(p23.PUZZLE.exact(arrays)["grad_key"].sum(-2)).max() < 1e-12


# ---- The cases ----------------------------------------------------------------------------------------------


def test_the_cases_cover_what_kernels_get_wrong():
    sizes = [case.dims for case in FINITE]
    assert CASES[0].dims == p23.DIMS
    assert any(S != T and S % 2 and T % 2 for _, _, S, T, _ in sizes)
    assert any(T > 128 and T % 16 for *_, T, _ in sizes), "a row longer than a block of 128 threads"
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
@names([case for case in FINITE if case.values == "hard"])
def test_hard_cases_are_hard(case, dtype):
    arrays = p23.inputs(case, dtype, 0)
    hidden = np.isneginf(arrays["mask"])
    assert hidden.all(-1).sum() == 1, "one row sees no key"
    assert (hidden & ~hidden.all(-1, keepdims=True)).any(), "others see some"
    v = p23.derive(arrays)
    rows = ~hidden.all(-1)
    assert np.abs(v.dot[:, :, rows]).max() > 0.1 * np.abs(v.grad_probabilities).max(), (
        "the row sum is not small"
    )
    assert np.median(v.probabilities[:, :, rows].max(-1)) < 0.9, "no row is decided by one key"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_large_enough_to_overflow_an_exponential(dtype):
    case = next(case for case in CASES if case.values == "large")
    with np.errstate(over="ignore"):
        assert all(np.isinf(np.exp(np.float32(scores.max()))) for scores in (
            p23.derive(p23.inputs(case, dtype, seed)).scores for seed in range(4)
        ))  # fmt: skip


@names([case for case in CASES if case.values in ("expanded", "transposed")])
def test_grad_output_reaches_torch_with_its_strides(case):
    grad = add_strides(p23.inputs(case, "float32", 0)["grad_output"], torch.float32)
    assert not grad.is_contiguous()
    assert (0 in grad.stride()) == (case.values == "expanded")


def test_dims_replace_the_sizes_and_keep_the_hard_values():
    chosen = p23.cases((1, 2, 5, 7, 3))
    assert {case.dims for case in chosen} == {(1, 2, 5, 7, 3)}
    assert [case.values for case in chosen] == ["plain", "hard"]


# ---- Known mistakes -----------------------------------------------------------------------------------------


def test_sums_that_each_tile_overwrites_keep_the_last_tile_of_the_last_head_that_shares_them():
    (case,) = p23.GATE_CASES
    arrays = p23.PUZZLE.inputs(case, "float64", 0)
    right = p23.derive(arrays)
    group, last = int(right.group), (right.query.shape[2] - 1) // TILE * TILE
    assert group > 1 and last > 0
    kept = (slice(None), slice(group - 1, None, group), slice(last, None))
    for quantity, weights, rows in (
        ("grad_key", right.scale * right.grad_scores, right.query),
        ("grad_value", right.probabilities, right.grad_output),
    ):
        (mistake,) = (m for m in MISTAKES if m.id == "last-queries-alone" and quantity in m.changes)
        got = getattr(p23.derive(arrays, mistake.changes), quantity)
        np.testing.assert_allclose(got, weights[kept].swapaxes(-1, -2) @ rows[kept], atol=1e-12)


def test_a_mistake_changes_one_step_and_has_it_to_itself():
    """Two changes at once would give the values of neither where one step follows from the other."""
    assert all(len(mistake.changes) == 1 for mistake in MISTAKES)
    assert len({(mistake.id, *mistake.changes) for mistake in MISTAKES}) == len(MISTAKES)


# ---- Sizes and bytes ----------------------------------------------------------------------------------------


def test_shapes_and_work_by_hand():
    shapes = p23.PUZZLE.shapes((2, 3, 5, 7, 4))
    assert shapes["output"] == shapes["grad_query"] == (2, 3, 5, 4)
    assert shapes["grad_key"] == shapes["grad_value"] == (2, 3, 7, 4)
    assert shapes["scores"] == shapes["grad_scores"] == (2, 3, 5, 7)
    assert p23.PUZZLE.multiply_adds((2, 3, 5, 7, 4)) == 2 * 2 * 3 * 5 * 7 * 4


def test_the_product_that_is_no_step_is_recorded_and_in_no_graph():
    gate = p23.PUZZLE.gates[0]
    assert gate.own == ("scores", "transposed_product")
    assert "transposed_product" in p23.PUZZLE.writes("unfused")
    in_graphs = p23.PUZZLE.calls_of(p23.PUZZLE.variants)
    assert [call for call in p23.PUZZLE.calls if call not in in_graphs] == [p23.VARIANTS["unfused"][-1]]
    assert p23.PUZZLE.shapes((2, 3, 5, 7, 4))["transposed_product"] == (2, 3, 4, 4)


def test_fewer_heads_of_key_and_value_by_hand():
    """Their sizes come behind the named ones; a report says them."""
    dims = (2, 6, 5, 7, 4, 3)
    shapes = p23.PUZZLE.shapes(dims)
    assert shapes["grad_query"] == (2, 6, 5, 4) and shapes["grad_key"] == shapes["grad_value"] == (2, 3, 7, 4)
    assert p23.PUZZLE.say_dims(dims) == "query [2, 6, 5, 4], key [2, 3, 7, 4]"


@pytest.mark.parametrize(
    ("name", "file", "value"),
    [
        ("ROW_THREADS", "attention", p23.ROW_THREADS),
        ("ROW_THREADS", "attention", BLOCK),
        ("TILE", "tiles", TILE),
    ],
)
def test_the_kernels_have_the_constants_of_the_spec(name, file, value):
    source = (roots.solutions() / "p23" / "op" / f"{file}.mojo").read_text()
    assert int(present(re.search(rf"^comptime {name} = (\d+)$", source, re.M))[1]) == value


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bytes_that_eager_keeps_are_those_that_autograd_keeps(dtype):
    B, N, S, T, d = dims = (2, 3, 5, 7, 4)
    kind = getattr(torch, dtype)
    inputs = [torch.randn(B, N, n, d, dtype=kind, requires_grad=True) for n in (S, T, T)]
    kept, _ = saved_bytes(lambda q, k, v: torch.softmax(q @ k.mT / d**0.5, -1) @ v, inputs)
    assert sum(p23.ledger(dims, dtype).saved_eager.values()) == kept


def test_the_fused_variant_keeps_and_allocates_no_matrix_of_scores():
    """Twice the length is twice the bytes, kept and in between; of eager and of the plain kernels it is more."""
    short, long = (p23.ledger((2, 3, S, S, 4), "bfloat16") for S in (64, 128))
    assert sum(long.saved_by["fused"].values()) == 2 * sum(short.saved_by["fused"].values())
    assert sum(long.between["fused"].values()) == 2 * sum(short.between["fused"].values())
    assert sum(long.saved_eager.values()) > 3 * sum(short.saved_eager.values())
    assert p23.ledger((2, 3, 5, 7, 4), "bfloat16").saved_by["fused"] == {
        "query": 240, "key": 336, "value": 336, "output": 240, "lse": 120,
    }  # fmt: skip


def test_the_ledger_by_hand():
    ledger = p23.ledger((2, 3, 5, 7, 4), "bfloat16")
    assert ledger.saved_ours["probabilities"] == 2 * 3 * 5 * 7 * 4, "in float32"
    assert ledger.saved_eager["probabilities"] == 2 * 3 * 5 * 7 * 2
    assert sum(ledger.between["unfused"].values()) == 3 * 2 * 3 * 5 * 7 * 4


def test_an_lse_that_is_infinite_without_large_scores_is_less_the_largest_before_it():
    def infinite(v):
        return np.where(np.isfinite(v.lse), np.inf, v.lse)

    assert (
        diagnose_values(p23.PUZZLE, "lse", infinite, ["chapter", "odd sizes"]).mistake == "infinite-at-first"
    )
    assert diagnose_values(p23.PUZZLE, "lse", infinite, ["large scores"]).mistake == "not-finite"
