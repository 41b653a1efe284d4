"""Shared libraries: built on demand, cached, written atomically; errors without a compiler."""

import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import CompileFailed, EnvironmentProblem, UsageError
from harness.toolchain import libraries
from harness.toolchain.libraries import Library, make_mojo_library, make_torch_library

ROOT = Path(__file__).resolve().parents[2]
DECLARATION = 'extern "C" __attribute__((visibility("default"))) int answer()'
SOURCE = DECLARATION + " { return ANSWER; }\n"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Folder of built libraries, also for child processes."""
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / "libraries"))
    monkeypatch.setattr(libraries, "BUNDLED_LIBRARIES", tmp_path / "carried")
    return tmp_path / "libraries"


@pytest.fixture
def source(tmp_path):
    """C++ file without PyTorch headers."""
    (tmp_path / "answer.cpp").write_text(SOURCE)
    return tmp_path / "answer.cpp"


def make_library(source: Path, answer: int = 42, home: Path | None = None) -> Library:
    """Create a library with a function that returns `answer`."""
    return make_torch_library("answer", [source], f"ANSWER={answer}", torch_home=home)


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    """Install a compiler that logs each call and sleeps before compiling; return the log."""
    log, script = tmp_path / "notes", tmp_path / "slow"
    compiler = libraries.find_compiler()
    script.write_text(
        f'#!/bin/sh\nif [ "$1" != --version ]; then echo $$ >> {log}; sleep 1; fi\nexec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


PROCESS = """
import sys
from pathlib import Path
from harness.toolchain.libraries import make_torch_library
library = make_torch_library("answer", [Path(sys.argv[1])], "ANSWER=42")
print(library.build().seconds > 0)
"""


def start_build(source: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)


def test_library_is_built_once_and_rebuilt_if_damaged(folder, source):
    library = make_library(source)
    first, second = library.build(), library.build()
    assert first.path == second.path and first.path.parent == folder
    assert first.duration_s > 0 and second.duration_s == 0
    first.path.write_bytes(b"not a library")
    assert library.load()[1].answer() == 42


def test_name_depends_on_source_flags_torch_and_compiler(folder, source, monkeypatch):
    names = {make_library(source).file_name, make_library(source, 43).file_name}
    monkeypatch.setattr(libraries, "read_torch_version", lambda home: "9.9.0")
    names.add(make_library(source).file_name)
    monkeypatch.setattr(libraries, "find_compiler", lambda: "/bin/echo")
    names.add(make_library(source).file_name)
    source.write_text(SOURCE + "\n")
    names.add(make_library(source).file_name)
    assert len(names) == 5


def test_build_succeeds_after_a_killed_process(folder, source, slow_compiler):
    process = start_build(source)
    while not slow_compiler.exists():
        assert process.poll() is None, "the process ended before it called the compiler"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(folder.glob("answer*"))
    assert make_library(source).load()[1].answer() == 42 and len(slow_compiler.read_text().split()) == 2


def test_unwritable_folder_is_reported(folder, source, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, "/proc/kernels")
    with pytest.raises(
        EnvironmentProblem, match=rf"cannot make the folder /proc/kernels.*; set {libraries.VARIABLE}"
    ):
        make_library(source).build()
    with pytest.raises(
        EnvironmentProblem, match=r"cannot make the folder /proc/other.*; name another --output"
    ):
        make_library(source).build(Path("/proc/other"))


def test_existing_library_is_used_without_a_compiler(folder, source, monkeypatch):
    built = make_library(source).build().path
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    assert make_library(source).build().path == built
    with pytest.raises(
        EnvironmentProblem,
        match=r"no C\+\+ compiler for answer.cpp and PyTorch [\d.]+: install g\+\+, or set CXX",
    ):
        make_library(source, 43).build()
    assert len(list(folder.iterdir())) == 1


def test_library_in_a_wheel_matches_a_minor_torch_version(folder, source, tmp_path, monkeypatch):
    home = tmp_path / "torch"
    home.mkdir()
    (home / "lib").symlink_to(libraries.find_torch_home() / "lib")
    (home / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    prebuilt = make_library(source, home=home).build(tmp_path / "carried").path
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    (home / "version.py").write_text("__version__ = '2.11.3'\n")
    assert make_library(source, home=home).find() == prebuilt
    (home / "version.py").write_text("__version__ = '2.12.0'\n")
    with pytest.raises(EnvironmentProblem, match=r"no C\+\+ compiler for answer.cpp and PyTorch 2.12.0"):
        make_library(source, home=home).build()
    with pytest.raises(UsageError, match="nothing is not a PyTorch folder"):
        make_library(source, home=tmp_path / "nothing")


def test_prebuilt_library_is_loaded_from_its_folder(folder, source):
    prebuilt = make_library(source).build(folder).path
    assert prebuilt.name == make_library(source).bundled_name and make_library(source).find() == prebuilt


def test_compile_error_is_reported(folder, source):
    source.write_text("int answer( { return 1; }\n")
    with pytest.raises(EnvironmentProblem, match=r"cannot build answer.cpp: .*answer.cpp:1:\d+: error: "):
        make_library(source).build()
    assert not list(folder.glob("answer*"))


def test_load_error_is_reported(folder, source, monkeypatch):
    source.write_text('extern "C" int missing(); ' + DECLARATION + " { return missing() + ANSWER; }\n")
    library = make_library(source)
    monkeypatch.setenv("LD_BIND_NOW", "1")
    run = subprocess.run(
        [sys.executable, "-c", PROCESS.replace("print(library.build().seconds > 0)", "library.load()"), str(source)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert f"EnvironmentProblem: cannot load {folder / library.file_name}" in run.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_build_shows_its_estimated_time(folder, source, slow_compiler, monkeypatch, tmp_path):
    """The first estimate is a constant, later ones are the last build's time; terminals show progress."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    pipe, terminal = io.StringIO(), Terminal()
    assert make_library(source).build(progress=libraries.Progress(pipe)).duration_s >= 1
    name = make_library(source).name
    assert pipe.getvalue() == f"Building {name} (about {libraries.CPP_BUILD_S} s, once) ...\n"
    make_library(source, 43).build(progress=libraries.Progress(terminal))
    frames = terminal.getvalue().split("\r\033[K")
    assert (
        re.fullmatch(rf"Building {re.escape(name)} \(0 of about [1-9]\d* s\)", frames[1]) and frames[-1] == ""
    )


