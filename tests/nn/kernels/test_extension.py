"""The extension module: which architecture, building once, the cache, loading elsewhere, the kernels on the virtual GPU.

The modules are built with the compiler once and then come from the workbook's cache: for sm_90a what most tests need, for sm_80
in a slow test.
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import CompileFailed, EnvironmentProblem
from harness.toolchain import extension, libraries

ROOT = Path(__file__).resolve().parents[3]


def run_python(code: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess:
    """Runs code in a process of its own, in the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **env},
    )


# ---- The name of the file -----------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """A copy of a layer's sources that a test may change, and modules of its own."""
    for file in extension.sources():
        copy = tmp_path / file.relative_to(extension.KERNELS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    monkeypatch.setattr(extension, "KERNELS", tmp_path)
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "modules"))
    extension.file_name.cache_clear()
    yield tmp_path / "cross_entropy"
    extension.file_name.cache_clear()


def test_the_name_follows_everything_that_the_module_depends_on(copied, monkeypatch):
    def name(architecture="sm_80"):
        extension.file_name.cache_clear()
        return extension.file_name(architecture)

    names = [name(), name("sm_86")]
    kernels = copied / "rows.mojo"
    kernels.write_text(kernels.read_text() + "\n")
    names.append(name())
    (copied / "more.mojo").write_text('"""Nothing."""\n')
    names.append(name())
    monkeypatch.setattr(extension, "mojo_version", lambda: "0.0")
    names.append(name())
    assert len(set(names)) == 5 and all(
        each.startswith("cross_entropy_sm_8") and each.endswith(".so") for each in names
    )
    assert name() == names[-1]


def test_the_sources_are_those_of_the_checkout():
    files = extension.sources()
    assert files[0] == ROOT / "harness" / "nn" / "kernels" / "cross_entropy" / "extension.mojo"
    assert {"rows.mojo", "stream_launcher.mojo", "launcher.mojo"} <= {file.name for file in files}


def test_the_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "a" / "b"))
    assert extension.folder() == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv(extension.VARIABLE, "")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    assert extension.folder() == tmp_path / "cache" / "extensions"


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "file" / "modules"))
    with pytest.raises(
        EnvironmentProblem, match=r"cannot make the folder .*; set WORKBOOK_EXTENSIONS to a folder"
    ):
        extension.build("sm_80")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_folder_that_cannot_be_written():
    with pytest.raises(
        EnvironmentProblem, match=r"cannot write the extension module to /proc/self .*; name another --output"
    ):
        extension.build("sm_80", Path("/proc/self"))


# ---- Building -----------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_a_module_that_is_there_is_not_built_again(monkeypatch):
    built = extension.build("sm_90a")
    monkeypatch.setattr(extension, "compile_module", None)
    again = extension.build("sm_90a", on_build=lambda: pytest.fail("built again"))
    assert again.path == built.path and again.seconds == 0


def slow_compile(architecture, staging, layer):
    """In the place of the compiler: leaves a mark and takes a while."""
    (staging.parent / f"mark-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(0.5)
    target = staging / "module.so"
    target.write_text(architecture)
    return target


def build_with_slow_compile(folder):
    extension.compile_module = slow_compile
    return extension.build("sm_80", folder)


@pytest.mark.compiles
def test_several_processes_build_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(build_with_slow_compile, [tmp_path] * 4)
    assert len({result.path for result in results}) == 1 and results[0].path.read_text() == "sm_80"
    assert len(list(tmp_path.glob("mark-*"))) == 1
    assert sorted(result.seconds > 0 for result in results) == [False, False, False, True]


def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(architecture, staging, layer):
        (staging / "half").write_text("")
        raise CompileFailed("no")

    monkeypatch.setattr(extension, "compile_module", fail)
    with pytest.raises(CompileFailed):
        extension.build("sm_80", tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(extension, "compile_module", slow_compile)
    assert extension.build("sm_80", tmp_path).path.read_text() == "sm_80"


@pytest.mark.compiles
def test_a_kernel_that_does_not_compile(copied):
    kernels = copied / "rows.mojo"
    text = kernels.read_text()
    assert " = ceildiv(" in text
    kernels.write_text(text.replace(" = ceildiv(", " = ceildivided(", 1))
    with pytest.raises(CompileFailed, match=r"extension\.mojo does not compile\n.*rows\.mojo:\d+") as caught:
        extension.build("sm_80")
    assert "ceildivided" in caught.value.details


@pytest.mark.compiles
def test_a_linker_that_is_missing(copied, monkeypatch, tmp_path):
    """The error is the environment's, and says the linker's last words."""
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "cc").write_text("#!/bin/sh\necho 'cc: no room on the device' >&2\nexit 1\n")
    (broken / "cc").chmod(0o755)
    (copied / "extension.mojo").write_text(
        '"""Small."""\n\n\n@export\ndef f() abi("C") -> Int:\n    return 1\n'
    )
    monkeypatch.setenv("PATH", f"{broken}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match="the extension module cannot be built: ") as caught:
        extension.build("sm_80")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.compiles
def test_it_links_without_a_c_compiler(copied, tmp_path, monkeypatch):
    """With a PATH on which there is no C compiler."""
    small = '"""Small."""\n\n\n@export\ndef answer() abi("C") -> Int:\n    return 42\n'
    (copied / "extension.mojo").write_text(small)
    for name in ("sh", "cp", "env"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    path = extension.build("sm_80").path
    import ctypes

    extension.load_runtime()
    assert ctypes.CDLL(str(path)).answer() == 42


# ---- Loading ------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_module(tmp_path):
    path = tmp_path / "module.so"
    path.write_text("not a library")
    with pytest.raises(EnvironmentProblem, match=f"cannot load {path}: "):
        extension.load(path)


@pytest.fixture
def fresh_runtime():
    extension.load_runtime.cache_clear()
    yield
    extension.load_runtime.cache_clear()


def test_without_max(monkeypatch, fresh_runtime):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="MAX is not installed"):
        extension.load_runtime()


def test_without_mojo_s_libraries(monkeypatch, fresh_runtime):
    monkeypatch.setattr(libraries, "RUNTIME", ("libnothing.so",))
    with pytest.raises(EnvironmentProblem, match=r"libnothing.so is in neither .*; reinstall MAX"):
        extension.load_runtime()
