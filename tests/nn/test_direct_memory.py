"""The backward pass of the direct way in little memory: dW first, asked for or because there is no room for more.

Without a GPU the stand-in module of `direct_module.py` computes. The test at the end wants a real GPU.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from direct_module import WAYS, bits, gpu_inputs
from layer_checks import (
    EPS,
    O,
    assert_as_good_as_torch,
    assert_near,
    make_inputs,
    output_and_gradients,
    plain_torch,
)
from torch import nn

from harness.nn import LayerNormLinear, fused_layernorm_linear, layernorm_direct, replace
from harness.nn.layernorm_plan import LIBRARY, OWN, make_plan

fused: Any = fused_layernorm_linear
plain: Any = plain_torch
REST = 2 + 4 + 8
"""db, dx, and dgamma with dbeta."""


def least(*inputs: Any) -> torch.Tensor:
    return fused_layernorm_linear(*inputs, memory="least")


def launched(module) -> list[int]:
    """The gradients that each backward pass through the module was asked for."""
    return [call[2] % 16 for call in module.calls if call[0] == "backward"]


@pytest.mark.parametrize("way", [(OWN, OWN, OWN), *WAYS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dW_comes_first(module, chosen, no_operator, dtype, way):
    chosen(*way)
    assert_as_good_as_torch(least, make_inputs(dtype, H=8, O=16))
    assert launched(module) == [1 if way[2] == OWN else 0, REST]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("H", "O"), [(203, 264), (200, 267), (203, 267)])
def test_no_factor_of_16_bits_is_copied(hopper, H, O):
    """Where rows are not aligned the library multiplies; this project's product on Hopper may write them."""
    products = make_plan(torch.Size((130, H)), O, torch.bfloat16, False, hopper, "fast", "least").choice
    output = OWN if hopper and H == 200 else LIBRARY
    assert products.plain == products.captured == (output, LIBRARY, LIBRARY) and not products.forked


@pytest.mark.parametrize("number", range(1, 32))
def test_of_frozen_inputs_nothing_is_computed(module, no_operator, number):
    inputs = make_inputs()
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(number >> index & 1))
    least(*inputs).sum().backward()
    expected = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    plain(*expected).sum().backward()
    for tensor, reference in zip(inputs, expected, strict=True):
        assert (tensor.grad is None) == (reference.grad is None)
        if reference.grad is not None:
            assert_near(tensor.grad, reference.grad)
    wanted = bits(inputs)
    splits = wanted & 1 and wanted & (4 | 8)
    assert launched(module) == ([1, wanted - 1] if splits else [wanted])


def test_without_room_for_both_dW_comes_first(module, no_operator, monkeypatch):
    """The allocator refuses the scratch memory of both at once, and lends that of either once the rest is given back."""
    inputs = make_inputs()
    output = fused(*inputs)
    lend, lent, refused = module.empty_strided, [], []

    def lend_little(size, strides, dtype):
        if dtype is torch.uint8 and not refused:
            refused.append(size)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert not refused or all(tensor() is None for tensor in lent)
        tensor = lend(size, strides, dtype)
        if not refused:
            lent.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(layernorm_direct, "empty_strided", lend_little)
    output.square().sum().backward()
    expected = make_inputs()
    plain(*expected).square().sum().backward()
    for tensor, reference in zip(inputs, expected, strict=True):
        assert_near(tensor.grad, reference.grad)
    assert lent and len(refused) == 1 and launched(module) == [1, REST]


def test_layer_and_replacement_hand_it_on(module):
    layer = LayerNormLinear(7, O, memory="least")
    assert "memory='least'" in repr(layer)
    assert layer.explain(make_inputs()[0])["way"] == "extension module, dW first"
    shared = LayerNormLinear.from_modules(nn.LayerNorm(7), nn.Linear(7, O), memory="least")
    model = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, O))
    replace(model, [("0", "1")], memory="least")
    for call in (layer, shared, model):
        module.calls.clear()
        call(make_inputs()[0]).sum().backward()
        assert launched(module) == [1, REST]


@pytest.mark.compiles
def test_the_operator_hands_it_on(module):
    torch._dynamo.reset()
    inputs = make_inputs()
    torch.library.opcheck(torch.ops.mojo_workbook.layernorm_linear.default, (*inputs, EPS, "fast", "least"))
    module.calls.clear()
    compiled = torch.compile(least, fullgraph=True, backend="aot_eager")
    for ours, reference in zip(
        output_and_gradients(compiled, inputs), output_and_gradients(plain_torch, inputs), strict=True
    ):
        assert_near(ours.detach(), reference.detach())
    assert launched(module) == [1, REST]
    torch._dynamo.reset()


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="memory: expected 'auto' or 'least', got 'little'"):
        fused(*make_inputs(), memory="little")


def requested(which: str) -> int:
    """Bytes asked of the allocator, now or at the peak: the blocks that it gives out are larger, by what it happens to have kept."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(4096, 768, 3072), (1000, 769, 1531)], ids=str)
def test_gpu_less_memory_and_the_same_gradients(kernels, dtype, sizes):
    rows, width, outputs = sizes
    inputs = gpu_inputs(dtype, (rows,), width, outputs)
    grad_output = torch.randn(rows, outputs, dtype=dtype, device="cuda")
    peaks, gradients = [], []
    for memory in ("auto", "least"):
        for _ in range(2):
            output = fused(*inputs, memory=memory)
            gc.collect()  # what an earlier test left must not be given back while this one counts
            torch.cuda.reset_peak_memory_stats()
            before = requested("current")  # with the gradients of the other way
            results = torch.autograd.grad(output, inputs, grad_output)
            torch.cuda.synchronize()
            peak = requested("peak") - before
        peaks.append(peak)
        gradients.append(results)
        del output, results
    assert peaks[0] - peaks[1] >= rows * width * dtype.itemsize // 2
    for quick, lean in zip(*gradients, strict=True):
        assert_near(lean, quick, 1e-5 if dtype is torch.float32 else 1e-2)
