"""The operator of linear with cross-entropy: against autograd and float64, its memory, its products, and use in models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loss_checks import (
    OPTIONS,
    H,
    V,
    assert_matches_formula,
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
NARROW = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.mojo_workbook
ROWS_KERNEL = "cross_entropy_rows"


# ---- Values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_agrees_with_autograd(options, reduction, chunk_rows, launched, device):
    given = make_tensors(ignored=options.get("ignore_index", -100), bias=chunk_rows is None, device=device)
    assert_matches_formula(given, reduction=reduction, chunk_rows=chunk_rows, **options)
    rows = [launch.grid[0] for launch in launched() if launch.name.startswith(ROWS_KERNEL)]
    of_one_pass = [10] if chunk_rows is None else [4, 4, 2]
    assert rows == of_one_pass * (2 if reduction == "none" else 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", ["all ignored", "no rows", "one class", "one row", "no leading dimension"])
def test_smallest_sizes(case, reduction, device):
    rows = {"no rows": (0,), "one row": (1,), "no leading dimension": ()}.get(case, (2, 5))
    given = list(make_tensors(rows=rows, classes=1 if case == "one class" else V, ignored=0, device=device))
    if case == "all ignored":
        given[2] = torch.full_like(given[2], -100)

    def two_functions(input, weight, target, bias, reduction):
        logits = F.linear(input, weight, bias).reshape(target.numel(), len(weight))
        losses = F.cross_entropy(logits, target.flatten(), reduction=reduction)
        return losses.view(target.shape) if reduction == "none" else losses

    got, expected = (
        differentiate(function, given, reduction=reduction)
        for function in (linear_cross_entropy, two_functions)
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_noncontiguous_tensors(device):
    input, weight, target, bias = make_tensors(rows=(5, 2), device=device)
    given = (input.transpose(0, 1), weight.t().contiguous().t(), target.t(), bias.repeat(2)[::2])
    assert not any(each.is_contiguous() for each in given)
    assert_matches_formula(given, chunk_rows=3)


def test_class_with_bias_minus_infinity(device):
    """Without label smoothing the loss is not NaN."""
    input, weight, target, bias = make_tensors(device=device)
    with torch.no_grad():
        bias[4] = -math.inf
    assert_matches_formula((input, weight, target.where(target != 4, 0), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", [-1, V, V + 3, None])
def test_invalid_target_or_nan_logit_gives_nan_row(dtype, target, device):
    given = make_tensors(dtype, device=device)
    with torch.no_grad():
        if target is None:
            given[0][0, 1, 0] = math.nan
        else:
            given[2][0, 1] = target
    losses, dx, *_ = differentiate(linear_cross_entropy, given, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[0, 1]] and dx.isnan().any(-1).nonzero().tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_dtypes_are_as_accurate_as_pytorch(dtype, reduction, device):
    """At most twice the error of PyTorch's functions on float32 logits."""
    given = make_tensors(dtype, rows=(300,), device=device)

    def in_float(x, w, target, b, **options):
        return F.cross_entropy(F.linear(x, w, b).float(), target, **options)

    ours = differentiate(linear_cross_entropy, given, reduction=reduction, chunk_rows=64)
    theirs = differentiate(in_float, given, reduction=reduction)
    truth = differentiate(compute_loss, to_float64(given), reduction=reduction)
    assert ours[0].dtype == torch.float32 and all(each.dtype == dtype for each in ours[1:])
    for got, other, exact in zip(ours, theirs, truth, strict=True):
        error, limit = ((each.double() - exact).norm() / exact.norm() for each in (got, other))
        assert error <= 2 * limit + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("logit", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_equal_large_logits_have_the_loss_log_2(dtype, logit, device):
    """The sum of the largest logit and the logarithm does not fit one float32 number."""
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
def test_common_offset_of_logits_changes_nothing(smoothing, device):
    """Integers from 0 to 7 plus 2^20 are exact in float32, but sums of them are not."""
    target = torch.randint(0, 3000, (3,), generator=torch.Generator().manual_seed(1)).to(device)
    weight = torch.arange(3000, device=device).remainder(8).float()[:, None]
    given, options = torch.ones(3, 2, device=device), {"reduction": "none", "label_smoothing": smoothing}
    weights = [torch.cat([weight, torch.full_like(weight, offset)], 1) for offset in (0.0, 2.0**20)]
    losses = [linear_cross_entropy(given, each, target, **options) for each in weights]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_confident_rows_have_a_small_nonzero_loss(device):
    weight = torch.cat([torch.eye(32), torch.zeros(32, 32)]).to(device)
    given = (20 * torch.eye(32, device=device), weight, torch.arange(32, device=device))
    loss = linear_cross_entropy(*given, reduction="none")
    torch.testing.assert_close(
        loss.double(), compute_loss(*to_float64(given), reduction="none"), rtol=1e-4, atol=0
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
def test_rows_of_many_classes(dtype, classes, options, device):
    """Few and many threads; vectors loaded several at a time and one at a time."""
    given = make_tensors(dtype, rows=(3,), classes=classes, features=1, device=device)
    # Both compute their float64 logits from the same rounded tensors.
    rounded = F.linear(given[0].detach(), given[1].detach(), given[3].detach()).double()
    loss = linear_cross_entropy(*given, reduction="none", **options)
    cases = make_tensors(rows=(3,), classes=classes, features=1, device=device)
    eye = torch.eye(3, dtype=torch.float64, device=device)
    exact = compute_loss(eye, rounded.t().contiguous(), cases[2], None, reduction="none", **options)
    torch.testing.assert_close(
        loss.double(), exact, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=1e-6
    )
    expected = differentiate(compute_loss, to_float64(given), reduction="none", **options)
    got = differentiate(linear_cross_entropy, given, reduction="none", **options)
    limit = 1e-11 if dtype == torch.float64 else 20 * torch.finfo(dtype).eps
    for ours, other in zip(got[1:], expected[1:], strict=True):
        assert (ours.double() - other).norm() <= limit * other.norm()


@pytest.mark.slow
def test_more_rows_than_the_grid_y_limit(device):
    given = make_tensors(torch.float32, rows=(65_537,), classes=2, features=1, device=device)
    assert_matches_formula(given, 1e-5, reduction="sum", chunk_rows=70_000)


def test_weight_gradient_accumulates_in_float32(device):
    """Rounding to bfloat16 after each of 128 chunks would multiply the error."""
    given = make_tensors(torch.bfloat16, rows=(128,), bias=False, device=device)
    exact = differentiate(compute_loss, to_float64(given))[2]
    errors = [
        (differentiate(linear_cross_entropy, given, chunk_rows=rows)[2].double() - exact).norm()
        / exact.norm()
        for rows in (1, 128)
    ]
    assert errors[0] < 1.1 * errors[1] < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [1, 257, 1030])
def test_float32_sum_shares_the_gradients_memory(dtype, classes, device):
    """The conversion in place overwrites nothing that is still to be read, for any number of classes."""
    given = make_tensors(dtype, rows=(24,), bias=False, classes=classes, features=640, device=device)
    given = [0.05 * given[0].detach(), *given[1:]]
    loss, _, got = differentiate(linear_cross_entropy, given, reduction="sum", chunk_rows=6)
    exact = differentiate(compute_loss, to_float64(given), reduction="sum")
    assert got.dtype == dtype and torch.allclose(loss.double(), exact[0], rtol=1e-2)
    assert (got.double() - exact[2]).norm() <= 2e-2 * exact[2].norm()


@pytest.mark.slow
def test_gradient_scaler_is_applied_before_rounding(device):
    """A probability of 1 / 400 divided by 1,000 is subnormal in float16, but not after scaling by 65,536."""
    input, weight, target, _ = make_tensors(
        torch.float16, rows=(1000,), classes=400, bias=False, device=device
    )
    small = (0.01 * weight).detach()
    (got,) = torch.autograd.grad(linear_cross_entropy(input, small, target) * 65536, [input])
    exact = torch.autograd.grad(compute_loss(input.double(), small.double(), target) * 65536, [input])[0]
    assert (got.double() - exact.double()).norm() < 4e-3 * exact.double().norm()


# ---- Products and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_never_stores_all_logits(reduction, peak, device):
    given = make_tensors(torch.float32, rows=(256,), classes=2048, bias=False, device=device)

    def both(function, **options):
        return lambda: torch.autograd.grad(function(*given, reduction=reduction, **options).sum(), given[:2])

    full = 256 * 2048 * 4
    assert peak(both(linear_cross_entropy, chunk_rows=32)) < full < peak(both(compute_loss))


def test_peak_memory_of_the_weight_gradient(peak, device):
    given = make_tensors(torch.bfloat16, rows=(64,), classes=1024, features=2048, bias=False, device=device)

    def gradient():
        torch.autograd.grad(linear_cross_entropy(*given, chunk_rows=32, reduction="sum"), [given[1]])

    gradient()  # cuBLAS allocates its workspace once
    # Bytes: the float32 sum, the piece that is converted first, and small tensors; a separate gradient would take 4 MiB.
    assert peak(gradient) < 4 * given[1].numel() + 4 * 2**18 + 2**20


def products_in(profile):
    """Return the matrix products in a profile."""
    return [event for event in profile.events() or () if event.name in ("aten::mm", "aten::addmm")]


@pytest.mark.parametrize(
    ("reduction", "frozen", "products"),
    [("mean", "", 3), ("sum", "weight", 2), ("mean", "input", 2), ("none", "", 4), ("none", "weight", 3)],
)
def test_only_required_products_are_computed(reduction, frozen, products, device):
    """For each chunk: the logits, dx and dW, and for "none" the logits again."""
    input, weight, target, bias = make_tensors(device=device)
    {"weight": weight, "input": input}.get(frozen, bias).requires_grad_(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear_cross_entropy(input, weight, target, bias, reduction=reduction, chunk_rows=2).sum().backward()
    assert len(products_in(profile)) == 5 * products  # five chunks
    assert {"weight": weight.grad, "input": input.grad}.get(frozen) is None


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "products"), [(24, 3), (27, 6), (5, 3)])
def test_unaligned_classes_are_separate_products(classes, products, device):
    """cuBLAS takes five times as long on all classes at once."""
    given = make_tensors(torch.float16, classes=classes, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = differentiate(linear_cross_entropy, given, reduction="sum", chunk_rows=16)
    assert len(products_in(profile)) == products
    for ours, exact in zip(got, differentiate(compute_loss, to_float64(given), reduction="sum"), strict=True):
        assert (ours.double() - exact).norm() < 1e-2 * exact.norm()


def test_nothing_is_saved_without_gradients(device, launched):
    given = make_tensors(device=device)
    with torch.no_grad():
        loss = linear_cross_entropy(*given)
    assert loss.grad_fn is None and len(launched()) == 1
    assert linear_cross_entropy(*make_tensors(requires_grad=False, device=device)).grad_fn is None


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph(reduction, device):
    input, weight, target, bias = make_tensors(device=device)
    leaves = [input, weight, bias]
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction).sum()
    three = torch.tensor(3.0, device=device).double()
    first = torch.autograd.grad(loss, leaves, three, retain_graph=True)
    kept = [each.clone() for each in first]
    second = torch.autograd.grad(loss, leaves, three)
    for again, gradient, before in zip(second, first, kept, strict=True):
        torch.testing.assert_close(again, before)
        assert torch.equal(gradient, before) and again.data_ptr() != gradient.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_negated_incoming_gradient(reduction, device):
    """Autograd creates such a view for the gradient of an imaginary part."""
    given = make_tensors(rows=(1,), device=device)
    input, weight, _, bias = given
    target = torch.tensor([2], device=device)
    leaves = [input, weight, bias]
    expected = torch.autograd.grad(
        compute_loss(input, weight, target, bias, reduction=reduction).sum(), leaves
    )
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction)
    seen = []
    loss.register_hook(lambda grad: seen.append(grad.is_neg()))
    number = torch.complex(torch.zeros_like(loss), loss)
    (number.conj() * torch.tensor(1j, device=device)).real.sum().backward()
    assert seen == [True]
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_gradients_of_forward_are_scaled_in_place(device, launched):
    """One launch per gradient reads the factor on the GPU."""
    input, weight, target, bias = make_tensors(device=device)
    linear_cross_entropy(input, weight, target, bias).backward()
    assert [name.startswith(ROWS_KERNEL) for name in launched.names] == [True, False, False, False]


