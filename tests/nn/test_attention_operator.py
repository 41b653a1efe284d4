"""Attention's operator and kernels on the virtual GPU: values, gradients and launches, against PyTorch in float64."""

import random
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from attention_checks import assert_as_accurate_as_pytorch, make_inputs
from philox_draws import ONE, keep_mask
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typed import loosely, present

from harness import nn
from harness.nn.attention_layer import Part, attention_block, attention_delta, use_portable_kernels
from harness.nn.attention_layer import explain as explain_call

pytestmark = [pytest.mark.on_virtual_gpu("attention"), pytest.mark.usefixtures("on_the_device")]
attention, attention_backward = loosely(nn.attention), loosely(nn.attention_backward)
attention_varlen, attention_with_lse = loosely(nn.attention_varlen), loosely(nn.attention_with_lse)
block_backward, explain = loosely(nn.attention_block_backward), loosely(explain_call)
sdpa = loosely(torch.nn.functional.scaled_dot_product_attention)
BF16 = torch.bfloat16
DELTA = "attention_delta"
OTHER_PARTS = {
    "more than a block of queries", "wide, ragged", "of 256, ragged", "wide, every batch", "padding",
    "every head, unaligned rows",
}  # fmt: skip
"""Cases whose kernels are in a part of the library that few tests use: those of float16, and those for every GPU."""
WGMMA = [
    "attention_forward_wgmma",
    "attention_row_numbers",
    "attention_key_value_wgmma",
    "attention_query_wgmma",
]
MMA = ["attention_forward_mma", DELTA, "attention_key_value_mma", "attention_query_mma"]


def make_tensors(dtype=BF16, **sizes) -> list[torch.Tensor]:
    """Return query, key and value."""
    return make_inputs(dtype=dtype, **{"B": 1, "d": 16} | sizes)


def make_leaves(dtype=BF16, **sizes) -> list[torch.Tensor]:
    """Return query, key and value that require gradients."""
    return [tensor.requires_grad_() for tensor in make_tensors(dtype, **sizes)]


@pytest.fixture
def ran(request, device):
    """The recorded launches; None on a real GPU."""
    return request.getfixturevalue("launched") if device == "cpu" else None


