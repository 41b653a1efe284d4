"""What the extension modules of two puzzles share on the side of torch: how they number dtypes, and a module on each GPU, once."""

import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from harness.errors import WorkbookError

Kernels = TypeVar("Kernels")

# How a module numbers dtypes.
KINDS = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
_opening = threading.Lock()


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    strides = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def open_once(
    found: dict[int, Kernels | None],
    device: torch.device,
    open_on: Callable[[torch.device], Kernels],
    otherwise: Callable[[], str],
) -> Kernels | None:
    """The kernels on a GPU, from the table by its number or opened now; None where that fails, for good.

    Args:
        found: What was opened before, by torch's number of the GPU; what is found is put in.
        device: The GPU.
        open_on: Builds, loads, opens and tries the module; may raise anything.
        otherwise: What goes through which MAX graph without it, for the one warning.
    """
    with _opening:
        if device.index in found:
            return found[device.index]
        opened = None
        try:
            opened = open_on(device)
        except (
            Exception
        ) as error:  # whatever the toolchain, the loader or the driver raises, there is another way
            reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{otherwise()} on {device}, which is slower and cannot be captured in a CUDA graph; there is no extension "
                f"module: {reason}",
                RuntimeWarning,
                stacklevel=3,
            )
        found[device.index] = opened  # not before: whoever looks without the lock takes what lies there
        return opened
