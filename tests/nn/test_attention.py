"""`harness.nn.attention` without its operator, as on a CPU: values, derivatives, and errors by name."""

from typing import Any

import attention_checks as checks
import pytest
import torch
import torch.nn.functional as F
from attention_checks import NAMES, inputs, output_and_gradients
from torch.autograd import forward_ad
from typed import loosely, present, three

from harness.nn import (
    attention,
    attention_backward,
    attention_block,
    attention_block_backward,
    attention_delta,
    attention_varlen,
    attention_with_lse,
)


def additive(*shape, dtype=torch.float32, seed=1) -> torch.Tensor:
    """A mask of numbers, a quarter of them -inf, with the first row -inf throughout."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(shape, generator=generator)
    mask[torch.rand(shape, generator=generator) < 0.25] = -torch.inf
    mask[..., 0, :] = -torch.inf
    return mask.to(dtype)


def causal(corner: str, queries: int, keys: int) -> torch.Tensor:
    """PyTorch's own causal mask, from "upper_left" or "lower_right"; its module loads all of dynamo."""
    from torch.nn.attention import bias

    return getattr(bias, f"causal_{corner}")(queries, keys)


# ---- Right values -------------------------------------------------------------------------------------------


def test_causal_is_from_the_top_left_and_says_how_to_have_the_other():
    """With more keys than queries the two differ: the first query sees one key, or all but the last S - 1."""
    query, key, value = inputs(S=3, T=5)
    first = attention(query, key, value, is_causal=True)[..., 0, :]
    assert torch.equal(first, value[..., 0, :])
    last = attention(query, key, value, attn_mask=causal("lower_right", 3, 5))[..., -1, :]
    assert torch.equal(last, attention(query, key, value)[..., -1, :])
    says = present(attention.__doc__)
    assert "top left" in says and "bottom right" in says


def test_a_row_that_sees_nothing_gives_nought_and_takes_no_gradient():
    mask = torch.zeros(5, 7)
    mask[2] = -torch.inf
    output, grad_query, *_ = output_and_gradients(attention, inputs(), attn_mask=mask)
    assert not output[:, :, 2].any() and not grad_query[:, :, 2].any()
    assert output[:, :, 1].all()
    hidden = output_and_gradients(attention, inputs(), attn_mask=torch.zeros(5, 7, dtype=torch.bool))
    assert not any(tensor.any() for tensor in hidden)


@pytest.mark.parametrize("where", range(3), ids=NAMES)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_and_inf_go_where_torchs_go(where, number):
    tensors = inputs()
    tensors[where][1, 0, 3, 2] = number
    got = output_and_gradients(lambda *own: attention_with_lse(*own)[0], tensors)
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    output = torch.softmax(query @ key.mT / 8**0.5, -1) @ value
    grad = 0.5 + torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    expected = [output, *torch.autograd.grad(output, (query, key, value), grad)]
    assert not got[0][1, 0].isfinite().all() and got[0][0].isfinite().all()
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


LEADS = {
    "no heads": ((5, 8), (7, 8)),
    "heads": ((3, 5, 8), (3, 7, 8)),
    "five axes": ((2, 1, 3, 5, 8), (2, 4, 3, 7, 8)),
    "batch broadcast": ((1, 3, 5, 8), (4, 3, 7, 8)),
    "heads broadcast": ((2, 3, 5, 8), (2, 1, 7, 8)),
}


@pytest.mark.parametrize(("of_query", "of_key"), LEADS.values(), ids=LEADS)
def test_leading_axes(of_query, of_key):
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(shape, generator=generator) for shape in (of_query, of_key, of_key))
    got = output_and_gradients(attention, (query, key, value))
    expected = output_and_gradients(checks.written_out, [t.double() for t in (query, key, value)])
    for ours, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


EMPTY = {
    "no batch": ((0, 2, 5, 8), (0, 2, 7, 8)),
    "no query": ((2, 2, 0, 8), (2, 2, 7, 8)),
    "no key": ((2, 2, 5, 8), (2, 2, 0, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8)),
}


@pytest.mark.parametrize(("of_query", "of_key"), EMPTY.values(), ids=EMPTY)
def test_empty_tensors(of_query, of_key):
    output, *gradients = output_and_gradients(
        attention, (torch.ones(of_query), torch.ones(of_key), torch.ones(of_key))
    )
    assert output.shape == of_query and not output.any()
    assert [g.shape for g in gradients] == [of_query, of_key, of_key]
    assert not any(g.any() for g in gradients)
    mask = torch.ones(of_query[-2], of_key[-2], requires_grad=True)
    attention(torch.ones(of_query), torch.ones(of_key), torch.ones(of_key), attn_mask=mask).sum().backward()
    assert mask.grad is not None and not mask.grad.any()


