"""The direct way from torch tensors to the extension module: what it passes, allocates, keeps, and when it steps aside.

Most tests run without a GPU: a module written with torch stands in the place of the built one. It computes from the
addresses that it is given, and memory comes from the CPU. The tests at the end want a real GPU.
"""

import copy
import ctypes
import math
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_checks import (
    EPS,
    GRAD_OUTPUTS,
    NAMES,
    ROWS,
    H,
    O,
    assert_as_good_as_torch,
    assert_near,
    assert_only_needed_gradients,
    layer_from,
    make_inputs,
    output_and_gradients,
    plain_torch,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typed import loosely, present

from harness.errors import EnvironmentProblem
from harness.nn import autograd, direct, layers, on_stream, products
from harness.nn.layers import LayerNormLinear
from harness.nn.products import LIBRARY, OWN, PADDED
from harness.toolchain import extension

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)
call_directly = loosely(autograd.call_directly)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

KINDS = {
    0: torch.float32,
    1: torch.float32,
    2: torch.bfloat16,
    3: torch.float16,
    4: torch.float64,
    5: torch.float32,
}


class TorchModule:
    """Stands in for the extension module: the same calls, computed by torch on the CPU memory behind the addresses.

    The scratch memory is overwritten first, so that a result which overlaps with it is lost. `calls` holds what was
    launched: the name, the kind and, of a backward pass, the gradients that were wanted. What a forward pass writes must lie in
    memory that was allocated for it, `allocated`: the address and the bytes of each tensor.
    """

    STREAM = 4711

    def __init__(self):
        self.calls = []
        self.allocated: list[tuple[int, int]] = []
        self.streams = {self.STREAM}

    def open(self, index):
        self.index = index
        return 22

    @staticmethod
    def needed(wanted, rows, H):
        """Any number; more of it for fewer gradients, as other kernels may do the work then. None: forward.

        And nothing for one row, as the module wants nothing for the smallest problems.
        """
        if rows == 1:
            return 0
        return (1 if wanted is None else 18 - wanted % 16) * rows * H * 8 // 256 * 256 + 256

    def start(self, gpu, stream, scratch, available, needed):
        """Whether to launch; counts otherwise."""
        if gpu == 0:
            assert (stream, scratch, available) == (0, 0, 0)
            return False
        assert gpu == 22 and stream in self.streams and available >= needed
        ctypes.memset(scratch, 0xFF, available)
        return True

    def empty_strided(self, size, strides, dtype):
        """What the layer allocates with."""
        tensor = torch.empty_strided(size, strides, dtype=dtype)
        self.allocated.append((tensor.data_ptr(), tensor.untyped_storage().nbytes()))
        return tensor

    def written(self, *tensors):
        """The tensors, None where there is none; each lies in one allocation."""
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                assert any(at <= first and last <= at + size for at, size in self.allocated), "past the end"
        return tensors

    def forward(self, gpu, stream, scratch, available, kind, rows, H, O, eps, *addresses):
        needed = self.needed(None, rows, H)
        if not self.start(gpu, stream, scratch, available, needed):
            return needed
        self.calls.append(("forward", kind))
        dtype = KINDS[kind]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        shapes = [(rows, O), (rows,), (rows,), (rows, H), (H,), (H,), (O, H), (O,)]
        types = [dtype, wide, wide, *[dtype] * 5]
        tensors = [at(*each) for each in zip(addresses, shapes, types, strict=True)]
        output, mean, rstd = self.written(*tensors[:3])
        x, gamma, beta, W, bias = (tensor.double() for tensor in tensors[3:])
        mean.copy_(x.mean(1))
        rstd.copy_((x.var(1, correction=0) + eps).rsqrt())
        output.copy_(F.linear(F.layer_norm(x, (H,), gamma, beta, eps), W, bias))
        return needed

    def forward_rows(self, gpu, stream, scratch, available, kind, rows, H, O, eps, *rest):
        assert (gpu, stream, scratch, available) == (22, self.STREAM, 0, 0)
        *addresses, stride = rest
        self.calls.append(("forward_rows", kind))
        dtype = KINDS[kind]
        shapes = [(rows, stride), (rows,), (rows,), (rows, H), (H,), (H,)]
        types = [dtype, wide_of(dtype), wide_of(dtype), *[dtype] * 3]
        tensors = [at(*each) for each in zip(addresses, shapes, types, strict=True)]
        ln_out, mean, rstd = self.written(*tensors[:3])
        x, gamma, beta = (tensor.double() for tensor in tensors[3:])
        mean.copy_(x.mean(1))
        rstd.copy_((x.var(1, correction=0) + eps).rsqrt())
        ln_out.zero_()[:, :H] = F.layer_norm(x, (H,), gamma, beta, eps)
        return 0

    def backward(self, gpu, stream, scratch, available, kind, rows, H, O, wanted, *rest):
        needed = self.needed(wanted, rows, H)
        if not self.start(gpu, stream, scratch, available, needed):
            return needed
        self.calls.append(("backward", kind, wanted))
        *addresses, stride = rest
        dtype, wide = KINDS[kind], wide_of(KINDS[kind])
        shapes = [
            (rows, H),
            (H,),
            (H,),
            (O, H),
            (O,),
            (rows, O),
            (rows, H),
            (rows,),
            (rows,),
            (H,),
            (H,),
            (O, H),
        ]
        shapes += [(rows, stride), (rows, stride)]
        types = [*[dtype] * 7, wide, wide, *[dtype] * 5]
        tensors = [at(*each) for each in zip(addresses, shapes, types, strict=True)]
        dx, dgamma, dbeta, dW, db = tensors[:5]
        dy, x, mean, rstd, gamma, beta, W = (tensor.double() for tensor in tensors[5:12])
        given, taken = tensors[12:]
        x_hat = (x - mean[:, None]) * rstd[:, None]
        ln_out = x_hat * gamma + beta
        assert (given is not None, taken is not None) == (bool(wanted & 16), bool(wanted & 32))
        dln = dy @ W if given is None else given[:, :H].double()
        g = dln * gamma
        c1, c2 = (g * x_hat).mean(1, keepdim=True), g.mean(1, keepdim=True)
        results = {4: dx, 8: dgamma, 1: dW, 2: db}
        assert {bit for bit, result in results.items() if result is not None} == {
            bit for bit in results if wanted & bit
        } and (dgamma is None) == (dbeta is None), "memory for what is wanted, and for nothing else"
        if dgamma is not None:
            dgamma.copy_((dln * x_hat).sum(0))
            dbeta.copy_(dln.sum(0))
        if dx is not None:
            dx.copy_(rstd[:, None] * (g - c2 - x_hat * c1))
        if taken is not None:
            taken.zero_()[:, :H] = ln_out
        if dW is not None:
            dW.copy_(dy.T @ ln_out)
        if db is not None:
            db.copy_(dy.sum(0))
        return needed


