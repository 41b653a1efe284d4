"""Fused linear and cross-entropy: accuracy, memory, matmuls, and use in models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loss_checks import (
    OPTIONS,
    H,
    V,
    assert_matches_reference,
    compute_loss,
    differentiate,
    make_tensors,
    to_float64,
)
from torch import nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.nn import LinearCrossEntropy, linear_cross_entropy

pytestmark = [pytest.mark.compiles, pytest.mark.on_virtual_gpu("cross_entropy")]

REDUCTIONS = ["mean", "sum", "none"]
KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.mojo_workbook
ROWS_KERNEL = "cross_entropy_rows"


# ---- Values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_loss_and_gradients_match_autograd(options, reduction, chunk_rows, launch_log, device):
    inputs = make_tensors(ignored=options.get("ignore_index", -100), bias=chunk_rows is None, device=device)
    assert_matches_reference(inputs, reduction=reduction, chunk_rows=chunk_rows, **options)
    rows = [launch.grid[0] for launch in launch_log() if launch.name.startswith(ROWS_KERNEL)]
    rows_per_pass = [10] if chunk_rows is None else [4, 4, 2]
    assert rows == rows_per_pass * (2 if reduction == "none" else 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", ["all ignored", "no rows", "one class", "one row", "no leading dimension"])
def test_empty_and_single_element_sizes(case, reduction, device):
    rows = {"no rows": (0,), "one row": (1,), "no leading dimension": ()}.get(case, (2, 5))
    inputs = list(make_tensors(rows=rows, classes=1 if case == "one class" else V, ignored=0, device=device))
    if case == "all ignored":
        inputs[2] = torch.full_like(inputs[2], -100)

    def linear_then_cross_entropy(input, weight, target, bias, reduction):
        logits = F.linear(input, weight, bias).reshape(target.numel(), len(weight))
        losses = F.cross_entropy(logits, target.flatten(), reduction=reduction)
        return losses.view(target.shape) if reduction == "none" else losses

    got, expected = (
        differentiate(function, inputs, reduction=reduction)
        for function in (linear_cross_entropy, linear_then_cross_entropy)
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_noncontiguous_tensors(device):
    input, weight, target, bias = make_tensors(rows=(5, 2), device=device)
    inputs = (input.transpose(0, 1), weight.t().contiguous().t(), target.t(), bias.repeat(2)[::2])
    assert not any(tensor.is_contiguous() for tensor in inputs)
    assert_matches_reference(inputs, chunk_rows=3)


def test_class_bias_of_minus_infinity(device):
    """Without label smoothing the loss is not NaN."""
    input, weight, target, bias = make_tensors(device=device)
    with torch.no_grad():
        bias[4] = -math.inf
    assert_matches_reference((input, weight, target.where(target != 4, 0), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", [-1, V, V + 3, None])
def test_invalid_target_or_nan_logit_gives_nan_row(dtype, target, device):
    inputs = make_tensors(dtype, device=device)
    with torch.no_grad():
        if target is None:
            inputs[0][0, 1, 0] = math.nan
        else:
            inputs[2][0, 1] = target
    losses, dx, *_ = differentiate(linear_cross_entropy, inputs, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[0, 1]] and dx.isnan().any(-1).nonzero().tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_dtypes_are_as_accurate_as_pytorch(dtype, reduction, device):
    """The error is at most twice that of PyTorch's functions on float32 logits."""
    inputs = make_tensors(dtype, rows=(300,), device=device)

    def compute_in_float32(x, w, target, b, **options):
        return F.cross_entropy(F.linear(x, w, b).float(), target, **options)

    results = differentiate(linear_cross_entropy, inputs, reduction=reduction, chunk_rows=64)
    baselines = differentiate(compute_in_float32, inputs, reduction=reduction)
    truth = differentiate(compute_loss, to_float64(inputs), reduction=reduction)
    assert results[0].dtype == torch.float32 and all(tensor.dtype == dtype for tensor in results[1:])
    for got, baseline, exact in zip(results, baselines, truth, strict=True):
        error, limit = ((tensor.double() - exact).norm() / exact.norm() for tensor in (got, baseline))
        assert error <= 2 * limit + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("logit", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_equal_large_logits_give_loss_log_2(dtype, logit, device):
    """Adding the logarithm to the maximum logit in float32 would lose it."""
    logit = min(logit, torch.finfo(dtype).max)
    bias = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
    weight = torch.full((2, 1), logit, dtype=dtype, device=device)
    target = torch.tensor([0], device=device)
    loss = linear_cross_entropy(torch.ones(1, 1, dtype=dtype, device=device), weight, target, bias)
    loss.backward()
    assert bias.grad is not None and bias.grad.tolist() == [-0.5, 0.5]
    torch.testing.assert_close(
        loss.double(), torch.tensor(math.log(2)).to(loss.device).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_invariant_to_logit_offset(smoothing, device):
    """Integers from 0 to 7 plus 2^20 are exact in float32; their sums are not."""
    target = torch.randint(0, 3000, (3,), generator=torch.Generator().manual_seed(1)).to(device)
    weight = torch.arange(3000, device=device).remainder(8).float()[:, None]
    ones, options = torch.ones(3, 2, device=device), {"reduction": "none", "label_smoothing": smoothing}
    weights = [torch.cat([weight, torch.full_like(weight, offset)], 1) for offset in (0.0, 2.0**20)]
    losses = [linear_cross_entropy(ones, shifted, target, **options) for shifted in weights]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_confident_rows_have_small_nonzero_loss(device):
    weight = torch.cat([torch.eye(32), torch.zeros(32, 32)]).to(device)
    inputs = (20 * torch.eye(32, device=device), weight, torch.arange(32, device=device))
    loss = linear_cross_entropy(*inputs, reduction="none")
    torch.testing.assert_close(
        loss.double(), compute_loss(*to_float64(inputs), reduction="none"), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(
    ("dtype", "classes", "options"),
    [
        (torch.bfloat16, 4099, {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.01}),
        (torch.float32, 8221, {}),
        (torch.bfloat16, 33001, {"label_smoothing": 0.1}),
        (torch.float32, 2040, {"softcap": 4.0, "z_loss": 0.01}),
        (torch.float64, 301, {"softcap": 4.0}),
    ],
    ids=str,
)
def test_many_classes_are_accurate(dtype, classes, options, device):
    """Small and large blocks of threads, with and without unrolled vector loads."""
    inputs = make_tensors(dtype, rows=(3,), classes=classes, features=1, device=device)
    # Compute the reference from the same rounded logits.
    rounded = F.linear(inputs[0].detach(), inputs[1].detach(), inputs[3].detach()).double()
    loss = linear_cross_entropy(*inputs, reduction="none", **options)
    unrounded = make_tensors(rows=(3,), classes=classes, features=1, device=device)
    eye = torch.eye(3, dtype=torch.float64, device=device)
    exact = compute_loss(eye, rounded.t().contiguous(), unrounded[2], None, reduction="none", **options)
    torch.testing.assert_close(
        loss.double(), exact, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=1e-6
    )
    expected = differentiate(compute_loss, to_float64(inputs), reduction="none", **options)
    got = differentiate(linear_cross_entropy, inputs, reduction="none", **options)
    limit = 1e-11 if dtype == torch.float64 else 20 * torch.finfo(dtype).eps
    for actual, reference in zip(got[1:], expected[1:], strict=True):
        assert (actual.double() - reference).norm() <= limit * reference.norm()


@pytest.mark.slow
def test_more_rows_than_the_grid_y_limit(device):
    inputs = make_tensors(torch.float32, rows=(65_537,), classes=2, features=1, device=device)
    assert_matches_reference(inputs, 1e-5, reduction="sum", chunk_rows=70_000)


def test_weight_gradient_accumulates_in_float32(device):
    """Rounding the sum to bfloat16 after each of 128 chunks would accumulate error."""
    inputs = make_tensors(torch.bfloat16, rows=(128,), bias=False, device=device)
    exact = differentiate(compute_loss, to_float64(inputs))[2]
    errors = [
        (differentiate(linear_cross_entropy, inputs, chunk_rows=rows)[2].double() - exact).norm()
        / exact.norm()
        for rows in (1, 128)
    ]
    assert errors[0] < 1.1 * errors[1] < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [1, 257, 1030])
def test_weight_gradient_is_converted_in_place(dtype, classes, device):
    """The in-place conversion never overwrites float32 sums before they are read."""
    inputs = make_tensors(dtype, rows=(24,), bias=False, classes=classes, features=640, device=device)
    inputs = [0.05 * inputs[0].detach(), *inputs[1:]]
    loss, _, got = differentiate(linear_cross_entropy, inputs, reduction="sum", chunk_rows=6)
    exact = differentiate(compute_loss, to_float64(inputs), reduction="sum")
    assert got.dtype == dtype and torch.allclose(loss.double(), exact[0], rtol=1e-2)
    assert (got.double() - exact[2]).norm() <= 2e-2 * exact[2].norm()


@pytest.mark.slow
def test_gradient_scale_is_applied_before_rounding(device):
    """A probability of 1 / 400 divided by 1,000 is subnormal in float16, but not after scaling by 65,536."""
    input, weight, target, _ = make_tensors(
        torch.float16, rows=(1000,), classes=400, bias=False, device=device
    )
    small = (0.01 * weight).detach()
    (got,) = torch.autograd.grad(linear_cross_entropy(input, small, target) * 65536, [input])
    exact = torch.autograd.grad(compute_loss(input.double(), small.double(), target) * 65536, [input])[0]
    assert (got.double() - exact.double()).norm() < 4e-3 * exact.double().norm()


# ---- Matmuls and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_logits_are_never_stored(reduction, measure_peak, device):
    inputs = make_tensors(torch.float32, rows=(256,), classes=2048, bias=False, device=device)

    def make_backward(function, **options):
        return lambda: torch.autograd.grad(
            function(*inputs, reduction=reduction, **options).sum(), inputs[:2]
        )

    logits_bytes = 256 * 2048 * 4
    assert (
        measure_peak(make_backward(linear_cross_entropy, chunk_rows=32))
        < logits_bytes
        < measure_peak(make_backward(compute_loss))
    )


def test_weight_gradient_peak_memory(measure_peak, device):
    inputs = make_tensors(torch.bfloat16, rows=(64,), classes=1024, features=2048, bias=False, device=device)

    def compute_weight_gradient():
        torch.autograd.grad(linear_cross_entropy(*inputs, chunk_rows=32, reduction="sum"), [inputs[1]])

    compute_weight_gradient()  # cuBLAS allocates its workspace once
    # The float32 sum, the first converted chunk, and small tensors; a separate gradient would add 4 MiB.
    assert measure_peak(compute_weight_gradient) < 4 * inputs[1].numel() + 4 * 2**18 + 2**20


def list_matmuls(profile):
    """Return the profiler events of matmuls."""
    return [event for event in profile.events() or () if event.name in ("aten::mm", "aten::addmm")]


@pytest.mark.parametrize(
    ("reduction", "frozen", "matmuls"),
    [("mean", "", 3), ("sum", "weight", 2), ("mean", "input", 2), ("none", "", 4), ("none", "weight", 3)],
)
def test_only_required_matmuls_run(reduction, frozen, matmuls, device):
    """Each chunk needs the logits, dx and dW; reduction "none" recomputes the logits."""
    input, weight, target, bias = make_tensors(device=device)
    {"weight": weight, "input": input}.get(frozen, bias).requires_grad_(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear_cross_entropy(input, weight, target, bias, reduction=reduction, chunk_rows=2).sum().backward()
    assert len(list_matmuls(profile)) == 5 * matmuls  # five chunks
    assert {"weight": weight.grad, "input": input.grad}.get(frozen) is None


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "matmuls"), [(24, 3), (27, 6), (5, 3)])
def test_unaligned_classes_use_separate_matmuls(classes, matmuls, device):
    """One cuBLAS call over all classes would take five times as long."""
    inputs = make_tensors(torch.float16, classes=classes, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = differentiate(linear_cross_entropy, inputs, reduction="sum", chunk_rows=16)
    assert len(list_matmuls(profile)) == matmuls
    for actual, exact in zip(
        got, differentiate(compute_loss, to_float64(inputs), reduction="sum"), strict=True
    ):
        assert (actual.double() - exact).norm() < 1e-2 * exact.norm()


def test_no_graph_is_saved_without_gradients(device, launch_log):
    inputs = make_tensors(device=device)
    with torch.no_grad():
        loss = linear_cross_entropy(*inputs)
    assert loss.grad_fn is None and len(launch_log()) == 1
    assert linear_cross_entropy(*make_tensors(requires_grad=False, device=device)).grad_fn is None


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph_can_be_differentiated_again(reduction, device):
    input, weight, target, bias = make_tensors(device=device)
    leaves = [input, weight, bias]
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction).sum()
    factor = torch.tensor(3.0, device=device).double()
    first = torch.autograd.grad(loss, leaves, factor, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, leaves, factor)
    for second_gradient, gradient, expected in zip(second, first, copies, strict=True):
        torch.testing.assert_close(second_gradient, expected)
        assert torch.equal(gradient, expected) and second_gradient.data_ptr() != gradient.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_negated_output_gradient(reduction, device):
    """Autograd passes a negated view as the gradient of an imaginary part."""
    inputs = make_tensors(rows=(1,), device=device)
    input, weight, _, bias = inputs
    target = torch.tensor([2], device=device)
    leaves = [input, weight, bias]
    expected = torch.autograd.grad(
        compute_loss(input, weight, target, bias, reduction=reduction).sum(), leaves
    )
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction)
    negated = []
    loss.register_hook(lambda grad: negated.append(grad.is_neg()))
    value = torch.complex(torch.zeros_like(loss), loss)
    (value.conj() * torch.tensor(1j, device=device)).real.sum().backward()
    assert negated == [True]
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_forward_gradients_are_scaled_in_place(device, launch_log):
    """One kernel per gradient reads the scale from GPU memory."""
    input, weight, target, bias = make_tensors(device=device)
    linear_cross_entropy(input, weight, target, bias).backward()
    assert [name.startswith(ROWS_KERNEL) for name in launch_log.names] == [True, False, False, False]


