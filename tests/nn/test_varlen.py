"""Variable-length attention: the PyTorch fallback, and the kernels on a real GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_checks import NAMES, differentiate
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.nn import attention_varlen

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1), (4, 2, 7, 0)
"""One sequence has no queries and one has no keys; PADDING rows follow the last one."""
PADDING = 2


def make_offsets(lengths, device="cpu"):
    """Return cumulative sequence lengths, starting at 0."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


OFFSETS = make_offsets(LENGTHS_Q), make_offsets(LENGTHS_K)


def make_packed(
    *, N=2, G=None, d=8, dv=None, dtype=torch.float32, lengths=(LENGTHS_Q, LENGTHS_K), device="cpu"
):
    """Return query [total, N, d], key and value for concatenated sequences."""
    generator = torch.Generator().manual_seed(0)
    query_rows, key_rows = (sum(counts) + PADDING for counts in lengths)
    shapes = (query_rows, N, d), (key_rows, G or N, d), (key_rows, G or N, dv or d)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.25).to(device, dtype)
        for shape in shapes
    ]


def attend(tensors, offsets=OFFSETS, **options):
    """Run `attention_varlen` with (query, key) offsets."""
    query, key, value = tensors
    return attention_varlen(query, key, value, *offsets, **options)


def attend_sequences_separately(tensors, offsets, **options):
    """Return the concatenated PyTorch attention outputs of the sequences; padding rows are 0."""
    query, key, value = tensors
    output = query.new_zeros(*query.shape[:2], value.shape[2])
    for (s0, s1), (t0, t1) in zip(*(itertools.pairwise(bounds.tolist()) for bounds in offsets), strict=True):
        if s1 > s0 and t1 > t0:
            q, k, v = (t.transpose(0, 1) for t in (query[s0:s1], key[t0:t1], value[t0:t1]))
            output[s0:s1] = F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1)
    return output


def assert_matches_separate_sequences(tensors, offsets=OFFSETS, grad_out=None, limit=None, **options):
    """Compare output and gradients with those of separate sequences in float64."""
    got = differentiate(lambda *t: attend(t, offsets, **options), tensors, grad_out)
    doubles = [tensor.double() for tensor in tensors]
    expected = differentiate(lambda *t: attend_sequences_separately(t, offsets, **options), doubles, grad_out)
    limit = limit or 32 * torch.finfo(tensors[0].dtype).eps
    for name, actual, truth in zip(("output", *NAMES), got, expected, strict=True):
        assert actual.dtype == tensors[0].dtype and actual.shape == truth.shape, name
        assert (actual.double() - truth).abs().max() <= limit * max(1, float(truth.abs().max())), name
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"d": 5, "dv": 9}, {"is_causal": True}),
        ({"N": 4, "G": 2}, {"enable_gqa": True, "is_causal": True}),
        ({"d": 256}, {"scale": -0.1}),
    ],
    ids=str,
)
def test_varlen_matches_separate_sequences(dtype, sizes, options):
    assert_matches_separate_sequences(
        make_packed(dtype=dtype, **sizes),
        limit=8 * torch.finfo(dtype).eps if dtype.itemsize == 2 else None,
        **options,
    )


def test_padding_rows_have_zero_output_and_gradient():
    """NaN in padding does not propagate."""
    tensors = make_packed()
    for tensor in tensors:
        tensor[-PADDING:] = torch.nan
    output, *gradients = differentiate(lambda *t: attend(t), tensors)
    assert output[:8].all() and not output[8:].any()
    assert all(not gradient[-PADDING:].any() and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("index", range(3), ids=NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_do_not_leak_between_sequences(index, value):
    tensors = make_packed(dtype=torch.float64)
    tensors[index][2, 0, 3] = value
    got = differentiate(lambda *t: attend(t), tensors)
    # On some processors PyTorch's fused CPU kernel drops a NaN in query.
    with sdpa_kernel([SDPBackend.MATH]):
        reference = differentiate(lambda *t: attend_sequences_separately(t, OFFSETS), tensors)
    assert not got[0].isfinite().all() and got[0][3:].isfinite().all()
    assert all(
        torch.equal(actual.isfinite(), expected.isfinite())
        for actual, expected in zip(got, reference, strict=True)
    )


def test_packed_documents_match_a_block_mask():
    """Two rows of 9 positions: documents of 4 and 5, and of 2, 6 and 1 tokens."""
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 6 + [2]])
    offsets = make_offsets((4, 5, 2, 6, 1))
    generator = torch.Generator().manual_seed(1)
    packed_qkv = [torch.randn(2, 9, 3, 8, generator=generator) for _ in range(3)]
    got = attend((t.flatten(0, 1) for t in packed_qkv), (offsets, offsets), is_causal=True).view(2, 9, 3, 8)
    visible = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    reference = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in packed_qkv), attn_mask=visible)
    torch.testing.assert_close(got, reference.transpose(1, 2))