def wide_of(dtype):
    """The dtype of the statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at(address, shape, dtype) -> Any:
    """A tensor on the memory at an address; None at address 0."""
    if not address:
        return None
    count = torch.Size(shape).numel()
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


@pytest.fixture
def module(monkeypatch):
    """The stand-in, behind everything on the CPU."""
    return stand_in(TorchModule(), monkeypatch)


def stand_in(module, monkeypatch):
    """Puts a module behind everything on the CPU."""
    monkeypatch.setattr(direct, "empty_strided", module.empty_strided)
    monkeypatch.setattr(direct, "current_device", lambda: -1)
    monkeypatch.setattr(on_stream, "DEVICE", "cpu")
    monkeypatch.setattr(direct, "current_stream", lambda index: {-1: TorchModule.STREAM}[index])
    monkeypatch.setattr(direct.kernels, "table", {-1: direct.LayerNormKernels(module, torch.device("cpu"))})
    return module


@pytest.fixture
def no_operator(monkeypatch):
    """The registered forward operator must not be called."""

    def refuse(*arguments):
        raise AssertionError("went through the registered operator")

    monkeypatch.setattr("harness.nn.layers.layernorm_linear", refuse)


# ---- What is passed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, (4,), (1, 1), (), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_autograd(module, no_operator, dtype, rows):
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, rows))
    kind = direct.KINDS[dtype]
    assert module.calls == [("forward", kind), ("backward", kind, 15)]


def test_the_first_call_goes_the_way_of_the_second(module, no_operator, monkeypatch):
    """It opens the module itself, once; not for arguments that are wrong."""
    table, opened = direct.kernels.table, []
    (kernels,) = table.values()
    monkeypatch.setattr(direct.kernels, "open", lambda device: opened.append(device) or kernels)
    table.clear()
    inputs = make_inputs()
    with pytest.raises(ValueError, match="ln_bias: expected 7 elements"):
        fused_layernorm_linear(*inputs[:2], torch.ones(H + 1), *inputs[3:])
    assert opened == []
    outputs = [fused_layernorm_linear(*inputs) for _ in range(2)]
    assert opened == [torch.device("cpu")] and module.calls == [("forward", 0)] * 2
    assert [type(output.grad_fn).__name__ for output in outputs] == ["DirectBackward"] * 2


def test_without_grad_nothing_is_kept(module, no_operator):
    inputs = make_inputs()
    expected = plain_torch(*inputs)
    with torch.no_grad():
        output = fused_layernorm_linear(*inputs)
    assert not output.requires_grad
    assert_near(output, expected.detach())
    frozen = fused_layernorm_linear(*make_inputs(requires_grad=False))
    assert not frozen.requires_grad and torch.equal(frozen, output)
    assert module.calls == [("forward", 0)] * 2


@pytest.mark.parametrize("needed", NAMES)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "all but"])
def test_gradients_only_where_needed(module, no_operator, needed, others):
    inputs = make_inputs(requires_grad=False)
    for name, tensor in zip(NAMES, inputs, strict=True):
        tensor.requires_grad_((name == needed) != others)
    assert_only_needed_gradients(inputs)
    assert module.calls[-1] == ("backward", 0, bits(inputs))


def bits(inputs):
    """What a backward pass is asked for: dx 4, dgamma with dbeta 8, dW 1, db 2."""
    x, gamma, beta, W, b = (tensor.requires_grad for tensor in inputs)
    return 4 * x + 8 * (gamma or beta) + W + 2 * b


@pytest.mark.parametrize(
    "absent", [("ln_weight",), ("ln_bias",), ("linear_bias",), ("ln_weight", "ln_bias", "linear_bias")]
)
def test_absent_parameters(module, no_operator, absent):
    def function(*tensors):
        given = [None if name in absent else tensor for name, tensor in zip(NAMES, tensors, strict=True)]
        return fused_layernorm_linear(*given)

    inputs = make_inputs()
    given = [None if name in absent else tensor for name, tensor in zip(NAMES, inputs, strict=True)]
    assert_near(function(*inputs), plain_torch(*given))
    leaves = [tensor for tensor in given if tensor is not None]
    got = torch.autograd.grad(function(*inputs).square().sum(), leaves)
    expected = torch.autograd.grad(plain_torch(*given).square().sum(), leaves)
    for ours, theirs in zip(got, expected, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("grad_output", GRAD_OUTPUTS.values(), ids=GRAD_OUTPUTS.keys())
def test_grad_output_of_any_strides(module, no_operator, grad_output):
    assert not grad_output.is_contiguous()
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(), grad_output)


def test_inputs_of_any_strides(module, no_operator):
    x, ln_weight, ln_bias, linear_weight, linear_bias = make_inputs()
    strided = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        ln_weight.repeat_interleave(2)[::2],
        ln_bias[0].expand(H),
        linear_weight.t().contiguous().t(),
        linear_bias.flip(0),
    )
    assert not any(tensor.is_contiguous() for tensor in strided[:4])
    leaves = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    got, expected = fused_layernorm_linear(*strided), plain_torch(*strided)
    assert_near(got, expected)
    pairs = zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    )
    for ours, theirs in pairs:
        assert_near(ours, theirs)


@pytest.mark.parametrize("rows", [(0,), (2, 0, 3)])
def test_zero_rows_launch_nothing(module, no_operator, rows):
    output, *gradients = output_and_gradients(fused_layernorm_linear, make_inputs(rows=rows))
    assert output.shape == (*rows, O) and gradients[0].shape == (*rows, H)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    assert module.calls == []


def test_scratch_is_counted_again_for_unaligned_tensors(module, monkeypatch):
    """Kernels may need more for tensors whose addresses rule out wide loads; those are counted call by call."""
    counted = []
    kernels = present(direct.kernels.table[-1])
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(kernels, name)

        def spy(*arguments, launch=launch, name=name):
            if arguments[0] == 0:
                counted.append((name, arguments[-5] % direct.VECTOR, arguments[-1] % direct.VECTOR))
            return launch(*arguments)

        monkeypatch.setattr(kernels, name, spy)
    base = torch.randn(1 + 4 * H)
    inputs = make_inputs(rows=(4,), requires_grad=False)
    for _ in range(2):
        fused_layernorm_linear(*inputs)
    assert counted == [("launch_forward", 0, 0)]
    inputs[0] = base[1:].view(4, H).requires_grad_()
    expected = plain_torch(*inputs)
    output = fused_layernorm_linear(*inputs)
    assert_near(output, expected)
    assert counted[1:] == [("launch_forward", 4, inputs[4].data_ptr() % 16)]
    output.backward(torch.ones_like(output))
    assert [name for name, *_ in counted[2:]] == ["launch_backward", "launch_backward"]


def test_a_call_with_other_sizes_plans_anew(module, no_operator):
    for rows, width, outputs in (
        ((2, 3), 7, 6),
        ((3, 2), 7, 6),
        ((6,), 7, 6),
        ((2, 3), 6, 7),
        ((2, 3), 7, 6),
    ):
        inputs = make_inputs(rows=rows, H=width, O=outputs)
        got = output_and_gradients(fused_layernorm_linear, inputs)
        for ours, theirs in zip(got, output_and_gradients(plain_torch, inputs), strict=True):
            assert_near(ours, theirs)


def test_eps_is_passed_on(module, no_operator):
    inputs = make_inputs()
    assert_near(fused_layernorm_linear(*inputs, 0.5), plain_torch(*inputs, eps=0.5))
    assert (fused_layernorm_linear(*inputs, 0.5) - plain_torch(*inputs)).abs().max() > 0.01


def test_tf32_follows_torch_s_flag_at_each_call(module, no_operator):
    inputs = make_inputs()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        output = fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        output.sum().backward()
        fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        fused_layernorm_linear(*make_inputs(torch.bfloat16))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert module.calls == [("forward", 1), ("backward", 0, 15), ("forward", 0), ("forward", 2)]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_tf32_follows_the_older_flag_too(precision):
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision(precision)
        assert direct.kind_of(torch.float32) == (1 if precision == "high" else 0)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_gradcheck(module, no_operator):
    inputs = make_inputs(torch.float64, rows=(4,))
    assert torch.autograd.gradcheck(fused_layernorm_linear, inputs)


def test_same_bits_every_time(module):
    inputs = make_inputs()
    first = output_and_gradients(fused_layernorm_linear, inputs)
    for _ in range(5):
        again = output_and_gradients(fused_layernorm_linear, inputs)
        assert all(map(torch.equal, first, again))


# ---- What is kept -------------------------------------------------------------------------------------------


def test_five_tensors_are_saved_and_only_the_statistics_are_new(module, no_operator):
    inputs = make_inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        fused_layernorm_linear(*inputs)
    given = {tensor.data_ptr() for tensor in inputs[:4]}
    own = [tensor for tensor in kept if tensor.data_ptr() not in given]
    assert len(kept) == 5 and [(tuple(tensor.shape), tensor.dtype) for tensor in own] == [
        ((2, *ROWS), torch.float32)
    ]


def saved_bytes(function, inputs):
    """What autograd keeps for the backward pass, without the parameters, each memory once."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.update({tensor.data_ptr(): tensor.nbytes}) or tensor, lambda tensor: tensor
    ):
        output = function(*inputs)
    output.sum().backward()
    return sum(kept[address] for address in kept.keys() - {tensor.data_ptr() for tensor in inputs[1:]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_of_what_torch_saves(module, dtype):
    inputs = make_inputs(dtype, (64,), H=256, O=256)
    assert saved_bytes(fused_layernorm_linear, inputs) <= 0.55 * saved_bytes(plain_torch, inputs)


def test_saved_tensors_may_come_back_strided(module, no_operator):
    """A hook may pack a tensor any way it likes."""
    inputs = make_inputs()
    expected = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)

    def unpack(tensor):
        return tensor.detach().repeat_interleave(2, -1)[..., ::2]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        got = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, got, expected))


