"""A module written with torch in place of the built extension, and what the tests of the direct way share.

It computes from the addresses that it is given, and memory comes from the CPU.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from layer_checks import ROWS, H, O, make_inputs
from torch import nn

from harness.nn import extension_kernels, layernorm_direct, layernorm_plan, layers
from harness.nn.layernorm_plan import LIBRARY, OWN, PADDED

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
        shapes += [(rows, stride), (H, rows) if wanted & 128 else (rows, stride)]
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
            taken.zero_()[:, : rows if wanted & 128 else H] = ln_out.T if wanted & 128 else ln_out
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


def stand_in(module, monkeypatch):
    """Makes every tensor on the CPU go to a module."""
    monkeypatch.setattr(layernorm_direct, "empty_strided", module.empty_strided)
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    for file in (layernorm_direct, extension_kernels):
        monkeypatch.setattr(file, "current_device", lambda: -1)
        monkeypatch.setattr(file, "current_stream", lambda index: {-1: TorchModule.STREAM}[index])
    monkeypatch.setattr(
        layernorm_direct.kernels,
        "table",
        {-1: layernorm_direct.LayerNormKernels(module, torch.device("cpu"))},
    )
    return module


def bits(inputs):
    """What a backward pass is asked for: dx 4, dgamma with dbeta 8, dW 1, db 2."""
    x, gamma, beta, W, b = (tensor.requires_grad for tensor in inputs)
    return 4 * x + 8 * (gamma or beta) + W + 2 * b


def forget_plans():
    for cached in (layernorm_plan.make_plan, layers.checked_plan):
        cached.cache_clear()


WAYS = [
    (OWN, OWN, LIBRARY),
    (LIBRARY, OWN, OWN),
    (OWN, LIBRARY, LIBRARY),
    (OWN, LIBRARY, OWN),
    (PADDED, PADDED, PADDED),
    (LIBRARY, PADDED, PADDED),
]


def gpu_inputs(dtype=torch.float32, rows=ROWS, H=H, O=O, seed=0, requires_grad=True):
    return make_inputs(dtype, rows, "cuda", H, O, seed, requires_grad)


def sequential():
    """What the layer replaces."""
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
