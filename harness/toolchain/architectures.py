"""Map GPUs to the architectures for which kernels are built, by their Mojo names."""

import functools
import re
from typing import TYPE_CHECKING

from harness.errors import EnvironmentProblem, UsageError
from harness.toolchain.packages import run_mojo

if TYPE_CHECKING:
    import torch

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Minimum compute capability, because of tensor core instructions and asynchronous copies."""

NVIDIA_ONLY_MESSAGE = "the kernels are for GPUs of NVIDIA"

# A line of `mojo build --print-supported-accelerators`: a name and, if it is an alias, its target.
ACCELERATOR = re.compile(r"^  (\w+)\s+- (?:\(alias\) -> (\w+))?", re.MULTILINE)


class UnsupportedGPU(EnvironmentProblem):
    """Raised for a GPU without kernels; the message is the reason."""


def get_nvidia_architecture(capability: tuple[int, int]) -> str:
    """Return the accelerator name of an NVIDIA compute capability: "sm_90a" for (9, 0).

    Raises UnsupportedGPU below MIN_COMPUTE_CAPABILITY.
    """
    major, minor = capability
    if capability < MIN_COMPUTE_CAPABILITY:
        raise UnsupportedGPU(f"the kernels need sm_80 or newer, not sm_{major}{minor}")
    # From Hopper on, the required instructions exist only in the architecture-specific target.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def normalize_architecture(name: str) -> str:
    """Return the architecture whose kernels a GPU uses: resolve aliases, and "sm_90" to "sm_90a".

    Raises UsageError for a name that is unknown to Mojo or has no kernels.
    """
    supported = list_accelerators()
    try:
        return get_kernel_architecture(supported[name])
    except KeyError:
        available = ", ".join(sorted(arch for arch in set(supported.values()) if has_kernels(arch)))
        raise UsageError(f"--arch {name}: unknown; there is {available}") from None
    except UnsupportedGPU as error:
        raise UsageError(f"--arch {name}: {error}") from None


def get_kernel_architecture(accelerator: str) -> str:
    """Return the architecture of an accelerator's kernels. Raises UnsupportedGPU if it has none."""
    if number := re.fullmatch(r"sm_(\d+)(\d)a?", accelerator):
        return get_nvidia_architecture((int(number[1]), int(number[2])))
    raise UnsupportedGPU(NVIDIA_ONLY_MESSAGE)


def has_kernels(accelerator: str) -> bool:
    """Return whether kernels are built for exactly this accelerator."""
    try:
        return get_kernel_architecture(accelerator) == accelerator
    except UnsupportedGPU:
        return False


def list_gpu_architectures() -> list[str]:
    """Return the architectures of the GPUs visible to PyTorch.

    Raises UsageError if there is none, UnsupportedGPU for one that is too old.
    """
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise UsageError("PyTorch sees no GPU on this machine; name what to build for, as in --arch sm_90a")
    return list(dict.fromkeys(get_architecture(device) for device in devices))


@functools.cache
def list_accelerators() -> dict[str, str]:
    output = run_mojo("build", "--print-supported-accelerators").stdout
    return {name: alias or name for name, alias in ACCELERATOR.findall(output)}


def get_architecture(device: "torch.device") -> str:
    """Return the accelerator name of a GPU visible to PyTorch. Raises UnsupportedGPU if it has no kernels."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedGPU(NVIDIA_ONLY_MESSAGE)
    return get_nvidia_architecture(torch.cuda.get_device_capability(device))
