"""Linear with cross-entropy: against autograd of PyTorch's two functions, its memory, its products, and what it refuses.

The kernels themselves run on the virtual GPU in tests/nn/kernels/test_cross_entropy_kernels.py; here a module written with torch stands in the
place of the built one.
"""

import copy
import ctypes
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from harness.nn import (
    LinearCrossEntropy,
    cross_entropy,
    cross_entropy_chunks,
    extension_kernels,
    linear_cross_entropy,
)
from harness.nn.cross_entropy_chunks import Loss, RowKernels, rows_by_torch

H, V, ROWS = 7, 11, (2, 5)
PLAIN = Loss(-100, 0.0, 0.0, 0.0)
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 2.0},
    {"label_smoothing": 0.3, "z_loss": 0.02, "softcap": 1.5, "ignore_index": 3},
]


def tensors(dtype=torch.float64, rows=ROWS, bias=True, classes=V, requires_grad=True, ignored=-100) -> Any:
    """input, weight, target, of which one row is ignored, and bias."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(requires_grad)

    target = torch.randint(0, classes, rows, generator=generator)
    if target.numel():
        target.view(-1)[-1] = ignored
    return randn(*rows, H), randn(classes, H), target, randn(classes) if bias else None


def plain_torch(
    input,
    weight,
    target,
    bias=None,
    *,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    ignore_index=-100,
    **options,
):
    """The formula, from PyTorch's own functions."""
    logits = F.linear(input, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = target.flatten()
    losses = F.cross_entropy(logits, rows, ignore_index=ignore_index, reduction="none", **options)
    counted = rows != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def two_functions(input, weight, target, bias, reduction):
    """What the layer takes the place of."""
    losses = F.cross_entropy(
        F.linear(input, weight, bias).flatten(0, -2), target.flatten(), reduction=reduction
    )
    return losses.view(target.shape) if reduction == "none" else losses


def loss_and_gradients(function, given, grad=None, **options):
    """The loss, and the gradients of input, weight and bias, from a gradient of the loss that is no 1."""
    input, weight, target, bias = given
    leaves = [each.detach().clone().requires_grad_() for each in (input, weight, bias) if each is not None]
    loss = function(*leaves[:2], target, *leaves[2:], **options)
    grad = torch.linspace(0.5, 2, loss.numel()).view(loss.shape) if grad is None else grad
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss.dtype))]