def test_lse_and_its_gradient():
    """A loss of output and lse together, in float64, and finite differences."""
    query, key, value = inputs(dtype=torch.float64, S=3, T=4, d=2)
    mask = additive(3, 4, dtype=torch.float64)[1:].repeat(2, 1)[:3]

    def both(*tensors):
        return attention_with_lse(*tensors, attn_mask=mask)

    output, lse = both(query, key, value)
    torch.testing.assert_close(lse, torch.logsumexp(query @ key.mT / 2**0.5 + mask, -1))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, mask))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    assert torch.autograd.gradcheck(both, leaves)
    alone = torch.autograd.grad(both(*leaves)[1].sum(), leaves, allow_unused=True)
    truth = torch.autograd.grad(
        torch.logsumexp(leaves[0] @ leaves[1].mT / 2**0.5 + mask, -1).sum(), leaves[:2]
    )
    torch.testing.assert_close(alone[:2], truth)
    assert alone[2] is None or not alone[2].any()


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "enable_gqa": True}, {"attn_mask": additive(5, 7)}], ids=str
)
def test_the_backward_pass_by_itself(options):
    query, key, value = inputs(N=4, G=2 if options.get("enable_gqa") else None)
    out, lse = attention_with_lse(query, key, value, **options)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    expected = output_and_gradients(attention, (query, key, value), grad_out, **options)[1:]
    got = attention_backward(grad_out, query, key, value, out, lse, **options)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", [1e4, 1e6, 1e8])
def test_gradients_of_large_scores_need_more_digits_than_lse_has(score):
    """Of keys with equal scores, and of some 8 below, against float64 (mlx#4188, pytorch#11752)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.tensor([score, 8.0]).expand(1, 1, 3, 2)
    key = torch.tensor([[1.0, 0], [1, 0], [1, -1], [1, 0], [1, -1]])[None, None]
    value, grad_out = (torch.randn(1, 1, rows, 2, generator=generator) for rows in (5, 3))
    out, lse = attention_with_lse(query, key, value, scale=1.0)
    got = attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
    exact = three(tensor.double() for tensor in (query, key, value))
    expected = output_and_gradients(F.scaled_dot_product_attention, exact, grad_out.double(), scale=1.0)
    for ours, right in zip((out, *got), expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-6 + 1e-5 * float(right.abs().max()))


# ---- Torch's own checks -------------------------------------------------------------------------------------


def test_autocast():
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*tensors, attn_mask=additive(5, 7))
    assert output.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*tensors, attn_mask=additive(5, 7))
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*three(inputs(dtype=torch.float64))).dtype == torch.float64


def test_shapes_without_memory():
    query, key, value = (tensor.to("meta") for tensor in inputs(dv=3))
    output, lse = attention_with_lse(query, key, value)
    assert output.shape == (2, 2, 5, 3) and lse.shape == (2, 2, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3])
@pytest.mark.parametrize("corner", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_any_sign_and_causal_masks(scale, corner, dtype):
    """PyTorch's fused kernels give NaN for a triangle and a scale that is not above 0."""
    tensors = inputs(dtype=dtype)
    hidden = ~torch.ones(5, 7, dtype=torch.bool)
    hidden = hidden if corner is None else torch.ones(5, 7).triu(1 if corner == "upper_left" else 3).bool()

    def formula(query, key, value):
        scores = (scale * query @ key.mT).masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ value

    mask = None if corner is None else causal(corner, 5, 7)
    truth = output_and_gradients(formula, [tensor.double() for tensor in tensors])
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for function in (attention, lambda *t, **o: attention_with_lse(*t, **o)[0]):
        found = output_and_gradients(function, tensors, attn_mask=mask, scale=scale)
        for got, right in zip(found, truth, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=limit, atol=limit)


def test_formulas_have_every_derivative():
    """First and second ones, forward mode, and torch.func's transforms, of what is no function of PyTorch's."""
    query, key, value = tensors = [
        t.requires_grad_() for t in inputs(dtype=torch.float64, B=1, S=3, T=4, d=2)
    ]
    out, lse = (t.detach() for t in attention_with_lse(query, key, value))
    delta, offsets = attention_delta(out, out), torch.tensor([0, 2, 3], dtype=torch.int32)
    varlen = loosely(attention_varlen)
    functions = {
        "lse": lambda q, k, v: attention_with_lse(q, k, v, is_causal=True),
        "block": attention_block,
        "backward": lambda q, k, v: attention_backward(out, q, k, v, out, lse),
        "block backward": lambda q, k, v: attention_block_backward(out, q, k, v, lse, delta),
        "varlen": lambda *t: varlen(*(each[0].transpose(0, 1) for each in t), offsets, offsets),
    }
    for name, function in functions.items():
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True), name
        assert torch.autograd.gradgradcheck(function, tensors), name
    with forward_ad.dual_level():
        dual = attention(forward_ad.make_dual(query.detach(), query.detach()), key, value)
        assert forward_ad.unpack_dual(dual).tangent is not None
    found = torch.func.vmap(lambda q: attention_with_lse(q, key, value)[0])(torch.stack([query, -query]))
    torch.testing.assert_close(found[1], attention(-query, key, value))


# ---- Errors -------------------------------------------------------------------------------------------------

