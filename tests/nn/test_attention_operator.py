"""Attention's operator and kernels on the virtual GPU: values, gradients and launches, against PyTorch in float64."""

import random
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from attention_checks import assert_as_accurate_as_pytorch, make_inputs
from philox_draws import NUM_VALUES, draw_keep_mask
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typed import erase_types, unwrap

from harness import nn
from harness.nn.attention_layer import Part, attention_block, attention_delta, use_portable_kernels
from harness.nn.attention_layer import explain as explain_call

pytestmark = [pytest.mark.on_virtual_gpu("attention"), pytest.mark.usefixtures("default_device")]
attention, attention_backward = erase_types(nn.attention), erase_types(nn.attention_backward)
attention_varlen, attention_with_lse = erase_types(nn.attention_varlen), erase_types(nn.attention_with_lse)
block_backward, explain = erase_types(nn.attention_block_backward), erase_types(explain_call)
sdpa = erase_types(torch.nn.functional.scaled_dot_product_attention)
BF16 = torch.bfloat16
DELTA = "attention_delta"
OTHER_PARTS = {
    "more than a block of queries", "wide, ragged", "of 256, ragged", "wide, every batch", "padding",
    "every head, unaligned rows",
}  # fmt: skip
"""Cases that need further builds of the library: float16 and the portable kernels."""
WGMMA = ["attention_forward_wgmma", "attention_row_numbers"]
WGMMA += ["attention_key_value_wgmma", "attention_query_wgmma"]
MMA = ["attention_forward_mma", DELTA, "attention_key_value_mma", "attention_query_mma"]


def make_tensors(dtype=BF16, **sizes) -> list[torch.Tensor]:
    """Return query, key and value."""
    return make_inputs(dtype=dtype, **{"B": 1, "d": 16} | sizes)


def make_leaves(dtype=BF16, **sizes) -> list[torch.Tensor]:
    """Return query, key and value that require gradients."""
    return [tensor.requires_grad_() for tensor in make_tensors(dtype, **sizes)]


@pytest.fixture
def optional_log(request, device):
    """The launch log; None on a real GPU."""
    return request.getfixturevalue("launch_log") if device == "cpu" else None


def mark_slow(cases: dict[str, tuple]) -> list:
    """Return case names as pytest parameters; mark those in OTHER_PARTS as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in OTHER_PARTS else []) for name in cases]


def make_normal(*shape: int, seed: int) -> torch.Tensor:
    """Return normal random numbers that do not depend on the device."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def get_launch_names(launch_log) -> Any:
    """Return the names of the launched kernels; on a real GPU `ANY`, which equals every list."""
    return ANY if launch_log is None else launch_log.names


def assert_within_rounding(got: torch.Tensor, truth: torch.Tensor, rounding: float = 2**-8) -> None:
    """Assert a difference of at most four units of rounding of the largest element."""
    size = truth.double().abs().max().clamp(min=0.1)
    assert (got.double() - truth.double()).abs().max() <= 4 * rounding * size


# ---- Kernels: tiles, heads, lengths, masks ------------------------------------------------------------------

SHAPES = {
    "ragged, causal from the bottom right, shared heads": (
        {"N": 2, "G": 1, "S": 70, "T": 150, "d": 64},
        {"lower_right": True, "enable_gqa": True},
    ),
    "more than a block of queries": ({"N": 1, "S": 200, "T": 64, "d": 40, "dtype": torch.float16}, {}),
    "more queries than keys, causal": ({"N": 1, "S": 130, "T": 64, "d": 64}, {"is_causal": True}),
    "wide, causal, shared heads": (
        {"N": 2, "G": 1, "S": 140, "T": 200, "d": 128},
        {"is_causal": True, "enable_gqa": True},
    ),
    "wide, ragged": ({"N": 1, "S": 70, "T": 130, "d": 88, "dtype": torch.float16}, {}),
    "of 192, causal": ({"N": 1, "S": 70, "T": 90, "d": 136}, {"is_causal": True}),
    "of 256, ragged": ({"N": 1, "S": 70, "T": 130, "d": 256, "dtype": torch.float16}, {}),
    "partial chunks, another head dimension of value": ({"N": 2, "S": 33, "T": 40, "d": 20, "dv": 37}, {}),
    "one query, one key": ({"N": 1, "S": 1, "T": 1, "d": 8}, {}),
}