def assert_equal_to_torch(given, tolerance=1e-13, **options):
    ours = loss_and_gradients(linear_cross_entropy, given, **options)
    options.pop("chunk_rows", None)
    for got, expected in zip(ours, loss_and_gradients(plain_torch, given, **options), strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def module(monkeypatch):
    """A module written with torch in the place of the built one, and the CPU in the place of the GPU."""
    stand_in: Any = TorchModule()
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(extension_kernels, "current_device", lambda: -1)
    monkeypatch.setattr(extension_kernels, "current_stream", lambda index: {-1: TorchModule.STREAM}[index])
    table = {-1: RowKernels(stand_in, torch.device("cpu"))}
    monkeypatch.setattr(cross_entropy_chunks.kernels, "table", table)
    return stand_in


def at(address, dtype, *shape):
    """The tensor at an address."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class TorchModule:
    """Stands in for the extension module: the same calls, computed by torch on the memory behind the addresses."""

    STREAM = 4711

    def __init__(self):
        self.calls = []

    def open(self, index):
        return 27

    @staticmethod
    def dtypes(kind):
        dtype = {number: dtype for dtype, number in extension_kernels.KINDS.items()}[kind]
        return dtype, torch.float64 if kind == 4 else torch.float32

    def cross_entropy_rows(self, gpu, stream, scratch, available, kind, rows, classes, pitch, step, *rest):
        assert (gpu, stream, scratch, available) == (27, self.STREAM, 0, 0)
        wanted, ignored, smoothing, z, cap, *addresses = rest
        dtype, sums = self.dtypes(kind)
        assert pitch * dtype.itemsize % 16 == 0 and addresses[0] % 16 == 0 and pitch - classes < 16
        logits = at(addresses[0], dtype, rows, pitch)[:, :classes]
        scales = at(addresses[3], sums, rows if step else 1)
        losses, target = at(addresses[1], sums, rows), at(addresses[2], torch.int64, rows)
        rows_by_torch(logits, losses, target, scales, Loss(ignored, smoothing, z, cap), bool(wanted))
        self.calls.append(("rows", rows, bool(wanted)))

    def scale_unless_one(self, gpu, stream, scratch, available, kind, count, values, factor):
        assert (gpu, stream, scratch, available) == (27, self.STREAM, 0, 0)
        dtype, sums = self.dtypes(kind)
        at(values, dtype, count).mul_(at(factor, sums, 1))
        self.calls.append(("scale", count))


# ---- The same as PyTorch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [None, 4, 1])
def test_agrees_with_autograd(options, reduction, chunk_rows):
    given = tensors(ignored=options.get("ignore_index", -100), bias=chunk_rows != 1)
    assert_equal_to_torch(given, reduction=reduction, chunk_rows=chunk_rows, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_agrees_with_autograd_through_the_module(module, options, reduction):
    given = tensors(ignored=options.get("ignore_index", -100))
    assert_equal_to_torch(given, reduction=reduction, chunk_rows=4, **options)
    assert [call[1] for call in module.calls if call[0] == "rows"][:3] == [4, 4, 2]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction):
    input, weight, target, bias = tensors()
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "chunk_rows": 4}
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, target, b, **options), (input, weight, bias)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", ["all ignored", "no rows", "one class", "one row", "no leading dimension"])
def test_the_smallest(case, reduction):
    rows = {"no rows": (0,), "one row": (1,), "no leading dimension": ()}.get(case, ROWS)
    given = list(tensors(rows=rows, classes=1 if case == "one class" else V, ignored=0))
    if case == "all ignored":
        given[2] = torch.full(rows, -100)
    if case == "no leading dimension":
        got = loss_and_gradients(linear_cross_entropy, given, reduction=reduction)
        given[0], given[2] = given[0].unsqueeze(0), given[2].unsqueeze(0)
    else:
        got = loss_and_gradients(linear_cross_entropy, given, reduction=reduction)
    theirs = loss_and_gradients(two_functions, given, reduction=reduction)
    for ours, expected in zip(got, theirs, strict=True):
        torch.testing.assert_close(ours, expected.view(ours.shape), rtol=1e-13, atol=1e-13, equal_nan=True)


def test_the_mean_of_nothing_is_nan_and_its_gradient_zero():
    input, weight, target, _ = tensors()
    loss = linear_cross_entropy(input, weight, torch.full_like(target, -100))
    loss.backward()
    assert loss.isnan() and not input.grad.any() and not weight.grad.any()


def test_tensors_that_do_not_lie_row_by_row():
    input, weight, target, bias = tensors(rows=(5, 2))
    given = (input.transpose(0, 1), weight.t().contiguous().t(), target.t(), bias.repeat(2)[::2])
    assert not any(each.is_contiguous() for each in given)
    assert_equal_to_torch(given, chunk_rows=3)


def test_a_masked_class_has_no_probability():
    """Its bias is -inf; without label smoothing that is no NaN."""
    input, weight, target, bias = tensors()
    with torch.no_grad():
        bias[4] = -math.inf
    assert_equal_to_torch((input, weight, target.where(target != 4, 0), bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("through", ["torch", "module"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_as_good_as_torch_in_narrow_dtypes(request, dtype, through, reduction):
    """No further from float64 than twice PyTorch's own functions, whose logits are taken to float32."""
    if through == "module":
        request.getfixturevalue("module")
    given = tensors(dtype, rows=(300,))

    def in_float(x, w, target, b, **options):
        return plain_torch_of(F.linear(x, w, b).float(), target, **options)

    def plain_torch_of(logits, target, reduction):
        return F.cross_entropy(logits, target, reduction=reduction)

    ours = loss_and_gradients(linear_cross_entropy, given, reduction=reduction, chunk_rows=64)
    theirs = loss_and_gradients(in_float, given, reduction=reduction)
    truth = loss_and_gradients(plain_torch, [None if t is None else t.double() if t.is_floating_point() else t for t in given], reduction=reduction)  # fmt: skip
    assert ours[0].dtype == torch.float32 and all(each.dtype == dtype for each in ours[1:])
    for got, other, exact in zip(ours, theirs, truth, strict=True):
        error, limit = ((each.double() - exact).norm() / exact.norm() for each in (got, other))
        assert error <= 2 * limit + torch.finfo(torch.float32).eps


def test_the_gradient_of_weight_is_added_up_in_float32():
    """Were it rounded to bfloat16 after each of 512 chunks, the error would be many times that of one chunk."""
    given = tensors(torch.bfloat16, rows=(512,), bias=False)
    exact = loss_and_gradients(
        plain_torch, [t.double() if t.is_floating_point() else t for t in given[:3]] + [None]
    )[2]
    errors = [
        (loss_and_gradients(linear_cross_entropy, given, chunk_rows=rows)[2].double() - exact).norm()
        / exact.norm()
        for rows in (1, 512)
    ]
    assert errors[0] < 1.1 * errors[1] < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [1, 100, 257, 530])
