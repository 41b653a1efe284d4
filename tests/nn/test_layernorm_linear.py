"""LayerNorm + Linear with its kernels, and in PyTorch's modes: errors against float64 are limited by those of eager mode."""

import threading
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typed import loosely

from harness.nn import layers
from harness.nn.layers import LayerNormLinear

pytestmark = pytest.mark.on_virtual_gpu("layernorm_linear")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
fused_layernorm_linear = loosely(layers.fused_layernorm_linear)
neg_view = loosely(vars(torch)["_neg_view"])
LEAF = "mojo_workbook.layernorm_linear_"
WIDE = pytest.param(FP32, marks=pytest.mark.slow)
"""Slow: these kernels are in a separate library, as are those of float32 x with 16-bit products."""


@loosely
def eager(x, gamma, beta, W, bias, eps=1e-5):
    """Compute the pair with PyTorch."""
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), W, bias)


def make_inputs(rows, H, O, dtype=BF16, *, x_dtype=None, mean=0.0, device="cpu", seed=0):
    """Return inputs that require gradients, and an incoming gradient correlated with x_hat."""
    torch.manual_seed(seed)
    x = mean + torch.randn(*rows, H)
    x[..., :1, :] *= 0.02 if x.dim() > 1 else 1
    dy = torch.randn(*rows, O) + 1 + x.mean(-1, keepdim=True)
    given = [x, 0.5 + torch.rand(H), torch.randn(H), torch.randn(O, H) / H**0.5, torch.randn(O)]
    dtypes = [x_dtype or dtype] * 3 + [dtype] * 2
    given = [t.to(device, kind).requires_grad_() for t, kind in zip(given, dtypes, strict=True)]
    return given, dy.to(device, dtype)


def step(function, given, dy):
    """Return the output and the gradients of all inputs that require one."""
    given = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in given]
    y = function(*given)
    asked = [t for t in given if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, asked, dy.to(y.dtype))]


