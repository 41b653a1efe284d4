"""LayerNorm + Linear: accuracy against float64 relative to eager mode, and PyTorch's modes."""

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
from typed import erase_types

from harness.nn import layers
from harness.nn.layers import LayerNormLinear

pytestmark = pytest.mark.on_virtual_gpu("layernorm_linear")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
fused_layernorm_linear = erase_types(layers.fused_layernorm_linear)
neg_view = erase_types(vars(torch)["_neg_view"])
OP_PREFIX = "mojo_workbook.layernorm_linear_"
SLOW_FP32 = pytest.param(FP32, marks=pytest.mark.slow)
"""Slow, because these kernels are compiled into a separate library."""


@erase_types
def eager(x, gamma, beta, W, bias, eps=1e-5):
    """Run PyTorch's layer_norm and linear."""
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), W, bias)


def make_inputs(rows, H, O, dtype=BF16, *, x_dtype=None, mean=0.0, device="cpu", seed=0):
    """Return [x, gamma, beta, W, bias] as leaves, and an output gradient correlated with x_hat."""
    torch.manual_seed(seed)
    x = mean + torch.randn(*rows, H)
    x[..., :1, :] *= 0.02 if x.dim() > 1 else 1
    dy = torch.randn(*rows, O) + 1 + x.mean(-1, keepdim=True)
    inputs = [x, 0.5 + torch.rand(H), torch.randn(H), torch.randn(O, H) / H**0.5, torch.randn(O)]
    dtypes = [x_dtype or dtype] * 3 + [dtype] * 2
    inputs = [t.to(device, kind).requires_grad_() for t, kind in zip(inputs, dtypes, strict=True)]
    return inputs, dy.to(device, dtype)


def step(function, inputs, dy):
    """Return the output and the gradients of all inputs that require grad."""
    inputs = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    y = function(*inputs)
    differentiable = [t for t in inputs if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, differentiable, dy.to(y.dtype))]


def compute_error(got, truth):
    """Return the maximum absolute error relative to the largest reference value."""
    assert got.shape == truth.shape
    return float((got.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


def compute_with_rounded_means(inputs, dy):
    """Return float64 results computed with row means that are rounded to float32."""
    x, gamma, beta, W, bias, dy = (t.detach().double() for t in (*inputs, dy))
    mean = x.mean(-1, keepdim=True).float().double()
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    x_hat, dln = (x - mean) * rstd, dy @ W
    ln_out, g = x_hat * gamma + beta, dln * gamma
    dx = rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return F.linear(ln_out, W, bias), dx, (dln * x_hat).sum(0), dln.sum(0), dy.T @ ln_out, dy.sum(0)


def assert_accurate(got, inputs, dy, reference=eager, rounded_truth=None):
    """Assert that errors are at most twice those of `reference` or `rounded_truth`, plus half an ulp."""
    doubles = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    truth = step(eager, doubles, dy.double())
    baseline = step(reference, inputs, dy)
    for actual, eager_result, exact, rounded in zip(
        got, baseline, truth, rounded_truth or truth, strict=True
    ):
        floor = torch.finfo(actual.dtype).eps * (
            4 if actual.dtype == FP32 and inputs[3].dtype == FP32 else 0.5
        )
        assert actual.dtype == eager_result.dtype
        assert (
            compute_error(actual, exact)
            <= 2 * max(compute_error(eager_result, exact), compute_error(rounded, exact)) + floor
        )


def assert_same(got, expected):
    """Assert that tensors are bit-equal."""
    assert [t.shape for t in got] == [t.shape for t in expected]
    assert all(map(torch.equal, got, expected))


@pytest.fixture
def capture_plans(device, monkeypatch):
    """Select GEMMs and streams as during CUDA graph capture."""
    if device != "cpu":
        pytest.skip("capture is simulated only on the virtual GPU")
    monkeypatch.setenv("WORKBOOK_CAPTURING", "1")


def with_autocast(device, dtype=BF16, function=fused_layernorm_linear):
    """Wrap a function in autocast."""

    def call(*inputs, **options):
        with torch.autocast(device, dtype):
            return function(*inputs, **options)

    return call


# ---- Kernels --------------------------------------------------------------------------------------------------------

SIZES = [
    ((4, 32), 256, 256),  # aligned rows, our GEMM
    ((2, 2), 8, 8),  # one launch for each pass
    ((77,), 136, 264),
    ((100,), 75, 53),  # unaligned rows: padded copies
    ((5,), 8208, 8),  # rows do not fit in registers
    ((6,), 8203, 16),
    ((3, 1), 96, 40),
    ((5,), 1, 3),  # x_hat is 0 (pytorch#188375)
]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_are_accurate(sizes, dtype, device):
    inputs, dy = make_inputs(*sizes, dtype=dtype, device=device, mean=1.0)
    for memory in ("auto", "least"):
        got, repeated = (
            step(lambda *t, memory=memory: fused_layernorm_linear(*t, memory=memory), inputs, dy)
            for _ in range(2)
        )
        assert_accurate(got, inputs, dy)
        assert_same(repeated, got)


@pytest.mark.parametrize("x_dtype", [BF16, SLOW_FP32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "gemms"),
    [
        (((128,), 64, 256), ("library", "own")),
        (((30,), 338, 97), ("library", "library")),
        (((520,), 75, 53), ("own", "own")),
        (((512,), 64, 1024), ("library", "own")),  # column sums of dY run on a third stream
    ],
    ids=str,
)
def test_graph_backward_uses_two_streams(sizes, gemms, x_dtype, capture_plans):
    inputs, dy = make_inputs(*sizes, x_dtype=x_dtype)
    call = fused_layernorm_linear if x_dtype == BF16 else with_autocast("cpu")
    layer = make_layer(inputs)
    with torch.autocast("cpu", BF16) if x_dtype == FP32 else nullcontext():
        explanation = layer.explain(inputs[0])
    selected = [explanation.get(f"{name} in a CUDA graph", explanation[name]) for name in ("dln", "dW")]
    assert (*selected, explanation["backward in a CUDA graph"]) == (*gemms, "two branches")
    assert_accurate(
        step(call, inputs, dy), inputs, dy, with_autocast("cpu", function=eager) if x_dtype == FP32 else eager
    )


def make_layer(inputs, **options):
    """Return a LayerNormLinear with these parameters."""
    _, gamma, beta, W, bias = inputs
    layer = LayerNormLinear(W.shape[1], W.shape[0], device=W.device, **options)
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    layer.load_state_dict(dict(zip(names, (gamma, beta, W, bias), strict=True)), assign=True)
    return layer


def test_explain_matches_eager_call(device, launch_log):
    inputs, dy = make_inputs((128,), 64, 256)
    assert make_layer(inputs).explain(inputs[0])["dW"] == "own"
    step(fused_layernorm_linear, inputs, dy)
    assert sum("gemm_hopper" in name for name in launch_log.names) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((64,), 128, 96), ((30,), 75, 53), ((3,), 8200, 8)], ids=str)
