"""Shared libraries that are built on first use: Mojo for a GPU's architecture, C++ for a version of PyTorch.

A library is one file, named by its contents and a hash of all it depends on. It is searched for in the wheel,
then in the folder of the environment variable WORKBOOK_EXTENSIONS, then in the workbook's cache; it may have
been built elsewhere.
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

from harness.errors import BadUse, EnvironmentProblem, WorkbookError
from harness.toolchain.cache import cache_folder, digest, discard, keep, make_folder
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.linker import environment_with_linker
from harness.toolchain.packages import compile_failed, mojo_version

VARIABLE = "WORKBOOK_EXTENSIONS"
REMEDY = f"set {VARIABLE} to a folder you can write"
CARRIED = Path(__file__).resolve().parents[1] / "_libraries"
"""The libraries of a wheel that was built with them."""
# Mojo's libraries that a built one needs, in the order of their dependencies.
RUNTIME = (
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
    "libAsyncRTMojoBindings.so",
    "libKGENCompilerRTShared.so",
)
# The code that runs on the host only launches; any machine of the kind that built it can run it.
HOST_CPU = {"x86_64": "x86-64-v2", "aarch64": "generic"}
# `mojo` through this Python: its own script may be in a folder that is not on the PATH.
MOJO = (
    "-c",
    "import sys; from mojo.run import subprocess_run_mojo; sys.exit(subprocess_run_mojo(sys.argv[1:]).returncode)",
)
CPP = ("-std=c++20", "-O2", "-shared", "-fPIC", "-DNDEBUG", "-fvisibility=hidden")
CPP_SECONDS = 25
"""An estimate of a build."""
COMPILERS = ("g++", "c++", "clang++")
MOST_AT_ONCE = 8
"""Builds at a time: one of Mojo takes up to 3 GB."""


@dataclass(frozen=True)
class Built:
    """A built library, and the seconds of its build; 0 if it existed."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class Library:
    """A shared library, built or not.

    Attributes:
        name: A readable name, the start of the file's name.
        digest: Of all it depends on.
        make: Writes it to a path of that name, in an empty folder.
        builder: A digest of the compiler; if there is no compiler, a library of another one may be used. ""
            otherwise.
        carried_as: Its name in a wheel, if that is more general.
    """

    name: str
    digest: str
    make: Callable[[Path], None]
    builder: str | None = ""
    carried_as: str = ""
    estimate: float = 60
    """Seconds that a build takes, until one was measured here."""

    @property
    def file_name(self) -> str:
        """The name of the file that is built."""
        return "_".join(filter(None, (self.name, self.digest, self.builder))) + ".so"

    @property
    def carried_name(self) -> str:
        """The name of the file in a wheel, and in a folder that was requested."""
        return f"{self.carried_as or self.name}_{self.digest}.so"

    def find(self, output: Path | None = None) -> Path | None:
        """Return the path of the library, None if it is not built."""
        if output:
            return next(filter(Path.is_file, [output / self.carried_name]), None)
        if (CARRIED / self.carried_name).is_file():
            return CARRIED / self.carried_name
        kept = [folder() / self.carried_name, folder() / self.file_name]
        if self.builder is None:  # no compiler
            kept += sorted(folder().glob(f"{self.name}_{self.digest}_*.so"))
        return next(filter(Path.is_file, kept), None)

    def build(self, output: Path | None = None, progress: "Progress | None" = None) -> Built:
        """Return the library, built if missing; in the requested folder, or where it is found.

        One of several processes and threads builds it and the others wait.

        Raises CompileFailed if the source does not compile, and EnvironmentProblem if the folder cannot be
        written or a compiler is missing.
        """
        remedy = "name another --output" if output else REMEDY
        place = make_folder(output, remedy) if output else None
        if there := self.find(place):
            return Built(there, 0)
        seconds = 0.0

        def make(staged: Path) -> None:
            nonlocal seconds
            started = time.monotonic()
            with (progress or Progress()).of(self):
                self.make(staged)
            seconds = time.monotonic() - started

        target = place / self.carried_name if place else folder() / self.file_name
        built = keep(target, make, f"the library {self.name}", remedy)
        if seconds:
            self.note_seconds(seconds)
        return Built(built, seconds)

    def expected_seconds(self) -> float:
        """Return how long the last build took here, else the estimate."""
        try:
            return float((cache_folder("seconds") / self.name).read_text())
        except (OSError, ValueError, EnvironmentProblem):
            return self.estimate

    def note_seconds(self, seconds: float) -> None:
        """Keep how long a build took."""
        with suppress(OSError, EnvironmentProblem):
            (cache_folder("seconds") / self.name).write_text(f"{seconds:.1f}")

    def load(self) -> tuple[Path, ctypes.CDLL]:
        """Return the loaded library and its path; built if missing, and rebuilt once if the file is damaged.

        Raises what `build` raises, and EnvironmentProblem if the system refuses the library.
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
    """Print what is being built, and for how long: one line that is updated on a terminal, else a line for
    each."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.running: dict[str, tuple[float, float]] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()

    @contextmanager
    def of(self, library: Library) -> Generator[None]:
        """Show a library as long as it is built."""
        expected = library.expected_seconds()
        if not self.stream.isatty():
            print(f"Building {library.name} (about {expected:.0f} s, once) ...", file=self.stream, flush=True)
            yield
            return
        with self.lock:
            self.running[library.name] = time.monotonic(), expected
            first = len(self.running) == 1
        if first:
            self.ended.clear()
            threading.Thread(target=self.move, daemon=True).start()
        try:
            yield
        finally:
            with self.lock:
                del self.running[library.name]
                if not self.running:
                    self.ended.set()
                    self.write("")

    def move(self) -> None:
        """Redraw the line as long as anything is built."""
        while not self.ended.wait(0.2):
            with self.lock:
                if self.running:
                    self.write(self.line())

    def line(self) -> str:
        """Return the libraries being built, and the seconds of each."""
        now = time.monotonic()
        parts = [
            f"{name} ({now - start:.0f} of about {expected:.0f} s)"
            for name, (start, expected) in self.running.items()
        ]
        return f"Building {', '.join(parts)}"

    def write(self, line: str) -> None:
        """Replace the last line, cut to the terminal's width."""
        self.stream.write(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}")
        self.stream.flush()


