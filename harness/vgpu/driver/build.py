"""Build the virtual GPU's stand-in libraries, and a `ptxas` that passes PTX through, into the cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.errors import EnvironmentProblem
from harness.toolchain.cache import cache_file, compute_digest, get_cache_folder
from harness.toolchain.linker import make_environment

from .interface import ALIASES, generate_constants, generate_entry_points

HERE = Path(__file__).resolve().parent
LIBRARIES = {"libcuda.so.1": "libcuda.mojo", "libnvidia-ml.so.1": "libnvml.mojo"}
CONSTRUCTOR = "workbook_vgpu_open"
OPTIONS = ("-D", "ASSERT=none")
"""Disable assertions: they need Mojo's run-time library, but these libraries may depend only on libc."""

# Mojo runs an external assembler as `ptxas IN -o OUT --gpu-name=...`. This one copies its input, so that
# cuModuleLoadDataEx gets PTX text instead of machine code.
PTXAS = """#!/bin/sh
# Copy the PTX unchanged: the virtual GPU needs text, not machine code.
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
    """Raised if the stand-in libraries cannot be built; the message is one line."""


@dataclass(frozen=True)
class Driver:
    """The paths of a built driver."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """Return variables that make Mojo and MAX emit PTX and allocate each buffer separately."""
        return {
            "MODULAR_NVPTX_COMPILER_PATH": str(self.folder / "ptxas"),
            "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE": "0",
        }


def find_mojo() -> str:
    """Return the path of the mojo executable, next to this Python or on the PATH."""
    sibling = Path(sys.executable).with_name("mojo")
    mojo = str(sibling) if sibling.exists() else shutil.which("mojo")
    if not mojo:
        raise DriverBuildError(
            "mojo not found: the virtual GPU's driver is written in Mojo and built on first use"
        )
    return mojo


def run_mojo(command: list[str], failure: str, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises DriverBuildError with `failure` and the last error line."""
    result = subprocess.run(
        command, env=env, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if result.returncode != 0:
        raise DriverBuildError(f"{failure}: {get_last_line(result.stderr)}")
    return result.stdout.strip()


def get_last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(no message)"


def compute_cache_key(mojo: str) -> str:
    sources = [*sorted(HERE.glob("*.mojo")), Path(__file__).with_name("interface.py"), Path(__file__)]
    version = run_mojo([mojo, "--version"], "`mojo --version` failed")
    return compute_digest([version, *(source.read_bytes() for source in sources)])


def build() -> Driver:
    """Return the driver from the cache, or build it (about 5 s); safe to call from several processes at once.

    Raises EnvironmentProblem if the cache folder cannot be written, DriverBuildError if the compiler fails.
    """
    if not sys.platform.startswith("linux"):
        raise DriverBuildError(f"the virtual GPU's driver needs Linux, this is {sys.platform}")
    mojo = find_mojo()
    folder = get_cache_folder("vgpu-driver") / compute_cache_key(mojo)
    return Driver(cache_file(folder, lambda staged: build_into(staged, mojo), "the virtual GPU's driver"))


def build_into(folder: Path, mojo: str) -> None:
    """Create a folder with both libraries, built in parallel, and the stand-in ptxas."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="linker-", dir=folder) as tools:
        env = make_environment(Path(tools))
        env["TMPDIR"] = tools  # mojo leaves intermediate archives there
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: compile_library(folder / name, LIBRARIES[name], mojo, env), LIBRARIES))
    ptxas = folder / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)


def compile_library(target: Path, source: str, mojo: str, env: dict[str, str]) -> None:
    """Compile one shared library from its source and interface.py; dlopen finds it by its soname.

    Raises DriverBuildError with the compiler's last line.
    """
    folder = Path(env["TMPDIR"]) / target.name
    folder.mkdir()
    (folder / "interface.mojo").write_text(generate_constants())
    combined = folder / source
    combined.write_text((HERE / source).read_text() + generate_entry_points(target.name))
    command = [mojo, "build", *OPTIONS, "-I", str(HERE), "-I", str(folder), "--emit", "shared-lib"]
    command += ["-o", str(target), str(combined)]
    for option in (f"-soname={target.name}", f"-init={CONSTRUCTOR}"):
        command += ["-Xlinker", option]
    for function, others in ALIASES[target.name].items():
        for name in others.split():
            command += ["-Xlinker", f"--defsym={name}={function}"]
    run_mojo(command, f"mojo could not build {target.name}", env)