@pytest.mark.parametrize(("rows", "chunk"), [(8192, 2048), (8193, 1664), (100, 128), (0, 128)])
def test_chunk_rows(rows, chunk):
    """At most 2,048 rows, a multiple of 128, and chunks of nearly equal size."""
    assert OPS.linear_cross_entropy_chunk_rows(rows) == chunk


# ---- In models ----------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Records the names of the dispatched operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dispatch_modes_see_the_operators(reduction, device):
    given = make_tensors(device=device)
    plain = differentiate(linear_cross_entropy, given, reduction=reduction)
    with Seen() as seen:
        watched = differentiate(linear_cross_entropy, given, reduction=reduction)
    own = [name for name in seen.names if name.startswith("mojo_workbook")]
    ends = ("forward", "backward")[: 1 + (reduction == "none")]
    assert own == [f"mojo_workbook::linear_cross_entropy_{end}" for end in ends]
    torch.testing.assert_close(watched, plain)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_compiled_call_matches_eager(reduction, dtype, device):
    given = make_tensors(dtype, device=device)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=False)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    plain = differentiate(linear_cross_entropy, given, **options)
    torch.testing.assert_close(differentiate(compiled, given, **options), plain)


def test_dynamic_rows_in_a_compiled_call(device):
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 12):
        given = make_tensors(rows=(rows,), device=device)
        for got, expected in zip(
            differentiate(compiled, given),
            differentiate(compute_loss, given),
            strict=True,
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
    detached = [each.detach() for each in (input, weight, bias)]
    rest = (target, [-100, reduction, 4], [0.1, 0.01, 2.0], 7)
    torch.library.opcheck(OPS.linear_cross_entropy_forward.default, (*detached, *rest))
    grad = torch.ones(target.shape, device=device)
    torch.library.opcheck(OPS.linear_cross_entropy_backward.default, (grad, *detached, *rest))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensor_hooks_and_checkpoints(reduction, device):
    given = make_tensors(device=device)
    plain = differentiate(linear_cross_entropy, given, reduction=reduction)

    def in_checkpoint(*arguments, reentrant, **options):
        return checkpoint(linear_cross_entropy, *arguments, use_reentrant=reentrant, **options)

    def unaligned(tensor):
        flat = tensor.reshape(-1)
        return torch.cat([flat[:1], flat])[1:].view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unaligned):
        shifted = differentiate(linear_cross_entropy, given, reduction=reduction)
    with torch.autograd.graph.save_on_cpu():
        moved = differentiate(linear_cross_entropy, given, reduction=reduction)
    again = differentiate(in_checkpoint, given, reentrant=False, reduction=reduction)
    for other in (shifted, moved, again):
        assert all(torch.equal(*pair) for pair in zip(other, plain, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_autograd(reduction, device):
    given = make_tensors(device=device)
    plain = differentiate(linear_cross_entropy, given, reduction=reduction)
    input, weight, target, bias = given
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction)
        loss.backward(torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape).to(loss.dtype))
    for leaf, expected in zip((input, weight, bias), plain[1:], strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def test_in_place_change_of_weight_is_detected(device):
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
    for own in (True, False):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(V, H).to(device), LinearCrossEntropy(H, V, device=device)
        head.weight = embedding.weight
        input = embedding(tokens)
        loss = head(input, tokens) if own else F.cross_entropy(F.linear(input, embedding.weight), tokens)
        loss.backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads)


