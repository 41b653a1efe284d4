"""Name the architecture of a GPU as Mojo does, for which kernels are built."""

import functools
import re
from typing import TYPE_CHECKING

from harness.errors import BadUse, EnvironmentProblem
from harness.toolchain.packages import run_mojo

if TYPE_CHECKING:
    import torch

OLDEST_NVIDIA = (8, 0)
"""Compute capability with the tensor core instructions and asynchronous copies that the fast kernels use."""

ONLY_NVIDIA = "the kernels are for GPUs of NVIDIA"

# A line of `mojo build --print-supported-accelerators`: a name, and what it is an alias of.
ACCELERATOR = re.compile(r"^  (\w+)\s+- (?:\(alias\) -> (\w+))?", re.MULTILINE)


class Unsupported(EnvironmentProblem):
    """There are no kernels for this GPU; the message says why."""


def nvidia_architecture(capability: tuple[int, int]) -> str:
    """Return the accelerator name of an NVIDIA GPU by its compute capability: (9, 0) is "sm_90a".

    Raises Unsupported below OLDEST_NVIDIA.
    """
    major, minor = capability
    if capability < OLDEST_NVIDIA:
        raise Unsupported(f"the kernels need sm_80 or newer, not sm_{major}{minor}")
    # From Hopper on, the instructions that matter here exist in the variant of one architecture only.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def canonical(name: str) -> str:
    """Return the name under which a GPU's kernels are looked for: an alias resolved, "sm_90" as "sm_90a".

    Raises BadUse for a name that Mojo does not know or that there are no kernels for.
    """
    known = list_supported()
    try:
        return with_kernels(known[name])
    except KeyError:
        fitting = ", ".join(sorted(each for each in set(known.values()) if has_kernels(each)))
        raise BadUse(f"--arch {name}: unknown; there is {fitting}") from None
    except Unsupported as error:
        raise BadUse(f"--arch {name}: {error}") from None


def with_kernels(accelerator: str) -> str:
    """Return the architecture whose kernels one of Mojo's accelerators runs. Raises Unsupported if there are none."""
    if number := re.fullmatch(r"sm_(\d+)(\d)a?", accelerator):
        return nvidia_architecture((int(number[1]), int(number[2])))
    raise Unsupported(ONLY_NVIDIA)


def has_kernels(accelerator: str) -> bool:
    """Check whether there are kernels under an accelerator's own name."""
    try:
        return with_kernels(accelerator) == accelerator
    except Unsupported:
        return False


def present() -> list[str]:
    """Return the architectures of the GPUs that torch sees.

    Raises BadUse if there is none, Unsupported for one that is too old.
    """
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise BadUse("PyTorch sees no GPU on this machine; name what to build for, as in --arch sm_90a")
    return list(dict.fromkeys(architecture(device) for device in devices))


@functools.cache
def list_supported() -> dict[str, str]:
    """Return the accelerators that the installed Mojo compiles for: each name and its meaning."""
    listed = run_mojo("build", "--print-supported-accelerators").stdout
    return {name: alias or name for name, alias in ACCELERATOR.findall(listed)}


def architecture(device: "torch.device") -> str:
    """Return the accelerator name of a GPU that torch sees. Raises Unsupported if there are no kernels for it."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        raise Unsupported(ONLY_NVIDIA)
    return nvidia_architecture(torch.cuda.get_device_capability(device))