def test_libraries_are_built_in_the_requested_order(folder, source):
    requested = [make_library(source, number) for number in (1, 2, 3)]
    built = list(libraries.build_all(requested, progress=libraries.Progress(io.StringIO())))
    assert [library for library, _ in built] == requested and all(each.duration_s > 0 for _, each in built)


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (importlib.util, "find_spec", lambda name: None, "MAX is not installed"),
        (libraries, "RUNTIME", ("libnothing.so",), r"libnothing.so is in neither .*; reinstall MAX"),
    ],
    ids=["without MAX", "without Mojo's libraries"],
)
def test_missing_runtime_is_an_environment_problem(monkeypatch, module, name, value, message):
    monkeypatch.setattr(module, name, value)
    with pytest.raises(EnvironmentProblem, match=message):
        libraries.load_runtime.__wrapped__()


@pytest.fixture
def small_mojo_file(tmp_path):
    (tmp_path / "small.mojo").write_text('@export("answer")\ndef answer() abi("C") -> Int64:\n    return 1\n')
    return tmp_path / "small.mojo"


@pytest.mark.compiles
def test_linker_error_is_an_environment_problem(folder, small_mojo_file, monkeypatch, tmp_path):
    """The message includes the linker's error."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text("#!/bin/sh\necho 'cc: no room on the device' >&2\nexit 1\n")
    (tmp_path / "bin" / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match=r"small\.mojo cannot be built: ") as caught:
        make_mojo_library("small", [small_mojo_file], tmp_path, "sm_80").build()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.compiles
def test_mojo_library_links_without_a_c_compiler(folder, small_mojo_file, monkeypatch, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cp", "env"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    libraries.load_runtime()
    assert make_mojo_library("small", [small_mojo_file], tmp_path, "sm_80").load()[1].answer() == 1


@pytest.mark.compiles
def test_part_selects_the_compiled_code(folder, tmp_path):
    """PART selects the compiled part; a compile error is reported as CompileFailed."""
    file = tmp_path / "part.mojo"
    file.write_text(
        "from std.sys.defines import get_defined_string\n\n\n"
        '@export("answer")\ndef answer() abi("C") -> Int64:\n'
        '    return 16 if get_defined_string["PART", ""]() == "float16" else 32\n'
    )
    answers = []
    for part in ("float16", "float32"):
        library = make_mojo_library(f"part_{part}", [file], tmp_path, "sm_90a", 3, PART=part)
        libraries.load_runtime()
        answers.append(library.load()[1].answer())
    assert answers == [16, 32]
    file.write_text("def broken(:\n")
    with pytest.raises(CompileFailed, match=r"part\.mojo does not compile"):
        make_mojo_library("part", [file], tmp_path, "sm_90a", 3).build()
