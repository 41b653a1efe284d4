"""The kernels of attention's fast variant on torch tensors, by an extension module: on torch's current stream, without MAX.

Nothing waits for the GPU and nothing is allocated but the results, so that a CUDA graph can capture a step. 16-bit types are
multiplied on tensor cores up to a head dimension of 128, at any strides whose last is 1; every other case runs on the flash
kernels, which want contiguous tensors. `explain` says which kernels a call takes, and by which way.
"""

import threading
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

from harness.errors import WorkbookError
from harness.nn.private import current_device, current_stream
from harness.toolchain import extension

Tensor = torch.Tensor
PUZZLE = "p23"

# How the module numbers dtypes, and the type of lse and of sums.
KINDS = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
TENSOR_CORES = (torch.bfloat16, torch.float16)
WIDEST = 128
"""The largest head dimension of the kernels on tensor cores."""
NO_SCRATCH = (0, 0)
"""In the place of scratch memory: the module needs none."""


def on_tensor_cores(query: Tensor) -> bool:
    """Whether there are tiles for query's dtype and head dimension, where the GPU has tensor cores for them."""
    return query.dtype in TENSOR_CORES and query.shape[-1] <= WIDEST and not torch.version.hip


def readable(tensor: Tensor, any_strides: bool) -> Tensor:
    """The tensor, or a copy that the kernels can read: the elements of a row are neighbours in memory."""
    if any_strides and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        return tensor
    return tensor.contiguous()


def row_strides(tensor: Tensor) -> tuple[int, ...]:
    """How far apart batches, heads and rows are, in elements."""
    return tensor.stride()[:3]


