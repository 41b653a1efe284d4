"""Builds the stand-in libraries of the virtual GPU once and keeps them in a cache folder.

A folder of the workbook's cache, named by a hash of the Mojo sources and the compiler's version, holds
libcuda.so.1, libnvidia-ml.so.1 and a `ptxas` stand-in that hands PTX through."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.errors import EnvironmentProblem
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.disk import compiler_out_of_room
from harness.toolchain.linker import environment_with_linker

HERE = Path(__file__).resolve().parent
LIBRARIES = {"libcuda.so.1": ("libcuda.mojo", "libcuda_work.mojo"), "libnvidia-ml.so.1": ("libnvml.mojo",)}
"""Library -> its source, and what is linked in: Mojo exports the functions of the file it compiles, not of those it imports."""
SAME = {
    "libcuda.so.1": {
        "cuMemAlloc_v2": "cuMemAllocAsync",
        "cuMemFree_v2": "cuMemFreeAsync",
        "cuMemHostAlloc": "cuMemAllocHost_v2",
        "cuMemcpyHtoD_v2": "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoH_v2": "cuMemcpyDtoHAsync_v2",
        "cuMemcpy": "cuMemcpyAsync cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2",
        "cuMemcpyPeer": "cuMemcpyPeerAsync",
        "cuMemcpy2D_v2": "cuMemcpy2DUnaligned_v2 cuMemcpy2DAsync_v2",
        "cuMemsetD8_v2": "cuMemsetD8Async",
        "cuMemsetD16_v2": "cuMemsetD16Async",
        "cuMemsetD32_v2": "cuMemsetD32Async",
        "cuMemsetD2D8_v2": "cuMemsetD2D8Async",
        "cuMemsetD2D16_v2": "cuMemsetD2D16Async",
        "cuMemsetD2D32_v2": "cuMemsetD2D32Async",
        "cuDevicePrimaryCtxRetain": "cuCtxCreate_v2 cuCtxGetCurrent",
        "cuStreamCreate": "cuStreamCreateWithPriority",
        "workbook_vgpu_nothing_to_do": (
            "cuMemPoolSetAccess cuMemPoolTrimTo cuDevicePrimaryCtxRelease_v2 cuCtxDestroy cuCtxSetCurrent "
            "cuCtxPushCurrent cuCtxEnablePeerAccess cuStreamDestroy cuStreamSynchronize cuStreamWaitEvent "
            "cuEventQuery cuEventSynchronize"
        ),
    },
    "libnvidia-ml.so.1": {"nvmlDeviceGetHandleByIndex": "nvmlDeviceGetHandleByIndex_v2"},
}
"""Library -> function -> the other names that it has there: with a stream, which orders nothing, or with flags."""
REFUSED = """
cuGraphAddChildGraphNode cuGraphAddEmptyNode cuGraphAddKernelNode cuGraphAddMemcpyNode
cuGraphAddMemsetNode cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphExecDestroy
cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams
cuGraphKernelNodeSetAttribute cuGraphLaunch cuMemAddressFree cuMemAddressReserve cuMemCreate
cuMemExportToShareableHandle cuMemGetAllocationGranularity cuMemGetHandleForAddressRange cuMemMap
cuMemRelease cuMemSetAccess cuMemUnmap cuMemcpyBatchAsync cuMulticastAddDevice cuMulticastBindMem
cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind cuPointerGetAttributes
cuPointerSetAttribute cuStreamBeginCapture cuStreamEndCapture cuStreamGetCaptureInfo_v2
cuStreamWaitValue64_v2 cuTensorMapEncodeIm2col
"""
"""What MAX looks up in libcuda.so.1 and the virtual GPU does not have: it answers CUDA_ERROR_NOT_SUPPORTED, and Python hears its name."""
REFUSAL = '\n\n@export("{0}")\ndef {0}() abi("C") -> Int32:\n    return unsupported("{0}")\n'
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
        """Variables that make Mojo and MAX emit PTX and allocate each buffer by itself."""
        return {
            "MODULAR_NVPTX_COMPILER_PATH": str(self.ptxas),
            "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE": "0",
        }


def find_mojo() -> str:
    """The mojo executable: beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name("mojo")
    mojo = str(beside) if beside.exists() else shutil.which("mojo")
    if not mojo:
        raise DriverBuildError(
            "mojo not found: the virtual GPU's driver is written in Mojo and built on first use"
        )
    return mojo


def mojo_version(mojo: str) -> str:
    """What `mojo --version` prints."""
    done = subprocess.run(
        [mojo, "--version"], capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode != 0:
        raise DriverBuildError(f"`mojo --version` failed: {last_line(done.stderr)}")
    return done.stdout.strip()


def last_line(text: str) -> str:
    """The last line with something in it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(no message)"


def cache_key(mojo: str) -> str:
    """Changes with any source of the libraries, with how they are built and with the compiler."""
    sources = [*sorted(HERE.glob("*.mojo")), Path(__file__)]
    return digest([mojo_version(mojo), *(source.read_bytes() for source in sources)])


def build() -> Driver:
    """The driver, from the cache or freshly built (about 5 s).

    Raises EnvironmentProblem where the cache folder cannot be written, DriverBuildError where the compiler
    fails. Safe when several processes call it at once."""
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
        env["TMPDIR"] = tools  # mojo leaves its intermediate archives there
        with ThreadPoolExecutor() as pool:
            list(
                pool.map(
                    lambda pair: compile_library(folder / pair[0], pair[1], mojo, env), LIBRARIES.items()
                )
            )
    ptxas = folder / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)


def compile_library(target: Path, sources: Sequence[str], mojo: str, env: dict[str, str]) -> None:
    """One shared library. The soname is what later dlopen calls find it by."""
    names = [(name, function) for function, others in SAME[target.name].items() for name in others.split()]
    options = [
        f"-soname={target.name}",
        f"-init={CONSTRUCTOR}",
        *(f"--defsym={name}={f}" for name, f in names),
    ]
    refusals = map(REFUSAL.format, REFUSED.split() if target.name == "libcuda.so.1" else ())
    whole = Path(env["TMPDIR"]) / sources[0]
    whole.write_text((HERE / sources[0]).read_text() + "".join(refusals))
    for source in sources[1:]:
        compiled = Path(env["TMPDIR"]) / f"{source}.o"
        compile_source(compiled, HERE / source, "object", target, mojo, env)
        options.append(str(compiled))
    compile_source(target, whole, "shared-lib", target, mojo, env, options)


def compile_source(
    to: Path,
    source: Path,
    kind: str,
    library: Path,
    mojo: str,
    env: dict[str, str],
    options: Sequence[str] = (),
) -> None:
    """One file of a library. Raises EnvironmentProblem on a full disk, DriverBuildError with the compiler's last line."""
    command = [mojo, "build", *OPTIONS, "-I", str(HERE), "--emit", kind, "-o", str(to), str(source)]
    for option in options:
        command += ["-Xlinker", option]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode != 0:
        full = compiler_out_of_room(done.stdout + done.stderr, library.parents[2])
        raise full or DriverBuildError(f"mojo could not build {library.name}: {last_line(done.stderr)}")
