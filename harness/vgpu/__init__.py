"""The virtual GPU: runs the PTX of Mojo kernels on the CPU, and checks memory, order and races while it does.

>>> gpu = VirtualGPU()
>>> kernel = next(iter(gpu.load(ptx_text).kernels.values()))

Its floors, from the top down; each file imports from its own folder and from floors below it, and a test
holds that:

- cli.py: `vgpu exec`, `vgpu info`: programs that know nothing of a virtual GPU run on it
- driver/: what such programs take for the CUDA driver: two libraries in Mojo, and a server
- machine.py: the device, `VirtualGPU`: memory, modules, launches
- engine/: one launch (launch.py), what runs it in NumPy (interpreter/), and the definition of each instruction (opcodes/)
- checks/: findings, and what makes them: races, order of copies, divergence, hangs; counters and events
- memory/: device memory with exact tensors, memory instructions, mbarriers, tensor maps
- errors.py: what is raised, each with the name of the CUDA error
- ptx/: the text: parser, control-flow graph, where an address comes from, source lines and names
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks.counters import Counters
    from .checks.events import Events
    from .checks.findings import Checks, Finding
    from .errors import VirtualGPUError
    from .machine import Kernel, Launch, VirtualGPU

__all__ = ["Checks", "Counters", "Events", "Finding", "Kernel", "Launch", "VirtualGPU", "VirtualGPUError"]

_HOMES = {
    "Counters": "checks.counters",
    "Events": "checks.events",
    "Checks": "checks.findings",
    "Finding": "checks.findings",
}
_HOMES |= {"VirtualGPUError": "errors", "Kernel": "machine", "Launch": "machine", "VirtualGPU": "machine"}


def __getattr__(name: str):
    """A public name, from its module, which is imported now: who asks for a finding loads no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