def test_the_sum_lies_in_the_gradient_s_own_memory(monkeypatch, dtype, classes):
    """What is narrowed there overwrites nothing that is still to be read, however the classes are cut."""
    monkeypatch.setattr(cross_entropy_chunks, "NARROWED_FIRST", 5)
    given = tensors(dtype, rows=(40,), bias=False, classes=classes)
    loss, _, got = loss_and_gradients(linear_cross_entropy, given, reduction="sum", chunk_rows=6)
    exact = loss_and_gradients(
        plain_torch, [t.double() if t.is_floating_point() else t for t in given[:3]] + [None], reduction="sum"
    )
    assert got.dtype == dtype and torch.allclose(loss.double(), exact[0], rtol=1e-2)
    assert (got.double() - exact[2]).norm() <= 1e-2 * exact[2].norm()


def test_a_wide_sum_and_the_gradient_take_little_more_memory_than_the_sum():
    weight = torch.ones(512, 640, dtype=torch.bfloat16)
    dlogits, x = torch.ones(8, 512, dtype=torch.bfloat16), torch.ones(8, 640, dtype=torch.bfloat16)
    with Live() as live:
        sums = cross_entropy_chunks.WeightSum(weight, chunked=True, narrow=True)
    with Live() as narrowing:
        gradient = sums.gradient()
    assert live.peak == 4 * weight.numel()
    assert narrowing.peak < 2.1 * 4 * cross_entropy_chunks.NARROWED_FIRST and gradient.dtype == weight.dtype
    sums.add(dlogits, x, first=True)
    assert (sums.gradient() == 8).all()


def test_a_scaler_s_factor_comes_before_the_rounding_of_float16():
    """1 / 60,000 of a probability of 1 / 11 is below what float16 has; times 65,536 it is not."""
    input, weight, target, _ = tensors(torch.float16, rows=(60_000,), bias=False)
    (got,) = torch.autograd.grad(linear_cross_entropy(input, weight, target) * 65536, [input])
    exact = torch.autograd.grad(plain_torch(input.double(), weight.double(), target) * 65536, [input])[0]
    assert (got.double() - exact).norm() < 2e-3 * exact.norm() and got.count_nonzero() > 0.98 * got.numel()


# ---- What it computes, and keeps ----------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes that results of operations have taken at a time, and the products that were made."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.products = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_never_stores_all_logits(reduction):
    rows, classes = 512, 4096
    given = tensors(torch.float32, rows=(rows,), classes=classes, bias=False)
    with Live() as plain:
        plain_torch(*given, reduction=reduction).sum().backward()
    with Live() as live:
        linear_cross_entropy(*given, reduction=reduction, chunk_rows=64).sum().backward()
    full = rows * classes * 4
    assert live.peak < full < plain.peak


@pytest.mark.parametrize(
    ("reduction", "frozen", "products"),
    [("mean", "", 3), ("sum", "weight", 2), ("mean", "input", 2), ("none", "", 4), ("none", "weight", 3)],
)
def test_only_the_products_that_are_wanted(reduction, frozen, products):
    """Of each chunk: the logits, dx and dW, and for "none" the logits once more."""
    input, weight, target, bias = tensors()
    (weight if frozen == "weight" else input).requires_grad_(not frozen)
    if not frozen:
        input.requires_grad_()
    with Live() as live:
        loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction, chunk_rows=2)
        loss.sum().backward()
    assert live.products == 5 * products  # as there are five chunks
    assert {"weight": weight.grad, "input": input.grad}.get(frozen) is None


def test_without_gradients_nothing_is_kept(module):
    given = tensors()
    with torch.no_grad():
        loss = linear_cross_entropy(*given)
    assert loss.grad_fn is None and module.calls == [("rows", 10, False)]
    frozen = tensors(requires_grad=False)
    assert linear_cross_entropy(*frozen).grad_fn is None


