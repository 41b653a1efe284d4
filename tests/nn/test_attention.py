"""`harness.nn.attention` on a CPU, without its operator: values, derivatives, and argument errors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_checks import NAMES, compute_attention, differentiate, make_inputs
from typed import as_triple, erase_types, unwrap

from harness.nn import (
    attention,
    attention_backward,
    attention_block,
    attention_block_backward,
    attention_delta,
    attention_varlen,
    attention_with_lse,
)


def make_additive_mask(*shape, dtype=torch.float32, seed=1) -> torch.Tensor:
    """Return a random additive mask; the first row and a quarter of the other elements are -inf."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(shape, generator=generator)
    mask[torch.rand(shape, generator=generator) < 0.25] = -torch.inf
    mask[..., 0, :] = -torch.inf
    return mask.to(dtype)


def make_causal_mask(corner: str, queries: int, keys: int) -> torch.Tensor:
    """Return PyTorch's causal bias for "upper_left" or "lower_right"; imported here because it loads dynamo."""
    from torch.nn.attention import bias

    return getattr(bias, f"causal_{corner}")(queries, keys)


# ---- Values -------------------------------------------------------------------------------------------


def test_causal_mask_is_aligned_to_the_top_left():
    """With more keys than queries, "lower_right" lets the first query attend to all but the last S - 1 keys."""
    query, key, value = make_inputs(S=3, T=5)
    first = attention(query, key, value, is_causal=True)[..., 0, :]
    assert torch.equal(first, value[..., 0, :])
    last = attention(query, key, value, attn_mask=make_causal_mask("lower_right", 3, 5))[..., -1, :]
    assert torch.equal(last, attention(query, key, value)[..., -1, :])
    documentation = unwrap(attention.__doc__)
    assert "top left" in documentation and "bottom right" in documentation


def test_fully_masked_row_has_zero_output_and_gradient():
    mask = torch.zeros(5, 7)
    mask[2] = -torch.inf
    output, grad_query, *_ = differentiate(attention, make_inputs(), attn_mask=mask)
    assert not output[:, :, 2].any() and not grad_query[:, :, 2].any()
    assert output[:, :, 1].all()
    fully_masked = differentiate(attention, make_inputs(), attn_mask=torch.zeros(5, 7, dtype=torch.bool))
    assert not any(tensor.any() for tensor in fully_masked)


@pytest.mark.parametrize("index", range(3), ids=NAMES)
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_propagate_as_in_pytorch(index, special):
    tensors = make_inputs()
    tensors[index][1, 0, 3, 2] = special
    got = differentiate(lambda *qkv: attention_with_lse(*qkv)[0], tensors)
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    output = torch.softmax(query @ key.mT / 8**0.5, -1) @ value
    grad = 0.5 + torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    expected = [output, *torch.autograd.grad(output, (query, key, value), grad)]
    assert not got[0][1, 0].isfinite().all() and got[0][0].isfinite().all()
    for actual, reference in zip(got, expected, strict=True):
        assert torch.equal(actual.isfinite(), reference.isfinite())


LEADING_SHAPES = {
    "no heads": ((5, 8), (7, 8)),
    "heads": ((3, 5, 8), (3, 7, 8)),
    "five axes": ((2, 1, 3, 5, 8), (2, 4, 3, 7, 8)),
    "batch broadcast": ((1, 3, 5, 8), (4, 3, 7, 8)),
    "heads broadcast": ((2, 3, 5, 8), (2, 1, 7, 8)),
}


@pytest.mark.parametrize(("query_shape", "key_shape"), LEADING_SHAPES.values(), ids=LEADING_SHAPES)
def test_leading_dimensions(query_shape, key_shape):
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(s, generator=generator) for s in (query_shape, key_shape, key_shape))
    got = differentiate(attention, (query, key, value))
    expected = differentiate(compute_attention, [t.double() for t in (query, key, value)])
    for actual, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-5, atol=1e-5)


EMPTY_SHAPES = {
    "no batch": ((0, 2, 5, 8), (0, 2, 7, 8)),
    "no query": ((2, 2, 0, 8), (2, 2, 7, 8)),
    "no key": ((2, 2, 5, 8), (2, 2, 0, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8)),
}


