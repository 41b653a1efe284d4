"""`harness.nn.attention` against PyTorch's own function: values, gradients, options, torch's checks, errors by name."""

import gc
from typing import Any

import attention_checks as checks
import pytest
import torch
import torch.nn.functional as F
from attention_checks import NAMES, assert_as_exact_as_torch, inputs, output_and_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from typed import present, three

from harness.nn import (
    attention,
    attention_arguments,
    attention_autograd,
    attention_backward,
    attention_delta,
    attention_with_lse,
)
from harness.nn.attention_plan import EVERY_KEY

OPERATOR = attention_autograd.forward_operator
BACKWARD = attention_autograd.backward_operator
MASK_BACKWARD = attention_autograd.mask_operator


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

MASKS = {
    "none": None,
    "[S, T]": additive(5, 7),
    "[B, 1, S, T]": additive(2, 1, 5, 7),
    "[N, S, T]": additive(2, 5, 7),
    "[B, N, S, T]": additive(2, 2, 5, 7),
    "[1, T]": additive(2, 7)[1:],
    "[S, 1]": torch.randn(5, 1, generator=torch.Generator().manual_seed(2)),
    "bool": additive(5, 7) > -0.5,
    "causal, top left": "upper_left",
    "causal, bottom right": "lower_right",
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask):
    own = causal(mask, 5, 7) if isinstance(mask, str) else mask
    assert_as_exact_as_torch(inputs(), attn_mask=own)


LEARNED = {
    name: mask for name, mask in MASKS.items() if type(mask) is torch.Tensor and mask.dtype == torch.float32
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [*LEARNED.values(), torch.ones(1)], ids=[*LEARNED, "[1]"])
def test_the_gradient_of_a_mask(mask, dtype):
    """Summed over all that it was broadcast to."""
    learned = mask.to(dtype).requires_grad_()
    assert_as_exact_as_torch(inputs(dtype=dtype), attn_mask=learned)


@pytest.mark.parametrize("shape", [(40, 1), (1,)], ids=str)
def test_the_gradient_of_a_mask_broadcast_along_the_keys_is_that_of_lse(shape):
    """A number more for every key of a row leaves its probabilities alone, and lse grows by it; of queries that the mask holds."""
    tensors = inputs(S=40, T=50, d=64, dtype=torch.bfloat16)
    mask = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
    output, lse = attention_with_lse(*tensors, attn_mask=mask)
    grad_out = torch.linspace(-1, 2, output.numel()).reshape(output.shape).bfloat16()
    (of_output,) = torch.autograd.grad(output, mask, grad_out, retain_graph=True)
    assert of_output.abs().max() < 1e-4
    (of_both,) = torch.autograd.grad((output, lse), mask, (grad_out, torch.full_like(lse, 0.5)))
    assert torch.equal(of_both, torch.full_like(of_both, 0.5 * lse.numel() / of_both.numel()))


def test_the_gradient_of_a_mask_beside_other_options():
    """Shared heads; five axes; the mask alone needs one; lse as a loss, and finite differences."""
    shared = inputs(N=4, G=2)
    assert_as_exact_as_torch(shared, attn_mask=additive(4, 5, 7).requires_grad_(), enable_gqa=True)
    generator = torch.Generator().manual_seed(6)
    query, key, value = (
        torch.randn(shape, generator=generator) for shape in ((2, 3, 2, 5, 8), *[(2, 3, 2, 7, 8)] * 2)
    )
    assert_as_exact_as_torch((query, key, value), attn_mask=torch.ones(3, 1, 5, 7, requires_grad=True))
    learned = torch.zeros(1, 7, requires_grad=True)
    attention(*shared, attn_mask=learned, enable_gqa=True).sum().backward()
    assert learned.grad is not None and learned.grad.shape == (1, 7)
    tensors = inputs(dtype=torch.float64, S=3, T=4, d=2)
    mask = torch.randn(2, 1, 1, 4, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda mask: attention_with_lse(*tensors, attn_mask=mask), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"S": 5, "T": 7}, {"is_causal": True}),
        ({"S": 9, "T": 4}, {"is_causal": True}),
        ({"N": 6, "G": 2}, {"enable_gqa": True}),
        ({"N": 3, "G": 1, "S": 6, "T": 6}, {"enable_gqa": True, "is_causal": True}),
        ({"S": 33, "T": 35, "d": 17}, {"scale": 0.3}),
        ({"S": 2, "T": 3, "d": 256}, {}),
        ({"S": 3, "T": 4, "d": 1}, {"scale": 0.0}),
        ({"d": 6, "dv": 11}, {}),
        ({"d": 11, "dv": 6}, {"is_causal": True}),
        ({"S": 1, "T": 1}, {}),
    ],
    ids=str,
)
def test_options(dtype, sizes, options):
    assert_as_exact_as_torch(inputs(dtype=dtype, **sizes), **options)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3])