class Kernels:
    """The module on one GPU.

    Args:
        module: The loaded extension module.
        index: torch's number of the GPU, which is MAX's too.
    """

    def __init__(self, module: ModuleType, index: int):
        self.index = index
        self.module = module
        self.gpu = module.open(index)
        device = torch.device("cuda", index)
        # What the flash kernels read where there is no mask. Made once: a CUDA graph must not own it.
        self.no_mask = {dtype: torch.zeros(1, 1, 1, 1, dtype=dtype, device=device) for dtype in KINDS}

    def call(self, launch: Callable[..., int], dtype: torch.dtype, *arguments) -> None:
        """Launches on torch's current stream of the GPU."""
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                self.call(launch, dtype, *arguments)
            return
        launch(self.gpu, current_stream(self.index), *NO_SCRATCH, KINDS[dtype], *arguments)

    def sizes(self, query: Tensor, key: Tensor, mask: Tensor | None, diagonal: int, mask_block: int):
        """What the module takes as sizes: B, N, G, S, T, d, the diagonal, the strides of the mask, and its blocks' side."""
        B, N, S, d = query.shape
        strides = (0, 0, 0, 0)
        if mask is not None:
            pairs = zip(mask.stride(), mask.shape, strict=True)
            strides = tuple(0 if size == 1 else stride for stride, size in pairs)
        return (
            B,
            N,
            key.shape[1],
            S,
            key.shape[2],
            d,
            diagonal,
            *strides,
            mask_block if mask is not None else 0,
        )

    def mask_address(self, mask: Tensor | None, dtype: torch.dtype) -> int:
        """Where the mask lies, or the 0 that stands for none."""
        return (self.no_mask[dtype] if mask is None else mask).data_ptr()

    def forward(self, query, key, value, mask, scale: float, diagonal: int, mask_block: int):
        """Output [B, N, S, d] and lse [B, N, S], both contiguous. None of the tensors is empty."""
        any_strides = on_tensor_cores(query)
        query, key, value = (readable(tensor, any_strides) for tensor in (query, key, value))
        output = query.new_empty(query.shape)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty(query.shape[:-1], dtype=wide)
        self.call(
            self.module.forward,
            query.dtype,
            *self.sizes(query, key, mask, diagonal, mask_block),
            scale,
            output.data_ptr(),
            lse.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            self.mask_address(mask, query.dtype),
            *row_strides(query),
            *row_strides(key),
            *row_strides(value),
            *row_strides(output),
        )
        return output, lse

    def delta(self, grad_out, output, grad_lse) -> Tensor:
        """rowsum(grad_out * output), less grad_lse where there is one: [B, N, S]."""
        any_strides = on_tensor_cores(output)
        grad_out, output = (readable(tensor, any_strides) for tensor in (grad_out, output))
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        delta = output.new_empty(output.shape[:-1], dtype=wide)
        inside = any_strides and grad_lse is not None
        rows = grad_lse.contiguous() if inside else None
        self.call(
            self.module.delta,
            output.dtype,
            *self.sizes(output, output, None, 0, 0),
            delta.data_ptr(),
            grad_out.data_ptr(),
            output.data_ptr(),
            0 if rows is None else rows.data_ptr(),
            *row_strides(grad_out),
            *row_strides(output),
        )
        return delta if inside or grad_lse is None else delta - grad_lse

    def backward(
        self, grad_out, query, key, value, lse, delta, mask, scale: float, diagonal: int, mask_block: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, contiguous. None of the tensors is empty."""
        any_strides = on_tensor_cores(query)
        grad_out, query, key, value = (
            readable(tensor, any_strides) for tensor in (grad_out, query, key, value)
        )
        lse, delta = lse.contiguous(), delta.contiguous()
        gradients = tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))
        self.call(
            self.module.backward,
            query.dtype,
            *self.sizes(query, key, mask, diagonal, mask_block),
            scale,
            *(gradient.data_ptr() for gradient in gradients),
            grad_out.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            lse.data_ptr(),
            delta.data_ptr(),
            self.mask_address(mask, query.dtype),
            *row_strides(query),
            *row_strides(key),
            *row_strides(value),
            *row_strides(grad_out),
            *(stride for gradient in gradients for stride in row_strides(gradient)),
        )
        return gradients

    def probe(self) -> None:
        """Launches one small forward pass. Raises whatever the driver and the kernels' assembler have against it."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return
            ones = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
            self.forward(ones, ones, ones, None, 1.0, 8, 1)


# ---- Which GPUs have a module -------------------------------------------------------------------------------

found: dict[int, Kernels | None] = {}
"""By torch's number of the GPU; None where building or loading has failed."""
_finding = threading.Lock()


def kernels(device: torch.device) -> Kernels | None:
    """The kernels for a device, built, loaded and opened when it is first asked for; None where there are none.

    Where that fails on a GPU, one warning says why.
    """
    if device.type != "cuda":
        return None
    try:
        return found[device.index]
    except KeyError:
        with _finding:
            if device.index not in found:
                found[device.index] = find(device)
            return found[device.index]


def find(device: torch.device) -> Kernels | None:
    """Builds, loads, opens and tries; warns where that fails."""
    try:
        built = extension.build(extension.architecture(device), puzzle=PUZZLE)
        opened = Kernels(extension.load(built.path, PUZZLE), device.index)
        opened.probe()
        return opened
    except (
        Exception
    ) as error:  # whatever the toolchain, the loader or the driver raises, there is another way
        reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"attention goes through a MAX graph of its flash kernels on {device}, which is slower and cannot be captured "
            f"in a CUDA graph; there is no extension module: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def explain(query: Tensor) -> str:
    """Which kernels `attention` runs for a query, and how it comes to them, in one line."""
    if query.device.type != "cuda":
        return "the plain loops of the CPU path, through a MAX graph"
    if kernels(query.device) is None:
        return "the flash kernels, through a MAX graph: there is no extension module for this GPU"
    if on_tensor_cores(query):
        return "tensor cores, through the extension module"
    return "the flash kernels, through the extension module: tensor cores take 16-bit types with heads of up to 128"