def build_all(
    expected: Sequence[Library], output: Path | None = None, progress: Progress | None = None
) -> Generator[tuple[Library, Built]]:
    """Build libraries, several at once if there are cores, and yield each in order. Raises as `Library.build`."""
    shown = progress or Progress()
    workers = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // 2, len(expected)))
    with ThreadPoolExecutor(workers) as pool:
        started = [pool.submit(library.build, output, shown) for library in expected]
        try:
            for library, future in zip(expected, started, strict=True):
                yield library, future.result()
        finally:
            for future in started:
                future.cancel()


def folder() -> Path:
    """Return the cache folder of libraries. Raises EnvironmentProblem if the folder cannot be made."""
    named = os.environ.get(VARIABLE)
    return make_folder(Path(named), REMEDY) if named else cache_folder("extensions")


def contents(files: Iterable[Path]) -> list[str | bytes]:
    """Return the names and texts of files, for a digest."""
    return [part for file in files for part in (file.name, file.read_bytes())]


# ---- Mojo -----------------------------------------------------------------------------------------------------------


def mojo_library(
    name: str, files: Sequence[Path], include: Path, architecture: str, estimate: float = 60, **defines: str
) -> Library:
    """Return the library of the first of some Mojo files for one architecture, as `mojo build
    --target-accelerator` takes it.

    Args:
        name: Of the library, without the architecture.
        files: All its Mojo files.
        include: The folder from which they import.
        architecture: For example "sm_90a".
        estimate: Seconds of a build.
        defines: Values for `get_defined_string`.
    """
    options = [f"{key}={value}" for key, value in sorted(defines.items())]
    host = [sys.platform, platform.machine(), HOST_CPU.get(platform.machine(), "")]
    key = digest([mojo_version(), *host, architecture, *options, *contents(files)])

    def make(staged: Path) -> None:
        os.replace(compile_mojo(files[0], include, architecture, staged.parent, *options), staged)

    return Library(f"{name}_{architecture}", key, make, estimate=estimate)


