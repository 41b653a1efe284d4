"""The backward pass of the direct way on branches of a CUDA graph: what runs where, in which order, and on whose memory.

Without a GPU the stand-in module of `direct_module.py` computes; what is launched on another stream than the current one waits
until that one is waited for, so that memory which was let go too early is written over. The tests at the end want a real GPU.
"""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from direct_module import DTYPES, TorchModule, bits, forget_plans, gpu_inputs, stand_in
from layer_checks import ROWS, H, O, assert_as_good_as_torch, assert_near, make_inputs, plain_torch
from typed import loosely

from harness.nn import layernorm_direct, layernorm_plan, layers
from harness.nn.layernorm_plan import LIBRARY, OWN
from harness.nn.layers import LayerNormLinear

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)
MAIN, DW, DB = TorchModule.STREAM, 1001, 1002
"""Streams: the current one, and those of the branches beside it."""
WAYS = [(OWN, OWN), (OWN, LIBRARY), (LIBRARY, OWN), (LIBRARY, LIBRARY)]


class Stream:
    """Keeps what it is given until somebody waits for it, but for torch's current one, which does it at once."""

    def __init__(self, number, log):
        self.cuda_stream, self.log, self.waiting = number, log, []

    def wait_stream(self, other):
        self.log.append((self.cuda_stream, other.cuda_stream))
        while other.waiting:
            other.waiting.pop(0)()