@pytest.mark.parametrize("through", ["torch", "module"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_graph_may_be_used_again(request, through, reduction):
    if through == "module":
        request.getfixturevalue("module")
    input, weight, target, bias = tensors()
    leaves = [input, weight, bias]
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, torch.tensor(3.0).double(), retain_graph=True)
    kept = [each.clone() for each in first]
    second = torch.autograd.grad(loss, leaves, torch.tensor(3.0).double())
    for again, gradient, before in zip(second, first, kept, strict=True):
        torch.testing.assert_close(again, before)
        assert torch.equal(gradient, before) and again.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_gradient_that_is_a_view_that_negates_is_read_as_what_it_stands_for(module, reduction):
    """As autograd makes one of the gradient of an imaginary part; a single number has no gaps, for which it would be copied."""
    input, weight, _, bias = tensors(rows=(1,))
    target = torch.tensor([2])
    leaves = [input, weight, bias]
    expected = torch.autograd.grad(
        plain_torch(input, weight, target, bias, reduction=reduction).sum(), leaves
    )
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction)
    seen = []
    loss.register_hook(lambda grad: seen.append(grad.is_neg()))
    number = torch.complex(torch.zeros_like(loss), loss)
    (number.conj() * torch.tensor(1j)).real.sum().backward()
    assert seen == [True]
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_the_forward_pass_s_gradients_are_scaled_where_they_lie(module):
    """By a launch for each that reads the factor on the GPU."""
    input, weight, target, bias = tensors()
    linear_cross_entropy(input, weight, target, bias).backward()
    assert module.calls == [("rows", 10, True), ("scale", 70), ("scale", 77), ("scale", 11)]


def test_the_same_bits_in_every_run():
    given = tensors(torch.float32)
    runs = [loss_and_gradients(linear_cross_entropy, given, chunk_rows=3) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("device", "rows", "chunk"),
    [("cuda", 8192, 2048), ("cuda", 8193, 1664), ("cuda", 100, 128), ("cpu", 8192, 256), ("cpu", 0, 128)],
)
def test_chunks_of_one_size(device, rows, chunk):
    """On a GPU 2,048 rows, on a CPU 32 MiB; in steps of 128, and the last no crumb."""
    got = cross_entropy_chunks.rows_of_a_chunk(rows, 50257, torch.bfloat16, torch.device(device))
    assert got == chunk


