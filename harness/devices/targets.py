"""Choose the devices of a run: those requested that this machine has, and why others are left out."""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import BadUse, EnvironmentProblem
from harness.vgpu.driver import gpu_present

if TYPE_CHECKING:  # MAX takes a while, and a list of puzzles needs none
    from max.driver import Device

KINDS = ("auto", "cpu", "gpu", "virtual", "all")
LABELS = {"cpu": "CPU", "gpu": "GPU", "virtual": "Virtual GPU"}

# Above this many multiply-adds in the forward matmul, the CPU path's plain loops take minutes.
CPU_LIMIT = 2**28
# Above this many, the virtual GPU takes minutes.
VIRTUAL_LIMIT = 2**22


@dataclass(frozen=True)
class Target:
    """One device of a run: its kind, a MAX device, and its full name ("NVIDIA H200 (sm_90a)").

    Without MAX there is no MAX device.
    """

    kind: str
    in_max: "Device | None"
    detail: str

    @property
    def device(self) -> "Device":
        """The MAX device of a target on which something is to be run."""
        assert self.in_max is not None
        return self.in_max

    @property
    def label(self) -> str:
        """Its name in the report: "CPU", "GPU" or "Virtual GPU"; a simulated GPU is never called a GPU."""
        return LABELS[self.kind]


CPU = Target("cpu", None, "")
"""The CPU, for code that runs without MAX."""
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
"""The virtual GPU, which replays recorded launches."""


@dataclass(frozen=True)
class Skipped:
    """A device that the run leaves out, with the reason in a few words."""

    kind: str
    reason: str


def cpu() -> Target:
    """Return the CPU path of the ops."""
    from max.driver import CPU

    return Target("cpu", CPU(), platform.processor() or platform.machine())


def gpu() -> Target | None:
    """Return the first accelerator that MAX sees, or None."""
    from max.driver import Accelerator, accelerator_count

    if accelerator_count() == 0:
        return None
    device = Accelerator()
    return Target("gpu", device, f"{device.api} {device.architecture_name}")


def gpu_may_exist() -> bool:
    """Check whether this machine may have a GPU for MAX, without MAX, which looks for devices only once."""
    return platform.system() != "Linux" or gpu_present()


def choose(expected: str, multiply_adds: int, dtype: str, on_cpu: bool) -> tuple[list[Target], list[Skipped]]:
    """Return the targets of a run and the skipped devices.

    Args:
        expected: A member of KINDS. "auto" is the CPU path, if there is one, and one GPU, real if there is one;
            "all" is every device.
        multiply_adds: Of the largest case; a slow device is skipped above a limit unless requested.
        dtype: float64 runs on the CPU path only.
        on_cpu: Whether the ops have a CPU path.

    Raises EnvironmentProblem if a GPU requested by name is missing, BadUse for float64 on one, and for a
    missing CPU path.
    """
    targets: list[Target] = []
    skipped: list[Skipped] = []
    if not on_cpu and (expected == "cpu" or dtype == "float64"):
        flag = "--device cpu" if expected == "cpu" else "--dtype float64"
        raise BadUse(f"{flag} is for a CPU path, which these kernels do not have")
    if on_cpu and expected in ("auto", "cpu", "all"):
        if multiply_adds > CPU_LIMIT and expected == "auto":
            skipped.append(Skipped("cpu", "more than 2^28 multiply-adds; --device cpu runs it"))
        else:
            targets.append(cpu())
    if expected == "cpu":
        return targets, skipped
    if dtype == "float64":
        if expected in ("gpu", "virtual"):
            raise BadUse(f"--dtype float64 is for the CPU path; --device {expected} does not run it")
        return targets, [*skipped, Skipped("gpu", "float64 is for the CPU path")]
    device = gpu() if expected != "virtual" and gpu_may_exist() else None
    if device:
        targets.append(device)
    elif expected == "gpu":
        raise EnvironmentProblem("--device gpu: MAX sees no GPU on this machine")
    elif multiply_adds > VIRTUAL_LIMIT and expected != "virtual":
        skipped.append(Skipped("gpu", "no GPU, and too large for the virtual one; --device virtual runs it"))
    else:
        targets.append(VIRTUAL)
    return targets, skipped