def test_changing_a_saved_tensor_in_place_is_an_error(module, no_operator):
    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    with torch.no_grad():
        inputs[3].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_double_backward_is_refused(module):
    inputs = make_inputs()
    (dx,) = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs[:1], create_graph=True)
    expected = torch.autograd.grad(plain_torch(*inputs).square().sum(), inputs[:1])[0]
    assert_near(dx.detach(), expected)
    with pytest.raises(NotImplementedError, match="fused_layernorm_linear has no double backward"):
        dx.sum().backward()


def test_out_of_memory_says_how_much(module, monkeypatch):
    def no_room(size, strides, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    monkeypatch.setattr(direct, "empty_strided", no_room)
    scratch = TorchModule.needed(None, 15, H)
    results = 15 * O * 4 + 2 * 15 * 4
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"forward pass over 15 rows, 7 -> 6 in float32, needed {results + scratch:,} bytes of GPU memory: "
        rf"{results:,} for results and {scratch:,} for scratch\. CUDA out of memory",
    ):
        fused_layernorm_linear(*inputs)
    scratch = TorchModule.needed(15, 15, H)
    results = 4 * (15 * H + 2 * H + O * H + O)
    with pytest.raises(torch.OutOfMemoryError, match=f"backward pass .* needed {results + scratch:,} bytes"):
        output.sum().backward()


# ---- Torch's own products -----------------------------------------------------------------------------------


def forget_plans():
    for cached in (direct.plan, autograd.checked_plan):
        cached.cache_clear()


@pytest.fixture
def library(module, monkeypatch):
    """Every product of float32 and float64 is torch's own."""
    forget_plans()
    for name in ("LIBRARY_FROM", "LIBRARY_FROM_IN_A_LOOP"):
        monkeypatch.setattr(products, name, 1)
    yield
    forget_plans()


