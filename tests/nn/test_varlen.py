"""Attention of sequences of unequal lengths without the operator, and its kernels on a real GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_checks import NAMES, differentiate
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.nn import attention_varlen

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1), (4, 2, 7, 0)
"""One sequence has no queries and one no keys; after the last, SPARE rows belong to no sequence."""
SPARE = 2


def make_offsets(lengths, device="cpu"):
    """Return the offsets of sequences of these lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


OFFSETS = make_offsets(LENGTHS_Q), make_offsets(LENGTHS_K)


def make_packed(
    *, N=2, G=None, d=8, dv=None, dtype=torch.float32, lengths=(LENGTHS_Q, LENGTHS_K), device="cpu"
):
    """Return query [total, N, d], key and value of concatenated sequences."""
    generator = torch.Generator().manual_seed(0)
    of_query, of_key = (sum(each) + SPARE for each in lengths)
    shapes = (of_query, N, d), (of_key, G or N, d), (of_key, G or N, dv or d)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.25).to(device, dtype)
        for shape in shapes
    ]


def attend(tensors, given=OFFSETS, **options):
    """Run `attention_varlen`; `given` are the offsets of queries and keys."""
    query, key, value = tensors
    return attention_varlen(query, key, value, *given, **options)


def attend_each(tensors, given, **options):
    """Return PyTorch's attention of each sequence, concatenated, with 0 for rows outside the sequences."""
    query, key, value = tensors
    output = query.new_zeros(*query.shape[:2], value.shape[2])
    for (s0, s1), (t0, t1) in zip(*(itertools.pairwise(each.tolist()) for each in given), strict=True):
        if s1 > s0 and t1 > t0:
            q, k, v = (t.transpose(0, 1) for t in (query[s0:s1], key[t0:t1], value[t0:t1]))
            output[s0:s1] = F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1)
    return output


def assert_matches_each(tensors, given=OFFSETS, grad_out=None, limit=None, **options):
    """Assert that output and gradients match those of the single sequences in float64."""
    got = differentiate(lambda *t: attend(t, given, **options), tensors, grad_out)
    doubles = [tensor.double() for tensor in tensors]
    right = differentiate(lambda *t: attend_each(t, given, **options), doubles, grad_out)
    limit = limit or 32 * torch.finfo(tensors[0].dtype).eps
    for name, ours, truth in zip(("output", *NAMES), got, right, strict=True):
        assert ours.dtype == tensors[0].dtype and ours.shape == truth.shape, name
        assert (ours.double() - truth).abs().max() <= limit * max(1, float(truth.abs().max())), name
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
def test_varlen_matches_each_sequence(dtype, sizes, options):
    assert_matches_each(
        make_packed(dtype=dtype, **sizes),
        limit=8 * torch.finfo(dtype).eps if dtype.itemsize == 2 else None,
        **options,
    )


def test_rows_outside_sequences_have_zero_output_and_gradient():
    """NaN there does not reach other rows."""
    tensors = make_packed()
    for tensor in tensors:
        tensor[-SPARE:] = torch.nan
    output, *gradients = differentiate(lambda *t: attend(t), tensors)
    assert output[:8].all() and not output[8:].any()
    assert all(not gradient[-SPARE:].any() and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("where", range(3), ids=NAMES)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_sequence(where, number):
    tensors = make_packed(dtype=torch.float64)
    tensors[where][2, 0, 3] = number
    got = differentiate(lambda *t: attend(t), tensors)
    # On some processors PyTorch's fused CPU kernel loses a NaN of the query.
    with sdpa_kernel([SDPBackend.MATH]):
        right = differentiate(lambda *t: attend_each(t, OFFSETS), tensors)
    assert not got[0].isfinite().all() and got[0][3:].isfinite().all()
    assert all(torch.equal(one.isfinite(), other.isfinite()) for one, other in zip(got, right, strict=True))


def test_packed_documents_match_a_block_mask():
    """Two rows of 9 positions: documents of 4 and 5, and of 2, 6 and 1 tokens."""
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 6 + [2]])
    own = make_offsets((4, 5, 2, 6, 1))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, 9, 3, 8, generator=generator) for _ in range(3)]
    got = attend((t.flatten(0, 1) for t in rows), (own, own), is_causal=True).view(2, 9, 3, 8)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    right = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in rows), attn_mask=seen)
    torch.testing.assert_close(got, right.transpose(1, 2))


def test_strided_tensors():
    """Query, key and value are views of one tensor, as after a projection; the gradient has stride 0."""
    total = sum(LENGTHS_Q)
    whole = torch.randn(total, 3, 2, 8, generator=torch.Generator().manual_seed(2))
    assert_matches_each(whole.unbind(1), (OFFSETS[0],) * 2, grad_out=torch.tensor(1.25).expand(total, 2, 8))


PLAIN = dict(zip((*NAMES, "offsets_q", "offsets_k"), (*make_packed(), *OFFSETS), strict=True))
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
    "decreasing offsets": (ValueError, r"offsets_k: expected numbers from 0 to 15 that never fall, got \[0, 4, 3, 13, 13\]", {"offsets_k": torch.tensor([0, 4, 3, 13, 13]).int()}),
    "below 0": (ValueError, "offsets_q: expected numbers from 0 to 11", {"offsets_q": OFFSETS[0] - 1}),
    "past the end": (ValueError, "offsets_q: expected numbers from 0 to 11", {"offsets_q": OFFSETS[0] + SPARE + 1}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "changed"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(kind, words, changed):
    with pytest.raises(kind, match=words) as error:
        attention_varlen(**{**PLAIN, **changed})
    assert len(str(error.value).splitlines()) == 1


# ---- On a GPU -----------------------------------------------------------------------------------------------

GPU_LENGTHS = (130, 1, 0, 700, 64), (70, 33, 9, 640, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [{"d": 64}, {"d": 128, "N": 4, "G": 2}, {"d": 60}, {"d": 160}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gpu_kernels(dtype, sizes, is_causal):
    tensors = make_packed(lengths=GPU_LENGTHS, dtype=dtype, device="cuda", **sizes)
    given = [make_offsets(lengths, "cuda") for lengths in GPU_LENGTHS]
    limit = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else None
    options = {"is_causal": is_causal, "enable_gqa": "G" in sizes}
    first, second = (assert_matches_each(tensors, given, limit=limit, **options) for _ in range(2))
    assert dtype == torch.float32 or all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_gpu_graph_replay_with_other_offsets():
    """The host does not read the offsets: a replay uses the lengths that they then contain."""
    lengths = (300, 20), (300, 20)
    leaves = [
        t.requires_grad_() for t in make_packed(lengths=lengths, d=64, dtype=torch.bfloat16, device="cuda")
    ]
    own = make_offsets(lengths[0], "cuda")

    def step():
        output = attend(leaves, (own, own), is_causal=True)
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for changed in ((100, 220), (0, 5)):
        own.copy_(make_offsets(changed, "cuda"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, step(), strict=True))