def mark_slow(cases: dict[str, tuple]) -> list:
    """Return the names of cases as parameters; mark those of OTHER_PARTS as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in OTHER_PARTS else []) for name in cases]


def make_normal(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers, the same on every device."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def get_launch_names(launched) -> Any:
    """Return the names of the launched kernels; on a real GPU a value that equals any list."""
    return ANY if launched is None else launched.names


def assert_near(got: torch.Tensor, truth: torch.Tensor, unit: float = 2**-8) -> None:
    """Assert that the difference is at most four units of the largest element."""
    size = truth.double().abs().max().clamp(min=0.1)
    assert (got.double() - truth.double()).abs().max() <= 4 * unit * size


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
def test_both_passes_are_as_accurate_as_pytorch(name, ran):
    sizes, options = SHAPES[name]
    if options.pop("lower_right", False):
        from torch.nn.attention.bias import causal_lower_right

        options = options | {"attn_mask": causal_lower_right(sizes["S"], sizes["T"])}
    assert_as_accurate_as_pytorch(make_tensors(**sizes), **options)
    assert get_launch_names(ran) == WGMMA


MASKS = {
    "every head, unaligned rows": ((1, 2, 70, 75), 64, BF16, MMA),
    "every head, in TMA tiles": ((1, 2, 70, 88), 64, BF16, WGMMA),
    "wide, every batch": ((2, 1, 70, 88), 72, torch.float16, WGMMA),
    "padding": ((2, 2, 1, 200), 64, torch.float16, WGMMA),
    "padding, wide": ((2, 1, 1, 136), 128, BF16, WGMMA),
    "three axes": ((2, 70, 88), 64, BF16, WGMMA),
}


@pytest.mark.parametrize("name", mark_slow(MASKS))
def test_masks_and_their_gradients(name, ran):
    shape, d, dtype, kernels = MASKS[name]
    mask = make_normal(*shape, seed=1).to(dtype).requires_grad_()
    tensors = make_tensors(dtype, B=2, S=70, T=shape[-1], d=d)
    assert_as_accurate_as_pytorch(tensors, attn_mask=mask)
    assert get_launch_names(ran) == [*kernels, DELTA, "attention_mask_gradient"]


@pytest.mark.parametrize("length", [75, 88])
def test_bool_masks_and_fully_masked_rows(length, ran):
    mask = make_normal(2, 1, 70, length, seed=2) > -0.5
    mask[:, :, 5] = False
    leaf = make_leaves(B=2, S=70, T=length, d=64)
    output = attention(*leaf, mask)
    gradients = torch.autograd.grad(output.float().pow(2).sum(), leaf)
    assert get_launch_names(ran) == WGMMA
    truth = sdpa(*(t.double() for t in leaf), mask)
    for got, right in zip(gradients, torch.autograd.grad(truth.pow(2).sum(), leaf), strict=True):
        assert_near(got, right)
    assert not output[:, :, 5].any() and not gradients[0][:, :, 5].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["negative", "zero", "one number", "wide heads", "portable"])
def test_calls_without_wgmma_run_the_portable_kernels(name, ran):
    one = make_normal(1, 2, 30, 1, seed=3).to(BF16)
    many = make_normal(1, 1, 30, 40, seed=3).to(BF16)
    options = {"negative": {"scale": -0.4}, "zero": {"scale": 0.0}, "one number": {"attn_mask": one}}
    options |= {"wide heads": {"attn_mask": many}, "portable": {}}
    with use_portable_kernels(name == "portable"):
        leaf = make_leaves(S=30, T=40, d=136 if name == "wide heads" else 16)
        output = attention(*leaf, **options[name])
        got = torch.autograd.grad(output.float().pow(2).sum(), leaf)
        explanation = explain(*leaf, **options[name])
    assert get_launch_names(ran) == [WGMMA[0] if name == "wide heads" else MMA[0], *MMA[1:]]
    assert explanation.startswith("mma.sync: ")
    given = {key: one.double() if key == "attn_mask" else each for key, each in options[name].items()}
    given = given | ({"attn_mask": many.double()} if name == "wide heads" else {})
    truth = sdpa(*(t.double() for t in leaf), **given)
    assert_near(output, truth)
    for own, right in zip(got, torch.autograd.grad(truth.pow(2).sum(), leaf), strict=True):
        assert_near(own, right)


@pytest.mark.slow
def test_explain_matches_the_launches(launched):
    """For random calls: heads, masks, scales of every sign, dropout."""
    draw, seen = random.Random(0), set()
    for _ in range(25):
        d, T = draw.choice([8, 20, 64, 72, 136]), draw.choice([24, 30])
        query, key, value = make_tensors(S=10, T=T, d=d)
        mask = draw.choice([None, None, (1, 1, 10, T), (1, 1, 1, T), (1, 2, 10, 1)])
        options = {"scale": draw.choice([None, 0.3, -0.3]), "dropout_p": draw.choice([0.0, 0.0, 0.2])}
        options |= {"attn_mask": None if mask is None else torch.zeros(mask, dtype=BF16)}
        with use_portable_kernels(draw.random() < 0.2):
            explanation = explain(query, key, value, **options)
            launched.forget()
            output = attention(*(t.requires_grad_() for t in (query, key, value)), **options)
            output.sum().backward()
        names = get_launch_names(launched)
        by = "PyTorch" if not names else "mma.sync" if MMA[-1] in names else "wgmma"
        assert explanation.startswith(by), (explanation, names)
        seen.add(by)
    assert len(seen) == 3


# ---- Outputs and layouts ----------------------------------------------------------------


def test_lse_and_its_gradient():
    leaf = make_leaves(S=20, T=24)
    output, lse = attention_with_lse(*leaf, is_causal=True)
    wide = [t.detach().double().requires_grad_() for t in leaf]
    scores = wide[0] @ wide[1].mT / 4
    scores = scores.masked_fill(torch.ones(20, 24).triu(1).bool(), -torch.inf)
    truth, sums = torch.softmax(scores, -1) @ wide[2], torch.logsumexp(scores, -1)
    assert_near(lse, sums, 2**-22)
    got = torch.autograd.grad(output.float().sum() + lse.pow(2).sum(), leaf)
    expected = torch.autograd.grad(truth.sum() + sums.pow(2).sum(), wide, retain_graph=True)
    for own, right in zip(got, expected, strict=True):
        assert_near(own, right)
    backward = attention_backward(torch.ones_like(output), *leaf, output, lse, is_causal=True)
    for own, right in zip(backward, torch.autograd.grad(truth.sum(), wide), strict=True):
        assert_near(own, right)


def test_large_scores_lose_at_most_one_rounding_of_lse():
    """Rounding lse once changes exp(score - lse) by at most |lse| 2^-23, less than a unit of bfloat16 for scores up to 2^14."""
    query = torch.full((1, 1, 1, 8), 35.0, dtype=BF16)
    key, value = torch.full((1, 1, 2, 8), 35.0, dtype=BF16), torch.eye(2, 8, dtype=BF16)[None, None]
    leaf = [t.requires_grad_() for t in (query, key, value)]
    output = attention(*leaf, scale=1.0)  # two scores of 9,800
    (gradient,) = torch.autograd.grad(output[..., 0].sum(), leaf[2])
    assert torch.equal(output[0, 0, 0, :2], torch.full((2,), 0.5, dtype=BF16))
    assert (gradient[0, 0, :, 0].float() - 0.5).abs().max() <= 9801 * 2**-23 * 0.5 + 2**-10


def test_results_have_the_layout_of_split_heads():
    """So that joining the heads needs no copy."""
    query = torch.randn(1, 20, 2, 16, dtype=BF16).transpose(1, 2).requires_grad_()
    output = attention(query, query, query)
    assert output.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert gradient.transpose(1, 2).is_contiguous()
    assert torch.equal(output, attention(*(query.detach().contiguous(),) * 3))


@pytest.mark.parametrize("kind", ["expanded", "negated", "transposed", "unaligned", "expanded gradient"])
def test_tensors_of_any_layout(kind):
    query, key, value = make_tensors(S=20, T=24)
    change = {
        "expanded": lambda t: t[:, :1].expand(t.shape),
        "negated": torch.ops.aten._neg_view.default,
        "transposed": lambda t: t.mT.contiguous().mT,
        "unaligned": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
        "expanded gradient": lambda t: t,
    }[kind]
    plain = [
        change(t).clone(memory_format=torch.contiguous_format).resolve_neg() for t in (query, key, value)
    ]
    changed = [change(t) for t in (query, key, value)]
    grad = torch.ones(1, 1, 1, 1).expand(1, 2, 20, 16) if kind == "expanded gradient" else None
    found = []
    for tensors in (plain, changed):
        leaf = [t.requires_grad_() for t in tensors]
        output = attention(*leaf)
        incoming = (output.detach() if grad is None else grad).to(BF16)
        found.append([output, *torch.autograd.grad(output, leaf, incoming)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("S", "T"), [(0, 5), (5, 0)])
def test_zero_queries_or_keys(S, T):
    leaf = make_leaves(S=S, T=T)
    output, lse = attention_with_lse(*leaf)
    output.sum().backward()
    assert output.shape == (1, 2, S, 16) and not output.any() and (lse == -torch.inf).all()
    assert not any(t.grad.any() for t in leaf if t.grad is not None)


@pytest.mark.slow
def test_leading_axes_broadcast():
    query, key = torch.randn(2, 3, 2, 9, 12).to(BF16), torch.randn(1, 3, 2, 7, 12).to(BF16)
    value, mask = torch.randn(2, 1, 2, 7, 20).to(BF16), torch.rand(3, 1, 9, 7) < 0.8
    truth = torch.softmax((query.double() @ key.double().mT / 12**0.5).masked_fill(~mask, -torch.inf), -1)
    assert_near(attention(query, key, value, mask), truth.nan_to_num() @ value.double())
    assert attention(query[0, 0, 0], key[0, 0, 0], value[0, 0, 0]).shape == (9, 20)


# ---- PyTorch's features ----------------------------------------------------------------------------


def test_saved_tensor_hooks_and_checkpoints():
    leaf = make_leaves(S=20, T=24)

    def gradients(function=attention):
        return torch.autograd.grad(function(*leaf).float().pow(2).sum(), leaf)

    expected = gradients()
    graph = torch.autograd.graph
    turned = graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 4 else t)
    for hooks in (graph.save_on_cpu(), turned):
        with hooks:
            assert all(map(torch.equal, gradients(), expected))
    again = gradients(lambda *t: checkpoint(attention, *t, use_reentrant=False))
    assert all(map(torch.equal, again, expected))
    output = attention(*leaf)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_derivatives_and_transforms_use_pytorch():
    leaf = make_leaves(S=9, T=11)
    wide = [t.detach().double().requires_grad_() for t in leaf]

    def second(function, tensors):
        (first,) = torch.autograd.grad(function(*tensors).pow(2).sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), tensors)

    def formula(query, key, value):
        return torch.softmax(query @ key.mT / 4, -1) @ value

    for got, right in zip(second(attention, leaf), second(formula, wide), strict=True):
        assert_near(got, right, 2**-6)
    query, key, value = (t.detach() for t in leaf)
    tangent = torch.ones_like(query)
    for function in (attention, attend_one_sequence):
        given = [
            t.transpose(0, 1) if function is attend_one_sequence else t for t in (query[0], key[0], value[0])
        ]
        got = torch.func.grad(lambda q, f=function, g=given: f(q, *g[1:]).float().sum())(given[0])
        right = torch.func.grad(lambda q: formula(q, key.double(), value.double()).sum())(query.double())[0]
        assert_near(got, right.transpose(0, 1) if function is attend_one_sequence else right)
    with forward_ad.dual_level():
        dual = attention(forward_ad.make_dual(query, tangent), key, value)
        got = forward_ad.unpack_dual(dual).tangent
    assert got is not None
    assert_near(
        got,
        torch.func.jvp(
            lambda q: formula(q, key.double(), value.double()), (query.double(),), (tangent.double(),)
        )[1],
    )
    batch = torch.stack([query, -query])
    assert_near(
        torch.func.vmap(attention, (0, None, None))(batch, key, value)[1],
        formula(-query.double(), key.double(), value.double()),
    )


def attend_one_sequence(query, key, value):
    """Run `attention_varlen` on one sequence."""
    offsets = [torch.tensor([0, len(t)], dtype=torch.int32) for t in (query, key)]
    return attention_varlen(query, key, value, *offsets)


def test_compiled_and_exported_models_are_bit_equal():
    leaf = make_leaves(S=20, T=24)

    def gradients(function):
        output = function(*leaf)
        return [output, *torch.autograd.grad(output.float().pow(2).sum(), leaf)]

    def causal(query, key, value):
        return attention(query, key, value, is_causal=True)

    expected = gradients(causal)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(causal, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert all(map(torch.equal, gradients(compiled), expected))
    leaf = make_leaves(S=13, T=17, seed=2)
    assert all(map(torch.equal, gradients(compiled), gradients(causal)))

    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return causal(query, key, value)

    plain = tuple(t.detach() for t in leaf)
    exported = torch.export.export(Model(), plain)
    assert torch.equal(exported.module()(*plain), causal(*plain))
    with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
        causal(*leaf).float().pow(2).sum().backward()
    assert all(torch.equal(present(t.grad), own) for t, own in zip(leaf, gradients(causal)[1:], strict=True))


def test_operators_pass_opcheck():
    query, key, value = make_tensors(S=9, T=16)
    kept: tuple[Any, ...] = (None, None, None, 0.3, 5, 1, ONE)
    ops = torch.ops.mojo_workbook
    out, lse = ops.attention_forward(query, key, value, *kept)
    torch.library.opcheck(ops.attention_forward.default, (query, key, value, *kept))
    given = out, query, key, value, out, lse, None, None
    mask = torch.zeros(1, 1, 9, 16, dtype=BF16)
    for masked, wanted in ((None, 7), (mask, 8), (mask, 15)):
        torch.library.opcheck(ops.attention_backward.default, (*given, masked, *kept[1:], wanted))
    torch.library.opcheck(ops.attention.default, tuple(make_leaves(S=9, T=16)))


def test_autocast_and_unsupported_dtypes():
    leaf = [t.requires_grad_() for t in make_tensors(torch.float32, S=20, T=24)]
    with torch.autocast(torch.get_default_device().type, BF16):
        output = attention(*leaf)
        sums = attention_with_lse(*leaf)[1]
    narrow = attention(*(t.to(BF16) for t in leaf))
    assert output.dtype == BF16 and torch.equal(output, narrow) and sums.dtype == torch.float32
    output.sum().backward()
    assert leaf[0].grad is not None and leaf[0].grad.dtype == torch.float32
    wide = [t.requires_grad_() for t in make_tensors(torch.float64, S=4, T=5, d=3)]
    assert torch.autograd.gradcheck(attention, wide)  # PyTorch's fused CPU kernel has no second derivative
    assert torch.autograd.gradgradcheck(lambda *t: attention_with_lse(*t, is_causal=True), wide)
    assert_as_accurate_as_pytorch(make_tensors(S=9, T=11, d=264))
    mask = torch.randn(1, 1, 9, 1).to(BF16).requires_grad_()
    assert "one number" in explain(*make_tensors(S=9, T=11), attn_mask=mask)
    assert_as_accurate_as_pytorch(make_tensors(S=9, T=11), attn_mask=mask)


# ---- Dropout ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("every_gpu", [False, True], ids=["wgmma", "mma.sync"])
def test_dropout_matches_philox_and_has_derivatives(every_gpu):
    for masked in ("no mask", "causal", "mask", "bool", "wide"):
        assert_drawn_by_philox(masked, every_gpu)


def assert_drawn_by_philox(masked, every_gpu):
    """Assert that dropout's output and derivatives are those of Philox's draws."""
    tensors = make_leaves(N=4, G=2, S=40, T=56, d=72 if masked == "wide" else 16)
    numbers = make_normal(1, 4, 40, 56, seed=1)
    mask = {"mask": numbers.to(BF16), "bool": numbers > -1}.get(masked)
    kept = ONE - round(0.3 * ONE)
    with use_portable_kernels(every_gpu):
        torch.manual_seed(3)
        output = attention(*tensors, mask, 0.3, masked == "causal", enable_gqa=True)
        found = torch.autograd.grad(output.float().pow(2).sum(), tensors, retain_graph=True)
    torch.manual_seed(3)
    keep = keep_mask(torch.randint(2**62, (2,)), (1, 4, 40, 56), kept).double() * (ONE / kept)
    query, key, value = (t.double().repeat_interleave(4 // t.shape[1], 1) for t in tensors)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden = torch.ones(40, 56).triu(1).bool() if masked == "causal" else None
    hidden = ~mask if masked == "bool" and mask is not None else hidden
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    scores = scores + mask.double() if masked == "mask" and mask is not None else scores
    truth = torch.softmax(scores, -1) * keep @ value
    assert_near(output, truth)
    right = torch.autograd.grad(truth.pow(2).sum(), tensors, create_graph=True)
    for got, own in zip(found, right, strict=True):
        assert_near(got, own)
    (first,) = torch.autograd.grad(output.float().pow(2).sum(), tensors[0], create_graph=True)
    assert_near(first, right[0])
    assert_near(
        torch.autograd.grad(first.float().sum(), tensors[1])[0],
        torch.autograd.grad(right[0].double().sum(), tensors[1])[0],
    )


@pytest.mark.parametrize("p", [0.0, 1.0, 2**-20])
def test_dropout_with_extreme_probabilities(p, ran):
    leaf = make_leaves(S=20, T=24)
    output = attention(*leaf, dropout_p=p)
    output.sum().backward()
    if p == 1:
        assert not output.any() and not any(t.grad.any() for t in leaf if t.grad is not None)
    else:
        assert get_launch_names(ran) == WGMMA
        assert torch.equal(output, attention(*leaf))


# ---- Sequences of unequal lengths ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [24, 20, 72])
def test_sequences_of_unequal_lengths(d, causal, ran):
    """Includes rows outside all sequences, empty sequences, one key (flash-attention#443), shared heads and a partial chunk."""
    starts, of_keys = [3, 10, 10, 31, 55, 150, 158], [0, 12, 20, 20, 69, 200, 201]
    shapes = ((160, 4, d), (210, 2, d), (210, 2, d))
    leaf = [make_normal(*shape, seed=i).to(BF16).requires_grad_() for i, shape in enumerate(shapes)]
    offsets = [torch.tensor(each, dtype=torch.int32) for each in (starts, of_keys)]
    output = attention_varlen(*leaf, *offsets, is_causal=causal, enable_gqa=True)
    grad = make_normal(*output.shape, seed=3).to(BF16)
    found = torch.autograd.grad(output, leaf, grad, retain_graph=True)
    assert get_launch_names(ran) == MMA
    query, key, value = (t.double().transpose(0, 1) for t in leaf)
    truth = torch.zeros(4, 160, d, dtype=torch.float64)
    for i in range(6):
        rows, keys = slice(*starts[i : i + 2]), slice(*of_keys[i : i + 2])
        if starts[i] < starts[i + 1] and of_keys[i] < of_keys[i + 1]:
            given = query[:, rows], *(t[:, keys].repeat_interleave(2, 0) for t in (key, value))
            with sdpa_kernel(SDPBackend.MATH):
                own = sdpa(*given, is_causal=causal)
            truth = truth + torch.nn.functional.pad(own, (0, 0, starts[i], 160 - starts[i + 1]))
    truth = truth.transpose(0, 1)
    assert_near(output, truth)
    right = torch.autograd.grad(truth, leaf, grad.double(), create_graph=True)
    for got, own in zip(found, right, strict=True):
        assert_near(got, own)
    (first,) = torch.autograd.grad(output, leaf[0], grad, create_graph=True)
    assert_near(
        torch.autograd.grad(first.float().sum(), leaf[1])[0],
        torch.autograd.grad(right[0].double().sum(), leaf[1])[0],
    )


# ---- Parts of a larger attention ----------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_and_their_gradients_combine_to_the_whole(ran):
    """Two parts of the keys, one causal; and masked blocks of queries and keys."""
    query, key, value = make_tensors(N=2, G=1, S=64, T=96)
    parts = [Part(32, 0, True), Part(32, 48, True)]
    halves = [(key[:, :, :48], value[:, :, :48]), (key[:, :, 48:], value[:, :, 48:])]
    found = [attention_block(query, *half, part) for half, part in zip(halves, parts, strict=True)]
    lse = torch.logaddexp(found[0][1], found[1][1])
    output = torch.stack([torch.exp(own - lse)[..., None] * out for out, own in found]).sum(0).to(BF16)
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    hidden = torch.arange(96) > torch.arange(64)[:, None] + 32
    scores = (wide[0] @ wide[1].mT / 4).masked_fill(hidden, -torch.inf)
    truth = torch.softmax(scores, -1) @ wide[2]
    assert_near(output, truth)
    grad = torch.randn(output.shape).to(BF16)
    delta = attention_delta(grad, output)
    shares = [
        block_backward(grad, query, *half, lse, delta, part) for half, part in zip(halves, parts, strict=True)
    ]
    got = shares[0][0].float() + shares[1][0], *(torch.cat([s[i] for s in shares], 2) for i in (1, 2))
    for own, right in zip(got, torch.autograd.grad(truth, wide, grad.double()), strict=True):
        assert_near(own, right)
    assert get_launch_names(ran) == [*WGMMA[:1] * 2, *WGMMA[1:] * 2]
    seen = torch.tensor([[True, False, True], [True, True, False]])
    output, _ = attention_block(query, key, value, Part(blocks=seen, block_size=32))
    mask = seen.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert_near(
        output, torch.softmax((wide[0] @ wide[1].mT / 4).masked_fill(~mask, -torch.inf), -1) @ wide[2]
    )


def test_calls_beyond_the_grid_limit_use_pytorch():
    query = torch.empty(2**31, 1, 1, 8, dtype=BF16, device="meta").requires_grad_()
    assert attention(query, query, query).shape == query.shape
    leaf = make_leaves(B=1, N=1, S=1, T=1, d=8)[0]
    many = leaf.as_strided((2**27, 16, 1, 8), (0, 0, 8, 1))
    assert "2^31 - 1 blocks" in explain(many)
    assert explain(leaf.as_strided((2**16, 1, 1, 8), (0, 8, 8, 1))).startswith("mma.sync: there is a batch")


@pytest.mark.parametrize(("sequences", "taken"), [(2**28 - 1, True), (2**28, False)])
def test_number_of_sequences_at_the_grid_limit(sequences, taken):
    """Each sequence takes a block per head, even if it is empty; the fallback reads the offsets, which fake tensors do not have."""
    with FakeTensorMode():
        query = torch.empty(8, 8, 16, dtype=BF16)
        offsets = torch.empty(sequences + 1, dtype=torch.int32)
        if taken:
            assert attention_varlen(query, query, query, offsets, offsets).shape == query.shape
        else:
            with pytest.raises(DataDependentOutputException):
                attention_varlen(query, query, query, offsets, offsets)