@pytest.mark.parametrize("name", mark_slow(SHAPES))
def test_forward_and_backward_are_as_accurate_as_pytorch(name, optional_log):
    sizes, options = SHAPES[name]
    if options.pop("lower_right", False):
        from torch.nn.attention.bias import causal_lower_right

        options = options | {"attn_mask": causal_lower_right(sizes["S"], sizes["T"])}
    assert_as_accurate_as_pytorch(make_tensors(**sizes), **options)
    assert get_launch_names(optional_log) == WGMMA


MASKS = {
    "every head, unaligned rows": ((1, 2, 70, 75), 64, BF16, MMA),
    "every head, in TMA tiles": ((1, 2, 70, 88), 64, BF16, WGMMA),
    "wide, every batch": ((2, 1, 70, 88), 72, torch.float16, WGMMA),
    "padding": ((2, 2, 1, 200), 64, torch.float16, WGMMA),
    "padding, wide": ((2, 1, 1, 136), 128, BF16, WGMMA),
    "three axes": ((2, 70, 88), 64, BF16, WGMMA),
}


@pytest.mark.parametrize("name", mark_slow(MASKS))
def test_additive_mask_gradients_are_accurate(name, optional_log):
    shape, d, dtype, kernels = MASKS[name]
    mask = make_normal(*shape, seed=1).to(dtype).requires_grad_()
    tensors = make_tensors(dtype, B=2, S=70, T=shape[-1], d=d)
    assert_as_accurate_as_pytorch(tensors, attn_mask=mask)
    assert get_launch_names(optional_log) == [*kernels, DELTA, "attention_mask_gradient"]


@pytest.mark.parametrize("length", [75, 88])
def test_bool_masks_and_fully_masked_rows(length, optional_log):
    mask = make_normal(2, 1, 70, length, seed=2) > -0.5
    mask[:, :, 5] = False
    leaves = make_leaves(B=2, S=70, T=length, d=64)
    output = attention(*leaves, mask)
    gradients = torch.autograd.grad(output.float().pow(2).sum(), leaves)
    assert get_launch_names(optional_log) == WGMMA
    truth = sdpa(*(t.double() for t in leaves), mask)
    for got, reference in zip(gradients, torch.autograd.grad(truth.pow(2).sum(), leaves), strict=True):
        assert_within_rounding(got, reference)
    assert not output[:, :, 5].any() and not gradients[0][:, :, 5].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["negative", "zero", "one number", "wide heads", "portable"])
def test_calls_without_wgmma_run_the_portable_kernels(name, optional_log):
    row_mask = make_normal(1, 2, 30, 1, seed=3).to(BF16)
    full_mask = make_normal(1, 1, 30, 40, seed=3).to(BF16)
    options = {"negative": {"scale": -0.4}, "zero": {"scale": 0.0}, "one number": {"attn_mask": row_mask}}
    options |= {"wide heads": {"attn_mask": full_mask}, "portable": {}}
    with use_portable_kernels(name == "portable"):
        leaves = make_leaves(S=30, T=40, d=136 if name == "wide heads" else 16)
        output = attention(*leaves, **options[name])
        got = torch.autograd.grad(output.float().pow(2).sum(), leaves)
        explanation = explain(*leaves, **options[name])
    assert get_launch_names(optional_log) == [WGMMA[0] if name == "wide heads" else MMA[0], *MMA[1:]]
    assert explanation.startswith("mma.sync: ")
    inputs = {key: row_mask.double() if key == "attn_mask" else value for key, value in options[name].items()}
    inputs = inputs | ({"attn_mask": full_mask.double()} if name == "wide heads" else {})
    truth = sdpa(*(t.double() for t in leaves), **inputs)
    assert_within_rounding(output, truth)
    for gradient, reference in zip(got, torch.autograd.grad(truth.pow(2).sum(), leaves), strict=True):
        assert_within_rounding(gradient, reference)


