"""Attention of parts of the queries and keys: combined, they equal the whole, in forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from attention_checks import make_inputs
from typed import loosely, three

from harness.nn import Part, attention_block, attention_block_backward, attention_delta


def make_grad(output: torch.Tensor) -> torch.Tensor:
    return 0.5 + torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)


def differentiate_whole(tensors, mask=None):
    """Return output and gradients from PyTorch in float64; the mask is boolean."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    return [output.detach(), *torch.autograd.grad(output, leaves, make_grad(output))]


def assert_near(got, truth):
    for ours, exact in zip(got, truth, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def combine(parts):
    """Return the whole output and lse, from the (output, lse) of parts with the same queries and different
    keys."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    shares = [torch.exp(part - lse.masked_fill(lse == -torch.inf, 0))[..., None] for _, part in parts]
    terms = [share.to(out.dtype) * out for share, (out, _) in zip(shares, parts, strict=True)]
    return torch.stack(terms).sum(0), lse


def differentiate_parts(query, key, value, cuts, **options):
    """Return output and gradients combined from one part for each cut of the keys, and the lse of each part."""
    parts = [Part(key_offset=cut.start, **options) for cut in cuts]
    pieces = [(key[:, :, cut], value[:, :, cut]) for cut in cuts]
    results = [attention_block(query, *piece, part) for piece, part in zip(pieces, parts, strict=True)]
    output, lse = combine(results)
    grad_out = make_grad(output)
    delta = attention_delta(grad_out, output)
    torch.testing.assert_close(delta, (grad_out * output).sum(-1), rtol=1e-5, atol=1e-5)
    shares = [
        attention_block_backward(grad_out, query, *piece, lse, delta, part)
        for piece, part in zip(pieces, parts, strict=True)
    ]
    gradients = sum(s[0] for s in shares), *(torch.cat([s[i] for s in shares], 2) for i in (1, 2))
    return (output, *gradients), [own for _, own in results]


@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_of_the_keys_combine_to_the_whole(is_causal):
    """In a ring, a part of the keys that a query cannot attend to has lse = -inf."""
    query, key, value = tensors = make_inputs(S=9, T=9)
    sees = torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else None
    results, lse = differentiate_parts(
        query, key, value, [slice(0, 4), slice(4, 5), slice(5, 9)], is_causal=is_causal
    )
    assert is_causal == bool(torch.isneginf(lse[2]).any())
    assert_near(results, differentiate_whole(tensors, sees))


def test_parts_of_the_queries_combine_to_the_whole():
    query, key, value = tensors = make_inputs(N=4, G=2, S=9, T=9)
    sees = torch.ones(9, 9, dtype=torch.bool).tril()
    outputs = [
        attention_block(query[:, :, cut], key, value, Part(query_offset=cut.start, is_causal=True))[0]
        for cut in (slice(0, 2), slice(2, 9))
    ]
    wide = [tensor.double().repeat_interleave(4 // tensor.shape[1], 1) for tensor in tensors]
    assert_near([torch.cat(outputs, 2)], differentiate_whole(wide, sees)[:1])


def test_autograd_differentiates_output_and_lse():
    tensors = make_inputs(dtype=torch.float64, S=5, T=7)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output, _ = combine(
        [attention_block(query, key[:, :, cut], value[:, :, cut]) for cut in (slice(0, 3), slice(3, 7))]
    )
    assert_near(
        [output, *torch.autograd.grad(output, leaves, make_grad(output))], differentiate_whole(tensors)
    )


def expand_mask(visible: torch.Tensor, size: int, S: int, T: int) -> torch.Tensor:
    """Expand a mask of blocks to elements."""
    return visible.repeat_interleave(size, 0).repeat_interleave(size, 1)[:S, :T]


@pytest.mark.parametrize("size", [3, 16, 32])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_blocks(size, as_pairs):
    S, T = 40, 52
    query, key, value = tensors = make_inputs(B=1, S=S, T=T)
    counts = -(-S // size), -(-T // size)
    visible = torch.rand(counts, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[0] = False
    visible[-1, 0] = True
    blocks = [(int(i), int(j)) for i, j in visible.nonzero()] if as_pairs else visible
    part = Part(blocks=blocks, block_size=size)
    output, lse = attention_block(query, key, value, part)
    assert not output[:, :, :size].any() and torch.isneginf(lse[:, :, :size]).all()
    grad_out = make_grad(output)
    delta = attention_delta(grad_out, output)
    gradients = attention_block_backward(grad_out, query, key, value, lse, delta, part)
    assert_near((output, *gradients), differentiate_whole(tensors, expand_mask(visible, size, S, T)))


def test_no_visible_block():
    output, lse = attention_block(*three(make_inputs()), Part(blocks=[], block_size=4))
    assert not output.any() and torch.isneginf(lse).all()


def test_index_permutes_the_rows():
    """Causal along the index, with blocks of index positions; results keep the order of the rows."""
    query, key, value = tensors = make_inputs(S=8, T=8)
    index = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([[True, False], [True, True]])
    part = Part(is_causal=True, blocks=visible, block_size=4, index=index)
    output, lse = attention_block(query, key, value, part)
    grad_out = make_grad(output)
    gradients = attention_block_backward(
        grad_out, query, key, value, lse, attention_delta(grad_out, output), part
    )
    position = torch.argsort(index)
    sees = (position[None] <= position[:, None]) & expand_mask(visible, 4, 8, 8)[position][:, position]
    assert_near((output, *gradients), differentiate_whole(tensors, sees))
    expected = torch.logsumexp((query @ key.mT / 8**0.5).masked_fill(~sees, -torch.inf), -1)
    torch.testing.assert_close(lse, expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", [1e4, 1e6, 1e8])
def test_parts_with_large_scores(score):
    """Two parts of keys with equal scores, or with scores that are 8 lower, match float64 (mlx#4188, pytorch#11752)."""
    query = torch.tensor([score, 8.0]).expand(1, 1, 5, 2)
    key = torch.tensor([[1.0, 0], [1, 0], [1, -1], [1, 0], [1, -1]])[None, None]
    value = torch.randn(1, 1, 5, 2, generator=torch.Generator().manual_seed(0))
    results, _ = differentiate_parts(query, key, value, [slice(0, 2), slice(2, 5)], scale=1.0)
    truth = differentiate_whole([query * 2**0.5, key, value])
    truth[1] *= 2**0.5  # PyTorch's query is scaled by 2**0.5, because of its default scale
    for ours, exact in zip(results, truth, strict=True):
        assert (ours - exact).abs().max() <= 1e-6 + 1e-5 * exact.abs().max()


@pytest.mark.parametrize("score", [1e2, 1e4, 1e6])
def test_gradient_error_of_float32_lse_is_bounded(score):
    """Relative error of each probability, as in the kernels: |lse| 2^-24; its terms of the gradients inherit it."""
    query, key, value = make_inputs(dtype=torch.float64, S=50, T=9)
    query = score * query
    _, lse = attention_block(query, key, value, Part(scale=1.0))
    grad_out, delta = torch.ones_like(query), torch.linspace(-1, 1, lse.numel()).double().view(lse.shape)
    exact, got = (
        attention_block_backward(grad_out, query, key, value, each, delta, Part(scale=1.0))
        for each in (lse, lse.float().double())
    )
    P = torch.exp(query @ key.mT - lse[..., None]) * torch.expm1(lse.abs() * 2.0**-24)[..., None]
    dS = P * (grad_out @ value.mT - delta[..., None]).abs()
    bounds = dS @ key.abs(), dS.mT @ query.abs(), P.mT @ grad_out
    for ours, right, bound in zip(got, exact, bounds, strict=True):
        assert (ours != right).any() and ((ours - right).abs() <= bound * (1 + 1e-6) + 1e-12 * score).all()


def test_part_with_scale():
    query, key, value = tensors = make_inputs()
    assert_near(
        [attention_block(query, key, value, Part(scale=1.0))[0]],
        differentiate_whole([query * 8**0.5, *tensors[1:]])[:1],
    )


ERRORS = {
    "size of a block": ({"block_size": 0}, "block_size: expected at least 1, got 0"),
    "shape of a mask": (
        {"blocks": torch.ones(1, 1).bool(), "block_size": 4},
        r"blocks: .* got bool \[1, 1\]",
    ),
    "dtype of a mask": ({"blocks": torch.ones(2, 2), "block_size": 4}, "blocks: .* got float32"),
    "pair outside": ({"blocks": [(0, 0), (0, 2)], "block_size": 4}, r"2 x 2, and \(0, 2\) is none of them"),
    "index": ({"index": torch.arange(4)}, r"index: expected int64 \[5\] .* for 5 queries and 7 keys"),
    "dtype of an index": ({"index": torch.ones(5)}, "index: expected int64"),
}


@pytest.mark.parametrize(("options", "words"), ERRORS.values(), ids=ERRORS)
def test_part_errors(options, words):
    with pytest.raises(ValueError, match=words):
        attention_block(*three(make_inputs()), Part(**options))


SHAPES = {
    "axes": ([torch.ones(2, 5, 8)] * 3, r"expected four axes, \[B, N, length, d\], got \[2, 5, 8\]"),
    "value": ([torch.ones(2, 2, *last) for last in ((5, 8), (7, 8), (7, 6))], "value: expected the shape"),
    "batch": ([torch.ones(2, 2, 5, 8), *[torch.ones(1, 2, 7, 8)] * 2], "query's batch of 2"),
}


@pytest.mark.parametrize(("tensors", "words"), SHAPES.values(), ids=SHAPES)
def test_part_shape_errors(tensors, words):
    with pytest.raises(ValueError, match=words):
        attention_block(*tensors)


def test_part_backward_errors():
    query, key, value = make_inputs()
    rows = torch.ones(2, 2, 5)
    right = [query, query, key, value, rows, rows]
    tries = (0, "grad_out", query.double()), (4, "lse", rows[..., 1:]), (5, "delta", rows.double())
    for number, name, wrong in tries:
        with pytest.raises(ValueError, match=f"{name}: expected float32"):
            loosely(attention_block_backward)(*right[:number], wrong, *right[number + 1 :])
    with pytest.raises(ValueError, match=r"out: expected \[B, N, S, d\] of a float dtype, got int64"):
        attention_delta(query.long(), query.long())