@pytest.fixture
def chosen(module, monkeypatch):
    """Sets the choice of every plan from now on."""

    def choose(output, dln, dW, *, graph=None):
        forget_plans()
        loop = products.Products(output, dln, dW)
        choice = products.Choice(loop, loop if graph is None else products.Products(*graph))
        monkeypatch.setattr(direct, "choose", lambda *sizes, **facts: choice)

    yield choose
    forget_plans()


def test_the_first_plain_call_of_every_plan_launches_what_a_graph_will(module, chosen, monkeypatch):
    """Also of a plan that takes the place in memory of one that is no longer in use."""
    monkeypatch.setattr(direct, "is_capturing", lambda: False)
    chosen(OWN, OWN, OWN, graph=(LIBRARY, OWN, OWN))
    for rows in range(2, 12):
        for parts in (["forward_rows", "forward"], ["forward"]):
            module.calls.clear()
            fused_layernorm_linear(*make_inputs(torch.float32, (rows,)))
            assert [call[0] for call in module.calls] == parts, rows
        forget_plans()


@pytest.mark.parametrize("rows", [ROWS, (4,), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_torch_between_the_rows(module, library, no_operator, dtype, rows):
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, rows))
    parts = [call[0] for call in module.calls]
    assert parts == (["forward_rows", "backward"] if dtype.itemsize >= 4 else ["forward", "backward"])
    few = 64 * (math.prod(rows) <= O)
    assert module.calls[-1][2] == (2 + 4 + 8 + 16 + 32 + few if dtype.itemsize >= 4 else 15)


WAYS = [
    (OWN, OWN, LIBRARY),
    (LIBRARY, OWN, OWN),
    (OWN, LIBRARY, LIBRARY),
    (OWN, LIBRARY, OWN),
    (PADDED, PADDED, PADDED),
    (LIBRARY, PADDED, PADDED),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(7, 6), (8, 16), (16, 5)], ids=str)
def test_whoever_multiplies(module, chosen, no_operator, dtype, way, sizes):
    chosen(*way)
    H, O = sizes
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, H=H, O=O))
    forward, backward = module.calls
    assert forward[0] == ("forward" if way[0] == OWN else "forward_rows")
    few = 64 * (math.prod(ROWS) <= O and OWN not in way[1:])
    assert backward[2] == 2 + 4 + 8 + (way[2] == OWN) + 16 * (way[1] != OWN) + 32 * (way[2] != OWN) + few


@pytest.mark.parametrize("way", [(OWN, OWN, OWN), *WAYS], ids=str)
@pytest.mark.parametrize("number", range(1, 32))
def test_only_what_is_asked_for_is_computed_or_multiplied(
    module, chosen, no_operator, monkeypatch, way, number
):
    """By what the module is asked for, by torch's own products, and by the result: every set of frozen inputs."""
    chosen(*way)
    inputs = make_inputs()
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(number >> index & 1))
    products_made = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *factors: products_made.append(factors) or mm(*factors))
    assert_only_needed_gradients(inputs)
    wanted, expected = module.calls[-1][2], bits(inputs)
    if expected & 1 and way[2] != OWN:
        expected += 32 - 1
    if expected & (4 | 8) and way[1] != OWN:
        expected += 16
    assert wanted == expected
    assert len(products_made) == bool(expected & 16) + bool(expected & 32)


def test_dx_takes_the_place_of_the_gradient_before_it(module, chosen, monkeypatch):
    """Where both lie alike, and rows are not few: one allocation for two."""
    chosen(LIBRARY, LIBRARY, LIBRARY)
    mm = torch.mm
    monkeypatch.setattr(direct, "MOST_FEW_ROWS", 4)
    for rows, alike in ((3, False), (4, False), (5, True)):
        inputs = make_inputs(rows=(rows,))
        output = fused_layernorm_linear(*inputs)
        dln = []
        with monkeypatch.context() as context:
            context.setattr(torch, "mm", lambda *factors, dln=dln: dln.append(mm(*factors)) or dln[-1])
            (dx,) = torch.autograd.grad(output.sum(), inputs[0])
        assert (dx.data_ptr() == dln[0].data_ptr()) == alike, rows
        assert bool(module.calls[-1][2] & 64) != alike, (
            "one launch for few rows reads the one while it writes the other"
        )


def test_dW_has_room_for_a_copy_of_the_weight_on_hopper(module, no_operator):
    """Where rows of the weight begin at any address; nobody sees it but the module, and the memory's owner."""
    kernels = present(direct.kernels.table[-1])
    for hopper, dtype, width, room in (
        (True, torch.bfloat16, 9, 64),
        (True, torch.bfloat16, 65, 128),
        (True, torch.bfloat16, 16, 16),
        (True, torch.float32, 9, 9),
        (False, torch.bfloat16, 9, 9),
    ):
        kernels.hopper = hopper
        forget_plans()
        inputs = make_inputs(dtype, H=width, O=5)
        (dW,) = torch.autograd.grad(fused_layernorm_linear(*inputs).sum(), inputs[3])
        assert dW.shape == (5, width) and dW.is_contiguous()
        assert dW.untyped_storage().nbytes() == 5 * room * dtype.itemsize
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
    kernels.hopper = False
    forget_plans()


def test_a_graph_has_its_own_choice(module, chosen, no_operator, monkeypatch):
    chosen(OWN, OWN, OWN, graph=(LIBRARY, LIBRARY, LIBRARY))
    inputs = make_inputs()
    names = []
    for capturing in (False, False, True):
        monkeypatch.setattr(direct, "is_capturing", lambda capturing=capturing: capturing)
        module.calls.clear()
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        names.append([call[0] for call in module.calls])
    own, graph = ["forward", "backward"], ["forward_rows", "backward"]
    # The first call loads the kernels of a graph, which none could while it is captured.
    assert names == [["forward_rows", "forward", "backward", "backward"], own, graph]