@pytest.mark.slow
def test_explain_matches_launches(launch_log):
    """Random calls with different head dimensions, masks, scales and dropout."""
    draw, backends = random.Random(0), set()
    for _ in range(25):
        d, T = draw.choice([8, 20, 64, 72, 136]), draw.choice([24, 30])
        query, key, value = make_tensors(S=10, T=T, d=d)
        mask = draw.choice([None, None, (1, 1, 10, T), (1, 1, 1, T), (1, 2, 10, 1)])
        options = {"scale": draw.choice([None, 0.3, -0.3]), "dropout_p": draw.choice([0.0, 0.0, 0.2])}
        options |= {"attn_mask": None if mask is None else torch.zeros(mask, dtype=BF16)}
        with use_portable_kernels(draw.random() < 0.2):
            explanation = explain(query, key, value, **options)
            launch_log.clear()
            output = attention(*(t.requires_grad_() for t in (query, key, value)), **options)
            output.sum().backward()
        names = get_launch_names(launch_log)
        backend = "PyTorch" if not names else "mma.sync" if MMA[-1] in names else "wgmma"
        assert explanation.startswith(backend), (explanation, names)
        backends.add(backend)
    assert len(backends) == 3


# ---- Outputs and layouts ----------------------------------------------------------------


def test_lse_and_its_gradient_are_accurate():
    leaves = make_leaves(S=20, T=24)
    output, lse = attention_with_lse(*leaves, is_causal=True)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    scores = doubles[0] @ doubles[1].mT / 4
    scores = scores.masked_fill(torch.ones(20, 24).triu(1).bool(), -torch.inf)
    truth, expected_lse = torch.softmax(scores, -1) @ doubles[2], torch.logsumexp(scores, -1)
    assert_within_rounding(lse, expected_lse, 2**-22)
    got = torch.autograd.grad(output.float().sum() + lse.pow(2).sum(), leaves)
    expected = torch.autograd.grad(truth.sum() + expected_lse.pow(2).sum(), doubles, retain_graph=True)
    for actual, reference in zip(got, expected, strict=True):
        assert_within_rounding(actual, reference)
    backward = attention_backward(torch.ones_like(output), *leaves, output, lse, is_causal=True)
    for actual, reference in zip(backward, torch.autograd.grad(truth.sum(), doubles), strict=True):
        assert_within_rounding(actual, reference)


def test_large_scores_lose_at_most_one_rounding_of_lse():
    """Rounding lse changes exp(score - lse) by at most |lse| 2^-23: below bfloat16 rounding up to 2^14."""
    query = torch.full((1, 1, 1, 8), 35.0, dtype=BF16)
    key, value = torch.full((1, 1, 2, 8), 35.0, dtype=BF16), torch.eye(2, 8, dtype=BF16)[None, None]
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = attention(*leaves, scale=1.0)  # two scores of 9,800
    (gradient,) = torch.autograd.grad(output[..., 0].sum(), leaves[2])
    assert torch.equal(output[0, 0, 0, :2], torch.full((2,), 0.5, dtype=BF16))
    assert (gradient[0, 0, :, 0].float() - 0.5).abs().max() <= 9801 * 2**-23 * 0.5 + 2**-10


def test_results_keep_the_split_head_layout():
    """Merging the heads afterwards needs no copy."""
    query = torch.randn(1, 20, 2, 16, dtype=BF16).transpose(1, 2).requires_grad_()
    output = attention(query, query, query)
    assert output.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert gradient.transpose(1, 2).is_contiguous()
    assert torch.equal(output, attention(*(query.detach().contiguous(),) * 3))


