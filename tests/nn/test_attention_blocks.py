"""Attention over parts of the queries and keys: combined results equal full attention, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from attention_checks import make_inputs
from typed import as_triple, erase_types

from harness.nn import Part, attention_block, attention_block_backward, attention_delta


def make_grad(output: torch.Tensor) -> torch.Tensor:
    return 0.5 + torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)


def compute_reference(tensors, mask=None):
    """Return PyTorch's output and gradients in float64, for a boolean mask."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    return [output.detach(), *torch.autograd.grad(output, leaves, make_grad(output))]


def assert_close(got, truth):
    for actual, exact in zip(got, truth, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


def combine(parts):
    """Return the whole output and lse, from the (output, lse) of parts with the same queries and different
    keys."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    weights = [
        torch.exp(part_lse - lse.masked_fill(lse == -torch.inf, 0))[..., None] for _, part_lse in parts
    ]
    terms = [share.to(out.dtype) * out for share, (out, _) in zip(weights, parts, strict=True)]
    return torch.stack(terms).sum(0), lse


def compute_from_parts(query, key, value, slices, **options):
    """Return output and gradients combined from one part per slice of the keys, and each part's lse."""
    parts = [Part(key_offset=key_slice.start, **options) for key_slice in slices]
    pairs = [(key[:, :, key_slice], value[:, :, key_slice]) for key_slice in slices]
    results = [attention_block(query, *pair, part) for pair, part in zip(pairs, parts, strict=True)]
    output, lse = combine(results)
    grad_out = make_grad(output)
    delta = attention_delta(grad_out, output)
    torch.testing.assert_close(delta, (grad_out * output).sum(-1), rtol=1e-5, atol=1e-5)
    part_grads = [
        attention_block_backward(grad_out, query, *pair, lse, delta, part)
        for pair, part in zip(pairs, parts, strict=True)
    ]
    gradients = sum(s[0] for s in part_grads), *(torch.cat([s[i] for s in part_grads], 2) for i in (1, 2))
    return (output, *gradients), [part_lse for _, part_lse in results]


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_parts_combine_to_full_attention(is_causal):
    """A part without visible keys has lse = -inf."""
    query, key, value = tensors = make_inputs(S=9, T=9)
    visible = torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else None
    results, lse = compute_from_parts(
        query, key, value, [slice(0, 4), slice(4, 5), slice(5, 9)], is_causal=is_causal
    )
    assert is_causal == bool(torch.isneginf(lse[2]).any())
    assert_close(results, compute_reference(tensors, visible))


def test_query_parts_combine_to_full_attention():
    query, key, value = tensors = make_inputs(N=4, G=2, S=9, T=9)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    outputs = [
        attention_block(
            query[:, :, query_slice], key, value, Part(query_offset=query_slice.start, is_causal=True)
        )[0]
        for query_slice in (slice(0, 2), slice(2, 9))
    ]
    doubles = [tensor.double().repeat_interleave(4 // tensor.shape[1], 1) for tensor in tensors]
    assert_close([torch.cat(outputs, 2)], compute_reference(doubles, visible)[:1])


def test_autograd_differentiates_output_and_lse():
    tensors = make_inputs(dtype=torch.float64, S=5, T=7)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output, _ = combine(
        [
            attention_block(query, key[:, :, key_slice], value[:, :, key_slice])
            for key_slice in (slice(0, 3), slice(3, 7))
        ]
    )
    assert_close(
        [output, *torch.autograd.grad(output, leaves, make_grad(output))], compute_reference(tensors)
    )


def expand_mask(visible: torch.Tensor, size: int, S: int, T: int) -> torch.Tensor:
    """Expand a block mask to an element mask."""
    return visible.repeat_interleave(size, 0).repeat_interleave(size, 1)[:S, :T]


@pytest.mark.parametrize("block_size", [3, 16, 32])
@pytest.mark.parametrize("as_indices", [False, True])
def test_block_masks_match_expanded_masks(block_size, as_indices):
    S, T = 40, 52
    query, key, value = tensors = make_inputs(B=1, S=S, T=T)
    counts = -(-S // block_size), -(-T // block_size)
    visible = torch.rand(counts, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[0] = False
    visible[-1, 0] = True
    blocks = [(int(i), int(j)) for i, j in visible.nonzero()] if as_indices else visible
    part = Part(blocks=blocks, block_size=block_size)
    output, lse = attention_block(query, key, value, part)
    assert not output[:, :, :block_size].any() and torch.isneginf(lse[:, :, :block_size]).all()
    grad_out = make_grad(output)
    delta = attention_delta(grad_out, output)
    gradients = attention_block_backward(grad_out, query, key, value, lse, delta, part)
    assert_close((output, *gradients), compute_reference(tensors, expand_mask(visible, block_size, S, T)))


def test_empty_block_list_gives_zero_output():
    output, lse = attention_block(*as_triple(make_inputs()), Part(blocks=[], block_size=4))
    assert not output.any() and torch.isneginf(lse).all()


def test_index_permutes_rows():
    """Masks are causal and blocked in permuted order; results are in row order."""
    query, key, value = tensors = make_inputs(S=8, T=8)
    index = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([[True, False], [True, True]])
    part = Part(is_causal=True, blocks=visible, block_size=4, index=index)
    output, lse = attention_block(query, key, value, part)
    grad_out = make_grad(output)
    delta = attention_delta(grad_out, output)
    gradients = attention_block_backward(grad_out, query, key, value, lse, delta, part)
    position = torch.argsort(index)
    in_blocks = expand_mask(visible, 4, 8, 8)[position][:, position]
    visible_elements = (position[None] <= position[:, None]) & in_blocks
    assert_close((output, *gradients), compute_reference(tensors, visible_elements))
    expected = torch.logsumexp((query @ key.mT / 8**0.5).masked_fill(~visible_elements, -torch.inf), -1)
    torch.testing.assert_close(lse, expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", [1e4, 1e6, 1e8])
def test_large_scores_in_parts(score):
    """Keys have equal scores, or scores that are lower by 8 (mlx#4188, pytorch#11752)."""
    query = torch.tensor([score, 8.0]).expand(1, 1, 5, 2)
    key = torch.tensor([[1.0, 0], [1, 0], [1, -1], [1, 0], [1, -1]])[None, None]
    value = torch.randn(1, 1, 5, 2, generator=torch.Generator().manual_seed(0))
    results, _ = compute_from_parts(query, key, value, [slice(0, 2), slice(2, 5)], scale=1.0)
    truth = compute_reference([query * 2**0.5, key, value])
    truth[1] *= 2**0.5  # undo the factor 2**0.5, which cancels PyTorch's default scale
    for actual, expected in zip(results, truth, strict=True):
        assert (actual - expected).abs().max() <= 1e-6 + 1e-5 * expected.abs().max()


@pytest.mark.parametrize("score", [1e2, 1e4, 1e6])
def test_gradient_error_of_float32_lse_is_bounded(score):
    """Rounding lse changes each probability by a factor of |lse| 2^-24, which bounds gradient errors."""
    query, key, value = make_inputs(dtype=torch.float64, S=50, T=9)
    query = score * query
    _, lse = attention_block(query, key, value, Part(scale=1.0))
    grad_out, delta = torch.ones_like(query), torch.linspace(-1, 1, lse.numel()).double().view(lse.shape)
    exact, got = (
        attention_block_backward(grad_out, query, key, value, row_lse, delta, Part(scale=1.0))
        for row_lse in (lse, lse.float().double())
    )
    P = torch.exp(query @ key.mT - lse[..., None]) * torch.expm1(lse.abs() * 2.0**-24)[..., None]
    dS = P * (grad_out @ value.mT - delta[..., None]).abs()
    bounds = dS @ key.abs(), dS.mT @ query.abs(), P.mT @ grad_out
    for actual, expected, bound in zip(got, exact, bounds, strict=True):
        assert (actual != expected).any() and (
            (actual - expected).abs() <= bound * (1 + 1e-6) + 1e-12 * score
        ).all()


def test_part_accepts_scale():
    query, key, value = tensors = make_inputs()
    assert_close(
        [attention_block(query, key, value, Part(scale=1.0))[0]],
        compute_reference([query * 8**0.5, *tensors[1:]])[:1],
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


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_parts_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        attention_block(*as_triple(make_inputs()), Part(**options))


SHAPES = {
    "axes": ([torch.ones(2, 5, 8)] * 3, r"expected four axes, \[B, N, length, d\], got \[2, 5, 8\]"),
    "value": ([torch.ones(2, 2, *last) for last in ((5, 8), (7, 8), (7, 6))], "value: expected the shape"),
    "batch": ([torch.ones(2, 2, 5, 8), *[torch.ones(1, 2, 7, 8)] * 2], "query's batch of 2"),
}


@pytest.mark.parametrize(("tensors", "message"), SHAPES.values(), ids=SHAPES)
def test_invalid_shapes_are_rejected(tensors, message):
    with pytest.raises(ValueError, match=message):
        attention_block(*tensors)


def test_invalid_backward_tensors_are_rejected():
    query, key, value = make_inputs()
    rows = torch.ones(2, 2, 5)
    valid = [query, query, key, value, rows, rows]
    cases = (0, "grad_out", query.double()), (4, "lse", rows[..., 1:]), (5, "delta", rows.double())
    for index, name, invalid in cases:
        with pytest.raises(ValueError, match=f"{name}: expected float32"):
            erase_types(attention_block_backward)(*valid[:index], invalid, *valid[index + 1 :])
    with pytest.raises(ValueError, match=r"out: expected \[B, N, S, d\] of a float dtype, got int64"):
        attention_delta(query.long(), query.long())
