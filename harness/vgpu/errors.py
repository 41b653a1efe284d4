"""The exceptions of the virtual GPU, each with the CUDA error name that a driver would return."""

from __future__ import annotations

from harness.vgpu.ptx.places import place


class VirtualGPUError(Exception):
    """Base class of the virtual GPU's exceptions."""

    cuda = "CUDA_ERROR_UNKNOWN"


class LaunchError(VirtualGPUError):
    """A launch that every GPU would reject; nothing has run."""

    def __init__(self, message: str, cuda: str = "CUDA_ERROR_INVALID_VALUE"):
        super().__init__(f"{message} [{cuda}]")
        self.cuda = cuda


class InvalidPTX(VirtualGPUError):
    """PTX that cannot be loaded: malformed, unsupported, or with too much static shared memory."""

    cuda = "CUDA_ERROR_INVALID_PTX"


class UnsupportedPTXVersion(InvalidPTX):
    """PTX of a version that the virtual GPU does not know."""

    cuda = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"


class OutOfDeviceMemory(VirtualGPUError):
    """An allocation does not fit."""

    cuda = "CUDA_ERROR_OUT_OF_MEMORY"


class InvalidAddress(VirtualGPUError):
    """A host range that is not inside one allocation."""

    cuda = "CUDA_ERROR_INVALID_VALUE"


class UnsupportedInstruction(VirtualGPUError):
    """An instruction that the virtual GPU does not execute; `.instr` is the instruction."""

    cuda = "CUDA_ERROR_NOT_SUPPORTED"

    def __init__(self, instr, why: str = ""):
        self.instr, self.why = instr, why
        at = place(instr)
        line = f" at PTX line {instr.line}" + (f" ({at})" if instr.loc else "")
        super().__init__(
            f"the virtual GPU does not support the instruction {instr.name}{line}{': ' + why if why else ''}"
        )


class StepBudgetExceeded(VirtualGPUError):
    """A launch that did not end within its step budget; the message names the loop."""

    cuda = "CUDA_ERROR_LAUNCH_TIMEOUT"