@pytest.mark.parametrize("kind", ["expanded", "negated", "transposed", "unaligned", "expanded gradient"])
def test_tensor_layouts_are_bit_equal(kind):
    query, key, value = make_tensors(S=20, T=24)
    transform = {
        "expanded": lambda t: t[:, :1].expand(t.shape),
        "negated": torch.ops.aten._neg_view.default,
        "transposed": lambda t: t.mT.contiguous().mT,
        "unaligned": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
        "expanded gradient": lambda t: t,
    }[kind]
    contiguous = [
        transform(t).clone(memory_format=torch.contiguous_format).resolve_neg() for t in (query, key, value)
    ]
    transformed = [transform(t) for t in (query, key, value)]
    grad = torch.ones(1, 1, 1, 1).expand(1, 2, 20, 16) if kind == "expanded gradient" else None
    results = []
    for tensors in (contiguous, transformed):
        leaves = [t.requires_grad_() for t in tensors]
        output = attention(*leaves)
        incoming = (output.detach() if grad is None else grad).to(BF16)
        results.append([output, *torch.autograd.grad(output, leaves, incoming)])
    assert all(torch.equal(result, expected) for result, expected in zip(*results, strict=True))


@pytest.mark.parametrize(("S", "T"), [(0, 5), (5, 0)])
def test_zero_queries_or_keys_give_zero_gradients(S, T):
    leaves = make_leaves(S=S, T=T)
    output, lse = attention_with_lse(*leaves)
    output.sum().backward()
    assert output.shape == (1, 2, S, 16) and not output.any() and (lse == -torch.inf).all()
    assert not any(t.grad.any() for t in leaves if t.grad is not None)


@pytest.mark.slow
def test_leading_dimensions_broadcast():
    query, key = torch.randn(2, 3, 2, 9, 12).to(BF16), torch.randn(1, 3, 2, 7, 12).to(BF16)
    value, mask = torch.randn(2, 1, 2, 7, 20).to(BF16), torch.rand(3, 1, 9, 7) < 0.8
    truth = torch.softmax((query.double() @ key.double().mT / 12**0.5).masked_fill(~mask, -torch.inf), -1)
    assert_within_rounding(attention(query, key, value, mask), truth.nan_to_num() @ value.double())
    assert attention(query[0, 0, 0], key[0, 0, 0], value[0, 0, 0]).shape == (9, 20)


# ---- PyTorch's features ----------------------------------------------------------------------------


def test_saved_tensor_hooks_and_checkpoints():
    leaves = make_leaves(S=20, T=24)

    def gradients(function=attention):
        return torch.autograd.grad(function(*leaves).float().pow(2).sum(), leaves)

    expected = gradients()
    graph = torch.autograd.graph
    transposing_hooks = graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 4 else t
    )
    for hooks in (graph.save_on_cpu(), transposing_hooks):
        with hooks:
            assert all(map(torch.equal, gradients(), expected))
    recomputed = gradients(lambda *t: checkpoint(attention, *t, use_reentrant=False))
    assert all(map(torch.equal, recomputed, expected))
    output = attention(*leaves)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_derivatives_and_transforms_match_pytorch():
    leaves = make_leaves(S=9, T=11)
    doubles = [t.detach().double().requires_grad_() for t in leaves]

    def second_derivatives(function, tensors):
        (first,) = torch.autograd.grad(function(*tensors).pow(2).sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), tensors)

    def reference_attention(query, key, value):
        return torch.softmax(query @ key.mT / 4, -1) @ value

    for got, reference in zip(
        second_derivatives(attention, leaves), second_derivatives(reference_attention, doubles), strict=True
    ):
        assert_within_rounding(got, reference, 2**-6)
    query, key, value = (t.detach() for t in leaves)
    tangent = torch.ones_like(query)
    for function in (attention, attend_one_sequence):
        inputs = [
            t.transpose(0, 1) if function is attend_one_sequence else t for t in (query[0], key[0], value[0])
        ]
        got = torch.func.grad(lambda q, f=function, g=inputs: f(q, *g[1:]).float().sum())(inputs[0])
        reference = torch.func.grad(lambda q: reference_attention(q, key.double(), value.double()).sum())(
            query.double()
        )[0]
        assert_within_rounding(
            got, reference.transpose(0, 1) if function is attend_one_sequence else reference
        )
    with forward_ad.dual_level():
        dual = attention(forward_ad.make_dual(query, tangent), key, value)
        got = forward_ad.unpack_dual(dual).tangent
    assert got is not None
    assert_within_rounding(
        got,
        torch.func.jvp(
            lambda q: reference_attention(q, key.double(), value.double()),
            (query.double(),),
            (tangent.double(),),
        )[1],
    )
    batch = torch.stack([query, -query])
    assert_within_rounding(
        torch.func.vmap(attention, (0, None, None))(batch, key, value)[1],
        reference_attention(-query.double(), key.double(), value.double()),
    )


