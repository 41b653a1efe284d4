"""Build shared libraries on first use: Mojo for a GPU's architecture, C++ for a version of PyTorch.

A library is one file, whose name contains a hash of all its inputs. It is searched for in the wheel, in the
folder in the environment variable WORKBOOK_EXTENSIONS, and in the workbook's cache.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from harness.errors import EnvironmentProblem, UsageError, WorkbookError
from harness.toolchain.cache import cache_file, compute_digest, create_folder, discard, get_cache_folder
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.linker import make_environment
from harness.toolchain.packages import get_mojo_version, make_compile_error

VARIABLE = "WORKBOOK_EXTENSIONS"
REMEDY = f"set {VARIABLE} to a folder you can write"
BUNDLED_LIBRARIES = Path(__file__).resolve().parents[1] / "_libraries"
"""Folder of the libraries in a wheel that contains them."""
# Mojo's runtime libraries, on which built libraries depend, in the order of loading.
RUNTIME = (
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
    "libAsyncRTMojoBindings.so",
    "libKGENCompilerRTShared.so",
)
# Host code only launches kernels, so it is built to run on any CPU of the machine's architecture.
HOST_CPU = {"x86_64": "x86-64-v2", "aarch64": "generic"}
# Run `mojo` through this Python interpreter, because its script may not be on the PATH.
MOJO_COMMAND = (
    "-c",
    "import sys; from mojo.run import subprocess_run_mojo; sys.exit(subprocess_run_mojo(sys.argv[1:]).returncode)",
)
CPP_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-DNDEBUG", "-fvisibility=hidden")
CPP_BUILD_S = 25
"""Estimated duration of a C++ build in seconds."""
COMPILERS = ("g++", "c++", "clang++")
MAX_CONCURRENT_BUILDS = 8
"""Limit on concurrent builds; a Mojo build takes up to 3 GB of memory."""


@dataclass(frozen=True)
class BuildResult:
    """A library's path, and the duration of its build, 0 if it already existed."""

    path: Path
    duration_s: float


@dataclass(frozen=True)
class Library:
    """A shared library to find, build and load.

    Attributes:
        name: The first part of the file's name.
        digest: Hash of all its inputs.
        make: Function that writes the library to a path in an empty folder.
        compiler_digest: Digest of the C++ compiler, "" for Mojo. None if there is no compiler; then a library
            from any compiler is used.
        bundled_as: Name in a wheel, for a library that several releases of PyTorch can use.
    """

    name: str
    digest: str
    make: Callable[[Path], None]
    compiler_digest: str | None = ""
    bundled_as: str = ""
    estimated_s: float = 60
    """Estimated build time, used until a build has been timed on this machine."""

    @property
    def file_name(self) -> str:
        return "_".join(filter(None, (self.name, self.digest, self.compiler_digest))) + ".so"

    @property
    def bundled_name(self) -> str:
        """File name in a wheel and in an output folder."""
        return f"{self.bundled_as or self.name}_{self.digest}.so"

    def find(self, output: Path | None = None) -> Path | None:
        """Return the path of the library, or None if it is not built."""
        if output:
            return next(filter(Path.is_file, [output / self.bundled_name]), None)
        if (BUNDLED_LIBRARIES / self.bundled_name).is_file():
            return BUNDLED_LIBRARIES / self.bundled_name
        candidates = [get_folder() / self.bundled_name, get_folder() / self.file_name]
        if self.compiler_digest is None:  # no compiler
            candidates += sorted(get_folder().glob(f"{self.name}_{self.digest}_*.so"))
        return next(filter(Path.is_file, candidates), None)

    def build(self, output: Path | None = None, progress: "Progress | None" = None) -> BuildResult:
        """Return the library in `output` or, without it, in the searched folders; build it if missing.

        If several processes or threads need it, one builds it and the others wait. Raises CompileFailed if
        the source does not compile, EnvironmentProblem if the folder is not writable or a compiler is
        missing.
        """
        remedy = "name another --output" if output else REMEDY
        output_folder = create_folder(output, remedy) if output else None
        if existing := self.find(output_folder):
            return BuildResult(existing, 0)
        seconds = 0.0

        def make(staging_path: Path) -> None:
            nonlocal seconds
            started = time.monotonic()
            with (progress or Progress()).show(self):
                self.make(staging_path)
            seconds = time.monotonic() - started

        target = output_folder / self.bundled_name if output_folder else get_folder() / self.file_name
        built = cache_file(target, make, f"the library {self.name}", remedy)
        if seconds:
            self.record_duration(seconds)
        return BuildResult(built, seconds)

    def estimate_duration(self) -> float:
        try:
            return float((get_cache_folder("seconds") / self.name).read_text())
        except (OSError, ValueError, EnvironmentProblem):
            return self.estimated_s

    def record_duration(self, seconds: float) -> None:
        with suppress(OSError, EnvironmentProblem):
            (get_cache_folder("seconds") / self.name).write_text(f"{seconds:.1f}")

    def load(self) -> tuple[Path, ctypes.CDLL]:
        """Return the path and the loaded library; build it if missing, and once again if the file is damaged.

        Raises the exceptions of `build`, and EnvironmentProblem if the system cannot load the library.
        """
        path = self.build().path
        try:
            return path, ctypes.CDLL(str(path))
        except OSError as error:
            with suppress(OSError, EnvironmentProblem):  # the folder may be read-only
                discard(path)
                path = self.build().path
                return path, ctypes.CDLL(str(path))
            raise EnvironmentProblem(f"cannot load {path}: {error}") from error


