"""The kernels of `step.mojo` on torch tensors: bfloat16, on a GPU, launched on torch's current stream."""

import ctypes
import functools
import struct
import warnings
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import WorkbookError
from harness.nn import host
from harness.toolchain import libraries
from harness.toolchain.packages import mojo_files

SOURCE = Path(__file__).with_name("step.mojo")


class StepKernels:
    """The library on one GPU."""

    def __init__(self, index: int):
        shared = [file for name in ("common", "shared") for file in mojo_files(host.KERNELS / name)]
        libraries.load_runtime()
        library = libraries.mojo_library(
            "training_step", [SOURCE, *shared], host.KERNELS, host.architecture(index)
        )
        _, self.library = library.load()
        self.message = ctypes.create_string_buffer(1024)
        self.gpu = self.call("open", index)

    def call(self, name: str, argument: "int | ctypes.Array[ctypes.c_int64]") -> int:
        """Call a function of the library with an integer or a string. Raise RuntimeError with its message if
        it fails."""
        function = self.library[f"workbook_{name}"]
        function.argtypes, function.restype = (
            (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
            ctypes.c_int64,
        )
        self.message.value = b""
        arguments = argument if isinstance(argument, int) else ctypes.addressof(argument)
        result = function(arguments, ctypes.addressof(self.message), len(self.message))
        if self.message.value:
            raise RuntimeError(self.message.value.decode())
        return result

    def launch(self, name: str, *arguments: Tensor | float) -> None:
        """Launch a pass on tensors and numbers, with its workspace."""
        device = next(each.device for each in arguments if isinstance(each, Tensor))
        values = list(map(word, arguments))
        needed = self.call(name, words(0, 0, 0, 0, *values))
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        lent = torch.empty(needed, dtype=torch.uint8, device=device)
        self.call(name, words(self.gpu, stream, lent.data_ptr(), needed, *values))


def words(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    """Convert numbers to the library's argument array."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def word(argument: Tensor | float) -> int:
    """Return the address of a tensor, an integer, or the bits of a float."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return struct.unpack("q", struct.pack("d", argument))[0] if isinstance(argument, float) else argument


@functools.cache
def open_kernels(index: int) -> StepKernels | None:
    """Return the kernels of a GPU, built if necessary; None after one warning with the reason."""
    try:
        return StepKernels(index)
    except (WorkbookError, RuntimeError) as error:
        warnings.warn(
            f"the training step goes through PyTorch's own operations on this GPU: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def kernels(tensor: Tensor) -> StepKernels | None:
    """Return the kernels for a bfloat16 tensor on a GPU; None for any other."""
    if tensor.device.type != host.DEVICE or tensor.dtype != torch.bfloat16 or torch.version.hip:
        return None
    return open_kernels(tensor.device.index or 0)


def on_kernels(device: torch.device) -> bool:
    """Return whether a step on a device runs on the kernels."""
    return kernels(torch.empty(0, dtype=torch.bfloat16, device=device)) is not None
