"""The memory of the direct way at its peak, counted allocation by allocation: on the meta device, which has shapes and no memory.

The built module for Hopper counts its scratch memory, as it does without a GPU; nothing is launched.
"""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.nn import extension_kernels, layernorm_direct
from harness.nn.layernorm_plan import make_plan
from harness.puzzles.p22.candidates import BENCHMARK, Sizes, drawn_sizes
from harness.toolchain import extension

pytestmark = pytest.mark.compiles
BLOCK = 512
"""Bytes of which torch's allocator gives out multiples."""
SIZES: list[Sizes] = [*(BENCHMARK.named[name][0] for name in ("S0", "S1", "S2", "S3")), *drawn_sizes(20)]
LENGTHS = [(rows, H, O) for rows in (3, 130, 5000) for H in (136, 139) for O in (264, 331)]


def blocks(*counts: int) -> int:
    """The bytes of allocations of so many bytes each."""
    return sum(-(-count // BLOCK) * BLOCK for count in counts)


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that are made meanwhile, now and at the peak."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = blocks(storage.nbytes())
                self.now += self.sizes[storage._cdata]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return result

    def free(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


class Counting:
    """The module, which counts and launches nothing."""

    def __init__(self, module: Any):
        self.module = module

    def open(self, index):
        return 22

    def forward(self, gpu, *rest):
        return 0 if gpu else self.module.forward(gpu, *rest)

    def backward(self, gpu, *rest):
        return 0 if gpu else self.module.backward(gpu, *rest)

    def forward_rows(self, *arguments):
        return 0


@pytest.fixture
def kernels(monkeypatch):
    def empty_strided(size, strides, dtype):
        return torch.empty_strided(size, strides, dtype=dtype, device="meta")

    monkeypatch.setattr(layernorm_direct, "empty_strided", empty_strided)
    monkeypatch.setattr(layernorm_direct, "is_capturing", lambda: False)
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    for file in (layernorm_direct, extension_kernels):
        monkeypatch.setattr(file, "current_device", lambda: -1)
        monkeypatch.setattr(file, "current_stream", lambda index: 0)
    module: Any = Counting(extension.load(extension.build("sm_90a").path))
    kernels = layernorm_direct.LayerNormKernels(module, torch.device("cpu"))
    monkeypatch.setattr(kernels, "hopper", True)
    # What the first call of a plan runs for a graph's sake is given back, and no later call's.
    monkeypatch.setattr(kernels, "is_first", lambda plan, wanted=0: False)
    return kernels


def peak_of(kernels, rows: int, H: int, O: int, dtype: torch.dtype, memory: str, wanted: int = 15) -> int:
    """Bytes at the peak of both passes, output and gradients among them."""
    shapes = (rows, H), (H,), (H,), (O, H), (O,), (rows, O)
    *inputs, grad_output = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    x, gamma, beta, W, _ = inputs
    planned = make_plan(x.shape, O, dtype, False, True, "fast", memory)
    with Allocated(*inputs, grad_output) as allocated:
        _output, statistics = kernels.forward(planned, 1e-5, True, *inputs)
        _gradients = kernels.backward(planned, wanted, grad_output, x, statistics, gamma, beta, W)
    return allocated.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_least_is_never_more(kernels, dtype):
    for sizes in [*((size.M, size.H, size.O) for size in SIZES), *LENGTHS]:
        for wanted in (15, 13, 4):
            least, auto = (peak_of(kernels, *sizes, dtype, memory, wanted) for memory in ("least", "auto"))
            assert least <= auto, (sizes, wanted)


def test_least_is_the_results_and_little_more(kernels):
    """torch.compile also has the LayerNorm output then, which is as large as dx."""
    for size in SIZES:
        rows, H, O = size.M, size.H, size.O
        of_rows = blocks(2 * rows * O, 8 * rows, 2 * rows * H)
        of_parameters = blocks(2 * H, 2 * H, 2 * O * H, 2 * O)
        shares = max(rows * H // 4, 8 * H + BLOCK)
        least = peak_of(kernels, rows, H, O, torch.bfloat16, "least")
        assert least <= of_rows + of_parameters + shares, size
