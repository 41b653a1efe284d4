"""harness.nn.ring_attention: values, gradients, and rejected derivatives and arguments."""

import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ring_ranks import make_tensors, run_bad_arguments, run_model, run_penalty
from torch.autograd import forward_ad
from typed import as_triple

from harness.devices.processes import run_ranks
from harness.nn import ring_attention
from harness.nn.ring import infer_length, merge_blocks
from harness.puzzles.p25 import layout


def count_positions(rank, size, length, balanced):
    return len(layout.get_positions(rank, size, length, balanced))


def test_ring_attention_matches_single_device_attention():
    """Compare four ranks with scaled_dot_product_attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 22, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = as_triple(tensor.clone().requires_grad_() for tensor in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    reference = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    cuts = [22 * i // 4 for i in range(5)]
    parts = [tuple(t[:, :, a:b].contiguous().numpy() for t in (q, k, v, grad)) for a, b in pairwise(cuts)]
    by_rank = run_ranks(run_model, parts)
    for number, expected in enumerate(reference):
        gathered = torch.cat([torch.from_numpy(values[number]) for values in by_rank], 2)
        torch.testing.assert_close(gathered, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("score", [1e4, 1e6, 1e8])
def test_blocks_with_large_scores_have_correct_weights(score, group_of_one):
    """Keys in two blocks have equal scores, or scores that are lower by 8 (mlx#4188, pytorch#11752)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.tensor([score, 8.0]).expand(1, 1, 5, 2)
    key = torch.tensor([[1.0, 0], [1, 0], [1, -1], [1, 0], [1, -1]])[None, None]
    value, grad_out = torch.randn(2, 1, 1, 5, 2, generator=generator)
    leaves = as_triple(tensor.clone().requires_grad_() for tensor in (query, key, value))
    out = ring_attention(*leaves, scale=1.0, balanced=True)
    exact = as_triple(tensor.double().requires_grad_() for tensor in (query, key, value))
    reference = torch.nn.functional.scaled_dot_product_attention(*exact, scale=1.0)
    got = (out, *torch.autograd.grad(out, leaves, grad_out))
    expected = (reference, *torch.autograd.grad(reference, exact, grad_out.double()))
    for actual, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(
            actual.double(), truth, rtol=0, atol=1e-6 + 1e-5 * float(truth.detach().abs().max())
        )


@pytest.mark.parametrize("score", [1e2, 1e3, 1e4])
def test_rounded_lse_has_bounded_error(score):
    """Rounding lse changes a block's weight and the merged output by at most |lse| 2^-24."""
    generator = torch.Generator().manual_seed(0)
    lse = score * (1 + 1e-3 * torch.randn(2, 1, 1, 1000, generator=generator, dtype=torch.float64))
    outs = torch.tensor([0.0, 1]).double().view(2, 1, 1, 1, 1).expand(2, 1, 1, 1000, 1)
    (exact, gathered), (got, merged_lse) = (
        merge_blocks(outs[0], values[0], outs[1], values[1]) for values in (lse, lse.float().double())
    )
    bound = lse.abs().amax(0) * 2.0**-24
    assert ((got - exact).abs()[..., 0] <= bound).all() and ((merged_lse - gathered).abs() <= bound).all()
    assert (got != exact).any()


# ---- Derivatives --------------------------------------------------------------------------------------------

DOUBLE_BACKWARD_ERROR = "ring_attention has no double backward: its gradients cannot be differentiated again; use torch.nn.functional.sc"


@pytest.mark.parametrize("squared", [True, False], ids=["dO follows the output", "dO is constant"])
def test_second_derivative_is_rejected(group_of_one, squared):
    assert run_penalty(squared).startswith(DOUBLE_BACKWARD_ERROR)


def test_second_derivative_is_rejected_on_all_ranks():
    assert all(message.startswith(DOUBLE_BACKWARD_ERROR) for message in run_ranks(run_penalty, [(True,)] * 2))


def test_create_graph_does_not_change_gradients(group_of_one):
    leaves = make_tensors(requires_grad=True)
    reference, graph = (
        torch.autograd.grad(ring_attention(*leaves).square().sum(), leaves, create_graph=create)
        for create in (False, True)
    )
    for a, b in zip(reference, graph, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=0)


def make_dual(f, x):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "dual": make_dual,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_other_derivatives_are_rejected_by_pytorch(group_of_one, transform):
    query, key, value = make_tensors()
    with pytest.raises((NotImplementedError, RuntimeError), match=r"implement the jvp|functorch transforms"):
        transform(lambda query: ring_attention(query, key, value), query)


# ---- Arguments ----------------------------------------------------------------------------------------------

VALID_ARGUMENTS = dict(zip(("query", "key", "value"), make_tensors(), strict=True))
INVALID_ARGUMENTS = {
    "integers": ({name: tensor.long() for name, tensor in VALID_ARGUMENTS.items()}, TypeError,
        "query: expected float32, float64, bfloat16, float16, got int64"),
    "three axes": ({name: tensor[0] for name, tensor in VALID_ARGUMENTS.items()}, ValueError,
        "query: expected four axes, [B, heads, length, d], got [2, 5, 4]"),
    "None": ({"value": None}, TypeError, "value: expected a torch tensor, got NoneType"),
    "mixed dtypes": ({"key": VALID_ARGUMENTS["key"].float()}, TypeError, "key: expected float64, as query, got float32"),
    "three heads over two": ({"query": torch.ones(1, 3, 5, 4).double()}, ValueError,
        "key: expected a number of heads that divides the 3 of query, got 2"),
    "other elements": ({"value": torch.ones(1, 2, 5, 3).double()}, ValueError,
        "value: expected [1, 2, 5, 4], got [1, 2, 5, 3]"),
    "meta": ({name: tensor.to("meta") for name, tensor in VALID_ARGUMENTS.items()}, NotImplementedError,
        "query: a tensor on meta has no data to send"),
    "two devices": ({"key": VALID_ARGUMENTS["key"].to("meta")}, ValueError,
        "key: expected it on cpu, as query, got meta"),
    "sparse": (
        {"query": VALID_ARGUMENTS["query"].to_sparse()},
        TypeError,
        "query: expected a dense tensor, got a sparse_coo one; `attention_varlen` takes sequences of unequal lengths",
    ),
    "a group by name": ({"group": "x"}, TypeError, "group: expected a process group, got 'x'"),
    "a group of others": ({"group": dist.GroupMember.NON_GROUP_MEMBER}, TypeError,
        "group: expected a process group, got one that does not include this rank"),
    "scale": ({"scale": "x"}, TypeError, "scale: expected a number or None, got str"),
    "is_causal": ({"is_causal": "no"}, TypeError, "is_causal: expected True or False, got 'no'"),
    "is_causal of a known length": ({"is_causal": "no", "length": 5}, TypeError,
        "is_causal: expected True or False, got 'no'"),
    "balanced": ({"balanced": 1}, TypeError, "balanced: expected True or False, got 1"),
    "length": ({"length": 5.0}, TypeError, "length: expected a whole number, got 5.0"),
    "another length": ({"length": 6}, ValueError, "length: of 6 positions rank 0 of 1 has 6, got 5"),
}  # fmt: skip


@pytest.mark.parametrize(("invalid", "kind", "message"), INVALID_ARGUMENTS.values(), ids=INVALID_ARGUMENTS)
def test_invalid_argument_is_reported(group_of_one, invalid, kind, message):
    with pytest.raises(kind) as raised:
        ring_attention(**{**VALID_ARGUMENTS, **invalid})
    assert str(raised.value) == message


def test_missing_process_group_is_rejected():
    with pytest.raises(
        ValueError,
        match=r"^group: there is no default one; call torch\.distributed\.init_process_group first$",
    ):
        ring_attention(**VALID_ARGUMENTS)


def test_all_ranks_report_an_invalid_argument_of_one():
    kinds = ["dtype", "requires_grad", "is_causal", "scale", "balanced"]
    expected = [
        "TypeError: rank 1 of 3: key: expected float64, as query, got float32",
        "ValueError: rank 1 of 3 has requires_grad=True, the others False",
        "ValueError: rank 1 of 3 has is_causal=True, the others False",
        "ValueError: rank 1 of 3 has scale=0.5, the others None",
        "ValueError: rank 1 of 3 has balanced=True, the others False",
    ]
    assert run_ranks(run_bad_arguments, [(kinds,)] * 3) == [expected] * 3


def test_single_differentiable_argument(group_of_one):
    query, key, value = make_tensors()
    out = ring_attention(query, key.requires_grad_(), value)
    (got,) = torch.autograd.grad(out.sum(), key)
    reference = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(got, torch.autograd.grad(reference.sum(), key)[0])


def make_shapes(*lengths):
    return [[[1, 2, length, 4], [1, 1, length, 4], [1, 1, length, 4]] for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            (5, 6, 5),
            "rank 1 of 3 has query, key and value of [1, 2, 6, 4], [1, 1, 6, 4], [1, 1, 6, 4]: the ranks have 5, 6, 5 "
            "positions, expected 5, 5, 5, of 15, or 5, 5, 6, of 16",
        ),
        (
            (8, 7, 8, 8),
            "rank 1 of 4 has query, key and value of [1, 2, 7, 4], [1, 1, 7, 4], [1, 1, 7, 4]: the ranks have 8, 7, 8, 8 "
            "positions, expected 8, 8, 8, 8, of 32, or 7, 8, 8, 8, of 31",
        ),
    ],
)
def test_inconsistent_lengths_are_rejected(lengths, message):
    with pytest.raises(ValueError) as raised:
        infer_length(make_shapes(*lengths), False, count_positions)
    assert str(raised.value) == message


def test_shapes_may_differ_only_in_length():
    shapes = make_shapes(5, 5)
    shapes[1][1] = [1, 1, 4, 4]
    with pytest.raises(
        ValueError, match=re.escape("and not [1, 2, 5, 4] and [1, 1, 5, 4], its part of 10 positions")
    ):
        infer_length(shapes, False, count_positions)


def test_consistent_parts_have_a_length():
    assert infer_length(make_shapes(5, 5, 6), False, count_positions) == 16