@pytest.mark.parametrize(
    ("dtype", "sizes", "kind"),
    [
        (torch.float32, (8, 16), 5),
        (torch.float32, (7, 16), 0),
        (torch.float32, (8, 12), 0),
        (torch.float64, (8, 16), 4),
        (torch.bfloat16, (8, 16), 2),
    ],
    ids=str,
)
def test_pairs_are_for_whole_rows_of_float32(module, no_operator, dtype, sizes, kind):
    forget_plans()
    kernels = present(direct.kernels.table[-1])
    inputs = make_inputs(dtype, H=sizes[0], O=sizes[1])

    def function(*tensors):
        return fused_layernorm_linear(*tensors, algorithm="pairs")

    for hopper in (False, True):
        kernels.hopper = hopper
        module.calls.clear()
        assert_as_good_as_torch(function, inputs)
        expected = kind if hopper else direct.KINDS[dtype]
        assert module.calls == [("forward", expected), ("backward", expected, 15)]
    layer = LayerNormLinear(*sizes, algorithm="pairs", dtype=dtype)
    assert layer.explain(inputs[0])["way"].endswith("pairs of float16") == (kind == 5)
    forget_plans()


@pytest.mark.parametrize("rows", [2**20 - 1, 2**20])
def test_large_products_are_torch_s(rows):
    plan = direct.plan(torch.Size([rows, 4]), 4, torch.float32)
    assert plan.choice.graph == (products.ALL_LIBRARY if rows == 2**20 else products.ALL_OWN)
    assert direct.plan(torch.Size([rows, 8]), 8, torch.bfloat16).choice.graph == products.ALL_OWN


@pytest.mark.parametrize(("width", "outputs", "aligned"), [(64, 64, True), (63, 64, False), (64, 60, False)])
def test_unaligned_products_of_16_bits_are_torch_s_where_they_are_large(width, outputs, aligned):
    few, many = (
        direct.plan(torch.Size([rows, width]), outputs, torch.bfloat16).choice.loop for rows in (8, 4096)
    )
    assert few == products.ALL_OWN and (many == products.ALL_OWN) == aligned


def test_explain_says_who_multiplies(module, chosen):
    layer = LayerNormLinear(H, O)
    x = make_inputs()[0]
    chosen(OWN, LIBRARY, LIBRARY)
    assert layer.explain(x) == {"way": "extension module", "output": OWN, "dln": LIBRARY, "dW": LIBRARY}
    chosen(OWN, OWN, OWN, graph=(PADDED, LIBRARY, OWN))
    assert layer.explain(x) == {
        **{"way": "extension module", "output": OWN, "dln": OWN, "dW": OWN},
        **{"output in a CUDA graph": PADDED, "dln in a CUDA graph": LIBRARY, "dW in a CUDA graph": OWN},
    }
    layer.algorithm = "unfused"
    assert layer.explain(x)["way"] == "MAX graph, unfused"
    assert module.calls == [], "nothing is computed"


def test_explain_under_autocast(module, monkeypatch):
    forget_plans()
    monkeypatch.setattr(products, "LIBRARY_FROM_IN_A_LOOP", 1)
    layer, x = LayerNormLinear(8, 8), torch.ones(4, 8)
    assert layer.explain(x)["dW"] == LIBRARY
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.explain(x)["dW"] == OWN
    forget_plans()


def test_explain_without_a_module(monkeypatch):
    monkeypatch.setattr(direct, "kernels", lambda device: None)
    assert LayerNormLinear(H, O).explain(make_inputs()[0])["way"] == "MAX graph, fast"


# ---- A weight that lies transposed, as GPT-2's do -----------------------------------------------------------


def transposed_inputs(dtype=torch.float32, rows=ROWS):
    """Inputs whose linear weight is the transpose of a matrix that lies row by row."""
    inputs = make_inputs(dtype, rows)
    inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    assert direct.lies_transposed(inputs[3])
    return inputs


