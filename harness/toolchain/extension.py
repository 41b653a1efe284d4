"""A solution's kernels as a Python extension module: built once for each GPU architecture, kept, and loaded.

`build(...)` also builds ahead of time, on a machine without a GPU. A module is one file, named by the puzzle, the
architecture and a hash of everything it depends on; it works with every Python. Its folder is in the workbook's cache, or
wherever the environment variable WORKBOOK_EXTENSIONS says. Where no puzzle is named, the first that has a module is meant.
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
from harness.toolchain.roots import solutions

__all__ = [  # with what its users find here until the layers' operators have replaced it
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
    "puzzles",
    "sources",
    "supported",
]


# ---- Building -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A built module, and the seconds that it took; 0 where it was there already."""

    path: Path
    architecture: str
    seconds: float


def puzzles() -> list[str]:
    """The puzzles whose solutions have an extension module: an `extension.mojo`."""
    return [path.parent.name for path in sorted(solutions().glob("*/extension.mojo"))]


def sources(puzzle: str = "") -> tuple[Path, list[Path]]:
    """The folder of a puzzle's solution, and the Mojo files in it that a module is made of."""
    folder = solutions() / (puzzle or puzzles()[0])
    beside = [folder / name for name in ("extension.mojo", "small.mojo")]
    return folder, [*(file for file in beside if file.is_file()), *mojo_files(folder / "op")]


@functools.cache
def file_name(architecture: str, puzzle: str = "") -> str:
    """The name of the module's file for one architecture: it changes with all that the module depends on."""
    folder, files = sources(puzzle)
    machine = platform.machine()
    parts: list[str | bytes] = [
        mojo_version(),
        sys.platform,
        machine,
        HOST_CPU.get(machine, ""),
        architecture,
    ]
    for file in files:
        parts += [str(file.relative_to(folder)), file.read_bytes()]
    return f"{folder.name}_{architecture}_{digest(parts)}.so"


def build(
    architecture: str,
    output: Path | None = None,
    on_build: Callable[[], None] = lambda: None,
    puzzle: str = "",
) -> Built:
    """The module for one architecture: what the folder holds, else built now, which takes a minute or two.

    Several processes and threads may ask at once: one builds and the others wait for it.

    Args:
        architecture: What `mojo build --target-accelerator` takes, for example "sm_90a" or "gfx942".
        output: The folder (default: `folder()`).
        on_build: Called before a build.
        puzzle: Whose module.

    Raises BadUse for an architecture that Mojo does not know, CompileFailed where the kernels do not compile, and
    EnvironmentProblem where the folder cannot be written or something is missing.
    """
    remedy = "name another --output" if output else REMEDY
    target = (made_folder(output, remedy) if output else folder()) / file_name(architecture, puzzle)
    seconds = 0.0

    def make(staged: Path) -> None:
        nonlocal seconds
        on_build()
        started = time.monotonic()
        os.replace(compile_module(architecture, staged.parent, puzzle), staged)
        seconds = time.monotonic() - started

    return Built(keep(target, make, "the extension module", remedy), architecture, seconds)


def compile_module(architecture: str, staging: Path, puzzle: str) -> Path:
    """Compiles and links the module in an empty folder."""
    source_folder, files = sources(puzzle)
    return compile_mojo(files[0], source_folder, architecture, staging)


# ---- Loading ------------------------------------------------------------------------------------------------


def load(path: Path, puzzle: str = "") -> ModuleType:
    """Loads a built module. Raises EnvironmentProblem where the system refuses it."""
    try:
        load_runtime()
        name = f"workbook_{puzzle or puzzles()[0]}"
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
