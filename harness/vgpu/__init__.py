"""A virtual GPU: run the PTX of Mojo kernels on the CPU with memory, ordering and race checks.

>>> gpu = VirtualGPU()
>>> kernel = next(iter(gpu.load(ptx_text).kernels.values()))

Its layers, from the top down (a file imports from its own folder and from the layers below):

- cli.py: `vgpu exec`, `vgpu info`: run unmodified programs on the virtual GPU
- driver/: the stand-in CUDA driver: two libraries in Mojo, and a server
- machine.py: the device, `VirtualGPU`: memory, modules, launches
- engine/: one launch (launch.py), its execution in NumPy (interpreter/), one definition per opcode (opcodes/)
- checks/: findings and the checks that report them: races, copy ordering, divergence, hangs; counters, events
- memory/: device memory with exact tensors, memory instructions, mbarriers, tensor maps
- errors.py: the exceptions, each with the name of its CUDA error
- ptx/: parser, control-flow graph, address provenance, source lines and names
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks.counters import Counters
    from .checks.events import Events
    from .checks.findings import Checks, Finding
    from .errors import VirtualGPUError
    from .machine import Kernel, Launch, VirtualGPU

__all__ = ["Checks", "Counters", "Events", "Finding", "Kernel", "Launch", "VirtualGPU", "VirtualGPUError"]

_MODULES = {"VirtualGPUError": "errors", "Kernel": "machine", "Launch": "machine", "VirtualGPU": "machine"}
_MODULES |= dict.fromkeys(("Checks", "Finding"), "checks.findings")
_MODULES |= {"Counters": "checks.counters", "Events": "checks.events"}


def __getattr__(name: str):
    """Import a public name's module on first use, so that `Finding` does not load the engine."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