@pytest.mark.parametrize("rows", [ROWS, (4,), (2, 1, 3, 2), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_lies_transposed_is_not_copied(module, no_operator, dtype, rows):
    inputs = transposed_inputs(dtype, rows)
    if 0 not in rows:
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        assert [call[0] for call in module.calls] == ["forward_rows", "backward"]
    output = fused_layernorm_linear(*inputs)
    gradient = torch.autograd.grad(output.sum(), inputs[3])[0]
    assert gradient.shape == (O, H) and gradient.stride() == inputs[3].stride()


def test_a_weight_with_gaps_is_copied(module, no_operator):
    inputs = make_inputs()
    inputs[3] = torch.randn(O, 2 * H)[:, ::2].requires_grad_()
    assert not direct.lies_transposed(inputs[3])
    assert_as_good_as_torch(fused_layernorm_linear, inputs)
    assert [call[0] for call in module.calls] == ["forward", "backward"]


def test_the_operator_leaves_a_transposed_weight_where_it_lies(module):
    inputs = transposed_inputs()
    output, statistics = autograd.layernorm_linear(*inputs, EPS, "fast")
    assert [call[0] for call in module.calls] == ["forward_rows"]
    x, gamma, beta, weight = inputs[:4]
    arguments = (torch.ones_like(output), x, statistics, gamma, beta, weight, 3, "fast")
    dW = autograd.layernorm_linear_backward(*arguments)[3]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a.detach()) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = autograd.layernorm_linear_backward(*fakes)[3]
    assert dW.stride() == weight.stride() == fake.stride() and dW.shape == fake.shape


def test_products_of_torch_and_its_modes(module, library, no_operator):
    """Without grad, in inference mode, backward under autocast, and an in-place operation on the output."""
    inputs = make_inputs()
    expected = output_and_gradients(plain_torch, inputs, torch.ones(*ROWS, O))
    with torch.no_grad():
        assert_near(fused_layernorm_linear(*inputs), expected[0])
    with torch.inference_mode():
        assert_near(fused_layernorm_linear(*inputs).clone(), expected[0])
    output = fused_layernorm_linear(*inputs)
    output.add_(1)
    assert_near(output.detach() - 1, expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = torch.autograd.grad(output, inputs, torch.ones(*ROWS, O))
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize(
    "way", [(OWN, OWN, OWN), (LIBRARY, LIBRARY, LIBRARY), (PADDED, PADDED, PADDED)], ids=str
)
@pytest.mark.parametrize("rows", [ROWS, (1,), (), (1, 1, 1)], ids=str)
def test_the_output_may_be_changed_in_place(module, chosen, no_operator, way, rows):
    """PyTorch refuses that of a view that a Function returns; H and O are odd, so that padded rows are cut."""
    chosen(*way)
    inputs, grad = make_inputs(rows=rows, H=7, O=5), torch.ones(*rows, 5)

    def doubled(*tensors):
        return fused_layernorm_linear(*tensors).mul_(2)

    got = output_and_gradients(doubled, inputs, grad)
    expected = output_and_gradients(plain_torch, inputs, 2 * grad)
    assert_near(got[0], 2 * expected[0])
    assert got[0].untyped_storage().nbytes() == got[0].nbytes
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert_near(ours, theirs)


def test_out_of_memory_in_a_product(module, library, monkeypatch):
    def no_room(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    monkeypatch.setattr(torch, "mm", no_room)
    monkeypatch.setattr(direct, "linear", no_room)
    results, scratch = 15 * O * 4 + 2 * 15 * 4, 15 * H * 4
    with pytest.raises(torch.OutOfMemoryError, match=f"forward pass .* needed {results + scratch:,} bytes"):
        fused_layernorm_linear(*inputs)
    results, scratch = 4 * (15 * H + 2 * H + O * H + O), 15 * H * 4
    with pytest.raises(torch.OutOfMemoryError, match=f"backward pass .* needed {results + scratch:,} bytes"):
        output.sum().backward()


# ---- The layer and torch's modes ----------------------------------------------------------------------------


def sequential():
    """What the layer replaces."""
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))


def test_layer(module, no_operator):
    reference = sequential()
    layer = layer_from(copy.deepcopy(reference))
    assert layer.algorithm == "fast"
    x, y = (make_inputs()[0] for _ in range(2))
    layer(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert_near(x.grad, y.grad)
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)


def test_layer_with_a_parametrized_weight(module, no_operator):
    """A parametrized weight is computed on access, and is no parameter of its module any more."""
    reference = sequential()
    nn.utils.parametrizations.weight_norm(reference[1])
    layer = layer_from(copy.deepcopy(reference))
    x = make_inputs()[0]
    assert_near(layer(x), reference(x))


def test_autocast_goes_the_direct_way(module, no_operator):
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused_layernorm_linear(*inputs)
    assert output.dtype == torch.bfloat16 and module.calls == [("forward", 2)]
    output.sum().backward()
    assert all(present(tensor.grad).dtype == torch.float32 for tensor in inputs)


def test_inference_mode(module, no_operator):
    inputs = make_inputs()
    with torch.inference_mode():
        output = fused_layernorm_linear(*inputs)
    assert output.is_inference()
    assert_near(output, plain_torch(*inputs).detach())


class Subclass(torch.Tensor):
    """Any subclass: its operators may mean something else."""


@pytest.mark.parametrize("name", NAMES)
def test_subclasses_go_through_the_operator(module, monkeypatch, name):
    inputs = make_inputs(requires_grad=False)
    index = NAMES.index(name)
    inputs[index] = inputs[index].as_subclass(Subclass)
    monkeypatch.setattr(autograd, "Direct", None)
    assert call_directly(*inputs, EPS) is None


def test_modes_and_transforms_go_through_the_operator(module):
    inputs = make_inputs(requires_grad=False)
    with FakeTensorMode():
        assert call_directly(*inputs, EPS) is None
    seen = []

    def function(x):
        seen.append(call_directly(x, *inputs[1:], EPS))
        return x.sum()

    torch.func.grad(function)(inputs[0])
    assert seen == [None] and module.calls == []


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda t: t.long(), TypeError, "x: expected float32, float64, bfloat16, float16, got int64"),
        ("x", lambda t: t[0, 0, 0], ValueError, "x: expected at least one dimension"),
        ("x", lambda t: t[..., :0], ValueError, "x: expected H >= 1"),
        ("ln_weight", lambda t: t.double(), TypeError, "ln_weight: expected float32, .* got float64"),
        ("ln_bias", lambda t: t[:-1], ValueError, "ln_bias: expected 7 elements, .* of x, got 6"),
        (
            "linear_weight",
            lambda t: t.t(),
            ValueError,
            r"linear_weight: expected shape \[O, 7\], .* got \[7, 6\]",
        ),
        ("linear_weight", lambda t: None, TypeError, "linear_weight: expected a torch tensor, got NoneType"),
        ("linear_bias", lambda t: t[None], ValueError, r"linear_bias: expected a vector, got shape \[1, 6\]"),
        ("linear_bias", lambda t: 0.0, TypeError, "linear_bias: expected a torch tensor, got float"),
    ],
)
def test_bad_input(module, name, change, error, message):
    inputs = make_inputs(requires_grad=False)
    index = NAMES.index(name)
    inputs[index] = change(inputs[index])
    with pytest.raises(error, match=message):
        fused_layernorm_linear(*inputs)
    assert module.calls == []


def test_sizes_beyond_32_bits(module):
    many = torch.empty(1).expand(2**31, 1)
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"rows: the kernels take at most 2,147,483,647, got 2,147,483,648"):
        fused_layernorm_linear(many, one, one, one[None], one)


# ---- The registered operators over the module ---------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("wanted", [15, 14, 13, 3, 12])
def test_opcheck(module, wanted):
    inputs = make_inputs()
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "fast"))
    x, ln_weight, ln_bias, linear_weight, _ = (tensor.detach() for tensor in inputs)
    _, statistics = autograd.layernorm_linear(*inputs, EPS, "fast")
    arguments = (torch.randn(*ROWS, O), x, statistics, ln_weight, ln_bias, linear_weight, wanted, "fast")
    torch.library.opcheck(autograd.layernorm_linear_backward, arguments)
    assert module.calls


@pytest.mark.compiler
def test_compiled_graphs_call_the_operator(module):
    torch._dynamo.reset()
    layer = layer_from(sequential())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 4, 9):
        x, y = (make_inputs(rows=(2, rows))[0] for _ in range(2))
        compiled(x).square().sum().backward()
        sequential()(y).square().sum().backward()
        assert_near(x.grad, y.grad)
    assert module.calls == [("forward", 0), ("backward", 0, 15)] * 3
    torch._dynamo.reset()


# ---- Finding the module -------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def empty_table(monkeypatch):
    monkeypatch.setattr(direct.kernels, "table", {})
    monkeypatch.setattr(on_stream, "capability", lambda device: (9, 0))
    monkeypatch.setattr(extension, "architecture", lambda device: "sm_90a")


