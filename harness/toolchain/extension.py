"""A solution's kernels as a Python extension module: built once for each GPU architecture, kept, and loaded.

`build(...)` also builds ahead of time, on a machine without a GPU. A module is one file, named by the puzzle, the
architecture and a hash of everything it depends on; it works with every Python. Its folder is in the workbook's cache, or
wherever the environment variable WORKBOOK_EXTENSIONS says. Where no puzzle is named, the first that has a module is meant.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from harness.errors import BadUse, EnvironmentProblem, WorkbookError
from harness.toolchain.cache import cache_folder, digest, discard, keep, made_folder
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.linker import environment_with_linker
from harness.toolchain.packages import compile_failed, mojo_files, mojo_version, run_mojo
from harness.toolchain.roots import solutions

if TYPE_CHECKING:
    import torch

VARIABLE = "WORKBOOK_EXTENSIONS"
REMEDY = f"set {VARIABLE} to a folder you can write"
OLDEST_NVIDIA = (8, 0)
"""Compute capability with the tensor core instructions and asynchronous copies that the fast kernels use."""

# A line of `mojo build --print-supported-accelerators`: a name, and what it is an alias of.
ACCELERATOR = re.compile(r"^  (\w+)\s+- (?:\(alias\) -> (\w+))?", re.MULTILINE)
# The libraries of Mojo that a built module wants, each before the ones that need it.
RUNTIME = (
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
    "libAsyncRTMojoBindings.so",
    "libKGENCompilerRTShared.so",
)
# The code that runs on the host only launches; any machine of the kind that built it can run it.
HOST_CPU = {"x86_64": "x86-64-v2", "aarch64": "generic"}
# `mojo` through this Python: its own script may lie in a folder that is not on the PATH.
MOJO = (
    "-c",
    "import sys; from mojo.run import subprocess_run_mojo; sys.exit(subprocess_run_mojo(sys.argv[1:]).returncode)",
)


class Unsupported(EnvironmentProblem):
    """There is no extension module for this GPU; the message says why."""


# ---- Which architecture -------------------------------------------------------------------------------------


def nvidia_architecture(capability: tuple[int, int]) -> str:
    """The accelerator name of an NVIDIA GPU by its compute capability: (9, 0) is "sm_90a".

    Raises Unsupported below OLDEST_NVIDIA.
    """
    major, minor = capability
    if capability < OLDEST_NVIDIA:
        raise Unsupported(f"the fast kernels want sm_80 or newer, not sm_{major}{minor}")
    # From Hopper on, the instructions that matter here exist in the variant of one architecture only.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def canonical(name: str) -> str:
    """The name under which a GPU's module is looked for: an alias resolved, "sm_90" as "sm_90a".

    Raises BadUse for a name that Mojo does not know or that has no extension module.
    """
    known = supported()
    try:
        return module_name(known[name])
    except KeyError:
        fitting = ", ".join(sorted(each for each in set(known.values()) if has_module(each)))
        raise BadUse(f"--arch {name}: unknown; there is {fitting}") from None
    except Unsupported as error:
        raise BadUse(f"--arch {name}: {error}") from None


def module_name(accelerator: str) -> str:
    """The architecture of the module for one of Mojo's accelerators. Raises Unsupported where there is none."""
    if number := re.fullmatch(r"sm_(\d+)(\d)a?", accelerator):
        return nvidia_architecture((int(number[1]), int(number[2])))
    if not accelerator.startswith("gfx"):
        raise Unsupported("extension modules are for GPUs of NVIDIA and AMD")
    return accelerator


def has_module(accelerator: str) -> bool:
    """Whether an accelerator is one that is looked for by its own name."""
    try:
        return module_name(accelerator) == accelerator
    except Unsupported:
        return False


def present() -> list[str]:
    """The architectures of the GPUs that torch sees.

    Raises BadUse where it sees none, Unsupported for one that is too old.
    """
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise BadUse("PyTorch sees no GPU on this machine; name what to build for, as in --arch sm_90a")
    return list(dict.fromkeys(architecture(device) for device in devices))


@functools.cache
def supported() -> dict[str, str]:
    """The accelerators that the installed Mojo compiles for: each name and what it stands for."""
    listed = run_mojo("build", "--print-supported-accelerators").stdout
    return {name: alias or name for name, alias in ACCELERATOR.findall(listed)}


def architecture(device: "torch.device") -> str:
    """The accelerator name of a GPU that torch sees. Raises Unsupported where there is none."""
    import torch

    if device.type != "cuda":
        raise Unsupported(f"no extension module for {device}: torch's stream there is no CUDA or ROCm stream")
    if torch.version.hip:
        # torch gives these properties no type.
        about = torch.cuda.get_device_properties(device)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return cast(str, about.gcnArchName).split(":")[0]  # pyright: ignore[reportUnknownMemberType]
    return nvidia_architecture(torch.cuda.get_device_capability(device))


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


def folder() -> Path:
    """Where modules are kept. Raises EnvironmentProblem where the folder cannot be made."""
    named = os.environ.get(VARIABLE)
    return made_folder(Path(named), REMEDY) if named else cache_folder("extensions")


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
    target = staging / "module.so"
    host_cpu = HOST_CPU.get(platform.machine())
    command = [
        *("build", "--emit", "shared-lib", "--target-accelerator", architecture),
        *(["--target-cpu", host_cpu] if host_cpu else []),
        *("--diagnostic-format", "json", "-I", str(source_folder), str(files[0]), "-o", str(target)),
    ]
    tools = staging / "tools"
    tools.mkdir()
    env = environment_with_linker(tools)
    env["TMPDIR"] = str(tools)  # mojo leaves intermediate files
    done = subprocess.run(
        [sys.executable, *MOJO, *command],
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    # A GPU target's code generator may print an error and the compiler go on.
    said = done.stdout + done.stderr
    if done.returncode != 0 or re.search(r"^error: ", said, re.MULTILINE):
        raise build_failed(files[0], said)
    return target


def build_failed(source: Path, said: str) -> WorkbookError:
    """The error for a failed build, by what the compiler said: the linker's trouble is not the kernels'."""
    if parse_diagnostics(said):
        return compile_failed(source, said)
    return EnvironmentProblem(f"the extension module cannot be built: {last_line(said)}")


def last_line(text: str) -> str:
    """The last line with something in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the compiler said nothing"


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


@functools.cache
def load_runtime() -> None:
    """Loads Mojo's libraries from where they are installed, before a module asks for them.

    A module remembers the folder of the machine that built it. What is loaded already is found by its name alone.
    """
    package = importlib.util.find_spec("max")
    if package is None or not package.submodule_search_locations:
        raise EnvironmentProblem(
            "MAX is not installed: run `uv sync`, or start through `uv run` or `pixi run`"
        )
    site = Path(next(iter(package.submodule_search_locations))).parent
    # In a wheel the libraries lie beside the package, in a conda environment in its own lib folder.
    folders = (site / "modular" / "lib", Path(sys.prefix) / "lib")
    library_folder = next((f for f in folders if (f / RUNTIME[-1]).is_file()), None)
    if library_folder is None:
        raise EnvironmentProblem(f"{RUNTIME[-1]} is in neither {folders[0]} nor {folders[1]}; reinstall MAX")
    for name in RUNTIME:
        ctypes.CDLL(str(library_folder / name), ctypes.RTLD_GLOBAL)
