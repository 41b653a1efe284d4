"""Parts of a larger attention: put together they are the whole, forward and backward, whatever the parts are."""

import pytest
import torch
import torch.nn.functional as F
from attention_checks import inputs
from typed import loosely, three

from harness.nn import Part, attention_block, attention_block_backward, attention_delta


def gradient_of(output: torch.Tensor) -> torch.Tensor:
    return 0.5 + torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)


def whole(tensors, mask=None):
    """Output and gradients by PyTorch in float64; the mask is of bool."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient_of(output))]


def near(got, truth):
    for ours, exact in zip(got, truth, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def put_together(parts):
    """The whole output and lse, from the (output, lse) of parts with the same queries and different keys."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    shares = [torch.exp(part - lse.masked_fill(lse == -torch.inf, 0))[..., None] for _, part in parts]
    return torch.stack([share * out for share, (out, _) in zip(shares, parts, strict=True)]).sum(0), lse


@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_of_the_keys_with_offsets_are_the_whole(is_causal):
    """As in a ring: keys come in pieces, each query sees them by positions, a piece it does not see gives lse = -inf."""
    query, key, value = tensors = inputs(S=9, T=9)
    cuts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    sees = torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else None
    truth = whole(tensors, sees)
    parts = [Part(key_offset=cut.start, is_causal=is_causal) for cut in cuts]
    pieces = [(key[:, :, cut], value[:, :, cut]) for cut in cuts]
    results = [attention_block(query, *piece, part) for piece, part in zip(pieces, parts, strict=True)]
    assert is_causal == bool(torch.isneginf(results[2][1]).any())
    output, lse = put_together(results)
    grad_out = gradient_of(output)
    delta = attention_delta(grad_out, output)
    torch.testing.assert_close(delta, (grad_out * output).sum(-1), rtol=1e-5, atol=1e-5)
    shares = [
        attention_block_backward(grad_out, query, *piece, lse, delta, part)
        for piece, part in zip(pieces, parts, strict=True)
    ]
    gradients = (sum(s[0] for s in shares), *(torch.cat([s[i] for s in shares], 2) for i in (1, 2)))
    near((output, *gradients), truth)


def test_parts_of_the_queries_with_offsets_are_the_whole():
    query, key, value = tensors = inputs(N=4, G=2, S=9, T=9)
    sees = torch.ones(9, 9, dtype=torch.bool).tril()
    outputs = [
        attention_block(query[:, :, cut], key, value, Part(query_offset=cut.start, is_causal=True))[0]
        for cut in (slice(0, 2), slice(2, 9))
    ]
    wide = [tensor.double().repeat_interleave(4 // tensor.shape[1], 1) for tensor in tensors]
    near([torch.cat(outputs, 2)], whole(wide, sees)[:1])


def test_autograd_goes_through_output_and_lse():
    tensors = inputs(dtype=torch.float64, S=5, T=7)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output, _ = put_together(
        [attention_block(query, key[:, :, cut], value[:, :, cut]) for cut in (slice(0, 3), slice(3, 7))]
    )
    near([output, *torch.autograd.grad(output, leaves, gradient_of(output))], whole(tensors))


def mask_of(visible: torch.Tensor, size: int, S: int, T: int) -> torch.Tensor:
    """A mask of blocks as one of elements."""
    return visible.repeat_interleave(size, 0).repeat_interleave(size, 1)[:S, :T]


@pytest.mark.parametrize("size", [3, 16, 32])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_blocks(size, as_pairs):
    S, T = 40, 52
    query, key, value = tensors = inputs(B=1, S=S, T=T)
    counts = -(-S // size), -(-T // size)
    visible = torch.rand(counts, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[0] = False
    visible[-1, 0] = True
    blocks = [(int(i), int(j)) for i, j in visible.nonzero()] if as_pairs else visible
    part = Part(blocks=blocks, block_size=size)
    output, lse = attention_block(query, key, value, part)
    assert not output[:, :, :size].any() and torch.isneginf(lse[:, :, :size]).all()
    grad_out = gradient_of(output)
    delta = attention_delta(grad_out, output)
    gradients = attention_block_backward(grad_out, query, key, value, lse, delta, part)
    near((output, *gradients), whole(tensors, mask_of(visible, size, S, T)))


def test_no_block_is_seen():
    output, lse = attention_block(*three(inputs()), Part(blocks=[], block_size=4))
    assert not output.any() and torch.isneginf(lse).all()


def test_an_index_is_the_order_in_which_rows_are_taken():
    """Causal along the index, with blocks of positions; results stand where their rows stand."""
    query, key, value = tensors = inputs(S=8, T=8)
    index = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([[True, False], [True, True]])
    part = Part(is_causal=True, blocks=visible, block_size=4, index=index)
    output, lse = attention_block(query, key, value, part)
    grad_out = gradient_of(output)
    gradients = attention_block_backward(
        grad_out, query, key, value, lse, attention_delta(grad_out, output), part
    )
    position = torch.argsort(index)
    sees = (position[None] <= position[:, None]) & mask_of(visible, 4, 8, 8)[position][:, position]
    near((output, *gradients), whole(tensors, sees))
    expected = torch.logsumexp((query @ key.mT / 8**0.5).masked_fill(~sees, -torch.inf), -1)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


def test_the_scale_of_a_part():
    query, key, value = tensors = inputs()
    near([attention_block(query, key, value, Part(scale=1.0))[0]], whole([query * 8**0.5, *tensors[1:]])[:1])


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
def test_errors_of_a_part(options, words):
    with pytest.raises(ValueError, match=words):
        attention_block(*three(inputs()), Part(**options))


SHAPES = {
    "axes": ([torch.ones(2, 5, 8)] * 3, r"expected four axes, \[B, N, length, d\], got \[2, 5, 8\]"),
    "value": ([torch.ones(2, 2, *last) for last in ((5, 8), (7, 8), (7, 6))], "value: expected the shape"),
    "batch": ([torch.ones(2, 2, 5, 8), *[torch.ones(1, 2, 7, 8)] * 2], "query's batch of 2"),
}


@pytest.mark.parametrize(("tensors", "words"), SHAPES.values(), ids=SHAPES)
def test_shapes_of_a_part(tensors, words):
    with pytest.raises(ValueError, match=words):
        attention_block(*tensors)


def test_errors_of_the_backward_pass_of_a_part():
    query, key, value = inputs()
    rows = torch.ones(2, 2, 5)
    right = [query, query, key, value, rows, rows]
    for number, name, wrong in (
        (0, "grad_out", query.double()),
        (4, "lse", rows[..., 1:]),
        (5, "delta", rows.double()),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected float32"):
            loosely(attention_block_backward)(*right[:number], wrong, *right[number + 1 :])
    with pytest.raises(ValueError, match=r"out: expected \[B, N, S, d\] of a float dtype, got int64"):
        attention_delta(query.long(), query.long())