@pytest.mark.parametrize("diagonal", [0, EVERY_KEY, 2])
def test_what_is_left_to_pytorch_has_scales_of_any_sign(scale, diagonal):
    """Its fused kernels give NaN for a triangle and a scale that is not above 0."""
    tensors = inputs(dtype=torch.float32)
    hidden = ~torch.ones(5, 7, dtype=torch.bool).tril(min(diagonal, 7))

    def theirs(query, key, value):
        return attention_autograd.torchs_own(query, key, value, None, 0.0, scale, diagonal)

    def formula(query, key, value):
        scores = (scale * query @ key.mT).masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ value

    truth = output_and_gradients(formula, [tensor.double() for tensor in tensors])
    for got, right in zip(output_and_gradients(theirs, tensors), truth, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


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


def test_any_strides():
    """As a model has them, [B, S, N, d] with heads and length exchanged; one tensor for all; a gradient of stride 0."""
    whole = torch.randn(2, 6, 3, 3, 8, generator=torch.Generator().manual_seed(4))
    tensors = [whole[:, :, i].transpose(1, 2) for i in range(3)]
    assert not any(tensor.is_contiguous() for tensor in tensors)
    leaf = whole.clone().requires_grad_()
    outputs = [
        function(*three(leaf[:, :, i].transpose(1, 2) for i in range(3)))
        for function in (attention, F.scaled_dot_product_attention)
    ]
    ours, theirs = (torch.autograd.grad(output.sum(), leaf)[0] for output in outputs)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_as_exact_as_torch(tensors, grad_out=torch.tensor(1.25).expand(2, 3, 6, 8))


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


@pytest.mark.parametrize("needed", range(3), ids=NAMES)
def test_gradients_only_where_needed(needed):
    tensors = three(inputs())
    tensors[needed].requires_grad_()
    attention(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [i == needed for i in range(3)]


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
    assert not alone[2].any()


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


def test_two_calls_give_the_same_bits():
    first, second = (output_and_gradients(attention, inputs(S=40, T=50)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_what_is_kept_is_of_the_size_of_the_inputs():
    """Beside query, key, value and the output one number for each row: nothing of S * T elements."""
    tensors = three(tensor.requires_grad_() for tensor in inputs(B=1, N=1, S=64, T=96, d=8))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        attention(*tensors, is_causal=True)
    assert sorted(kept) == sorted([64 * 8, 96 * 8, 96 * 8, 64 * 8, 64])


# ---- Torch's own checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask", [None, additive(1, 2, 5, 7)[:, :, 1:].repeat(1, 1, 2, 1)[:, :, :5]], ids=["plain", "mask"]
)
def test_opcheck(mask):
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    torch.library.opcheck(OPERATOR, (*tensors, mask, 0.3, 2, 1))
    with torch.no_grad():
        out, lse = OPERATOR(*tensors, mask, 0.3, 2, 1)
        plain = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(BACKWARD, (out, *plain, out, lse, None, mask, 0.3, 2, 1))
    if mask is not None:
        torch.library.opcheck(MASK_BACKWARD, (out, *plain, out, lse, None, mask, 0.3, 2))


def test_gradcheck():
    tensors = [tensor.requires_grad_() for tensor in inputs(dtype=torch.float64, N=4, G=2, S=3, T=4, d=3)]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, is_causal=True, enable_gqa=True), tensors)


def test_compiles_as_one_graph():
    def function(*tensors):
        return attention(*tensors, is_causal=True, enable_gqa=True).square()

    tensors = inputs(N=4, G=2)
    expected = output_and_gradients(function, tensors)
    torch._dynamo.reset()
    got = output_and_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), tensors)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_memory_is_constant():
    """Over hundreds of steps: as many live tensors and bytes at the end as after the first."""
    tensors = [tensor.requires_grad_() for tensor in inputs(S=16, T=24)]
    mask = torch.zeros(16, 24, requires_grad=True)

    def alive(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            attention(*tensors, attn_mask=mask).square().sum().backward()
            for leaf in (*tensors, mask):
                leaf.grad = None
        tensors_alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return len(tensors_alive), sum(tensor.numel() * tensor.element_size() for tensor in tensors_alive)

    alive(1)
    gc.collect()
    assert alive(1) == alive(300)


def test_a_bool_mask_becomes_numbers_of_query_s_dtype_under_autocast_on_a_gpu_too():
    """Which makes float32 of some functions' results. Fake tensors need no GPU."""
    with FakeTensorMode():
        query = torch.empty(2, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        mask = torch.empty(2, 1, 8, 12, device="cuda", dtype=torch.bool)
        torch.set_autocast_enabled("cuda", True)
        try:
            bias = attention_arguments.as_numbers(mask, query)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert bias.dtype == torch.bfloat16 and bias.shape == mask.shape and bias.stride() == (128, 128, 16, 1)


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


def test_a_second_derivative_is_right_or_refused():
    """PyTorch's fused functions have none, its formula has; what the operators give is refused."""
    leaves = [tensor.requires_grad_() for tensor in inputs(dtype=torch.float64, S=3, T=4, d=2)]
    with sdpa_kernel([SDPBackend.MATH]):
        assert torch.autograd.gradgradcheck(lambda *own: attention(*three(own), is_causal=True), leaves)
    for function in (attention, lambda *own: attention_with_lse(*own)[0]):
        (grad,) = torch.autograd.grad(function(*three(leaves)).sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match=r"derivative for|attention has no double backward"):
            grad.sum().backward()


def test_delta_has_no_gradient_and_says_so():
    """Beside other terms too: without a graph it would count as constant."""
    grad_out, out = (inputs()[0].requires_grad_() for _ in range(2))
    loss = out.sum() + attention_delta(grad_out, out=out).sum()
    with pytest.raises(NotImplementedError, match="attention has no double backward"):
        torch.autograd.grad(loss, out)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_its_gradient():
    query, key, value = inputs(dtype=torch.float64)
    queries = torch.stack([query, 2 * query]).requires_grad_()
    got = torch.func.vmap(lambda query: attention(query, key, value))(queries)
    right = F.scaled_dot_product_attention(queries, key, value)
    torch.testing.assert_close(got, right)
    gradients = (torch.autograd.grad(out.square().sum(), queries)[0] for out in (got, right))
    torch.testing.assert_close(*gradients)


def test_shapes_without_memory():
    query, key, value = (tensor.to("meta") for tensor in inputs(dv=3))
    output, lse = attention_with_lse(query, key, value)
    assert output.shape == (2, 2, 5, 3) and lse.shape == (2, 2, 5) and lse.dtype == torch.float32


# ---- Errors -------------------------------------------------------------------------------------------------

PLAIN = dict(zip(NAMES, inputs(), strict=True))
ERRORS = {
    "mask and causal": (
        ValueError,
        "is_causal: expected False",
        {"is_causal": True, "attn_mask": additive(5, 7)},
    ),
    "no tensor": (TypeError, "key: expected a torch tensor, got list", {"key": [1.0]}),
    "sparse": (
        TypeError,
        "value: .* got a sparse_coo one; `attention_varlen`",
        {"value": torch.ones(2, 2, 7, 8).to_sparse()},
    ),
    "nested": (
        TypeError,
        "query: expected a dense tensor, got a nested one; `attention_varlen` takes sequences",
        {"query": torch.nested.nested_tensor([torch.ones(2, 5, 8), torch.ones(2, 4, 8)])},
    ),
    "integers": (
        TypeError,
        "query: expected float32, .* got int64",
        {"query": torch.ones(2, 2, 5, 8).long()},
    ),
    "another dtype": (
        TypeError,
        "key: expected float32, as query, got float64",
        {"key": PLAIN["key"].double()},
    ),
    "another device": (ValueError, "value: expected it on cpu", {"value": PLAIN["value"].to("meta")}),
    "a vector": (ValueError, r"query: expected \[..., heads, length, dim\]", {"query": torch.ones(8)}),
    "elements of key": (
        ValueError,
        "key: expected 8 elements a head, as query, got 7",
        {"key": torch.ones(2, 2, 7, 7)},
    ),
    "length of value": (
        ValueError,
        "value: expected the length of key, 7, got 6",
        {"value": torch.ones(2, 2, 6, 8)},
    ),
    "no elements": (ValueError, "at least one element a head, got 0", {"value": torch.ones(2, 2, 7, 0)}),
    "too wide": (NotImplementedError, "256 elements at most, got 257", {"value": torch.ones(2, 2, 7, 257)}),
    "leading axes": (ValueError, "leading axes do not broadcast", {"key": torch.ones(3, 2, 7, 8)}),
    "dtype of mask": (
        TypeError,
        "attn_mask: expected bool or float32, got float64",
        {"attn_mask": torch.ones(5, 7).double()},
    ),
    "shape of mask": (ValueError, "attn_mask: shape .* does not broadcast", {"attn_mask": torch.ones(4, 7)}),
    "mask too large": (
        ValueError,
        "attn_mask: shape .* does not broadcast",
        {"attn_mask": torch.ones(3, 1, 2, 5, 7)},
    ),
    "causal mask": (
        ValueError,
        "a causal mask of 5 queries and 6 keys",
        {"attn_mask": ("lower_right", 5, 6)},
    ),
    "scale": (TypeError, "scale: expected a number or None, got str", {"scale": "x"}),
    "is_causal": (TypeError, "is_causal: expected True or False, got 'no'", {"is_causal": "no"}),
    "enable_gqa": (TypeError, "enable_gqa: expected True or False, got 1", {"enable_gqa": 1}),
    "scale of no number": (TypeError, "scale: expected a number or None, got bool", {"scale": True}),
    "groups": (
        ValueError,
        "enable_gqa: .* got 2 for query, 3 for key and 3 for value",
        {"key": torch.ones(2, 3, 7, 8), "value": torch.ones(2, 3, 7, 8), "enable_gqa": True},
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


@pytest.mark.parametrize(("changed", "words"), BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS)
def test_errors_of_the_backward_pass(changed, words):
    right = {"grad_out": PLAIN["query"], **PLAIN, "out": PLAIN["query"], "lse": torch.ones(2, 2, 5)}
    with pytest.raises(ValueError, match=words):
        attention_backward(**{**right, **changed})


@pytest.mark.parametrize("name", ["grad_out", "query", "key", "value", "out", "lse"])
def test_the_backward_pass_wants_dense_tensors_in_one_place(name):
    right: dict[str, Any] = {
        "grad_out": PLAIN["query"],
        **PLAIN,
        "out": PLAIN["query"],
        "lse": torch.ones(2, 2, 5),
    }
    with pytest.raises(TypeError, match=f"^{name}: expected a torch tensor, got NoneType$"):
        attention_backward(**{**right, name: None})
    with pytest.raises(ValueError, match="expected it on"):
        attention_backward(**{**right, name: right[name].to("meta")})


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