def test_explain(device):
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
        "gradients": "backward pass, from logits computed again",
    }
    assert layer.explain(torch.ones(1, H, device=device).int())["rows"].endswith("no kernels for int32")


# ---- Calls that use PyTorch's operations ---------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative(reduction, device):
    input, weight, target, bias = make_tensors(device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}
    assert torch.autograd.gradgradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, target, b, **options), (input, weight, bias)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms_and_tangents_match_the_formula(options, reduction, device, launched):
    input, weight, target, bias = make_tensors(
        requires_grad=False, ignored=options.get("ignore_index", -100), device=device
    )

    def ours(x):
        return linear_cross_entropy(x, weight, target, bias, reduction=reduction, **options).sum()

    def exact(x):
        return compute_loss(x, weight, target, bias, reduction=reduction, **options).sum()

    torch.testing.assert_close(torch.func.grad(ours)(input), torch.func.grad(exact)(input))
    both = (input, torch.ones_like(input))
    torch.testing.assert_close(torch.func.jvp(ours, *zip(both)), torch.func.jvp(exact, *zip(both)))
    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(f(forward_ad.make_dual(*both))).tangent for f in (ours, exact)]
    torch.testing.assert_close(*tangents)
    batches = torch.stack([input, 2 * input])
    torch.testing.assert_close(torch.func.vmap(ours)(batches), torch.func.vmap(exact)(batches))
    assert not launched()


@pytest.mark.parametrize(
    ("classes", "expected"), [(2**31 - 4096, True), (2**31 - 4095, False), (2**31 + 8, False)]
)
def test_classes_beyond_32_bits_use_pytorch(classes, expected, device):
    with FakeTensorMode(), Seen() as seen:
        input = torch.empty(3, 1, device=device)
        weight = torch.empty(classes, 1, device=device)
        linear_cross_entropy(input, weight, torch.empty(3, dtype=torch.int64, device=device))
    assert ("mojo_workbook::linear_cross_entropy_forward" in seen.names) is expected