def compute_error(got, truth):
    """Return the largest difference divided by the largest value."""
    assert got.shape == truth.shape
    return float((got.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


def compute_with_rounded_means(given, dy):
    """Return the results in float64, except that each row's mean is rounded to float32."""
    x, gamma, beta, W, bias, dy = (t.detach().double() for t in (*given, dy))
    mean = x.mean(-1, keepdim=True).float().double()
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    x_hat, dln = (x - mean) * rstd, dy @ W
    ln_out, g = x_hat * gamma + beta, dln * gamma
    dx = rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return F.linear(ln_out, W, bias), dx, (dln * x_hat).sum(0), dln.sum(0), dy.T @ ln_out, dy.sum(0)


def assert_accurate(got, given, dy, reference=eager, also=None):
    """Assert that errors are at most twice those of eager mode, or of the results `also`, plus half a rounding."""
    wide = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    truth = step(eager, wide, dy.double())
    baseline = step(reference, given, dy)
    for one, other, true, rounded in zip(got, baseline, truth, also or truth, strict=True):
        floor = torch.finfo(one.dtype).eps * (4 if one.dtype == FP32 and given[3].dtype == FP32 else 0.5)
        assert one.dtype == other.dtype
        assert (
            compute_error(one, true)
            <= 2 * max(compute_error(other, true), compute_error(rounded, true)) + floor
        )


def assert_same(got, expected):
    """Assert bit-equal tensors."""
    assert [t.shape for t in got] == [t.shape for t in expected]
    assert all(map(torch.equal, got, expected))


@pytest.fixture
def capturing(device, monkeypatch):
    """Make plans as for a CUDA graph."""
    if device != "cpu":
        pytest.skip("a CUDA graph captures on a real GPU")
    monkeypatch.setenv("WORKBOOK_CAPTURING", "1")


def in_autocast(device, dtype=BF16, function=fused_layernorm_linear):
    """Return the function under autocast."""

    def call(*given, **options):
        with torch.autocast(device, dtype):
            return function(*given, **options)

    return call


# ---- Kernels --------------------------------------------------------------------------------------------------------

SIZES = [
    ((4, 32), 256, 256),  # aligned rows, our GEMM
    ((2, 2), 8, 8),  # one launch for each pass
    ((77,), 136, 264),
    ((100,), 75, 53),  # unaligned rows are copied
    ((5,), 8208, 8),  # rows too long for registers
    ((6,), 8203, 16),
    ((3, 1), 96, 40),
    ((5,), 1, 3),  # x_hat is 0 (pytorch#188375)
]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(sizes, dtype, device):
    given, dy = make_inputs(*sizes, dtype=dtype, device=device, mean=1.0)
    for memory in ("auto", "least"):
        got, again = (
            step(lambda *t, memory=memory: fused_layernorm_linear(*t, memory=memory), given, dy)
            for _ in range(2)
        )
        assert_accurate(got, given, dy)
        assert_same(again, got)


@pytest.mark.parametrize("x_dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize(
    ("sizes", "gemms"),
    [
        (((128,), 64, 256), ("library", "own")),
        (((30,), 338, 97), ("library", "library")),
        (((520,), 75, 53), ("own", "own")),
        (((512,), 64, 1024), ("library", "own")),  # the column sums of dY are a third stream
    ],
    ids=str,
)
def test_two_streams_in_a_graph(sizes, gemms, x_dtype, capturing):
    given, dy = make_inputs(*sizes, x_dtype=x_dtype)
    call = fused_layernorm_linear if x_dtype == BF16 else in_autocast("cpu")
    layer = make_layer(given)
    with torch.autocast("cpu", BF16) if x_dtype == FP32 else nullcontext():
        explanation = layer.explain(given[0])
    words = [explanation.get(f"{name} in a CUDA graph", explanation[name]) for name in ("dln", "dW")]
    assert (*words, explanation["backward in a CUDA graph"]) == (*gemms, "two branches")
    assert_accurate(
        step(call, given, dy), given, dy, in_autocast("cpu", function=eager) if x_dtype == FP32 else eager
    )


def make_layer(given, **options):
    """Return a layer with these parameters."""
    _, gamma, beta, W, bias = given
    layer = LayerNormLinear(W.shape[1], W.shape[0], device=W.device, **options)
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    layer.load_state_dict(dict(zip(names, (gamma, beta, W, bias), strict=True)), assign=True)
    return layer


def test_explain_matches_an_eager_call(device, launched):
    given, dy = make_inputs((128,), 64, 256)
    assert make_layer(given).explain(given[0])["dW"] == "own"
    step(fused_layernorm_linear, given, dy)
    assert sum("gemm_hopper" in name for name in launched.names) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((64,), 128, 96), ((30,), 75, 53), ((3,), 8200, 8)], ids=str)
def test_float32_with_pytorch_matmuls(sizes, device):
    """At a mean of 100, rounding it to float32 can cost more than PyTorch's own error."""
    given, dy = make_inputs(*sizes, dtype=FP32, device=device, mean=100.0)
    got = step(fused_layernorm_linear, given, dy)
    assert_accurate(got, given, dy, also=compute_with_rounded_means(given, dy))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((64,), 128, 96), ((50,), 75, 53)], ids=str)
def test_float32_as_split_float16(sizes, device):
    def by_pairs(*given):
        return fused_layernorm_linear(*given, algorithm="pairs")

    given, dy = make_inputs(*sizes, dtype=FP32, device=device)
    got = step(by_pairs, given, dy)
    assert_accurate(got, given, dy)
    plain = step(fused_layernorm_linear, given, dy)
    assert all(map(torch.equal, got, plain)) == (sizes[1] == 75)  # what is no multiple of 8 is "fast"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_computes_the_layernorm_in_float32(dtype, device):
    """Rows with a large offset lose digits if x is rounded before the LayerNorm (onnxruntime#28463, flax#612)."""
    for sizes in (((4, 32), 256, 256), ((100,), 75, 53), ((2, 2), 8, 8), ((5,), 9000, 8)):
        given, dy = make_inputs(*sizes, dtype=dtype, x_dtype=FP32, mean=100.0, device=device)
        given[3], given[4] = (t.detach().float().requires_grad_() for t in given[3:])
        got = step(in_autocast(device, dtype), given, dy)
        assert [t.dtype for t in got] == [dtype] + [FP32] * 5
        assert_accurate(got, given, dy, in_autocast(device, dtype, eager))


