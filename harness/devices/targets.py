"""Which devices a run uses: what was asked for, what this machine has, and why a device is left out."""

from dataclasses import dataclass

from harness.errors import BadUse

KINDS = ("auto", "cpu", "gpu", "virtual", "all")
LABELS = {"cpu": "CPU", "gpu": "GPU", "virtual": "Virtual GPU"}

# Above this many multiply-adds in the forward matmul, the CPU path's plain loops take minutes.
CPU_LIMIT = 2**28


@dataclass(frozen=True)
class Target:
    """One device of a run: its kind, a MAX device, and what it is called in full ("NVIDIA H200 (sm_90a)")."""

    kind: str
    device: object
    detail: str

    @property
    def label(self) -> str:
        """What the report calls it: "CPU", "GPU" or "Virtual GPU"; a simulated GPU is never called a GPU."""
        return LABELS[self.kind]


@dataclass(frozen=True)
class Skipped:
    """A device that the run leaves out, with the reason in a few words."""

    kind: str
    reason: str


def cpu() -> Target:
    """The CPU path of the ops."""
    import platform

    from max.driver import CPU

    return Target("cpu", CPU(), platform.processor() or platform.machine())


def gpu() -> Target | None:
    """The first accelerator that MAX sees, or None."""
    from max.driver import Accelerator, accelerator_count

    if accelerator_count() == 0:
        return None
    device = Accelerator()
    return Target("gpu", device, f"{device.api} {device.architecture_name}")


def choose(wanted: str, multiply_adds: int, dtype: str) -> tuple[list[Target], list[Skipped]]:
    """The targets of a run and the devices it leaves out.

    Args:
        wanted: A member of KINDS. "auto" is the CPU and one GPU, real if there is one; "all" is every device.
        multiply_adds: Of the largest case; what decides whether the CPU path is run without being asked for.
        dtype: float64 is for the CPU path.

    Raises BadUse where a device that was asked for by name is not there.
    """
    targets: list[Target] = []
    skipped: list[Skipped] = []
    if wanted in ("auto", "cpu", "all"):
        if multiply_adds > CPU_LIMIT and wanted == "auto":
            skipped.append(Skipped("cpu", "more than 2^28 multiply-adds; --device cpu runs it"))
        else:
            targets.append(cpu())
    if wanted in ("auto", "gpu", "all"):
        found = gpu()
        if found is None and wanted == "gpu":
            raise BadUse("--device gpu: MAX sees no GPU on this machine")
        if found is None:
            skipped.append(Skipped("gpu", "no GPU"))
        elif dtype == "float64":
            skipped.append(Skipped("gpu", "float64 is for the CPU path"))
        else:
            targets.append(found)
    if wanted == "virtual":
        raise BadUse("--device virtual: this version has no virtual GPU")
    return targets, skipped
