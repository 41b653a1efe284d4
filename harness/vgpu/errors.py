"""The exceptions of the virtual GPU, each with the CUDA error name that a driver would return."""

from __future__ import annotations

from harness.vgpu.ptx.locations import format_location


class VirtualGPUError(Exception):
    """Base class of the virtual GPU's exceptions."""

    cuda = "CUDA_ERROR_UNKNOWN"


class LaunchError(VirtualGPUError):
    """Raised for a launch that any GPU would reject, before it executes."""

    def __init__(self, message: str, cuda: str = "CUDA_ERROR_INVALID_VALUE"):
        super().__init__(f"{message} [{cuda}]")
        self.cuda = cuda


class InvalidPTX(VirtualGPUError):
    """Raised for PTX that cannot be loaded: malformed, unsupported, or with too much static shared memory."""

    cuda = "CUDA_ERROR_INVALID_PTX"


class UnsupportedPTXVersion(InvalidPTX):
    """Raised for PTX of an unsupported version."""

    cuda = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"


class OutOfDeviceMemory(VirtualGPUError):
    """Raised for an allocation that does not fit."""

    cuda = "CUDA_ERROR_OUT_OF_MEMORY"


class InvalidAddress(VirtualGPUError):
    """Raised for a range of device addresses that is not inside one allocation."""

    cuda = "CUDA_ERROR_INVALID_VALUE"


class UnsupportedInstruction(VirtualGPUError):
    """Raised for an instruction that the virtual GPU cannot execute, `.instr`."""

    cuda = "CUDA_ERROR_NOT_SUPPORTED"

    def __init__(self, instr, reason: str = ""):
        self.instr, self.reason = instr, reason
        location = format_location(instr)
        line = f" at PTX line {instr.line}" + (f" ({location})" if instr.loc else "")
        super().__init__(
            f"the virtual GPU does not support the instruction {instr.name}{line}{': ' + reason if reason else ''}"
        )


class StepBudgetExceeded(VirtualGPUError):
    """Raised for a launch that exceeds its step budget; the message contains the location of the loop."""

    cuda = "CUDA_ERROR_LAUNCH_TIMEOUT"