@pytest.mark.parametrize(("query_shape", "key_shape"), EMPTY_SHAPES.values(), ids=EMPTY_SHAPES)
def test_empty_tensors_give_zero_gradients(query_shape, key_shape):
    output, *gradients = differentiate(
        attention, (torch.ones(query_shape), torch.ones(key_shape), torch.ones(key_shape))
    )
    assert output.shape == query_shape and not output.any()
    assert [g.shape for g in gradients] == [query_shape, key_shape, key_shape]
    assert not any(g.any() for g in gradients)
    mask = torch.ones(query_shape[-2], key_shape[-2], requires_grad=True)
    attention(
        torch.ones(query_shape), torch.ones(key_shape), torch.ones(key_shape), attn_mask=mask
    ).sum().backward()
    assert mask.grad is not None and not mask.grad.any()


def test_lse_gradient_matches_finite_differences():
    """The loss uses both output and lse, in float64."""
    query, key, value = make_inputs(dtype=torch.float64, S=3, T=4, d=2)
    mask = make_additive_mask(3, 4, dtype=torch.float64)[1:].repeat(2, 1)[:3]

    def compute_both(*tensors):
        return attention_with_lse(*tensors, attn_mask=mask)

    output, lse = compute_both(query, key, value)
    torch.testing.assert_close(lse, torch.logsumexp(query @ key.mT / 2**0.5 + mask, -1))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, mask))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    assert torch.autograd.gradcheck(compute_both, leaves)
    lse_gradients = torch.autograd.grad(compute_both(*leaves)[1].sum(), leaves, allow_unused=True)
    truth = torch.autograd.grad(
        torch.logsumexp(leaves[0] @ leaves[1].mT / 2**0.5 + mask, -1).sum(), leaves[:2]
    )
    torch.testing.assert_close(lse_gradients[:2], truth)
    assert lse_gradients[2] is None or not lse_gradients[2].any()


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "enable_gqa": True}, {"attn_mask": make_additive_mask(5, 7)}], ids=str
)
def test_attention_backward_matches_autograd(options):
    query, key, value = make_inputs(N=4, G=2 if options.get("enable_gqa") else None)
    out, lse = attention_with_lse(query, key, value, **options)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    expected = differentiate(attention, (query, key, value), grad_out, **options)[1:]
    got = attention_backward(grad_out, query, key, value, out, lse, **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", [1e4, 1e6, 1e8])
def test_large_scores_have_accurate_gradients(score):
    """Keys have equal scores, or scores that are lower by 8 (mlx#4188, pytorch#11752)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.tensor([score, 8.0]).expand(1, 1, 3, 2)
    key = torch.tensor([[1.0, 0], [1, 0], [1, -1], [1, 0], [1, -1]])[None, None]
    value, grad_out = (torch.randn(1, 1, rows, 2, generator=generator) for rows in (5, 3))
    out, lse = attention_with_lse(query, key, value, scale=1.0)
    got = attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
    doubles = as_triple(tensor.double() for tensor in (query, key, value))
    expected = differentiate(F.scaled_dot_product_attention, doubles, grad_out.double(), scale=1.0)
    offsets = torch.tensor([0, 3]).int(), torch.tensor([0, 5]).int()

    def run_packed(*tensors, **options):
        rows = (tensor[0].transpose(0, 1) for tensor in tensors)
        return attention_varlen(*as_triple(rows), *offsets, **options).transpose(0, 1)[None]

    varlen = differentiate(run_packed, (query, key, value), grad_out, scale=1.0)
    for actual, reference in zip((out, *got, *varlen), (*expected, *expected), strict=True):
        torch.testing.assert_close(
            actual.double(), reference, rtol=0, atol=1e-6 + 1e-5 * float(reference.abs().max())
        )


# ---- PyTorch's features -------------------------------------------------------------------------------------


def test_autocast_matches_pytorch():
    tensors = make_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*tensors, attn_mask=make_additive_mask(5, 7))
    assert output.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*tensors, attn_mask=make_additive_mask(5, 7))
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*as_triple(make_inputs(dtype=torch.float64))).dtype == torch.float64


def test_meta_tensors_have_output_shapes():
    query, key, value = (tensor.to("meta") for tensor in make_inputs(dv=3))
    output, lse = attention_with_lse(query, key, value)
    assert output.shape == (2, 2, 5, 3) and lse.shape == (2, 2, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3])
@pytest.mark.parametrize("corner", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_and_negative_scales_with_causal_masks(scale, corner, dtype):
    """PyTorch's fused kernels return NaN for a causal mask with a nonpositive scale."""
    tensors = make_inputs(dtype=dtype)
    masked_out = ~torch.ones(5, 7, dtype=torch.bool)
    masked_out = (
        masked_out if corner is None else torch.ones(5, 7).triu(1 if corner == "upper_left" else 3).bool()
    )

    def reference_attention(query, key, value):
        scores = (scale * query @ key.mT).masked_fill(masked_out, -torch.inf)
        return torch.softmax(scores, -1) @ value

    mask = None if corner is None else make_causal_mask(corner, 5, 7)
    truth = differentiate(reference_attention, [tensor.double() for tensor in tensors])
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for function in (attention, lambda *t, **o: attention_with_lse(*t, **o)[0]):
        results = differentiate(function, tensors, attn_mask=mask, scale=scale)
        for actual, expected in zip(results, truth, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


def test_higher_derivatives_and_transforms():
    """Cover the functions that PyTorch does not have."""
    query, key, value = tensors = [
        t.requires_grad_() for t in make_inputs(dtype=torch.float64, B=1, S=3, T=4, d=2)
    ]
    out, lse = (t.detach() for t in attention_with_lse(query, key, value))
    delta, offsets = attention_delta(out, out), torch.tensor([0, 2, 3], dtype=torch.int32)
    varlen = erase_types(attention_varlen)
    functions = {
        "lse": lambda q, k, v: attention_with_lse(q, k, v, is_causal=True),
        "block": attention_block,
        "backward": lambda q, k, v: attention_backward(out, q, k, v, out, lse),
        "block backward": lambda q, k, v: attention_block_backward(out, q, k, v, lse, delta),
        "varlen": lambda *t: varlen(*(tensor[0].transpose(0, 1) for tensor in t), offsets, offsets),
    }
    for name, function in functions.items():
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True), name
        assert torch.autograd.gradgradcheck(function, tensors), name
    results = torch.func.vmap(lambda q: attention_with_lse(q, key, value)[0])(torch.stack([query, -query]))
    torch.testing.assert_close(results[1], attention(-query, key, value))


def sum_of_sines(function):
    """Wrap a function to return a scalar."""
    return lambda *tensors: function(*tensors).sin().sum()


SAMPLES = [torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(3)).double()
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(sum_of_sines(f), argnums=(0, 1, 2, 3))(*SAMPLES, MASK),
    "vmap": lambda f: torch.func.vmap(f, in_dims=(0, 0, 0, None))(*SAMPLES, MASK),
    "gradients of samples": lambda f: torch.func.vmap(torch.func.grad(sum_of_sines(f)))(*SAMPLES),
    "jvp": lambda f: torch.func.jvp(f, tuple(SAMPLES), tuple(SAMPLES)),
    "hessian": lambda f: torch.func.hessian(sum_of_sines(f))(SAMPLES[0][:1, :1], *SAMPLES[1:]),
    "causal, shared heads": lambda f: torch.func.grad(
        sum_of_sines(lambda q, k: f(q, k, k, None, 0.0, True, 0.3, True))
    )(SAMPLES[0], SAMPLES[1][:, :1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func_transforms_match_reference(transform):
    def reference_attention(q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
        scores = scores if mask is None else scores + mask
        masked_out = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(masked_out, -torch.inf) if is_causal else scores).softmax(-1) @ v

    torch.testing.assert_close(transform(attention), transform(reference_attention), rtol=1e-9, atol=1e-9)


# ---- Errors -------------------------------------------------------------------------------------------------

VALID_ARGUMENTS = dict(zip(NAMES, make_inputs(), strict=True))
ones = torch.ones
NESTED = torch.nested.nested_tensor([ones(2, 5, 8), ones(2, 4, 8)])
THREE_HEADS = {"key": ones(2, 3, 7, 8), "value": ones(2, 3, 7, 8), "enable_gqa": True}
ERRORS = {
    "with a mask": (ValueError, "is_causal: expected False", {"is_causal": True, "attn_mask": ones(5, 7)}),
    "no tensor": (TypeError, "key: expected a torch tensor, got list", {"key": [1.0]}),
    "sparse": (TypeError, "value: .* a sparse_coo one;", {"value": ones(2, 2, 7, 8).to_sparse()}),
    "nested": (TypeError, "query: .* dense tensor, got a nested one; `attention_varlen`", {"query": NESTED}),
    "integers": (TypeError, "query: expected float32, .* got int64", {"query": ones(2, 2, 5, 8).long()}),
    "dtype": (
        TypeError,
        "key: expected float32, as query, got float64",
        {"key": VALID_ARGUMENTS["key"].double()},
    ),
    "device": (ValueError, "value: expected it on cpu", {"value": VALID_ARGUMENTS["value"].to("meta")}),
    "a vector": (ValueError, r"query: expected \[..., heads, length, dim\]", {"query": ones(8)}),
    "elements": (ValueError, "key: expected 8 elements per head, as query, got 7", {"key": ones(2, 2, 7, 7)}),
    "length": (ValueError, "value: expected the length of key, 7, got 6", {"value": ones(2, 2, 6, 8)}),
    "no elements": (ValueError, "at least one element per head, got 0", {"value": ones(2, 2, 7, 0)}),
    "leading axes": (ValueError, "leading axes do not broadcast", {"key": ones(3, 2, 7, 8)}),
    "dtype of mask": (TypeError, "attn_mask: .* got float64", {"attn_mask": ones(5, 7).double()}),
    "shape of mask": (ValueError, "attn_mask: shape .* does not broadcast", {"attn_mask": ones(4, 7)}),
    "large mask": (ValueError, "attn_mask: shape .* does not broadcast", {"attn_mask": ones(3, 1, 2, 5, 7)}),
    "bias": (ValueError, "a causal mask of 5 queries and 6 keys", {"attn_mask": ("lower_right", 5, 6)}),
    "scale": (TypeError, "scale: expected a number or None, got str", {"scale": "x"}),
    "is_causal": (TypeError, "is_causal: expected True or False, got 'no'", {"is_causal": "no"}),
    "enable_gqa": (TypeError, "enable_gqa: expected True or False, got 1", {"enable_gqa": 1}),
    "bool scale": (TypeError, "scale: expected a number or None, got bool", {"scale": True}),
    "groups": (ValueError, "enable_gqa: .* 2 for query, 3 for key and 3 for value", THREE_HEADS),
}


@pytest.mark.parametrize(("kind", "message", "invalid"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_invalid_argument(kind, message, invalid):
    mask = invalid.get("attn_mask")
    mask_argument = {"attn_mask": make_causal_mask(*mask)} if isinstance(mask, tuple) else {}
    with pytest.raises(kind, match=message) as error:
        attention(**{**VALID_ARGUMENTS, **invalid, **mask_argument})
    assert len(str(error.value).splitlines()) == 1


BACKWARD_ERRORS = {
    "gradient": ({"grad_out": torch.ones(2, 2, 5, 7)}, r"grad_out: expected float32 \[2, 2, 5, 8\]"),
    "output": ({"out": torch.ones(2, 2, 5, 8).double()}, "out: .* got float64"),
    "lse": ({"lse": torch.ones(2, 2, 6)}, r"lse: expected float32 \[2, 2, 5\]"),
    "heads": ({"key": ones(2, 1, 7, 8), "value": ones(2, 1, 7, 8)}, "expected query's leading axes"),
}
BACKWARD: dict[str, Any] = {
    "grad_out": VALID_ARGUMENTS["query"],
    **VALID_ARGUMENTS,
    "out": VALID_ARGUMENTS["query"],
    "lse": ones(2, 2, 5),
}


@pytest.mark.parametrize(("invalid", "message"), BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS)
def test_backward_errors_name_the_invalid_argument(invalid, message):
    with pytest.raises(ValueError, match=message):
        attention_backward(**{**BACKWARD, **invalid})


@pytest.mark.parametrize("name", ["grad_out", "query", "key", "value", "out", "lse"])
def test_backward_rejects_missing_tensors_and_other_devices(name):
    with pytest.raises(TypeError, match=f"^{name}: expected a torch tensor, got NoneType$"):
        attention_backward(**{**BACKWARD, name: None})
    with pytest.raises(ValueError, match="expected it on"):
        attention_backward(**{**BACKWARD, name: BACKWARD[name].to("meta")})


@pytest.mark.parametrize("name", ["grad_out", "out"])
def test_delta_rejects_missing_tensors(name):
    valid = {"grad_out": VALID_ARGUMENTS["query"], "out": VALID_ARGUMENTS["query"]}
    with pytest.raises(TypeError, match=f"^{name}: expected a torch tensor, got NoneType$"):
        attention_delta(**{**valid, name: None})


def test_argument_names_match_pytorch():
    import inspect

    assert list(inspect.signature(attention).parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    assert list(inspect.signature(attention_backward).parameters)[:6] == [
        "grad_out", "query", "key", "value", "out", "lse",
    ]  # fmt: skip