@pytest.mark.parametrize(("rows", "chunk"), [(8192, 2048), (8193, 1664), (100, 128), (0, 128)])
def test_default_chunk_rows(rows, chunk):
    """Chunks have nearly equal sizes: multiples of 128, at most 2,048 rows."""
    assert OPS.linear_cross_entropy_chunk_rows(rows) == chunk


# ---- In models ----------------------------------------------------------------------------------------------


class OpRecorder(TorchDispatchMode):
    """Records the names of dispatched operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dispatch_modes_see_the_operators(reduction, device):
    inputs = make_tensors(device=device)
    expected = differentiate(linear_cross_entropy, inputs, reduction=reduction)
    with OpRecorder() as recorder:
        actual = differentiate(linear_cross_entropy, inputs, reduction=reduction)
    operators = [name for name in recorder.names if name.startswith("mojo_workbook")]
    passes = ("forward", "backward")[: 1 + (reduction == "none")]
    assert operators == [f"mojo_workbook::linear_cross_entropy_{direction}" for direction in passes]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_compiled_call_matches_eager(reduction, dtype, device):
    inputs = make_tensors(dtype, device=device)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=False)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    eager = differentiate(linear_cross_entropy, inputs, **options)
    torch.testing.assert_close(differentiate(compiled, inputs, **options), eager)


def test_compiled_call_accepts_dynamic_rows(device):
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 12):
        inputs = make_tensors(rows=(rows,), device=device)
        for got, expected in zip(
            differentiate(compiled, inputs), differentiate(compute_loss, inputs), strict=True
        ):
            torch.testing.assert_close(got, expected)


def test_autocast_with_a_frozen_weight(device):
    input, weight, target, bias = make_tensors(torch.float32, device=device)
    weight.requires_grad_(False)

    def step():
        with torch.autocast(device, torch.bfloat16):
            return linear_cross_entropy(input, weight, target, bias)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = function()
        results.append([loss, *torch.autograd.grad(loss, [input, bias])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    exact = compute_loss(input, weight, target, bias)
    assert 1e-5 < (results[0][0] - exact).abs() / exact < 1e-2 and results[0][1].dtype == torch.float32


@pytest.mark.parametrize("reduction", [0, 1])
def test_operators_pass_opcheck(reduction, device):
    input, weight, target, bias = make_tensors(torch.float32, device=device)
    torch.library.opcheck(
        OPS.linear_cross_entropy.default, (input, weight, bias, target, -100, 0.1, reduction, 0.01, 2.0, 4)
    )
    detached = [tensor.detach() for tensor in (input, weight, bias)]
    arguments = (target, [-100, reduction, 4], [0.1, 0.01, 2.0], 7)
    torch.library.opcheck(OPS.linear_cross_entropy_forward.default, (*detached, *arguments))
    grad = torch.ones(target.shape, device=device)
    torch.library.opcheck(OPS.linear_cross_entropy_backward.default, (grad, *detached, *arguments))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensor_hooks_and_checkpoints(reduction, device):
    inputs = make_tensors(device=device)
    expected = differentiate(linear_cross_entropy, inputs, reduction=reduction)

    def run_with_checkpoint(*arguments, reentrant, **options):
        return checkpoint(linear_cross_entropy, *arguments, use_reentrant=reentrant, **options)

    def unalign(tensor):
        flat = tensor.reshape(-1)
        return torch.cat([flat[:1], flat])[1:].view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unalign):
        with_unaligned_tensors = differentiate(linear_cross_entropy, inputs, reduction=reduction)
    with torch.autograd.graph.save_on_cpu():
        with_cpu_tensors = differentiate(linear_cross_entropy, inputs, reduction=reduction)
    with_checkpoint = differentiate(run_with_checkpoint, inputs, reentrant=False, reduction=reduction)
    for actual in (with_cpu_tensors, with_checkpoint):
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    # On some CPUs PyTorch's matmul rounds unaligned float64 rows in another order.
    torch.testing.assert_close(with_unaligned_tensors, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_autograd_matches_eager(reduction, device):
    inputs = make_tensors(device=device)
    eager = differentiate(linear_cross_entropy, inputs, reduction=reduction)
    input, weight, target, bias = inputs
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction)
        loss.backward(torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape).to(loss.dtype))
    for leaf, expected in zip((input, weight, bias), eager[1:], strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def test_in_place_modification_of_weight_is_detected(device):
    input, weight, target, bias = make_tensors(device=device)
    loss = linear_cross_entropy(input, weight, target, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_module_matches_the_function_and_linear(device):
    input, _, target, _ = make_tensors(torch.float32, device=device)
    layer = LinearCrossEntropy(H, V, True, softcap=3.0, label_smoothing=0.1, chunk_rows=4, device=device)
    linear = nn.Linear(H, V, device=device)
    layer.load_state_dict(linear.state_dict())
    expected = compute_loss(input, linear.weight, target, linear.bias, softcap=3.0, label_smoothing=0.1)
    torch.testing.assert_close(layer(input, target), expected)
    torch.testing.assert_close(layer.logits(input), 3 * torch.tanh(linear(input) / 3))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(input, target), layer(input, target)) and copied.weight is not layer.weight
    assert repr(copied) == "LinearCrossEntropy(in_features=7, out_features=11, bias=True, reduction='mean')"


def test_weight_tied_to_an_embedding(device):
    tokens = torch.tensor([1, 4, 4, 9], device=device)
    grads = []
    for fused in (True, False):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(V, H).to(device), LinearCrossEntropy(H, V, device=device)
        head.weight = embedding.weight
        input = embedding(tokens)
        loss = head(input, tokens) if fused else F.cross_entropy(F.linear(input, embedding.weight), tokens)
        loss.backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads)


def test_explain_reports_backend_and_chunks(device):
    layer = LinearCrossEntropy(H, V, chunk_rows=3)
    assert layer.explain(torch.ones(2, 4, H, device=device)) == {
        "rows": "kernels (float32)",
        "products": "library",
        "chunks": "3 of 3 rows",
        "gradients": "forward pass",
    }
    layer = LinearCrossEntropy(H, V, reduction="none")
    assert layer.explain(torch.ones(0, H, device=device).bfloat16()) == {
        "rows": "kernels (bfloat16)",
        "products": "library",
        "chunks": "0 of 128 rows",
        "gradients": "backward pass, from recomputed logits",
    }
    assert layer.explain(torch.ones(1, H, device=device).int())["rows"].endswith("no kernels for int32")


# ---- Fallback to PyTorch's operations ---------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative_passes_gradgradcheck(reduction, device):
    input, weight, target, bias = make_tensors(rows=(2, 2), classes=5, features=3, device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}
    assert torch.autograd.gradgradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, target, b, **options), (input, weight, bias)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms_and_tangents_match_reference(options, reduction, device, launch_log):
    input, weight, target, bias = make_tensors(
        requires_grad=False, ignored=options.get("ignore_index", -100), device=device
    )

    def run_operator(x):
        return linear_cross_entropy(x, weight, target, bias, reduction=reduction, **options).sum()

    def run_reference(x):
        return compute_loss(x, weight, target, bias, reduction=reduction, **options).sum()

    torch.testing.assert_close(torch.func.grad(run_operator)(input), torch.func.grad(run_reference)(input))
    input_and_tangent = (input, torch.ones_like(input))
    torch.testing.assert_close(
        torch.func.jvp(run_operator, *zip(input_and_tangent)),
        torch.func.jvp(run_reference, *zip(input_and_tangent)),
    )
    with forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(f(forward_ad.make_dual(*input_and_tangent))).tangent
            for f in (run_operator, run_reference)
        ]
    torch.testing.assert_close(*tangents)
    batches = torch.stack([input, 2 * input])
    torch.testing.assert_close(
        torch.func.vmap(run_operator)(batches), torch.func.vmap(run_reference)(batches)
    )
    assert not launch_log()


@pytest.mark.parametrize(
    ("classes", "expected"), [(2**31 - 4096, True), (2**31 - 4095, False), (2**31 + 8, False)]
)
def test_class_counts_beyond_int32_fall_back_to_pytorch(classes, expected, device):
    with FakeTensorMode(), OpRecorder() as recorder:
        input = torch.empty(3, 1, device=device)
        weight = torch.empty(classes, 1, device=device)
        linear_cross_entropy(input, weight, torch.empty(3, dtype=torch.int64, device=device))
    assert ("mojo_workbook::linear_cross_entropy_forward" in recorder.names) is expected