class Progress:
    """Prints the libraries being built and their times: one updated line on a terminal, else a line each."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.running: dict[str, tuple[float, float]] = {}
        self.lock = threading.Lock()
        self.finished_event = threading.Event()

    @contextmanager
    def show(self, library: Library) -> Generator[None]:
        """Show a library while it is being built."""
        expected = library.estimate_duration()
        if not self.stream.isatty():
            print(f"Building {library.name} (about {expected:.0f} s, once) ...", file=self.stream, flush=True)
            yield
            return
        with self.lock:
            self.running[library.name] = time.monotonic(), expected
            first = len(self.running) == 1
        if first:
            self.finished_event.clear()
            threading.Thread(target=self.refresh_periodically, daemon=True).start()
        try:
            yield
        finally:
            with self.lock:
                del self.running[library.name]
                if not self.running:
                    self.finished_event.set()
                    self.write("")

    def refresh_periodically(self) -> None:
        while not self.finished_event.wait(0.2):
            with self.lock:
                if self.running:
                    self.write(self.format_line())

    def format_line(self) -> str:
        """Format the libraries being built and the elapsed time of each."""
        now, running = time.monotonic(), self.running.items()
        parts = [f"{name} ({now - start:.0f} of about {seconds:.0f} s)" for name, (start, seconds) in running]
        return f"Building {', '.join(parts)}"

    def write(self, line: str) -> None:
        self.stream.write(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}")
        self.stream.flush()


def build_all(
    libraries: Sequence[Library], output: Path | None = None, progress: Progress | None = None
) -> Generator[tuple[Library, BuildResult]]:
    """Build libraries concurrently and yield them in order. Raises the exceptions of `Library.build`."""
    display = progress or Progress()
    workers = max(1, min(MAX_CONCURRENT_BUILDS, len(os.sched_getaffinity(0)) // 2, len(libraries)))
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(library.build, output, display) for library in libraries]
        try:
            for library, future in zip(libraries, futures, strict=True):
                yield library, future.result()
        finally:
            for future in futures:
                future.cancel()


def get_folder() -> Path:
    """Return the cache folder of libraries. Raises EnvironmentProblem if it cannot be created."""
    configured = os.environ.get(VARIABLE)
    return create_folder(Path(configured), REMEDY) if configured else get_cache_folder("extensions")


def read_contents(files: Iterable[Path]) -> list[str | bytes]:
    return [part for file in files for part in (file.name, file.read_bytes())]


# ---- Mojo --------------------------------------------------------------------------------------------------


def make_mojo_library(
    name: str,
    files: Sequence[Path],
    include: Path,
    architecture: str,
    estimated_s: float = 60,
    **defines: str,
) -> Library:
    """Return the library compiled from the first Mojo file for an architecture such as "sm_90a".

    The other files are imported from `include`; `defines` are values for `get_defined_string`.
    """
    options = [f"{key}={value}" for key, value in sorted(defines.items())]
    host = [sys.platform, platform.machine(), HOST_CPU.get(platform.machine(), "")]
    key = compute_digest([get_mojo_version(), *host, architecture, *options, *read_contents(files)])

    def make(staging_path: Path) -> None:
        os.replace(compile_mojo(files[0], include, architecture, staging_path.parent, *options), staging_path)

    return Library(f"{name}_{architecture}", key, make, estimated_s=estimated_s)


def compile_mojo(source: Path, include: Path, architecture: str, staging: Path, *defines: str) -> Path:
    """Compile and link a Mojo file as a shared library in an empty folder."""
    target = staging / "module.so"
    host_cpu = HOST_CPU.get(platform.machine())
    command = [
        *("build", "--emit", "shared-lib", "--target-accelerator", architecture),
        *(["--target-cpu", host_cpu] if host_cpu else []),
        *(flag for define in defines for flag in ("-D", define)),
        *("--diagnostic-format", "json", "-I", str(include), str(source), "-o", str(target)),
    ]
    tools = staging / "tools"
    tools.mkdir()
    env = make_environment(tools)
    env["TMPDIR"] = str(tools)  # mojo leaves intermediate files there
    result = run([sys.executable, *MOJO_COMMAND, *command], env)
    # The GPU code generator may print an error without making the compiler fail.
    text = result.stdout + result.stderr
    if result.returncode != 0 or re.search(r"^error: ", text, re.MULTILINE):
        raise create_build_error(source, text)
    return target


def create_build_error(source: Path, output_text: str) -> WorkbookError:
    """Return the error for a failed build: CompileFailed with diagnostics, else EnvironmentProblem."""
    if parse_diagnostics(output_text):
        return make_compile_error(source, output_text)
    return EnvironmentProblem(f"{source.name} cannot be built: {get_last_line(output_text)}")


def get_last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the compiler printed nothing"


@functools.cache
def load_runtime() -> None:
    """Load Mojo's runtime libraries, which must precede a built library.

    A built library refers to them by paths of the machine that built it; loaded libraries are found by name.
    """
    package = importlib.util.find_spec("max")
    if package is None or not package.submodule_search_locations:
        raise EnvironmentProblem(
            "MAX is not installed: run `uv sync`, or start through `uv run` or `pixi run`"
        )
    site = Path(next(iter(package.submodule_search_locations))).parent
    # From a wheel they are next to the package, from conda in the environment's lib folder.
    folders = (site / "modular" / "lib", Path(sys.prefix) / "lib")
    library_folder = next((f for f in folders if (f / RUNTIME[-1]).is_file()), None)
    if library_folder is None:
        raise EnvironmentProblem(f"{RUNTIME[-1]} is in neither {folders[0]} nor {folders[1]}; reinstall MAX")
    for name in RUNTIME:
        ctypes.CDLL(str(library_folder / name), ctypes.RTLD_GLOBAL)


# ---- C++ ---------------------------------------------------------------------------------------------------


def make_torch_library(
    name: str, files: Sequence[Path], *defines: str, torch_home: Path | None = None
) -> Library:
    """Return the library compiled from the first C++ file for one version of PyTorch; the others are headers.

    PyTorch must be loaded first. `torch_home` is PyTorch's folder, None for the installed one. A library in a
    wheel works with all patch releases of a minor version.
    """
    torch_home = torch_home or find_torch_home()
    version = read_torch_version(torch_home)
    compiler = find_compiler()
    key = compute_digest([sys.platform, platform.machine(), *CPP_FLAGS, *defines, *read_contents(files)])

    def make(staging_path: Path) -> None:
        if compiler is None:
            raise EnvironmentProblem(
                f"no C++ compiler for {files[0].name} and PyTorch {version}: install g++, or set CXX"
            )
        compile_cpp(compiler, torch_home, files[0], staging_path, defines)

    compiler_digest = compiler and compute_digest([compiler, run([compiler, "--version"]).stdout])
    minor = ".".join(version.split(".")[:2])
    return Library(f"{name}_torch{version}", key, make, compiler_digest, f"{name}_torch{minor}", CPP_BUILD_S)


def find_torch_home() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EnvironmentProblem("PyTorch is not installed")
    return Path(spec.origin).parent


def read_torch_version(home: Path) -> str:
    """Return PyTorch's version without the build suffix. Raises UsageError for any other folder."""
    try:
        text = (home / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if match := re.search(r"^__version__ = '([^'+]+)", text, re.MULTILINE):
        return match[1]
    raise UsageError(f"{home} is not a PyTorch folder: it has no version.py")


def find_compiler() -> str | None:
    """Return the path of the C++ compiler, $CXX or the first on the PATH, or None."""
    configured = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [configured] if configured else COMPILERS)), None)


def compile_cpp(compiler: str, home: Path, source: Path, target: Path, defines: Sequence[str]) -> None:
    includes = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
    options = [*CPP_FLAGS, *(f"-D{define}" for define in defines), *(f"-I{folder}" for folder in includes)]
    # Libraries must follow the objects that use them.
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    result = run([compiler, *options, str(source), "-o", str(target), *libraries])
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).splitlines()
        first = next((line for line in lines if "error" in line), "it printed nothing")
        raise EnvironmentProblem(f"{compiler} cannot build {source.name}: {first.strip()}")


def run(command: list[str], env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