PLAIN = dict(zip(NAMES, inputs(), strict=True))
ones = torch.ones
ERRORS = {
    "mask and causal": (
        ValueError,
        "is_causal: expected False",
        {"is_causal": True, "attn_mask": ones(5, 7)},
    ),
    "no tensor": (TypeError, "key: expected a torch tensor, got list", {"key": [1.0]}),
    "sparse": (TypeError, "value: .* a sparse_coo one;", {"value": ones(2, 2, 7, 8).to_sparse()}),
    "nested": (
        TypeError,
        "query: expected a dense tensor, got a nested one; `attention_varlen`",
        {"query": torch.nested.nested_tensor([ones(2, 5, 8), ones(2, 4, 8)])},
    ),
    "integers": (TypeError, "query: expected float32, .* got int64", {"query": ones(2, 2, 5, 8).long()}),
    "dtype": (TypeError, "key: expected float32, as query, got float64", {"key": PLAIN["key"].double()}),
    "device": (ValueError, "value: expected it on cpu", {"value": PLAIN["value"].to("meta")}),
    "a vector": (ValueError, r"query: expected \[..., heads, length, dim\]", {"query": ones(8)}),
    "elements": (ValueError, "key: expected 8 elements a head, as query, got 7", {"key": ones(2, 2, 7, 7)}),
    "length": (ValueError, "value: expected the length of key, 7, got 6", {"value": ones(2, 2, 6, 8)}),
    "no elements": (ValueError, "at least one element a head, got 0", {"value": ones(2, 2, 7, 0)}),
    "leading axes": (ValueError, "leading axes do not broadcast", {"key": ones(3, 2, 7, 8)}),
    "dtype of mask": (TypeError, "attn_mask: .* got float64", {"attn_mask": ones(5, 7).double()}),
    "shape of mask": (ValueError, "attn_mask: shape .* does not broadcast", {"attn_mask": ones(4, 7)}),
    "large mask": (ValueError, "attn_mask: shape .* does not broadcast", {"attn_mask": ones(3, 1, 2, 5, 7)}),
    "bias": (ValueError, "a causal mask of 5 queries and 6 keys", {"attn_mask": ("lower_right", 5, 6)}),
    "scale": (TypeError, "scale: expected a number or None, got str", {"scale": "x"}),
    "is_causal": (TypeError, "is_causal: expected True or False, got 'no'", {"is_causal": "no"}),
    "enable_gqa": (TypeError, "enable_gqa: expected True or False, got 1", {"enable_gqa": 1}),
    "bool scale": (TypeError, "scale: expected a number or None, got bool", {"scale": True}),
    "groups": (
        ValueError,
        "enable_gqa: .* got 2 for query, 3 for key and 3 for value",
        {"key": ones(2, 3, 7, 8), "value": ones(2, 3, 7, 8), "enable_gqa": True},
    ),
}


@pytest.mark.parametrize(("kind", "words", "changed"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(kind, words, changed):
    mask = changed.get("attn_mask")
    own = {"attn_mask": causal(*mask)} if isinstance(mask, tuple) else {}
    with pytest.raises(kind, match=words) as error:
        attention(**{**PLAIN, **changed, **own})
    assert len(str(error.value).splitlines()) == 1


BACKWARD_ERRORS = {
    "gradient": ({"grad_out": torch.ones(2, 2, 5, 7)}, r"grad_out: expected float32 \[2, 2, 5, 8\]"),
    "output": ({"out": torch.ones(2, 2, 5, 8).double()}, "out: .* got float64"),
    "lse": ({"lse": torch.ones(2, 2, 6)}, r"lse: expected float32 \[2, 2, 5\]"),
    "heads": (
        {"key": torch.ones(2, 1, 7, 8), "value": torch.ones(2, 1, 7, 8)},
        "expected query's leading axes",
    ),
}


BACKWARD: dict[str, Any] = {"grad_out": PLAIN["query"], **PLAIN, "out": PLAIN["query"], "lse": ones(2, 2, 5)}


@pytest.mark.parametrize(("changed", "words"), BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS)
def test_errors_of_the_backward_pass(changed, words):
    with pytest.raises(ValueError, match=words):
        attention_backward(**{**BACKWARD, **changed})


@pytest.mark.parametrize("name", ["grad_out", "query", "key", "value", "out", "lse"])
def test_the_backward_pass_wants_dense_tensors_in_one_place(name):
    with pytest.raises(TypeError, match=f"^{name}: expected a torch tensor, got NoneType$"):
        attention_backward(**{**BACKWARD, name: None})
    with pytest.raises(ValueError, match="expected it on"):
        attention_backward(**{**BACKWARD, name: BACKWARD[name].to("meta")})


@pytest.mark.parametrize("name", ["grad_out", "out"])
def test_delta_wants_dense_tensors(name):
    right = {"grad_out": PLAIN["query"], "out": PLAIN["query"]}
    with pytest.raises(TypeError, match=f"^{name}: expected a torch tensor, got NoneType$"):
        attention_delta(**{**right, name: None})


def test_the_names_of_the_arguments():
    """As models call them: positions and names are those of PyTorch's function."""
    import inspect

    assert list(inspect.signature(attention).parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    assert list(inspect.signature(attention_backward).parameters)[:6] == [
        "grad_out", "query", "key", "value", "out", "lse",
    ]  # fmt: skip
