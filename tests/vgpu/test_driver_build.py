"""Build of the driver's libraries without a C compiler, into a cache shared by concurrent builds."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typed import unwrap

from harness.errors import EnvironmentProblem
from harness.toolchain import linker
from harness.vgpu.driver import build

ROOT = Path(__file__).resolve().parents[2]
BUILD_SCRIPT = "from harness.vgpu.driver import build; print(build.build().folder)"
# Load the library, look up the names given as arguments, and initialize the driver without an executor.
LOAD_LIBRARY_SCRIPT = """
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


def make_path(folder: Path, *names: str) -> str:
    """Return a PATH with only the named programs."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(unwrap(shutil.which(name)))
    return str(folder)


def list_driver_names_in_max() -> list[str]:
    """Return the CUDA driver's entry points whose names occur in MAX's library."""
    package = Path(unwrap(unwrap(importlib.util.find_spec("modular")).submodule_search_locations)[0])
    text = (package / "lib" / "libAsyncRTMojoBindings.so").read_bytes()
    # Skip fragments between machine instructions.
    names = re.findall(
        rb"(?<=\0)cu(?:Mem|Stream|Graph|Event|Func|Module|Launch)[A-Za-z0-9]+(?:_v\d)?(?=\0)", text
    )
    # These three are part of messages.
    return sorted({name.decode() for name in names} - {"cuMemset", "cuMemcpyBatch", "cuMemcpyDtoD"})


def is_only_entry(folder: Path) -> bool:
    """Return whether the cache contains only this driver and no partial build."""
    return {path.name for path in folder.parent.iterdir()} == {folder.name}


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> list[Path]:
    """Folders of two concurrent builds into an empty cache, without a C compiler."""
    root = tmp_path_factory.mktemp("driver")
    env = {**os.environ, "PATH": make_path(root / "bin", "sh", "cp"), "WORKBOOK_CACHE": str(root / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_SCRIPT], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = [Path(process.communicate(timeout=120)[0].strip()) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return folders


@pytest.mark.compiles
def test_libraries_build_without_a_c_compiler(builds):
    folder = builds[0]
    assert sorted(p.name for p in folder.iterdir()) == ["libcuda.so.1", "libnvidia-ml.so.1", "ptxas"]
    no_device, driver_not_loaded = 100, 9
    names = ["cuInit", *list_driver_names_in_max()]
    assert len(names) > 80
    result = run_python(LOAD_LIBRARY_SCRIPT, str(folder / "libcuda.so.1"), *names)
    assert json.loads(result.stdout) == {"missing": [], "code": no_device}, result.stderr
    result = run_python(
        LOAD_LIBRARY_SCRIPT, str(folder / "libnvidia-ml.so.1"), "nvmlInit_v2", "nvmlDeviceGetCount_v2"
    )
    assert json.loads(result.stdout) == {"missing": [], "code": driver_not_loaded}, result.stderr


@pytest.mark.compiles
def test_concurrent_builds_share_one_result(builds):
    assert builds[0] == builds[1] and is_only_entry(builds[0])


@pytest.mark.compiles
def test_second_build_uses_the_cache(builds, monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", str(builds[0].parents[1]))
    monkeypatch.setattr(build, "build_into", lambda folder, mojo: pytest.fail("built again"))
    assert build.build().folder == builds[0]


@pytest.mark.compiles
def test_compile_error_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken.mojo").write_text("def f() -> Int:\n    return nothing\n")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", {"libcuda.so.1": "broken.mojo"})
    with pytest.raises(build.DriverBuildError, match=r"mojo could not build libcuda\.so\.1: .*failed"):
        build.build()
    assert list((tmp_path / "cache" / "vgpu-driver").iterdir()) == []


def test_full_disk_is_reported(tmp_path, monkeypatch):
    def raise_disk_full(folder, mojo):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "build_into", raise_disk_full)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        build.build()
    assert list((tmp_path / "vgpu-driver").iterdir()) == []


def test_missing_mojo_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.DriverBuildError, match="mojo not found"):
        build.find_mojo()
    with pytest.raises(FileNotFoundError, match="no C compiler on the PATH, and no lld"):
        linker.find_lld()


def test_failing_mojo_is_reported(tmp_path):
    broken = tmp_path / "mojo"
    broken.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(build.DriverBuildError, match="failed: no licence"):
        build.compute_cache_key(str(broken))


def test_other_systems_are_rejected(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.DriverBuildError, match="needs Linux, this is darwin"):
        build.build()


def test_linker_translates_a_compiler_call():
    call = [
        "-shared", "-Wl,--whole-archive", "a.a", "-Wl,-z,now", "-Xlinker", "-soname=x.so", "-lm", "-o",
        "x.so",
    ]  # fmt: skip
    assert linker.translate_arguments(call, Path("/lib/libc.so.6")) == [
        *("-flavor", "gnu", "--as-needed"),
        *("-shared", "--whole-archive", "a.a", "-z", "now", "-soname=x.so", "/lib/libm.so.6", "-o", "x.so"),
        "/lib/libc.so.6",
    ]


def test_linker_rejects_executables(capsys):
    assert linker.main(["a.o", "-o", "a.out"]) == 1
    assert "only shared libraries can be linked" in capsys.readouterr().err


def test_linker_requires_glibc():
    maps = "7f00-7f01 r-xp 00000000 08:01 42    /lib/ld-musl-x86_64.so.1\n"
    with pytest.raises(FileNotFoundError, match="Linux with glibc"):
        linker.find_libc(maps)
    maps += "7f02-7f03 r-xp 00000000 08:01 43    /usr/lib/x86_64-linux-gnu/libc.so.6\n"
    assert linker.find_libc(maps) == Path("/usr/lib/x86_64-linux-gnu/libc.so.6")
