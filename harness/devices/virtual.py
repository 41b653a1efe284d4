"""The virtual GPU as a device of a run: kernels and tensors get their names, and findings and failures their words."""

from collections.abc import Mapping
from dataclasses import dataclass

from max.driver import Buffer

from harness.devices.recorder import Recording
from harness.errors import EnvironmentProblem, KernelFailed, WorkbookError
from harness.vgpu.checks.findings import by_cause
from harness.vgpu.driver import inprocess
from harness.vgpu.driver.device import Device


@dataclass(frozen=True)
class Finding:
    """What the virtual GPU saw: its kind, whether it is an error or only a note, how often, and the words for it."""

    kind: str
    is_error: bool
    where: str
    count: int
    text: str


def driver() -> Device:
    """The driver side of the virtual GPU that this process has switched on."""
    device = inprocess.device()
    assert device is not None  # MAX has given it to the run
    return device


def name_kernels(recording: Recording) -> None:
    """Tells the driver the names and source lines of the kernels that it is about to be given without either."""
    names = recording.kernel_names()
    for symbol, ptx in recording.ptx.items():
        driver().catalogue.add(names[symbol], ptx)


def name_buffers(
    buffers: Mapping[str, Buffer], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> None:
    """Tells the virtual GPU which tensor lies where, so that a finding names it and an index in it."""
    gpu = driver().gpu
    for name, shape in shapes.items():
        buffer = buffers[name]
        if buffer.num_elements:
            nbytes = buffer.num_elements * buffer.dtype.size_in_bytes
            gpu.name(buffer._data_ptr(), nbytes, name.split(".")[-1], shape, dtypes[name])


def findings() -> list[Finding]:
    """Everything found since the process began, one for each cause, errors first and the most frequent first."""
    merged = by_cause(driver().gpu.findings)
    return [Finding(f.kind, f.is_error, f.where, f.count, f.text()) for f in merged]


def failure(error: Exception) -> WorkbookError | Exception:
    """The error to show for a failed call of MAX: the virtual GPU's own, where it is behind it."""
    from harness.vgpu.errors import StepBudgetExceeded, UnsupportedInstruction

    behind = driver().errors
    if not behind:
        return error
    if isinstance(behind[0], UnsupportedInstruction):
        return EnvironmentProblem(str(behind[0]))
    if isinstance(behind[0], StepBudgetExceeded):
        return KernelFailed(str(behind[0]))
    return KernelFailed(f"the virtual GPU refused a call: {behind[0]}")
