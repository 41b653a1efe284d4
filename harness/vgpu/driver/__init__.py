"""The stand-in CUDA driver of `vgpu exec`: two libraries in Mojo, and the server that answers them."""

from pathlib import Path


def has_gpu() -> bool:
    """Return whether a GPU's device file exists: NVIDIA's, AMD's, or Windows' in WSL."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
