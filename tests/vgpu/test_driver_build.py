"""The driver's libraries: they build on a machine without a C compiler, into a cache that several runs share."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typed import present

from harness.errors import EnvironmentProblem
from harness.toolchain import linker
from harness.vgpu.driver import build

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from harness.vgpu.driver import build; print(build.build().folder)"
# Loads the library, looks up every name given on the command line, and starts the driver with nobody to answer.
USE = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
missing = [name for name in sys.argv[2:] if not hasattr(library, name)]
print(json.dumps({"missing": missing, "code": getattr(library, sys.argv[2])(0)}))
"""


def run_python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def tools(folder: Path, *names: str) -> str:
    """A PATH that holds the named programs only."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(present(shutil.which(name)))
    return str(folder)


def names_max_looks_up() -> list[str]:
    """Entry points of the CUDA driver whose names stand in MAX's own library."""
    package = Path(present(present(importlib.util.find_spec("modular")).submodule_search_locations)[0])
    text = (package / "lib" / "libAsyncRTMojoBindings.so").read_bytes()
    # Only whole strings: some names stand in pieces between machine instructions.
    names = re.findall(
        rb"(?<=\0)cu(?:Mem|Stream|Graph|Event|Func|Module|Launch)[A-Za-z0-9]+(?:_v\d)?(?=\0)", text
    )
    # These three are words of messages.
    return sorted({name.decode() for name in names} - {"cuMemset", "cuMemcpyBatch", "cuMemcpyDtoD"})


def only_entry(folder: Path) -> bool:
    """Whether the cache holds a driver and nothing half-built beside it."""
    return {path.name for path in folder.parent.iterdir()} == {folder.name}


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> list[Path]:
    """What two processes say that build at once, into an empty cache, on a machine without a C compiler."""
    root = tmp_path_factory.mktemp("driver")
    env = {**os.environ, "PATH": tools(root / "bin", "sh", "cp"), "WORKBOOK_CACHE": str(root / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(process.communicate(timeout=120)[0].strip()) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return folders


@pytest.mark.compiles
def test_libraries_build_without_a_c_compiler(builds):
    folder = builds[0]
    assert sorted(p.name for p in folder.iterdir()) == ["libcuda.so.1", "libnvidia-ml.so.1", "ptxas"]
    no_device, driver_not_loaded = 100, 9
    names = ["cuInit", *names_max_looks_up()]
    assert len(names) > 80
    used = run_python(USE, str(folder / "libcuda.so.1"), *names)
    assert json.loads(used.stdout) == {"missing": [], "code": no_device}, used.stderr
    used = run_python(USE, str(folder / "libnvidia-ml.so.1"), "nvmlInit_v2", "nvmlDeviceGetCount_v2")
    assert json.loads(used.stdout) == {"missing": [], "code": driver_not_loaded}, used.stderr


@pytest.mark.compiles
def test_two_builds_at_once_share_one_result(builds):
    assert builds[0] == builds[1] and only_entry(builds[0])


@pytest.mark.compiles
def test_second_build_takes_what_the_first_left(builds, monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", str(builds[0].parents[1]))
    monkeypatch.setattr(build, "build_into", lambda folder, mojo: pytest.fail("built again"))
    assert build.build().folder == builds[0]


@pytest.mark.compiles
def test_library_that_does_not_compile(tmp_path, monkeypatch):
    (tmp_path / "broken.mojo").write_text("def f() -> Int:\n    return nothing\n")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", {"libcuda.so.1": "broken.mojo"})
    with pytest.raises(build.DriverBuildError, match=r"mojo could not build libcuda\.so\.1: .*failed"):
        build.build()
    assert list((tmp_path / "cache" / "vgpu-driver").iterdir()) == []


def test_disk_that_fills_up(tmp_path, monkeypatch):
    def no_room(folder, mojo):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "build_into", no_room)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        build.build()
    assert list((tmp_path / "vgpu-driver").iterdir()) == []


def test_missing_mojo(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.DriverBuildError, match="mojo not found"):
        build.find_mojo()
    with pytest.raises(FileNotFoundError, match="no C compiler on the PATH, and no lld"):
        linker.find_lld()


def test_mojo_that_does_not_run(tmp_path):
    broken = tmp_path / "mojo"
    broken.write_text("#!/bin/sh\necho no licence today >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(build.DriverBuildError, match="failed: no licence today"):
        build.mojo_version(str(broken))


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.DriverBuildError, match="needs Linux, this is darwin"):
        build.build()


def test_linker_translates_a_compiler_call():
    call = [
        "-shared", "-Wl,--whole-archive", "a.a", "-Wl,-z,now", "-Xlinker", "-soname=x.so", "-lm", "-o",
        "x.so",
    ]  # fmt: skip
    assert linker.lld_arguments(call, Path("/lib/libc.so.6")) == [
        *("-flavor", "gnu", "--as-needed"),
        *("-shared", "--whole-archive", "a.a", "-z", "now", "-soname=x.so", "/lib/libm.so.6", "-o", "x.so"),
        "/lib/libc.so.6",
    ]


def test_linker_refuses_executables(capsys):
    assert linker.main(["a.o", "-o", "a.out"]) == 1
    assert "only shared libraries can be linked" in capsys.readouterr().err


def test_linker_needs_glibc():
    maps = "7f00-7f01 r-xp 00000000 08:01 42    /lib/ld-musl-x86_64.so.1\n"
    with pytest.raises(FileNotFoundError, match="glibc only"):
        linker.c_library(maps)
    maps += "7f02-7f03 r-xp 00000000 08:01 43    /usr/lib/x86_64-linux-gnu/libc.so.6\n"
    assert linker.c_library(maps) == Path("/usr/lib/x86_64-linux-gnu/libc.so.6")