def test_no_module_for_other_devices(empty_table):
    assert direct.kernels(torch.device("cpu")) is None and direct.kernels(torch.device("meta")) is None
    assert direct.kernels.table == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EnvironmentProblem("no linker here"), "no linker here"),
        (ImportError("bad file"), "ImportError: bad file"),
    ],
)
def test_without_a_module_one_warning_says_why(empty_table, monkeypatch, error, words):
    def fail(architecture, puzzle):
        raise error

    monkeypatch.setattr(extension, "build", fail)
    with pytest.warns(
        RuntimeWarning, match=f"MAX graph of its fast kernels on cuda:0, which is slower .*: {words}"
    ):
        assert direct.kernels(GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert direct.kernels(GPU) is None


def test_a_driver_that_refuses_the_kernels_is_a_warning(empty_table, monkeypatch, tmp_path):
    def refuse(kernels):
        raise Exception("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(
        extension, "build", lambda architecture, puzzle: extension.Built(tmp_path, architecture, 0.0)
    )
    monkeypatch.setattr(extension, "load", lambda path, puzzle: TorchModule())
    monkeypatch.setattr(direct.LayerNormKernels, "probe", refuse)
    with pytest.warns(
        RuntimeWarning, match="there is no extension module: Exception: CUDA_ERROR_UNSUPPORTED_PTX"
    ):
        assert direct.kernels(GPU) is None


def test_an_old_gpu_gets_the_unfused_kernels(empty_table, monkeypatch):
    monkeypatch.setattr(on_stream, "capability", lambda device: (7, 5))
    monkeypatch.setattr(extension, "architecture", lambda device: extension.nvidia_architecture((7, 5)))
    with pytest.warns(RuntimeWarning, match=r"unfused kernels on cuda:0.*want sm_80 or newer, not sm_75"):
        assert direct.kernels(GPU) is None
    assert direct.graph_algorithm(GPU) == "unfused"
    assert direct.graph_algorithm(torch.device("cpu")) == "fast"


def test_several_threads_open_a_gpu_once(empty_table, monkeypatch, tmp_path):
    built = []
    stand_in = TorchModule()
    monkeypatch.setattr(
        extension,
        "build",
        lambda architecture, puzzle: (
            built.append(architecture) or extension.Built(tmp_path, architecture, 0.0)
        ),
    )
    monkeypatch.setattr(extension, "load", lambda path, puzzle: stand_in)
    monkeypatch.setattr(direct.LayerNormKernels, "probe", lambda kernels: built.append("tried"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(direct.kernels(GPU))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["sm_90a", "tried"] and len(found) == 8 and len(set(map(id, found))) == 1
    assert found[0].gpu == 22 and stand_in.index == 0


# ---- On a real GPU ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels():
    """The kernels of the first GPU, and no warning on the way to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = direct.kernels(torch.device("cuda", 0))
    assert found is not None
    return found


@pytest.fixture
def counted(kernels, monkeypatch):
    """How often the module was called to launch a whole pass, that a graph's kernels may be loaded aside."""
    calls = []
    monkeypatch.setattr(kernels, "is_first", lambda plan, wanted=0: False)
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(kernels, name)

        def spy(*arguments, launch=launch, name=name):
            if arguments[0]:
                calls.append(name)
            return launch(*arguments)

        monkeypatch.setattr(kernels, name, spy)
    return calls


def gpu_inputs(dtype=torch.float32, rows=ROWS, H=H, O=O, seed=0, requires_grad=True):
    return make_inputs(dtype, rows, "cuda", H, O, seed, requires_grad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [
        ((3, 5), 7, 6),
        ((1,), 8, 16),
        ((4, 4), 8, 16),
        ((257,), 129, 65),
        ((2, 100), 768, 320),
        ((130,), 2056, 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_agrees_with_autograd(kernels, counted, dtype, rows, width, outputs):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, rows, width, outputs))
    plan = direct.plan(torch.Size([*rows, width]), outputs, dtype, False, kernels.hopper)
    own = plan.choice.loop == products.ALL_OWN
    assert counted == (["launch_forward", "launch_backward"] if own else ["launch_backward"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_at_the_size_of_a_model(kernels, dtype):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, (4, 1024), 768, 3072))


@pytest.mark.gpu
def test_gpu_a_million_rows(kernels):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(rows=(1_000_003,), H=9, O=4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpu_products_of_torch(counted, dtype):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, (12_000,), 259, 131))
    assert counted == ["launch_backward"], "above LIBRARY_FROM_IN_A_LOOP the rows alone are the module's"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [((64,), 264, 256), ((1024,), 768, 1024)], ids=["own products", "torch's"])
def test_gpu_tf32_is_as_good_as_torch_s(kernels, sizes):
    before = torch.backends.cuda.matmul.fp32_precision
    inputs = gpu_inputs(torch.float32, *sizes)
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        exact = fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert not torch.equal(fused_layernorm_linear(*inputs), exact), "the flag changes nothing"
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(5), ids=NAMES)
def test_gpu_unaligned_tensors(counted, dtype, which):
    """A slice that begins one element after an aligned address."""
    inputs = gpu_inputs(dtype, (9,), 264, 24)

    def function(*tensors):
        tensors = list(tensors)
        memory = torch.cat([tensors[which].new_zeros(1), tensors[which].flatten()])
        tensors[which] = memory[1:].view_as(tensors[which])
        assert tensors[which].data_ptr() % direct.VECTOR and tensors[which].is_contiguous()
        return fused_layernorm_linear(*tensors)

    assert_as_good_as_torch(function, inputs)
    assert counted == ["launch_forward", "launch_backward"]


@pytest.mark.gpu
def test_gpu_strided_tensors(kernels):
    inputs = gpu_inputs(rows=(6, 4))
    grad_output = torch.ones(O, 6, 4, device="cuda").permute(1, 2, 0)

    def function(x, ln_weight, ln_bias, linear_weight, linear_bias):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        return fused_layernorm_linear(
            x, ln_weight, ln_bias, linear_weight.repeat_interleave(2, 1)[:, ::2], linear_bias
        )

    assert_as_good_as_torch(function, inputs, grad_output)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [((4, 300), 776, 520), ((4, 4), 8, 16)], ids=["large", "small"])