def test_float32_with_pytorch_matmuls(sizes, device):
    """With a mean of 100, rounding the mean to float32 can exceed PyTorch's own error."""
    inputs, dy = make_inputs(*sizes, dtype=FP32, device=device, mean=100.0)
    got = step(fused_layernorm_linear, inputs, dy)
    assert_accurate(got, inputs, dy, rounded_truth=compute_with_rounded_means(inputs, dy))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((64,), 128, 96), ((50,), 75, 53)], ids=str)
def test_float32_with_split_float16_gemms(sizes, device):
    def split_float16(*inputs):
        return fused_layernorm_linear(*inputs, algorithm="pairs")

    inputs, dy = make_inputs(*sizes, dtype=FP32, device=device)
    got = step(split_float16, inputs, dy)
    assert_accurate(got, inputs, dy)
    default = step(fused_layernorm_linear, inputs, dy)
    assert all(map(torch.equal, got, default)) == (
        sizes[1] == 75
    )  # sizes not divisible by 8 use the algorithm "fast"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_computes_the_layernorm_in_float32(dtype, device):
    """Rows with a large offset lose digits if x is rounded before the LayerNorm (onnxruntime#28463, flax#612)."""
    for sizes in (((4, 32), 256, 256), ((100,), 75, 53), ((2, 2), 8, 8), ((5,), 9000, 8)):
        inputs, dy = make_inputs(*sizes, dtype=dtype, x_dtype=FP32, mean=100.0, device=device)
        inputs[3], inputs[4] = (t.detach().float().requires_grad_() for t in inputs[3:])
        got = step(with_autocast(device, dtype), inputs, dy)
        assert [t.dtype for t in got] == [dtype] + [FP32] * 5
        assert_accurate(got, inputs, dy, with_autocast(device, dtype, eager))