# ---- In models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_graphs_hold_it_as_one_operator(reduction, dtype):
    given = tensors(dtype)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"reduction": reduction, "label_smoothing": 0.1}
    plain = loss_and_gradients(linear_cross_entropy, given, **options)
    for got, expected in zip(loss_and_gradients(compiled, given, **options), plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_compiled_under_autocast_with_a_frozen_weight():
    input, weight, target, bias = tensors(torch.float32)
    weight.requires_grad_(False)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(input, weight, target, bias)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = function()
        results.append([loss, *torch.autograd.grad(loss, [input, bias])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    exact = plain_torch(input, weight, target, bias)
    assert 1e-5 < (results[0][0] - exact).abs() / exact < 1e-2 and results[0][1].dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_operators_pass_torch_s_own_checks(reduction):
    input, weight, target, bias = tensors(torch.float32)
    options = Loss(-100, 0.1, 0.01, 2.0, reduction, 7, 4)
    torch.library.opcheck(
        cross_entropy.operator, (input, weight, bias, target, *options),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip
    given = [each.detach() for each in (torch.ones(ROWS), input, weight, bias)]
    torch.library.opcheck(
        cross_entropy.operator_backward, (*given, target, *options._replace(reduction="none")),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_the_module_is_the_function_and_a_linear_layer():
    input, _, target, _ = tensors(torch.float32)
    layer = LinearCrossEntropy(H, V, True, softcap=3.0, label_smoothing=0.1, chunk_rows=4)
    linear = nn.Linear(H, V)
    layer.load_state_dict(linear.state_dict())
    expected = plain_torch(input, linear.weight, target, linear.bias, softcap=3.0, label_smoothing=0.1)
    torch.testing.assert_close(layer(input, target), expected)
    torch.testing.assert_close(layer.logits(input), 3 * torch.tanh(linear(input) / 3))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(input, target), layer(input, target)) and copied.weight is not layer.weight
    assert repr(copied) == "LinearCrossEntropy(in_features=7, out_features=11, bias=True, reduction='mean')"
    assert LinearCrossEntropy(H, V).bias is None


def test_a_weight_that_is_tied_to_an_embedding_gets_both_gradients():
    tokens = torch.tensor([1, 4, 4, 9])
    grads = []
    for own in (True, False):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(V, H), LinearCrossEntropy(H, V)
        head.weight = embedding.weight
        input = embedding(tokens)
        loss = head(input, tokens) if own else F.cross_entropy(F.linear(input, embedding.weight), tokens)
        loss.backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads)


def test_explain(module):
    layer = LinearCrossEntropy(H, V, chunk_rows=3)
    assert layer.explain(torch.ones(2, 4, H)) == {
        "rows": "extension module",
        "products": "library",
        "chunks": "3 of 3 rows",
        "gradients": "forward pass",
    }
    layer = LinearCrossEntropy(H, V, reduction="none")
    assert layer.explain(torch.ones(0, H, device="meta")) == {
        "rows": "PyTorch's operations",
        "products": "library",
        "chunks": "0 of 128 rows",
        "gradients": "backward pass, from logits computed again",
    }


@pytest.mark.parametrize(("classes", "products"), [(24, 3), (27, 6), (5, 3)])
def test_classes_that_fill_no_vector_are_products_of_their_own(module, classes, products):
    """On a GPU, where the library would take five times as long for all; both together give every result."""
    input, weight, target, bias = tensors(torch.float16, classes=classes)
    with Live() as live:
        results = cross_entropy_chunks.compute(
            input.detach().view(-1, H),
            weight.detach(),
            bias.detach(),
            target.view(-1),
            torch.ones(1),
            PLAIN._replace(chunk_rows=16),
            7,
        )
    assert live.products == products
    exact = loss_and_gradients(
        plain_torch, [input.double(), weight.double(), target, bias.double()], reduction="sum"
    )
    for got, other in zip((results.dx, results.dW, results.db), exact[1:], strict=True):
        assert got is not None and (got.double() / 2 - other.view(got.shape)).norm() < 1e-2 * other.norm()


# ---- What it refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    input, weight, target, bias = tensors()
    loss = linear_cross_entropy(input, weight, target, bias, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, [input], create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy has no double backward"):
        gradient.sum().backward()


def wrong(position, value):
    """The arguments with another one at a position."""
    given = list(tensors(torch.float32))
    given[position] = value(given[position])
    return given


@pytest.mark.parametrize(
    ("position", "value", "error", "words"),
    [
        (0, lambda t: t.tolist(), TypeError, "input: expected a torch tensor, got list"),
        (0, lambda t: t.int(), TypeError, "input: expected float32, float64, bfloat16, float16, got int32"),
        (0, lambda t: t[0, 0, 0], ValueError, r"input: expected at least one dimension, \[..., H\], got a scalar"),
        (1, lambda t: t.to_sparse(), TypeError, "weight: expected a dense tensor, got a sparse_coo one"),
        (1, lambda t: t.double(), TypeError, "weight: expected float32, as input, got float64"),
        (1, lambda t: t[:, 1:], ValueError, r"weight: expected shape \[V, 7\], .*, V >= 1, got \[11, 6\]"),
        (1, lambda t: t[:0], ValueError, r"weight: expected shape \[V, 7\], .*, V >= 1, got \[0, 7\]"),
        (1, lambda t: t.to("meta"), ValueError, "weight: expected it on cpu, as input, got meta"),
        (2, lambda t: t.int(), TypeError, "target: expected int64 classes, got int32"),
        (2, lambda t: t[0], ValueError, r"target: expected shape \[2, 5\], .* got \[5\]"),
        (2, lambda t: t.clone().index_fill_(1, torch.tensor([3]), 11), ValueError,
         r"target: expected classes from 0 to 10, or ignore_index -100, got 11 at \[0, 3\]"),
        (2, lambda t: t.clone().index_fill_(1, torch.tensor([2]), -1), ValueError, r"got -1 at \[0, 2\]"),
        (3, lambda t: t[1:], ValueError, r"bias: expected shape \[11\], the rows of weight, got \[10\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(position, value, error, words):
    with pytest.raises(error, match=words):
        linear_cross_entropy(*wrong(position, value))


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("reduction", "average", ValueError, "reduction: expected 'mean', 'sum', 'none', got 'average'"),
        ("ignore_index", 1.5, TypeError, "ignore_index: expected an integer, got float"),
        ("label_smoothing", "a lot", TypeError, "label_smoothing: expected a number, got str"),
        ("label_smoothing", 1.5, ValueError, "label_smoothing: expected a number from 0 to 1, got 1.5"),
        ("z_loss", -1.0, ValueError, "z_loss: expected a number that is not negative, got -1.0"),
        ("softcap", 0, ValueError, "softcap: expected a number above 0, or None, got 0"),
        ("chunk_rows", True, TypeError, "chunk_rows: expected an integer, got bool"),
        ("chunk_rows", 0, ValueError, "chunk_rows: expected at least 1, got 0"),
    ],
)
def test_options_that_there_are_not(option, value, error, words):
    with pytest.raises(error, match=words):
        linear_cross_entropy(*tensors(), **{option: value})
    with pytest.raises(error, match=words):
        LinearCrossEntropy(H, V, **{option: value})


def test_options_that_torch_does_not_refuse_agree_with_the_smallest_and_largest():
    for smoothing, z in itertools.product((0, 1), (0, 1)):
        assert_equal_to_torch(tensors(), label_smoothing=float(smoothing), z_loss=z)