def test_unbound_projection_views():
    """Query, key and value are views of one tensor; the output gradient has stride 0."""
    total = sum(LENGTHS_Q)
    qkv = torch.randn(total, 3, 2, 8, generator=torch.Generator().manual_seed(2))
    assert_matches_separate_sequences(
        qkv.unbind(1), (OFFSETS[0],) * 2, grad_out=torch.tensor(1.25).expand(total, 2, 8)
    )


VALID_ARGUMENTS = dict(zip((*NAMES, "offsets_q", "offsets_k"), (*make_packed(), *OFFSETS), strict=True))
ERRORS = {
    "axes": (ValueError, r"query: expected \[total, heads, dim\], got shape \[1, 11, 2, 8\]", {"query": make_packed()[0][None]}),
    "no tensor": (TypeError, "key: expected a torch tensor, got NoneType", {"key": None}),
    "dtype": (TypeError, "value: expected float32, as query, got float64", {"value": make_packed()[2].double()}),
    "heads": (ValueError, "key, value: expected the 2 heads of query, got 1 and 2; enable_gqa", {"key": make_packed(G=1)[1]}),
    "groups": (ValueError, "enable_gqa: the heads of key", {"key": make_packed(G=3)[1], "value": make_packed(G=3)[2], "enable_gqa": True}),
    "scale": (TypeError, "scale: expected a number or None, got str", {"scale": "x"}),
    "is_causal": (TypeError, "is_causal: expected True or False, got 'no'", {"is_causal": "no"}),
    "enable_gqa": (TypeError, "enable_gqa: expected True or False, got 1", {"enable_gqa": 1}),
    "offsets of another dtype": (ValueError, r"offsets_q: expected int32 \[sequences \+ 1\], got int64 \[5\]", {"offsets_q": OFFSETS[0].long()}),
    "offsets of no sequence": (ValueError, r"offsets_k: expected int32 .* got int32 \[1\]", {"offsets_k": OFFSETS[1][:1]}),
    "two axes of offsets": (ValueError, r"offsets_k: expected int32 .* got int32 \[1, 5\]", {"offsets_k": OFFSETS[1][None]}),
    "no offsets": (TypeError, "offsets_q: expected a torch tensor, got list", {"offsets_q": [0, 3]}),
    "offsets on another device": (ValueError, "offsets_q: expected it on cpu, as query, got meta", {"offsets_q": OFFSETS[0].to("meta")}),
    "numbers of offsets": (ValueError, "offsets_k: expected 5 of them, as offsets_q, got 4", {"offsets_k": OFFSETS[1][:4]}),
    "decreasing offsets": (ValueError, r"offsets_k: expected non-decreasing numbers from 0 to 15, got \[0, 4, 3, 13, 13\]", {"offsets_k": torch.tensor([0, 4, 3, 13, 13]).int()}),
    "below 0": (ValueError, "offsets_q: expected non-decreasing numbers from 0 to 11", {"offsets_q": OFFSETS[0] - 1}),
    "past the end": (ValueError, "offsets_q: expected non-decreasing numbers from 0 to 11", {"offsets_q": OFFSETS[0] + PADDING + 1}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "invalid"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_invalid_argument(kind, message, invalid):
    with pytest.raises(kind, match=message) as error:
        attention_varlen(**{**VALID_ARGUMENTS, **invalid})
    assert len(str(error.value).splitlines()) == 1


# ---- On a GPU -----------------------------------------------------------------------------------------------

GPU_LENGTHS = (130, 1, 0, 700, 64), (70, 33, 9, 640, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [{"d": 64}, {"d": 128, "N": 4, "G": 2}, {"d": 60}, {"d": 160}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gpu_kernels_are_accurate_and_reproducible(dtype, sizes, is_causal):
    tensors = make_packed(lengths=GPU_LENGTHS, dtype=dtype, device="cuda", **sizes)
    offsets = [make_offsets(lengths, "cuda") for lengths in GPU_LENGTHS]
    limit = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else None
    options = {"is_causal": is_causal, "enable_gqa": "G" in sizes}
    first, second = (
        assert_matches_separate_sequences(tensors, offsets, limit=limit, **options) for _ in range(2)
    )
    assert dtype == torch.float32 or all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_gpu_graph_replay_reads_updated_offsets():
    """The host does not read offsets, so a replay uses their current values."""
    lengths = (300, 20), (300, 20)
    leaves = [
        t.requires_grad_() for t in make_packed(lengths=lengths, d=64, dtype=torch.bfloat16, device="cuda")
    ]
    offsets = make_offsets(lengths[0], "cuda")

    def step():
        output = attend(leaves, (offsets, offsets), is_causal=True)
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new_lengths in ((100, 220), (0, 5)):
        offsets.copy_(make_offsets(new_lengths, "cuda"))
        graph.replay()
        assert all(torch.equal(result, expected) for result, expected in zip(captured, step(), strict=True))