class LateModule(TorchModule):
    """The stand-in, whose launches wait on their streams. `log` holds them, and which stream waited for which."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple[int, int]] = []
        self.main, *self.sides = (Stream(number, self.log) for number in (MAIN, DW, DB))
        self.all = {stream.cuda_stream: stream for stream in (self.main, *self.sides)}
        self.streams = set(self.all)
        self.on = self.main

    def backward(self, gpu, stream, *rest):
        if gpu == 0 or stream == self.STREAM:
            self.log += [(stream, rest[6])] * (gpu != 0)
            return super().backward(gpu, stream, *rest)
        self.all[stream].waiting.append(lambda: super(LateModule, self).backward(gpu, stream, *rest))
        self.log.append((stream, rest[6]))
        return self.needed(rest[6], rest[3], rest[4])


@pytest.fixture
def late(monkeypatch):
    """The module, in a graph that is being captured."""
    module = stand_in(LateModule(), monkeypatch)

    @contextlib.contextmanager
    def on(stream):
        module.on = stream
        yield
        module.on = module.main

    def mm(left, right, *, out=None, mm=torch.mm):
        if module.on is module.main:
            return mm(left, right) if out is None else mm(left, right, out=out)
        module.on.waiting.append(lambda: mm(left, right, out=out))
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", {-1: module.main}.__getitem__)
    monkeypatch.setattr(layernorm_direct, "is_capturing", lambda: True)
    monkeypatch.setitem(layernorm_direct.kernels.table[-1].__dict__, "sides", tuple(module.sides))
    yield module
    forget_plans()


@pytest.fixture
def forked(monkeypatch):
    """Sets the way of every graph from now on; plain calls multiply by themselves."""

    def choose(dln, dW):
        forget_plans()
        choice = layernorm_plan.Choice(layernorm_plan.ALL_OWN, layernorm_plan.Products(OWN, dln, dW), True)
        monkeypatch.setattr(layernorm_plan, "choose", lambda *sizes, **facts: choice)

    return choose


@pytest.mark.parametrize("apart", [False, True], ids=["", "db apart"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_of_two_branches(late, forked, monkeypatch, dtype, way, apart):
    monkeypatch.setattr(layernorm_direct, "MANY_SUMS", 1 if apart else 2**62)
    forked(*way)
    apart = apart and way[0] == LIBRARY
    for rows in (ROWS, (70,)):
        late.log.clear()
        assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, rows))
        given = 16 * (way[0] == LIBRARY)
        few = 64 * (rows == ROWS and given > 0 and ROWS[0] * ROWS[1] <= O)
        assert late.log == [
            *[(DW, MAIN), (DB, MAIN), (DW, 1 if way[1] == OWN else 32)],
            *[(DB, 2)] * apart,
            (MAIN, 4 + 8 + 2 * (not apart) + given + few),
            *[(MAIN, DW), (MAIN, DB)],
        ]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("number", range(1, 32))
def test_there_are_branches_where_both_have_something_to_do(late, forked, monkeypatch, way, number):
    monkeypatch.setattr(layernorm_direct, "MANY_SUMS", 1)
    forked(*way)
    inputs = make_inputs()
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(number >> index & 1))
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    got = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), leaves)
    expected = torch.autograd.grad(plain_torch(*inputs).square().sum(), leaves)
    for ours, theirs in zip(got, expected, strict=True):
        assert_near(ours, theirs)
    wanted = bits(inputs)
    assert ((DW, MAIN) in late.log) == bool(wanted & 1 and wanted & 12)
    launched = [parts for _, parts in late.log if parts not in late.streams]
    assert sum(parts & 2 for parts in launched) == wanted & 2, "db once"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_first_plain_call_launches_what_the_branches_will(late, forked, monkeypatch, way):
    """In order on one stream, and once for each set of gradients."""
    monkeypatch.setattr(layernorm_direct, "is_capturing", lambda: False)
    forked(*way)
    inputs = make_inputs()
    for wanted in (15, 5):
        for index, tensor in enumerate(inputs):
            tensor.requires_grad_(wanted == 15 or index in (0, 3))
        for first in (True, False):
            late.log.clear()
            fused_layernorm_linear(*inputs).sum().backward()
            rest = wanted - 1 + 16 * (way[0] == LIBRARY)
            branches = [1 if way[1] == OWN else 32, rest] if first else []
            assert late.log == [(MAIN, parts) for parts in (*branches, wanted)]


@pytest.mark.parametrize("allocation", [0, 1, 2, 4])
def test_branches_without_memory_meet_and_say_how_much(late, forked, monkeypatch, allocation):
    """Whichever branch finds none, nor dW alone; a capture whose branches do not meet cannot be ended."""
    forked(OWN, LIBRARY)
    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    empty, count = layernorm_direct.empty_strided, itertools.count()

    def no_room(size, strides, dtype):
        if next(count) >= allocation:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return empty(size, strides, dtype)

    monkeypatch.setattr(layernorm_direct, "empty_strided", no_room)
    words = r"backward pass over 15 rows, 7 -> 6 in float32, needed [\d,]+ bytes .* CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError, match=words) as raised:
        output.sum().backward()
    assert str(raised.value).count("fused_layernorm_linear") == 1
    assert late.log[-2:] == [(MAIN, DW), (MAIN, DB)]


def test_explain_says_that_there_are_branches(late, forked):
    forked(LIBRARY, OWN)
    found = LayerNormLinear(H, O).explain(make_inputs()[0])
    assert found["backward in a CUDA graph"] == "two branches" and found["dln in a CUDA graph"] == LIBRARY


# ---- On a GPU -----------------------------------------------------------------------------------------------

FORKED = [
    (4096, 768, 3072),
    (512, 256, 1024),
    (64, 768, 3072),
    (1115, 134, 654),
    (31, 650, 243),
    (7403, 576, 192),
]


def step(inputs, grad_output):
    """The output and all gradients."""
    output = fused_layernorm_linear(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_output)]


def captured(function):
    """A graph of a function, and what it returned, after a plain call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def exact(inputs, grad_output):
    """What `step` returns, in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = plain_torch(*wide)
    return [output.detach(), *torch.autograd.grad(output, wide, grad_output.double())]


def assert_right(got, expected, relative=1e-2):
    """By the norm of the difference."""
    for mine, right in zip(got, expected, strict=True):
        assert (mine.double() - right).norm() < relative * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", FORKED, ids=str)
def test_gpu_branches_again_and_again(kernels, sizes):
    """New values in the same memory, and each time the same bits."""
    rows, width, outputs = sizes
    inputs = gpu_inputs(torch.bfloat16, (rows,), width, outputs)
    grad_output = torch.randn(rows, outputs, dtype=torch.bfloat16, device="cuda")
    plan = layernorm_plan.make_plan(inputs[0].shape, outputs, torch.bfloat16, False, kernels.hopper)
    assert plan.choice.forked == kernels.hopper
    graph, got = captured(lambda: step(inputs, grad_output))
    for seed in range(3):
        with torch.no_grad():
            for tensor, fresh in zip(
                inputs, gpu_inputs(torch.bfloat16, (rows,), width, outputs, seed), strict=True
            ):
                tensor.copy_(fresh)
        graph.replay()
        first = [tensor.clone() for tensor in got]
        assert_right(first, exact(inputs, grad_output))
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(got, first, strict=True))


@pytest.mark.gpu
def test_gpu_a_stack_of_layers_on_branches(kernels):
    """Every layer's branches meet before the next one's begin, whose kernels may start early."""
    torch.manual_seed(0)
    layers = [LayerNormLinear(768, 768, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn_like(x)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]

    def run():
        y = x
        for layer in layers:
            y = y + layer(y)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_output)]

    plain = [tensor.double() for tensor in run()]
    graph, got = captured(run)
    for _ in range(20):
        for tensor in got:
            tensor.fill_(torch.nan)
        graph.replay()
        assert_right(got, plain, 2e-2)


@pytest.mark.gpu
def test_gpu_branches_of_layers_on_streams_of_the_caller_s(kernels):
    """Two layers beside each other in one graph, on two streams of whoever captures it."""
    inputs = [gpu_inputs(torch.bfloat16, (512,), 256, 1024, seed) for seed in range(2)]
    grad_output = torch.randn(512, 1024, dtype=torch.bfloat16, device="cuda")
    other = torch.cuda.Stream()

    def run():
        current = torch.cuda.current_stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            theirs = step(inputs[1], grad_output)
        mine = step(inputs[0], grad_output)
        current.wait_stream(other)
        return mine + theirs

    graph, got = captured(run)
    for _ in range(20):
        graph.replay()
        assert_right(got[:6], exact(inputs[0], grad_output))
        assert_right(got[6:], exact(inputs[1], grad_output))


@pytest.mark.gpu
def test_gpu_graphed_callables(kernels):
    """torch's own way to graphs of forward and backward."""
    layer = LayerNormLinear(256, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    grad_output = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    plain = [tensor.double() for tensor in torch.autograd.grad(layer(x), leaves, grad_output)]
    graphed: Any = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(),))
    for _ in range(5):
        assert_right(torch.autograd.grad(graphed(x), leaves, grad_output), plain)