def test_gpu_same_bits_every_time(kernels, sizes):
    inputs = gpu_inputs(torch.bfloat16, *sizes)
    first = output_and_gradients(fused_layernorm_linear, inputs)
    for _ in range(50):
        again = output_and_gradients(fused_layernorm_linear, inputs)
        assert all(map(torch.equal, first, again))


@pytest.mark.gpu
def test_gpu_gradcheck(kernels):
    assert torch.autograd.gradcheck(fused_layernorm_linear, gpu_inputs(torch.float64, (4,)))


@pytest.mark.gpu
def test_gpu_zero_rows(kernels):
    _, *gradients = output_and_gradients(fused_layernorm_linear, gpu_inputs(rows=(0,)))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.gpu
def test_gpu_out_of_memory(kernels):
    """4 TiB of results; what is there already is left alone."""
    x, one = torch.ones(2**20, 1, device="cuda"), torch.ones(1, device="cuda")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"1048576 rows, 1 -> 1048576 in float32, needed 4,398,\d+,\d+"
    ):
        fused_layernorm_linear(x, one, one, x, x[:, 0])
    assert fused_layernorm_linear(*gpu_inputs()).isfinite().all()


def side_stream_work(inputs_of, function, repeats, size=4096):
    """Results of `function` on a side stream, its inputs rewritten there just before each call, behind a long kernel."""
    stream = torch.cuda.Stream()
    busy = torch.randn(size, size, device="cuda")
    leaves = [torch.zeros_like(tensor).requires_grad_() for tensor in inputs_of(0)]
    sources = [inputs_of(seed) for seed in range(repeats)]
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(stream):
        for source in sources:
            busy = busy @ busy * 1e-4
            with torch.no_grad():
                for leaf, tensor in zip(leaves, source, strict=True):
                    leaf.copy_(tensor)
            output = function(*leaves)
            gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
            got.append([tensor.detach().clone() for tensor in (output, *gradients)])
    stream.synchronize()
    return got


@pytest.mark.gpu
def test_gpu_threads_with_streams_of_their_own(kernels):
    results, raised = {}, []

    def inputs_of(thread):
        return lambda seed: gpu_inputs(rows=(64 + thread,), seed=100 * thread + seed, requires_grad=False)

    def work(thread):
        try:
            results[thread] = side_stream_work(inputs_of(thread), fused_layernorm_linear, 10, 1024)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    for thread, found in results.items():
        for seed, ours in enumerate(found):
            inputs = inputs_of(thread)(seed)
            ones = torch.ones(inputs[0].shape[0], O)
            for mine, theirs in zip(ours, output_and_gradients(plain_torch, inputs, ones), strict=True):
                assert_near(mine, theirs)


@pytest.mark.gpu
def test_gpu_graph_captures_both_passes(kernels):
    inputs = gpu_inputs(rows=(32,))
    grad_output = torch.ones(32, O, device="cuda")

    def step():
        output = fused_layernorm_linear(*inputs)
        return [output, *torch.autograd.grad(output, inputs, grad_output)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(5):
        with torch.no_grad():
            for tensor, fresh in zip(inputs, gpu_inputs(rows=(32,), seed=seed), strict=True):
                tensor.copy_(fresh)
        graph.replay()
        expected = output_and_gradients(plain_torch, inputs, grad_output)
        for ours, theirs in zip(captured, expected, strict=True):
            assert_near(ours.detach(), theirs)


@pytest.mark.gpu
def test_gpu_graph_of_a_layer_whose_plain_calls_multiply_otherwise(kernels):
    """A capture can load no kernel: the plain call before has launched those of the graph too."""
    inputs = gpu_inputs(torch.bfloat16, (64,), 768, 776)
    choice = direct.plan(inputs[0].shape, 776, torch.bfloat16, False, kernels.hopper).choice
    grad_output = torch.randn(64, 776, dtype=torch.bfloat16, device="cuda")

    def run():
        output = fused_layernorm_linear(*inputs)
        return output.detach(), *torch.autograd.grad(output, inputs, grad_output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert not kernels.hopper or choice.loop != choice.graph
    for mine, theirs in zip(captured, plain, strict=True):
        assert (mine - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gpu_compiled(counted, mode):
    torch._dynamo.reset()
    reference = sequential().cuda()
    layer = layer_from(copy.deepcopy(reference))
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(5):
        x, y = (gpu_inputs(rows=(2, 3), seed=seed)[0] for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        # As in training: a gradient that is kept lies in the memory of the graph that the next step replays.
        layer.zero_grad()
        reference.zero_grad()
        compiled(x).square().sum().backward()
        reference(y).square().sum().backward()
        assert_near(x.grad, y.grad)
        for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            assert_near(mine.grad, theirs.grad)
    assert counted
    torch._dynamo.reset()


@pytest.mark.gpu
def test_gpu_compiled_with_changing_lengths(kernels):
    torch._dynamo.reset()
    reference = sequential().cuda()
    compiled = torch.compile(layer_from(copy.deepcopy(reference)), fullgraph=True)
    for rows in (3, 4):
        compiled(gpu_inputs(rows=(2, rows))[0]).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (5, 17, 2):
            x = gpu_inputs(rows=(2, rows))[0]
            assert_near(compiled(x), reference(x))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_gpu_autocast(counted):
    layer = layer_from(sequential()).cuda()
    x = gpu_inputs()[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = layer(x)
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16 and present(x.grad).dtype == torch.float32
    assert counted == ["launch_forward", "launch_backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [True, False], ids=["all", "no biases"])
def test_gpu_opcheck(kernels, biases):
    inputs = gpu_inputs() if biases else [*gpu_inputs()[:2], None, gpu_inputs()[3], None]
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "fast"))


@pytest.mark.gpu(count=2)
def test_gpu_the_second_of_two():
    """The tensors decide, not the current device, which stays as it is."""
    inputs = [tensor.detach().to("cuda:1").requires_grad_() for tensor in make_inputs()]
    with torch.cuda.device(0):
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        assert torch.cuda.current_device() == 0
    assert present(direct.kernels.table[1]).index == 1