@pytest.mark.slow
def test_autocast_takes_16_bit_inputs_and_parameters(device):
    given, dy = make_inputs((64,), 64, 48, device=device)
    assert_same(step(in_autocast(device), given, dy), step(fused_layernorm_linear, given, dy))
    given[1:3] = (t.detach().float().requires_grad_() for t in given[1:3])
    got = step(in_autocast(device), given, dy)
    assert [t.dtype for t in got] == [BF16, BF16, FP32, FP32, BF16, BF16]
    assert_accurate(got, given, dy, in_autocast(device, function=eager))


def test_autocast_leaves_float64_alone(device):
    given, dy = make_inputs((4,), 8, 8, torch.float64, device=device)
    assert_same(step(in_autocast(device), given, dy), step(eager, given, dy))


# ---- Layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(5))
def test_strided_and_shifted_inputs(which, device):
    given, dy = make_inputs((3, 20), 40, 24, device=device)
    expected = step(fused_layernorm_linear, given, dy)
    t = given[which].detach()
    apart = torch.stack([t, t], -1)[..., 0]  # every other element
    shifted = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)  # unaligned
    for lying in (apart, shifted):
        other = [*given]
        other[which] = lying.requires_grad_()
        got = step(lambda *tensors: fused_layernorm_linear(*tensors), other, dy)
        assert all(compute_error(a, b.double()) < 0.02 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_expanded_transposed_and_negated_gradients(transposed, device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    for one in (dy[:1].expand(20, 24), dy.t().contiguous().t(), neg_view(dy.neg())):
        W = given[3].detach().t().contiguous().t() if transposed else given[3]
        these = [*given[:3], W.requires_grad_(), given[4]]
        assert_same(
            step(fused_layernorm_linear, these, one), step(fused_layernorm_linear, these, one.clone())
        )


@pytest.mark.parametrize("which", range(5))
def test_negated_views(which, device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    negated = [*given]
    negated[which] = neg_view(given[which].detach().neg()).requires_grad_()
    assert_same(step(fused_layernorm_linear, negated, dy), step(fused_layernorm_linear, given, dy))


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
def test_weight_with_the_layout_of_gpt2(dtype, device):
    """PyTorch computes the product and dW, which has the layout of W."""
    given, dy = make_inputs((20,), 40, 24, dtype, device=device)
    given[3] = given[3].detach().t().contiguous().t().requires_grad_()
    got = step(fused_layernorm_linear, given, dy)
    assert_accurate(got, given, dy)
    assert got[4].t().is_contiguous()


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
def test_absent_parameters(dtype, device):
    every, dy = make_inputs((20,), 40, 24, dtype, device=device)
    for absent in ((1,), (2,), (4,), (1, 2), (1, 2, 4)):
        given = [None if i in absent else t for i, t in enumerate(every)]
        assert_accurate(step(fused_layernorm_linear, given, dy), given, dy)


@pytest.mark.parametrize("memory", ["auto", "least"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (0, 1, 2), (3, 4)], ids=str)
@pytest.mark.parametrize("sizes", [((96,), 40, 24), ((70,), 75, 53), ((2,), 8, 8)], ids=str)
def test_subset_of_gradients(sizes, wanted, memory, device):
    given, dy = make_inputs(*sizes, device=device)
    some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    assert_accurate(step(lambda *t: fused_layernorm_linear(*t, memory=memory), some, dy), some, dy)


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)], ids=str)
def test_zero_rows_give_zero_gradients(leading, dtype, device):
    given, dy = make_inputs(leading, 40, 24, dtype, device=device)
    assert_same(step(fused_layernorm_linear, given, dy), step(eager, given, dy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_nan_and_inf_propagate(value, where, device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    with torch.no_grad():
        (given[0] if where == "x" else dy)[3, 5] = value
    got, expected = step(fused_layernorm_linear, given, dy), step(eager, given, dy)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


def test_unsupported_inputs_use_pytorch(device, launched):
    for dtype, width in ((torch.float64, 8), (BF16, 2**20 + 8)):
        given, dy = make_inputs((2,), width, 8, dtype, device=device)
        launched.forget()
        assert_same(step(fused_layernorm_linear, given, dy), step(eager, given, dy))
        assert (
            launched() == [] and make_layer(given).explain(given[0])["backend"] == "PyTorch's own operations"
        )
    given, _ = make_inputs((2,), 8, 8, device=device)
    with pytest.raises(RuntimeError, match="the kernels do not support tensors of these shapes and dtypes"):
        torch.ops.mojo_workbook.layernorm_linear_forward(*given[:3], given[3].detach().double(), None, 1e-5)
    with pytest.raises(RuntimeError, match="grad: expected 2 rows of 8 in the dtype of weight"):
        statistics = torch.ones(2, 2, device=device)
        detached = [t.detach() for t in given[:4]]
        torch.ops.mojo_workbook.layernorm_linear_backward(
            detached[0][:1], detached[0], statistics, *detached[1:4], 15
        )
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fused_layernorm_linear(given[0][:, :4], *given[1:])
    with pytest.raises(RuntimeError, match="dtype"):
        fused_layernorm_linear(given[0].detach().float(), *given[1:])


@pytest.mark.parametrize(
    ("rows", "H", "O", "taken"),
    [
        (2**31 - 1, 8, 8, True),
        (2**31, 8, 8, False),
        (3, 2**20, 8, True),
        (3, 2**20 + 8, 8, False),
        (3, 8, 2**31 - 9, True),
        (3, 8, 2**31 - 8, False),
        (2**31 - 1, 2**20, 2**31 - 9, True),
    ],
    ids=str,
)
def test_size_limits_of_grids_and_32_bit_integers(rows, H, O, taken, device):
    """Rows are blocks of a grid, columns are padded to whole vectors; fake tensors take no memory."""
    with FakeTensorMode(), Watching() as seen:
        given = [
            torch.empty(size, dtype=BF16, device=device) for size in ((rows, H), (H,), (H,), (O, H), (O,))
        ]
        assert fused_layernorm_linear(*given).shape == (rows, O)
    assert (f"{LEAF}forward.default" in seen.names) is taken


# ---- Autograd -------------------------------------------------------------------------------------------------------


def test_hooks_receive_the_saved_tensors(device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, given, dy)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t.clone(), lambda t: t.clone()):
        assert_same(step(fused_layernorm_linear, given, dy), expected)
    assert sorted(saved) == sorted([(20, 40), (2, 20), (40,), (40,), (24, 40)])
    with save_on_cpu():
        assert_same(step(fused_layernorm_linear, given, dy), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant, device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    found = []
    for function in (
        fused_layernorm_linear,
        lambda *t: checkpoint(fused_layernorm_linear, *t, use_reentrant=use_reentrant),
    ):
        leaves = [t.detach().requires_grad_() for t in given]
        function(*leaves).backward(dy)
        found.append([t.grad for t in leaves])
    assert_same(*found)


def test_in_place_changes_are_detected(device):
    for which, noticed in enumerate([True, True, True, True, False]):
        given, dy = make_inputs((20,), 40, 24, device=device)
        y = fused_layernorm_linear(*given)
        with torch.no_grad():
            given[which].add_(1)
        with (
            pytest.raises(RuntimeError, match="modified by an inplace operation")
            if noticed
            else nullcontext()
        ):
            y.backward(dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_output_may_be_changed_in_place(device):
    for sizes in (((20,), 40, 24), ((20,), 40, 23)):
        given, dy = make_inputs(*sizes, device=device)
        changed = step(lambda *t: fused_layernorm_linear(*t).mul_(2), given, dy)
        assert_same(changed[1:], step(fused_layernorm_linear, given, 2 * dy)[1:])


def test_modes_without_gradients(device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, given, dy)[0]
    with torch.no_grad():
        y = fused_layernorm_linear(*given)
    assert torch.equal(y, expected) and not y.requires_grad
    with torch.inference_mode():
        y = fused_layernorm_linear(*given)
    assert torch.equal(y, expected) and y.is_inference()


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
def test_second_derivatives_match_pytorch(dtype, device):
    given, dy = make_inputs((6,), 16, 8, dtype, device=device)

    def second(function):
        leaves = [t.detach().requires_grad_() for t in given]
        first = torch.autograd.grad(function(*leaves), leaves, dy, create_graph=True)
        return torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), leaves[:4])

    expected = second(eager)
    got = second(fused_layernorm_linear)
    assert all(
        compute_error(a, b.double()) < (0.05 if dtype == BF16 else 1e-5)
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.slow
def test_transforms_and_tangents_match_pytorch(device):
    given, dy = make_inputs((6,), 16, 8, FP32, device=device)
    given = [t.detach() for t in given]
    x, rest = given[0], given[1:]

    def of_x(function):
        return lambda x: function(x, *rest)

    def loss(function):
        return lambda x: (function(x, *rest) * dy).sum()

    same = torch.testing.assert_close
    same(torch.func.grad(loss(fused_layernorm_linear))(x), torch.func.grad(loss(eager))(x))
    same(torch.func.hessian(loss(fused_layernorm_linear))(x), torch.func.hessian(loss(eager))(x))
    batched = torch.func.vmap(lambda row: fused_layernorm_linear(row, *rest))(x)
    same(batched, eager(x, *rest))
    got, expected = (torch.func.jvp(of_x(f), (x,), (x,)) for f in (fused_layernorm_linear, eager))
    same(got, expected)
    with forward_ad.dual_level():
        dual = fused_layernorm_linear(forward_ad.make_dual(x, x), *rest)
        same(forward_ad.unpack_dual(dual).tangent, expected[1])


# ---- The dispatcher -------------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """Records the names of the dispatched operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass that records the functions called on it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_and_subclasses_see_the_operators(device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, given, dy)
    with Watching() as mode:
        assert_same(step(fused_layernorm_linear, given, dy), expected)
    assert [name for name in mode.names if LEAF in name] == [
        f"{LEAF}forward.default",
        f"{LEAF}backward.default",
    ]
    y = fused_layernorm_linear(given[0].detach().as_subclass(Named), *given[1:])
    assert isinstance(y, Named) and torch.equal(y.detach().as_subclass(torch.Tensor), expected[0])
    assert any("layernorm_linear" in name for name in Named.seen)


@pytest.mark.parametrize("x_dtype", [BF16, WIDE], ids=str)
def test_operators_pass_opcheck(x_dtype, device):
    given, _ = make_inputs((20,), 40, 24, x_dtype=x_dtype, device=device)
    leaf = torch.ops.mojo_workbook.layernorm_linear_forward.default
    torch.library.opcheck(leaf, (*(t.detach() for t in given), 1e-5))
    if x_dtype == BF16:
        torch.library.opcheck(torch.ops.mojo_workbook.layernorm_linear.default, (*given, 1e-5))


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_call_is_bit_equal(dynamic, mixed, device):
    given, dy = make_inputs((20,), 40, 24, x_dtype=FP32 if mixed else BF16, device=device)
    call = in_autocast(device) if mixed else fused_layernorm_linear
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (20, 13):
        some = [given[0].detach()[:rows].requires_grad_(), *given[1:]]
        assert_same(step(compiled, some, dy[:rows]), step(call, some, dy[:rows]))


def test_compiled_autograd(device):
    given, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, given, dy)[1:]
    torch._dynamo.reset()
    leaves = [t.detach().requires_grad_() for t in given]
    y = fused_layernorm_linear(*leaves)
    with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
        y.backward(dy)
    assert_same([t.grad for t in leaves], expected)


def test_exported(device):
    given, _ = make_inputs((20,), 40, 24, device=device)
    layer = make_layer(given)
    program = torch.export.export(layer, (given[0].detach(),))
    assert any(
        LEAF in str(node.target) or "layernorm_linear" in str(node.target) for node in program.graph.nodes
    )
    assert torch.equal(program.module()(given[0].detach()), layer(given[0]))


def test_threads(device):
    """Concurrent calls at new sizes give the results of single calls."""
    made = [make_inputs((8 * k,), 8 * k, 16, device=device, seed=k) for k in range(1, 5)]
    alone = [step(fused_layernorm_linear, *one) for one in made]
    found: list = [None] * len(made)

    def work(k):
        for _ in range(3):
            found[k] = step(fused_layernorm_linear, *made[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(found, alone, strict=True):
        assert_same(got, expected)
