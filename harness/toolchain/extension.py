"""A layer's kernels as a Python extension module: built once for each GPU architecture, kept, and loaded.

`build(...)` also builds ahead of time, on a machine without a GPU. A module is one file, named by the layer, the
architecture and a hash of everything it depends on; it works with every Python. Its folder is in the workbook's cache, or
wherever the environment variable WORKBOOK_EXTENSIONS says.
"""

import functools
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from harness.errors import EnvironmentProblem
from harness.toolchain.architectures import (
    OLDEST_NVIDIA,
    Unsupported,
    architecture,
    canonical,
    nvidia_architecture,
    present,
    supported,
)
from harness.toolchain.cache import digest, discard, keep, made_folder
from harness.toolchain.libraries import (
    HOST_CPU,
    REMEDY,
    VARIABLE,
    compile_mojo,
    folder,
    load_runtime,
)
from harness.toolchain.packages import mojo_files, mojo_version

__all__ = [  # with what its users find here until the layers' operators have replaced it
    "LAYERS",
    "OLDEST_NVIDIA",
    "VARIABLE",
    "Unsupported",
    "architecture",
    "build",
    "canonical",
    "file_name",
    "folder",
    "load",
    "load_runtime",
    "nvidia_architecture",
    "present",
    "sources",
    "supported",
]

LAYERS = ("cross_entropy",)
"""The layers that have a module; where none is named the first is meant."""
KERNELS = Path(__file__).resolve().parents[1] / "nn" / "kernels"


# ---- Building -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A built module, and the seconds that it took; 0 where it was there already."""

    path: Path
    architecture: str
    seconds: float


def sources(layer: str = LAYERS[0]) -> list[Path]:
    """The Mojo files that a layer's module is made of, the module's own first."""
    folder = KERNELS / layer
    first = folder / "extension.mojo"
    folders = (folder, KERNELS / "common", KERNELS / "shared")
    return [first, *(file for each in folders for file in mojo_files(each) if file != first)]


@functools.cache
def file_name(architecture: str, layer: str = LAYERS[0]) -> str:
    """The name of the module's file for one architecture: it changes with all that the module depends on."""
    machine = platform.machine()
    parts: list[str | bytes] = [
        mojo_version(),
        sys.platform,
        machine,
        HOST_CPU.get(machine, ""),
        architecture,
    ]
    for file in sources(layer):
        parts += [str(file.relative_to(KERNELS)), file.read_bytes()]
    return f"{layer}_{architecture}_{digest(parts)}.so"


def build(
    architecture: str,
    output: Path | None = None,
    on_build: Callable[[], None] = lambda: None,
    layer: str = LAYERS[0],
) -> Built:
    """The module for one architecture: what the folder holds, else built now, which takes a minute or two.

    Several processes and threads may ask at once: one builds and the others wait for it.

    Args:
        architecture: What `mojo build --target-accelerator` takes, for example "sm_90a" or "gfx942".
        output: The folder (default: `folder()`).
        on_build: Called before a build.
        layer: Whose module.

    Raises BadUse for an architecture that Mojo does not know, CompileFailed where the kernels do not compile, and
    EnvironmentProblem where the folder cannot be written or something is missing.
    """
    remedy = "name another --output" if output else REMEDY
    target = (made_folder(output, remedy) if output else folder()) / file_name(architecture, layer)
    seconds = 0.0

    def make(staged: Path) -> None:
        nonlocal seconds
        on_build()
        started = time.monotonic()
        os.replace(compile_module(architecture, staged.parent, layer), staged)
        seconds = time.monotonic() - started

    return Built(keep(target, make, "the extension module", remedy), architecture, seconds)


def compile_module(architecture: str, staging: Path, layer: str) -> Path:
    """Compiles and links the module in an empty folder."""
    return compile_mojo(sources(layer)[0], KERNELS, architecture, staging)


# ---- Loading ------------------------------------------------------------------------------------------------


def load(path: Path, layer: str = LAYERS[0]) -> ModuleType:
    """Loads a built module. Raises EnvironmentProblem where the system refuses it."""
    try:
        load_runtime()
        name = f"workbook_{layer}"
        loader = ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader, origin=str(path))
        assert spec is not None  # the loader is given
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        if isinstance(error, ImportError):
            with suppress(OSError):  # the folder may be read-only
                discard(path)  # damaged: the next call builds it again
        raise EnvironmentProblem(f"cannot load {path}: {error}") from error
    return module
