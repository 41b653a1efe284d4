"""Build the stand-in libraries of the virtual GPU once, into the cache.

A folder of the workbook's cache, named by a hash of the Mojo sources and the compiler's version, holds
libcuda.so.1, libnvidia-ml.so.1 and a `ptxas` stand-in that passes PTX through.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.errors import EnvironmentProblem
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.linker import environment_with_linker

from .interface import SAME, constants, entry_points

HERE = Path(__file__).resolve().parent
LIBRARIES = {"libcuda.so.1": "libcuda.mojo", "libnvidia-ml.so.1": "libnvml.mojo"}
CONSTRUCTOR = "workbook_vgpu_open"
OPTIONS = ("-D", "ASSERT=none")
"""Without assertions, which print by Mojo's run-time library: these libraries need libc only."""

# Mojo calls an external assembler as `ptxas IN -o OUT --gpu-name=...`. Copying the input keeps the PTX text,
# which then reaches cuModuleLoadDataEx instead of machine code.
PTXAS = """#!/bin/sh
# Hands PTX through unchanged, so that the virtual GPU gets text and not machine code.
in=
out=
while [ $# -gt 0 ]; do
    case $1 in
        -o) out=$2; shift ;;
        -*) ;;
        *) in=$1 ;;
    esac
    shift
done
exec cp "$in" "$out"
"""


class DriverBuildError(EnvironmentProblem):
    """The stand-in libraries cannot be built here; the message is one line that says what to do."""


@dataclass(frozen=True)
class Driver:
    """Paths of a built driver."""

    folder: Path

    @property
    def libcuda(self) -> Path:
        return self.folder / "libcuda.so.1"

    @property
    def libnvml(self) -> Path:
        return self.folder / "libnvidia-ml.so.1"

    @property
    def ptxas(self) -> Path:
        return self.folder / "ptxas"

    def environment(self) -> dict[str, str]:
        """Return variables that make Mojo and MAX emit PTX and allocate each buffer separately."""
        return {
            "MODULAR_NVPTX_COMPILER_PATH": str(self.ptxas),
            "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE": "0",
        }


def find_mojo() -> str:
    """Return the mojo executable: next to this Python, or on the PATH."""
    beside = Path(sys.executable).with_name("mojo")
    mojo = str(beside) if beside.exists() else shutil.which("mojo")
    if not mojo:
        raise DriverBuildError(
            "mojo not found: the virtual GPU's driver is written in Mojo and built on first use"
        )
    return mojo


def mojo_version(mojo: str) -> str:
    done = subprocess.run(
        [mojo, "--version"], capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode != 0:
        raise DriverBuildError(f"`mojo --version` failed: {last_line(done.stderr)}")
    return done.stdout.strip()


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(no message)"


def cache_key(mojo: str) -> str:
    """Hash the libraries' sources, the way they are built and the compiler's version."""
    sources = [*sorted(HERE.glob("*.mojo")), Path(__file__).with_name("interface.py"), Path(__file__)]
    return digest([mojo_version(mojo), *(source.read_bytes() for source in sources)])


def build() -> Driver:
    """Return the driver from the cache, or build it (about 5 s). Safe in several processes at once.

    Raise EnvironmentProblem where the cache folder cannot be written, DriverBuildError where the compiler
    fails.
    """
    if not sys.platform.startswith("linux"):
        raise DriverBuildError(f"the virtual GPU's driver needs Linux, this is {sys.platform}")
    mojo = find_mojo()
    folder = cache_folder("vgpu-driver") / cache_key(mojo)
    return Driver(keep(folder, lambda staged: build_into(staged, mojo), "the virtual GPU's driver"))


def build_into(folder: Path, mojo: str) -> None:
    """Build both libraries side by side in a new folder, and write the ptxas stand-in."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="linker-", dir=folder) as tools:
        env = environment_with_linker(Path(tools))
        env["TMPDIR"] = tools  # mojo leaves intermediate archives there
        with ThreadPoolExecutor() as pool:
            list(
                pool.map(
                    lambda pair: compile_library(folder / pair[0], pair[1], mojo, env), LIBRARIES.items()
                )
            )
    ptxas = folder / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)


def compile_library(target: Path, source: str, mojo: str, env: dict[str, str]) -> None:
    """Compile one shared library from its source and interface.py; dlopen finds it by its soname.

    Raise DriverBuildError with the compiler's last line.
    """
    folder = Path(env["TMPDIR"]) / target.name
    folder.mkdir()
    (folder / "interface.mojo").write_text(constants())
    whole = folder / source
    whole.write_text((HERE / source).read_text() + entry_points(target.name))
    command = [mojo, "build", *OPTIONS, "-I", str(HERE), "-I", str(folder), "--emit", "shared-lib"]
    command += ["-o", str(target), str(whole)]
    for option in (f"-soname={target.name}", f"-init={CONSTRUCTOR}"):
        command += ["-Xlinker", option]
    for function, others in SAME[target.name].items():
        for name in others.split():
            command += ["-Xlinker", f"--defsym={name}={function}"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode != 0:
        raise DriverBuildError(f"mojo could not build {target.name}: {last_line(done.stderr)}")