def compile_mojo(source: Path, include: Path, architecture: str, staging: Path, *defines: str) -> Path:
    """Compile and link a Mojo file as a shared library in an empty folder."""
    target = staging / "module.so"
    host_cpu = HOST_CPU.get(platform.machine())
    command = [
        *("build", "--emit", "shared-lib", "--target-accelerator", architecture),
        *(["--target-cpu", host_cpu] if host_cpu else []),
        *(word for define in defines for word in ("-D", define)),
        *("--diagnostic-format", "json", "-I", str(include), str(source), "-o", str(target)),
    ]
    tools = staging / "tools"
    tools.mkdir()
    env = environment_with_linker(tools)
    env["TMPDIR"] = str(tools)  # mojo leaves intermediate files
    done = run([sys.executable, *MOJO, *command], env)
    # A GPU target's code generator may print an error and the compiler go on.
    text = done.stdout + done.stderr
    if done.returncode != 0 or re.search(r"^error: ", text, re.MULTILINE):
        raise build_failed(source, text)
    return target


def build_failed(source: Path, said: str) -> WorkbookError:
    """Return the error for a failed build, by the compiler's output: linker errors are not the kernels'
    fault."""
    if parse_diagnostics(said):
        return compile_failed(source, said)
    return EnvironmentProblem(f"{source.name} cannot be built: {last_line(said)}")


def last_line(text: str) -> str:
    """Return the last line with something in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the compiler printed nothing"


@functools.cache
def load_runtime() -> None:
    """Load Mojo's libraries from their installation, before a built library needs them.

    A built library has the path of the machine that built it; a library that is already loaded is found by
    its name.
    """
    package = importlib.util.find_spec("max")
    if package is None or not package.submodule_search_locations:
        raise EnvironmentProblem(
            "MAX is not installed: run `uv sync`, or start through `uv run` or `pixi run`"
        )
    site = Path(next(iter(package.submodule_search_locations))).parent
    # In a wheel the libraries are next to the package, in a conda environment in its own lib folder.
    folders = (site / "modular" / "lib", Path(sys.prefix) / "lib")
    library_folder = next((f for f in folders if (f / RUNTIME[-1]).is_file()), None)
    if library_folder is None:
        raise EnvironmentProblem(f"{RUNTIME[-1]} is in neither {folders[0]} nor {folders[1]}; reinstall MAX")
    for name in RUNTIME:
        ctypes.CDLL(str(library_folder / name), ctypes.RTLD_GLOBAL)


# ---- C++ ------------------------------------------------------------------------------------------------------------


def torch_library(name: str, files: Sequence[Path], *defines: str, home: Path | None = None) -> Library:
    """Return the library of the first of some C++ files, the others being its headers, for one PyTorch.

    It names no library's place: PyTorch must be loaded before. One in a wheel serves all releases of a minor version.

    Args:
        name: Of the library, without PyTorch's version.
        files: The C++ file and its headers.
        defines: Macros.
        home: PyTorch's folder; None for the one that is installed.
    """
    home = home or torch_home()
    version = torch_version(home)
    compiler = find_compiler()
    key = digest([sys.platform, platform.machine(), *CPP, *defines, *contents(files)])

    def make(staged: Path) -> None:
        if compiler is None:
            raise EnvironmentProblem(
                f"no C++ compiler for {files[0].name} and PyTorch {version}: install g++, or set CXX"
            )
        compile_cpp(compiler, home, files[0], staged, defines)

    builder = compiler and digest([compiler, run([compiler, "--version"]).stdout])
    minor = ".".join(version.split(".")[:2])
    return Library(f"{name}_torch{version}", key, make, builder, f"{name}_torch{minor}", CPP_SECONDS)


def torch_home() -> Path:
    """Return the folder of the PyTorch that is installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EnvironmentProblem("PyTorch is not installed")
    return Path(spec.origin).parent


def torch_version(home: Path) -> str:
    """Return the version of a PyTorch, without what it was built for. Raises BadUse for another folder."""
    try:
        text = (home / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if found := re.search(r"^__version__ = '([^'+]+)", text, re.MULTILINE):
        return found[1]
    raise BadUse(f"{home} is not a PyTorch folder: it has no version.py")


def find_compiler() -> str | None:
    """Return the C++ compiler: that of the environment variable CXX, else the first on the PATH; None if
    there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


def compile_cpp(compiler: str, home: Path, source: Path, target: Path, defines: Sequence[str]) -> None:
    """Compile and link a C++ file against PyTorch."""
    includes = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
    command = [
        compiler,
        *CPP,
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in includes),
    ]
    # Libraries come after the objects that use them.
    command += [str(source), "-o", str(target), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = run(command)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error" in line), "it printed nothing")
        raise EnvironmentProblem(f"{compiler} cannot build {source.name}: {first.strip()}")


def run(command: list[str], env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a compiler and capture its output."""
    return subprocess.run(
        command, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