@pytest.mark.slow
def test_autocast_accepts_16_bit_inputs_and_parameters(device):
    inputs, dy = make_inputs((64,), 64, 48, device=device)
    assert_same(step(with_autocast(device), inputs, dy), step(fused_layernorm_linear, inputs, dy))
    inputs[1:3] = (t.detach().float().requires_grad_() for t in inputs[1:3])
    got = step(with_autocast(device), inputs, dy)
    assert [t.dtype for t in got] == [BF16, BF16, FP32, FP32, BF16, BF16]
    assert_accurate(got, inputs, dy, with_autocast(device, function=eager))


def test_autocast_does_not_change_float64(device):
    inputs, dy = make_inputs((4,), 8, 8, torch.float64, device=device)
    assert_same(step(with_autocast(device), inputs, dy), step(eager, inputs, dy))


# ---- Layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(5))
def test_strided_and_shifted_inputs(index, device):
    inputs, dy = make_inputs((3, 20), 40, 24, device=device)
    expected = step(fused_layernorm_linear, inputs, dy)
    t = inputs[index].detach()
    strided = torch.stack([t, t], -1)[..., 0]  # stride 2
    shifted = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)  # unaligned
    for view in (strided, shifted):
        changed = [*inputs]
        changed[index] = view.requires_grad_()
        got = step(lambda *tensors: fused_layernorm_linear(*tensors), changed, dy)
        assert all(compute_error(a, b.double()) < 0.02 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_expanded_transposed_and_negated_gradients(transposed, device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    for grad in (dy[:1].expand(20, 24), dy.t().contiguous().t(), neg_view(dy.neg())):
        W = inputs[3].detach().t().contiguous().t() if transposed else inputs[3]
        leaves = [*inputs[:3], W.requires_grad_(), inputs[4]]
        assert_same(
            step(fused_layernorm_linear, leaves, grad), step(fused_layernorm_linear, leaves, grad.clone())
        )


@pytest.mark.parametrize("index", range(5))
def test_negated_input_views(index, device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    negated = [*inputs]
    negated[index] = neg_view(inputs[index].detach().neg()).requires_grad_()
    assert_same(step(fused_layernorm_linear, negated, dy), step(fused_layernorm_linear, inputs, dy))


@pytest.mark.parametrize("dtype", [BF16, SLOW_FP32], ids=str)
def test_transposed_gpt2_weight(dtype, device):
    """PyTorch's matmul computes the output and dW; dW has the layout of W."""
    inputs, dy = make_inputs((20,), 40, 24, dtype, device=device)
    inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    got = step(fused_layernorm_linear, inputs, dy)
    assert_accurate(got, inputs, dy)
    assert got[4].t().is_contiguous()


@pytest.mark.parametrize("dtype", [BF16, SLOW_FP32], ids=str)
def test_missing_parameters_are_accepted(dtype, device):
    all_inputs, dy = make_inputs((20,), 40, 24, dtype, device=device)
    for absent in ((1,), (2,), (4,), (1, 2), (1, 2, 4)):
        inputs = [None if i in absent else t for i, t in enumerate(all_inputs)]
        assert_accurate(step(fused_layernorm_linear, inputs, dy), inputs, dy)


@pytest.mark.parametrize("memory", ["auto", "least"])
@pytest.mark.parametrize(
    "indices", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (0, 1, 2), (3, 4)], ids=str
)
@pytest.mark.parametrize("sizes", [((96,), 40, 24), ((70,), 75, 53), ((2,), 8, 8)], ids=str)
def test_subsets_of_gradients_are_accurate(sizes, indices, memory, device):
    inputs, dy = make_inputs(*sizes, device=device)
    leaves = [t.detach().requires_grad_(i in indices) for i, t in enumerate(inputs)]
    assert_accurate(step(lambda *t: fused_layernorm_linear(*t, memory=memory), leaves, dy), leaves, dy)


@pytest.mark.parametrize("dtype", [BF16, SLOW_FP32], ids=str)
@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)], ids=str)
def test_zero_rows_give_zero_gradients(leading, dtype, device):
    inputs, dy = make_inputs(leading, 40, 24, dtype, device=device)
    assert_same(step(fused_layernorm_linear, inputs, dy), step(eager, inputs, dy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("tensor", ["x", "dy"])
def test_nan_and_inf_propagate(value, tensor, device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    with torch.no_grad():
        (inputs[0] if tensor == "x" else dy)[3, 5] = value
    got, expected = step(fused_layernorm_linear, inputs, dy), step(eager, inputs, dy)
    for actual, reference in zip(got, expected, strict=True):
        assert torch.equal(actual.isfinite(), reference.isfinite())


def test_unsupported_inputs_fall_back_to_pytorch(device, launch_log):
    for dtype, width in ((torch.float64, 8), (BF16, 2**20 + 8)):
        inputs, dy = make_inputs((2,), width, 8, dtype, device=device)
        launch_log.clear()
        assert_same(step(fused_layernorm_linear, inputs, dy), step(eager, inputs, dy))
        assert launch_log() == []
        assert make_layer(inputs).explain(inputs[0])["backend"] == "PyTorch's own operations"
    inputs, _ = make_inputs((2,), 8, 8, device=device)
    with pytest.raises(RuntimeError, match="the kernels do not support tensors of these shapes and dtypes"):
        torch.ops.mojo_workbook.layernorm_linear_forward(*inputs[:3], inputs[3].detach().double(), None, 1e-5)
    with pytest.raises(RuntimeError, match="grad: expected 2 rows of 8 in the dtype of weight"):
        statistics = torch.ones(2, 2, device=device)
        detached = [t.detach() for t in inputs[:4]]
        torch.ops.mojo_workbook.layernorm_linear_backward(
            detached[0][:1], detached[0], statistics, *detached[1:4], 15
        )
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fused_layernorm_linear(inputs[0][:, :4], *inputs[1:])
    with pytest.raises(RuntimeError, match="dtype"):
        fused_layernorm_linear(inputs[0].detach().float(), *inputs[1:])


@pytest.mark.parametrize(
    ("rows", "H", "O", "supported"),
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
def test_grid_and_int32_size_limits(rows, H, O, supported, device):
    """The grid has a block per row, and columns are padded to the vector width; fake tensors need no memory."""
    with FakeTensorMode(), OpRecorder() as recorder:
        shapes = (rows, H), (H,), (H,), (O, H), (O,)
        inputs = [torch.empty(shape, dtype=BF16, device=device) for shape in shapes]
        assert fused_layernorm_linear(*inputs).shape == (rows, O)
    assert (f"{OP_PREFIX}forward.default" in recorder.names) is supported


# ---- Autograd -------------------------------------------------------------------------------------------------------


def test_hooks_receive_saved_tensors(device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, inputs, dy)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t.clone(), lambda t: t.clone()):
        assert_same(step(fused_layernorm_linear, inputs, dy), expected)
    assert sorted(saved) == sorted([(20, 40), (2, 20), (40,), (40,), (24, 40)])
    with save_on_cpu():
        assert_same(step(fused_layernorm_linear, inputs, dy), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_is_bit_equal(use_reentrant, device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    gradients = []
    for function in (
        fused_layernorm_linear,
        lambda *t: checkpoint(fused_layernorm_linear, *t, use_reentrant=use_reentrant),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        function(*leaves).backward(dy)
        gradients.append([t.grad for t in leaves])
    assert_same(*gradients)


def test_in_place_modifications_are_detected(device):
    for index, detected in enumerate([True, True, True, True, False]):
        inputs, dy = make_inputs((20,), 40, 24, device=device)
        y = fused_layernorm_linear(*inputs)
        with torch.no_grad():
            inputs[index].add_(1)
        with (
            pytest.raises(RuntimeError, match="modified by an inplace operation")
            if detected
            else nullcontext()
        ):
            y.backward(dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_output_can_be_modified_in_place(device):
    for sizes in (((20,), 40, 24), ((20,), 40, 23)):
        inputs, dy = make_inputs(*sizes, device=device)
        doubled = step(lambda *t: fused_layernorm_linear(*t).mul_(2), inputs, dy)
        assert_same(doubled[1:], step(fused_layernorm_linear, inputs, 2 * dy)[1:])


def test_no_grad_and_inference_mode(device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, inputs, dy)[0]
    with torch.no_grad():
        y = fused_layernorm_linear(*inputs)
    assert torch.equal(y, expected) and not y.requires_grad
    with torch.inference_mode():
        y = fused_layernorm_linear(*inputs)
    assert torch.equal(y, expected) and y.is_inference()


@pytest.mark.parametrize("dtype", [BF16, SLOW_FP32], ids=str)
def test_second_derivatives_match_pytorch(dtype, device):
    inputs, dy = make_inputs((6,), 16, 8, dtype, device=device)

    def second_derivatives(function):
        leaves = [t.detach().requires_grad_() for t in inputs]
        first = torch.autograd.grad(function(*leaves), leaves, dy, create_graph=True)
        return torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), leaves[:4])

    expected = second_derivatives(eager)
    got = second_derivatives(fused_layernorm_linear)
    assert all(
        compute_error(a, b.double()) < (0.05 if dtype == BF16 else 1e-5)
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.slow
def test_transforms_and_tangents_match_pytorch(device):
    inputs, dy = make_inputs((6,), 16, 8, FP32, device=device)
    inputs = [t.detach() for t in inputs]
    x, rest = inputs[0], inputs[1:]

    def bind_parameters(function):
        return lambda x: function(x, *rest)

    def loss(function):
        return lambda x: (function(x, *rest) * dy).sum()

    assert_close = torch.testing.assert_close
    assert_close(torch.func.grad(loss(fused_layernorm_linear))(x), torch.func.grad(loss(eager))(x))
    assert_close(torch.func.hessian(loss(fused_layernorm_linear))(x), torch.func.hessian(loss(eager))(x))
    mapped = torch.func.vmap(lambda row: fused_layernorm_linear(row, *rest))(x)
    assert_close(mapped, eager(x, *rest))
    got, expected = (torch.func.jvp(bind_parameters(f), (x,), (x,)) for f in (fused_layernorm_linear, eager))
    assert_close(got, expected)
    with forward_ad.dual_level():
        dual = fused_layernorm_linear(forward_ad.make_dual(x, x), *rest)
        assert_close(forward_ad.unpack_dual(dual).tangent, expected[1])


# ---- The dispatcher -------------------------------------------------------------------------------------------------


class OpRecorder(TorchDispatchMode):
    """Records the names of dispatched operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class RecordingTensor(torch.Tensor):
    """Tensor subclass that records the functions called on it."""

    functions: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.functions.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_dispatch_modes_and_subclasses_see_the_operators(device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, inputs, dy)
    with OpRecorder() as recorder:
        assert_same(step(fused_layernorm_linear, inputs, dy), expected)
    assert [name for name in recorder.names if OP_PREFIX in name] == [
        f"{OP_PREFIX}forward.default",
        f"{OP_PREFIX}backward.default",
    ]
    y = fused_layernorm_linear(inputs[0].detach().as_subclass(RecordingTensor), *inputs[1:])
    assert isinstance(y, RecordingTensor) and torch.equal(y.detach().as_subclass(torch.Tensor), expected[0])
    assert any("layernorm_linear" in name for name in RecordingTensor.functions)


@pytest.mark.parametrize("x_dtype", [BF16, SLOW_FP32], ids=str)
def test_operators_pass_opcheck(x_dtype, device):
    inputs, _ = make_inputs((20,), 40, 24, x_dtype=x_dtype, device=device)
    leaf = torch.ops.mojo_workbook.layernorm_linear_forward.default
    torch.library.opcheck(leaf, (*(t.detach() for t in inputs), 1e-5))
    if x_dtype == BF16:
        torch.library.opcheck(torch.ops.mojo_workbook.layernorm_linear.default, (*inputs, 1e-5))


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_call_is_bit_equal(dynamic, mixed, device):
    inputs, dy = make_inputs((20,), 40, 24, x_dtype=FP32 if mixed else BF16, device=device)
    call = with_autocast(device) if mixed else fused_layernorm_linear
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (20, 13):
        leaves = [inputs[0].detach()[:rows].requires_grad_(), *inputs[1:]]
        assert_same(step(compiled, leaves, dy[:rows]), step(call, leaves, dy[:rows]))


def test_compiled_autograd_is_bit_equal(device):
    inputs, dy = make_inputs((20,), 40, 24, device=device)
    expected = step(fused_layernorm_linear, inputs, dy)[1:]
    torch._dynamo.reset()
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = fused_layernorm_linear(*leaves)
    with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
        y.backward(dy)
    assert_same([t.grad for t in leaves], expected)


def test_exported_program_is_bit_equal(device):
    inputs, _ = make_inputs((20,), 40, 24, device=device)
    layer = make_layer(inputs)
    program = torch.export.export(layer, (inputs[0].detach(),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert any(OP_PREFIX in target or "layernorm_linear" in target for target in targets)
    assert torch.equal(program.module()(inputs[0].detach()), layer(inputs[0]))


def test_concurrent_calls_match_sequential_calls(device):
    """Each thread uses a size that is not planned yet."""
    problems = [make_inputs((8 * k,), 8 * k, 16, device=device, seed=k) for k in range(1, 5)]
    expected_results = [step(fused_layernorm_linear, *problem) for problem in problems]
    results: list = [None] * len(problems)

    def run_steps(k):
        for _ in range(3):
            results[k] = step(fused_layernorm_linear, *problems[k])

    threads = [threading.Thread(target=run_steps, args=(k,)) for k in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, reference in zip(results, expected_results, strict=True):
        assert_same(got, reference)