def attend_one_sequence(query, key, value):
    """Run `attention_varlen` on a single sequence."""
    offsets = [torch.tensor([0, len(t)], dtype=torch.int32) for t in (query, key)]
    return attention_varlen(query, key, value, *offsets)


def test_compiled_and_exported_models_are_bit_equal():
    leaves = make_leaves(S=20, T=24)

    def gradients(function):
        output = function(*leaves)
        return [output, *torch.autograd.grad(output.float().pow(2).sum(), leaves)]

    def causal(query, key, value):
        return attention(query, key, value, is_causal=True)

    expected = gradients(causal)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(causal, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert all(map(torch.equal, gradients(compiled), expected))
    leaves = make_leaves(S=13, T=17, seed=2)
    assert all(map(torch.equal, gradients(compiled), gradients(causal)))

    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return causal(query, key, value)

    detached = tuple(t.detach() for t in leaves)
    exported = torch.export.export(Model(), detached)
    assert torch.equal(exported.module()(*detached), causal(*detached))
    with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
        causal(*leaves).float().pow(2).sum().backward()
    assert all(
        torch.equal(unwrap(t.grad), expected_grad)
        for t, expected_grad in zip(leaves, gradients(causal)[1:], strict=True)
    )


@pytest.mark.slow
def test_operators_pass_opcheck():
    query, key, value = make_tensors(S=9, T=16)
    arguments: tuple[Any, ...] = (None, None, None, 0.3, 5, 1, NUM_VALUES)
    ops = torch.ops.mojo_workbook
    out, lse = ops.attention_forward(query, key, value, *arguments)
    torch.library.opcheck(ops.attention_forward.default, (query, key, value, *arguments))
    inputs = out, query, key, value, out, lse, None, None
    mask = torch.zeros(1, 1, 9, 16, dtype=BF16)
    for masked, required in ((None, 7), (mask, 8), (mask, 15)):
        torch.library.opcheck(ops.attention_backward.default, (*inputs, masked, *arguments[1:], required))
    torch.library.opcheck(ops.attention.default, tuple(make_leaves(S=9, T=16)))


def test_autocast_and_unsupported_dtypes():
    leaves = [t.requires_grad_() for t in make_tensors(torch.float32, S=20, T=24)]
    with torch.autocast(torch.get_default_device().type, BF16):
        output = attention(*leaves)
        sums = attention_with_lse(*leaves)[1]
    in_bfloat16 = attention(*(t.to(BF16) for t in leaves))
    assert output.dtype == BF16 and torch.equal(output, in_bfloat16) and sums.dtype == torch.float32
    output.sum().backward()
    assert leaves[0].grad is not None and leaves[0].grad.dtype == torch.float32
    doubles = [t.requires_grad_() for t in make_tensors(torch.float64, S=4, T=5, d=3)]
    assert torch.autograd.gradcheck(attention, doubles)  # PyTorch's fused CPU kernel has no second derivative
    assert torch.autograd.gradgradcheck(lambda *t: attention_with_lse(*t, is_causal=True), doubles)
    assert_as_accurate_as_pytorch(make_tensors(S=9, T=11, d=264))


@pytest.mark.slow
def test_mask_of_one_number_per_row_has_a_gradient():
    mask = torch.randn(1, 1, 9, 1).to(BF16).requires_grad_()
    assert "one number" in explain(*make_tensors(S=9, T=11), attn_mask=mask)
    assert_as_accurate_as_pytorch(make_tensors(S=9, T=11), attn_mask=mask)


# ---- Dropout ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("portable", [False, True], ids=["wgmma", "mma.sync"])
def test_dropout_and_its_derivatives_match_philox(portable):
    for mask_kind in ("no mask", "causal", "mask", "bool", "wide"):
        assert_dropout_matches_philox(mask_kind, portable)


def assert_dropout_matches_philox(mask_kind, portable):
    """Compare dropout's output and derivatives with a reference that uses the same Philox draws."""
    tensors = make_leaves(N=4, G=2, S=40, T=56, d=72 if mask_kind == "wide" else 16)
    numbers = make_normal(1, 4, 40, 56, seed=1)
    mask = {"mask": numbers.to(BF16), "bool": numbers > -1}.get(mask_kind)
    threshold = NUM_VALUES - round(0.3 * NUM_VALUES)
    with use_portable_kernels(portable):
        torch.manual_seed(3)
        output = attention(*tensors, mask, 0.3, mask_kind == "causal", enable_gqa=True)
        gradients = torch.autograd.grad(output.float().pow(2).sum(), tensors, retain_graph=True)
    torch.manual_seed(3)
    keep = draw_keep_mask(torch.randint(2**62, (2,)), (1, 4, 40, 56), threshold).double() * (
        NUM_VALUES / threshold
    )
    query, key, value = (t.double().repeat_interleave(4 // t.shape[1], 1) for t in tensors)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    masked_out = torch.ones(40, 56).triu(1).bool() if mask_kind == "causal" else None
    masked_out = ~mask if mask_kind == "bool" and mask is not None else masked_out
    scores = scores if masked_out is None else scores.masked_fill(masked_out, -torch.inf)
    scores = scores + mask.double() if mask_kind == "mask" and mask is not None else scores
    truth = torch.softmax(scores, -1) * keep @ value
    assert_within_rounding(output, truth)
    reference = torch.autograd.grad(truth.pow(2).sum(), tensors, create_graph=True)
    for got, expected in zip(gradients, reference, strict=True):
        assert_within_rounding(got, expected)
    (first,) = torch.autograd.grad(output.float().pow(2).sum(), tensors[0], create_graph=True)
    assert_within_rounding(first, reference[0])
    assert_within_rounding(
        torch.autograd.grad(first.float().sum(), tensors[1])[0],
        torch.autograd.grad(reference[0].double().sum(), tensors[1])[0],
    )


@pytest.mark.parametrize("p", [0.0, pytest.param(1.0, marks=pytest.mark.slow), 2**-20])
def test_extreme_dropout_probabilities(p, optional_log):
    leaves = make_leaves(S=20, T=24)
    output = attention(*leaves, dropout_p=p)
    output.sum().backward()
    if p == 1:
        assert not output.any() and not any(t.grad.any() for t in leaves if t.grad is not None)
    else:
        assert get_launch_names(optional_log) == WGMMA
        assert torch.equal(output, attention(*leaves))


# ---- Variable-length sequences ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [24, 20, 72])
def test_variable_length_sequences(d, causal, optional_log):
    """Padding rows, empty sequences, one key (flash-attention#443), GQA, and a partial chunk of d."""
    query_offsets, key_offsets = [3, 10, 10, 31, 55, 150, 158], [0, 12, 20, 20, 69, 200, 201]
    shapes = ((160, 4, d), (210, 2, d), (210, 2, d))
    leaves = [make_normal(*shape, seed=i).to(BF16).requires_grad_() for i, shape in enumerate(shapes)]
    offsets = [torch.tensor(values, dtype=torch.int32) for values in (query_offsets, key_offsets)]
    output = attention_varlen(*leaves, *offsets, is_causal=causal, enable_gqa=True)
    grad = make_normal(*output.shape, seed=3).to(BF16)
    gradients = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    assert get_launch_names(optional_log) == MMA
    query, key, value = (t.double().transpose(0, 1) for t in leaves)
    truth = torch.zeros(4, 160, d, dtype=torch.float64)
    for i in range(6):
        rows, keys = slice(*query_offsets[i : i + 2]), slice(*key_offsets[i : i + 2])
        if query_offsets[i] < query_offsets[i + 1] and key_offsets[i] < key_offsets[i + 1]:
            inputs = query[:, rows], *(t[:, keys].repeat_interleave(2, 0) for t in (key, value))
            with sdpa_kernel(SDPBackend.MATH):
                expected = sdpa(*inputs, is_causal=causal)
            truth = truth + torch.nn.functional.pad(
                expected, (0, 0, query_offsets[i], 160 - query_offsets[i + 1])
            )
    truth = truth.transpose(0, 1)
    assert_within_rounding(output, truth)
    reference = torch.autograd.grad(truth, leaves, grad.double(), create_graph=True)
    for got, expected in zip(gradients, reference, strict=True):
        assert_within_rounding(got, expected)
    (first,) = torch.autograd.grad(output, leaves[0], grad, create_graph=True)
    assert_within_rounding(
        torch.autograd.grad(first.float().sum(), leaves[1])[0],
        torch.autograd.grad(reference[0].double().sum(), leaves[1])[0],
    )


# ---- Blocks of keys and queries ----------------------------------------------------------------------------


@pytest.mark.slow
def test_key_blocks_and_their_gradients_combine(optional_log):
    """Two causal blocks of keys, and a block mask."""
    query, key, value = make_tensors(N=2, G=1, S=64, T=96)
    parts = [Part(32, 0, True), Part(32, 48, True)]
    halves = [(key[:, :, :48], value[:, :, :48]), (key[:, :, 48:], value[:, :, 48:])]
    results = [attention_block(query, *half, part) for half, part in zip(halves, parts, strict=True)]
    lse = torch.logaddexp(results[0][1], results[1][1])
    weighted = [torch.exp(part_lse - lse)[..., None] * out for out, part_lse in results]
    output = torch.stack(weighted).sum(0).to(BF16)
    doubles = [t.double().requires_grad_() for t in (query, key, value)]
    masked_out = torch.arange(96) > torch.arange(64)[:, None] + 32
    scores = (doubles[0] @ doubles[1].mT / 4).masked_fill(masked_out, -torch.inf)
    truth = torch.softmax(scores, -1) @ doubles[2]
    assert_within_rounding(output, truth)
    grad = torch.randn(output.shape).to(BF16)
    delta = attention_delta(grad, output)
    pairs = zip(halves, parts, strict=True)
    grads = [block_backward(grad, query, *half, lse, delta, part) for half, part in pairs]
    got = grads[0][0].float() + grads[1][0], *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))
    for part_lse, reference in zip(got, torch.autograd.grad(truth, doubles, grad.double()), strict=True):
        assert_within_rounding(part_lse, reference)
    assert get_launch_names(optional_log) == [*WGMMA[:1] * 2, *WGMMA[1:] * 2]
    visible_blocks = torch.tensor([[True, False, True], [True, True, False]])
    output, _ = attention_block(query, key, value, Part(blocks=visible_blocks, block_size=32))
    mask = visible_blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    scores = (doubles[0] @ doubles[1].mT / 4).masked_fill(~mask, -torch.inf)
    assert_within_rounding(output, torch.softmax(scores, -1) @ doubles[2])


def test_calls_beyond_the_grid_limit_fall_back_to_pytorch():
    query = torch.empty(2**31, 1, 1, 8, dtype=BF16, device="meta").requires_grad_()
    assert attention(query, query, query).shape == query.shape
    leaf = make_leaves(B=1, N=1, S=1, T=1, d=8)[0]
    huge = leaf.as_strided((2**27, 16, 1, 8), (0, 0, 8, 1))
    assert "2^31 - 1 blocks" in explain(huge)
    assert explain(leaf.as_strided((2**16, 1, 1, 8), (0, 8, 8, 1))).startswith("mma.sync: there is a batch")


@pytest.mark.parametrize(
    ("sequences", "supported"), [pytest.param(2**28 - 1, True, marks=pytest.mark.slow), (2**28, False)]
)
def test_sequence_count_at_the_grid_limit(sequences, supported):
    """The grid has a block per sequence and head; the fallback reads offsets, so it fails for fake tensors."""
    with FakeTensorMode():
        query = torch.empty(8, 8, 16, dtype=BF16)
        offsets = torch.empty(sequences + 1, dtype=torch.int32)
        if supported:
            assert attention_varlen(query, query, query, offsets, offsets).shape == query.shape
        else:
            with pytest.raises(DataDependentOutputException):
                attention_varlen(query, query, query, offsets, offsets)
