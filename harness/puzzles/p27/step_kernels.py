"""The kernels of `step.mojo` for bfloat16 GPU tensors, launched on PyTorch's current stream."""

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
from harness.toolchain.packages import list_mojo_files

SOURCE = Path(__file__).with_name("step.mojo")


class StepKernels:
    """The library of the kernels, loaded on one GPU."""

    def __init__(self, index: int):
        shared = [
            file for name in ("common", "shared") for file in list_mojo_files(host.KERNELS_FOLDER / name)
        ]
        libraries.load_runtime()
        library = libraries.make_mojo_library(
            "training_step", [SOURCE, *shared], host.KERNELS_FOLDER, host.get_architecture(index)
        )
        _, self.library = library.load()
        self.message = ctypes.create_string_buffer(1024)
        self.gpu = self.call("open", index)

    def call(self, name: str, argument: "int | ctypes.Array[ctypes.c_int64]") -> int:
        """Call a function of the library. Raises RuntimeError with its message if it fails."""
        function = self.library[f"workbook_{name}"]
        function.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        function.restype = ctypes.c_int64
        self.message.value = b""
        arguments = argument if isinstance(argument, int) else ctypes.addressof(argument)
        result = function(arguments, ctypes.addressof(self.message), len(self.message))
        if self.message.value:
            raise RuntimeError(self.message.value.decode())
        return result

    def launch(self, name: str, *arguments: Tensor | float) -> None:
        """Launch a function on tensors and numbers, with the workspace that it needs."""
        device = next(t.device for t in arguments if isinstance(t, Tensor))
        values = list(map(to_word, arguments))
        size = self.call(name, make_words(0, 0, 0, 0, *values))
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.call(name, make_words(self.gpu, stream, memory.data_ptr(), size, *values))


def make_words(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def to_word(argument: Tensor | float) -> int:
    """Convert an argument to an int64: a tensor's address, an integer, or a float64's bits."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return struct.unpack("q", struct.pack("d", argument))[0] if isinstance(argument, float) else argument


@functools.cache
def load_kernels(index: int) -> StepKernels | None:
    """Load a GPU's kernels, building them if needed; on failure, warn once and return None."""
    try:
        return StepKernels(index)
    except (WorkbookError, RuntimeError) as error:
        message = f"the training step runs PyTorch's own operations on this GPU: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return None


def get_kernels(tensor: Tensor) -> StepKernels | None:
    """Return the kernels for a bfloat16 tensor on a GPU; None for any other tensor."""
    if tensor.device.type != host.DEVICE or tensor.dtype != torch.bfloat16 or torch.version.hip:
        return None
    return load_kernels(tensor.device.index or 0)


def has_kernels(device: torch.device) -> bool:
    return get_kernels(torch.empty(0, dtype=torch.bfloat16, device=device)) is not None
