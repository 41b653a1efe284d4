"""Choose the devices of a run, and give reasons for the skipped ones."""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import EnvironmentProblem, UsageError
from harness.vgpu.driver import has_gpu

if TYPE_CHECKING:  # importing MAX is slow, and listing puzzles does not need it
    from max.driver import Device

DEVICE_KINDS = ("auto", "cpu", "gpu", "virtual", "all")
DEVICE_LABELS = {"cpu": "CPU", "gpu": "GPU", "virtual": "Virtual GPU"}

# Above this many multiply-adds in the forward matmul, the CPU path's loops take minutes.
MAX_CPU_MULTIPLY_ADDS = 2**28
# Above this many, the virtual GPU takes minutes.
MAX_VIRTUAL_MULTIPLY_ADDS = 2**22


@dataclass(frozen=True)
class Target:
    """One device of a run: its kind, MAX device, and full name ("NVIDIA H200 (sm_90a)").

    A device that runs without MAX has `max_device=None`.
    """

    kind: str
    max_device: "Device | None"
    device_name: str

    @property
    def device(self) -> "Device":
        assert self.max_device is not None
        return self.max_device

    @property
    def label(self) -> str:
        """The device's name in reports: "CPU", "GPU" or "Virtual GPU"."""
        return DEVICE_LABELS[self.kind]


CPU = Target("cpu", None, "")
"""The CPU, for code that runs without MAX."""
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
"""The virtual GPU, which replays recorded launches."""


@dataclass(frozen=True)
class SkippedDevice:
    """A device that the run skips, with a short reason."""

    kind: str
    reason: str


def make_cpu_target() -> Target:
    from max.driver import CPU

    return Target("cpu", CPU(), platform.processor() or platform.machine())


def find_gpu_target() -> Target | None:
    """Return the first accelerator visible to MAX, or None."""
    from max.driver import Accelerator, accelerator_count

    if accelerator_count() == 0:
        return None
    device = Accelerator()
    return Target("gpu", device, f"{device.api} {device.architecture_name}")


def may_have_gpu() -> bool:
    """Return whether MAX may find a GPU, without calling MAX, which looks for devices only once."""
    return platform.system() != "Linux" or has_gpu()


def choose_targets(
    kind: str, multiply_adds: int, dtype: str, has_cpu_path: bool
) -> tuple[list[Target], list[SkippedDevice]]:
    """Return the targets of a run and the skipped devices.

    Args:
        kind: A member of DEVICE_KINDS. "auto": the CPU path, if any, and one GPU, real if possible; "all":
            every device.
        multiply_adds: Those of the largest case; above a limit, slow devices run only if requested.
        dtype: float64 runs on the CPU path only.
        has_cpu_path: Whether the ops have a CPU path.

    Raises EnvironmentProblem if a GPU requested by name is missing, UsageError for float64 on one, and for a
    missing CPU path.
    """
    targets: list[Target] = []
    skipped: list[SkippedDevice] = []
    if not has_cpu_path and (kind == "cpu" or dtype == "float64"):
        flag = "--device cpu" if kind == "cpu" else "--dtype float64"
        raise UsageError(f"{flag} is for a CPU path, which these kernels do not have")
    if has_cpu_path and kind in ("auto", "cpu", "all"):
        if multiply_adds > MAX_CPU_MULTIPLY_ADDS and kind == "auto":
            skipped.append(SkippedDevice("cpu", "more than 2^28 multiply-adds; --device cpu runs it"))
        else:
            targets.append(make_cpu_target())
    if kind == "cpu":
        return targets, skipped
    if dtype == "float64":
        if kind in ("gpu", "virtual"):
            raise UsageError(f"--dtype float64 is for the CPU path; --device {kind} does not run it")
        return targets, [*skipped, SkippedDevice("gpu", "float64 is for the CPU path")]
    device = find_gpu_target() if kind != "virtual" and may_have_gpu() else None
    if device:
        targets.append(device)
    elif kind == "gpu":
        raise EnvironmentProblem("--device gpu: MAX sees no GPU on this machine")
    elif multiply_adds > MAX_VIRTUAL_MULTIPLY_ADDS and kind != "virtual":
        skipped.append(
            SkippedDevice("gpu", "no GPU, and too large for the virtual one; --device virtual runs it")
        )
    else:
        targets.append(VIRTUAL)
    return targets, skipped
