"""The stand-in CUDA driver of `vgpu exec`: two libraries in Mojo, and the server process."""

from pathlib import Path


def gpu_present() -> bool:
    """Return whether the system shows a GPU (NVIDIA, AMD, or Windows' through WSL). Linux only."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
