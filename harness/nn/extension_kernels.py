"""What the ways to the layers' extension modules share: a module opened once on each GPU, and how it numbers dtypes."""

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import Function

from harness.errors import WorkbookError
from harness.nn.private import current_device, current_stream, empty_strided
from harness.toolchain import extension

Tensor = torch.Tensor
NOTHING_TO_DO = nullcontext()
NOWHERE = (0, 0, 0, 0)
"""In the place of GPU, stream and scratch memory: launches nothing, and only counts the scratch memory."""
DEVICE = "cuda"
"""What torch calls NVIDIA's and AMD's GPUs."""
# How a module numbers dtypes.
KINDS = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
VECTOR = 16
"""Bytes to which every address must be aligned for the kernels' wide loads; others take a slower variant."""
PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The types of tensors whose memory the kernels may take without asking anybody."""


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    strides = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def padded(width: int, dtype: torch.dtype) -> int:
    """The elements of the shortest aligned row that holds `width` elements."""
    step = VECTOR // dtype.itemsize
    return -(-width // step) * step


def applied(function: type[Function]) -> Callable[..., Tensor]:
    """A Function's `apply` without its Python part, which looks for functorch's transforms: there must be none."""
    # The type checker does not see the class in C behind it.
    return super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def address(argument: Any) -> Any:
    """Where a tensor lies, 0 for None; a number as it is."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else argument


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU."""
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Whether a device has the modules' kernels for Hopper."""
    return device.type == "cuda" and not torch.version.hip and capability(device) == (9, 0)


class OnDevice:
    """A layer's extension module on one GPU.

    Args:
        module: The loaded module.
        device: The GPU.

    Attributes:
        index: torch's number of the GPU, which is MAX's too.
        gpu: What the module calls it.
        hopper: Whether it has the kernels for Hopper.
    """

    def __init__(self, module: ModuleType, device: torch.device):
        self.index = -1 if device.index is None else device.index
        self.module: Any = module
        self.gpu = module.open(self.index)
        self.hopper = is_hopper(device)

    def current(self) -> AbstractContextManager[object]:
        """Meanwhile this GPU is the current one."""
        return NOTHING_TO_DO if current_device() == self.index else torch.cuda.device(self.index)

    def launch(self, function: Callable[..., int], *arguments: Any, scratch: int | None = None) -> None:
        """Launches on torch's current stream of this GPU, with so many bytes of scratch memory; None for as many as the module counts.

        The module gets the address of a tensor, 0 for None, and numbers as they are.
        """
        given = [address(argument) for argument in arguments]
        if scratch is None:
            scratch = function(*NOWHERE, *given)
        with self.current():
            lent = empty_strided((scratch,), (1,), torch.uint8) if scratch else None
            function(self.gpu, current_stream(self.index), address(lent), scratch, *given)

    def smallest_pass(self) -> None:
        """Launches one small forward pass."""
        raise NotImplementedError

    def probe(self) -> None:
        """Tries a small pass. Raises whatever the driver and the kernels' assembler have against it."""
        with torch.cuda.device(self.index):
            if not torch.cuda.is_current_stream_capturing():
                self.smallest_pass()


Kernels = TypeVar("Kernels", bound=OnDevice)
_opening = threading.Lock()


class Opened(Generic[Kernels]):
    """A layer's kernels by device, built, loaded, opened and tried when they are first asked for.

    Args:
        layer: Whose extension module it is.
        kind: What is made of the module on a device.
        otherwise: What goes through which MAX graph without the module, for the one warning that says why there is none.

    Attributes:
        table: By torch's number of the GPU; None where building or loading has failed.
    """

    def __init__(self, layer: str, kind: type[Kernels], otherwise: Callable[[torch.device], str]):
        self.layer, self.kind, self.otherwise = layer, kind, otherwise
        self.table: dict[int, Kernels | None] = {}

    def __call__(self, device: torch.device) -> Kernels | None:
        """The kernels for a device; None where there are none."""
        if device.type != DEVICE:
            return None
        index = -1 if device.index is None else device.index
        try:
            return self.table[index]
        except KeyError:
            with _opening:
                if index not in self.table:
                    # Not before it is open: whoever looks without the lock takes what lies there.
                    self.table[index] = self.open(device)
                return self.table[index]

    def open(self, device: torch.device) -> Kernels | None:
        """The kernels, or None after the warning."""
        try:
            built = extension.build(extension.architecture(device), layer=self.layer)
            kernels = self.kind(extension.load(built.path, self.layer), device)
            kernels.probe()
        except Exception as error:  # of the toolchain, the loader or the driver: there is another way
            reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{self.otherwise(device)} on {device}, which is slower and cannot be captured in a CUDA graph; there is no "
                f"extension module: {reason}",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
        return kernels
