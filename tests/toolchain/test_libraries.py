"""Shared libraries built where they are needed: built once, found, kept whole, and what is said where a compiler is missing."""

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

from harness.errors import BadUse, CompileFailed, EnvironmentProblem
from harness.toolchain import libraries
from harness.toolchain.libraries import Library, mojo_library, torch_library

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 'extern "C" __attribute__((visibility("default"))) int answer()'
SOURCE = SHOWN + " { return ANSWER; }\n"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for libraries, which the processes that the tests start inherit."""
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(libraries, "CARRIED", tmp_path / "carried")
    return tmp_path / "kept"


@pytest.fixture
def source(tmp_path):
    """A C++ file that needs no header of PyTorch's."""
    (tmp_path / "answer.cpp").write_text(SOURCE)
    return tmp_path / "answer.cpp"


def answering(source: Path, answer: int = 42, home: Path | None = None) -> Library:
    """The library of a source whose function returns this."""
    return torch_library("answer", [source], f"ANSWER={answer}", home=home)


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    """A compiler that notes its calls, then waits, then compiles: (the file of notes)."""
    notes, script = tmp_path / "notes", tmp_path / "slow"
    real = libraries.find_compiler()
    script.write_text(
        f'#!/bin/sh\nif [ "$1" != --version ]; then echo $$ >> {notes}; sleep 1; fi\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return notes


PROCESS = """
import sys
from pathlib import Path
from harness.toolchain.libraries import torch_library
library = torch_library("answer", [Path(sys.argv[1])], "ANSWER=42")
print(library.build().seconds > 0)
"""


def start(source: Path) -> subprocess.Popen:
    """Build in a process of its own."""
    command = [sys.executable, "-c", PROCESS, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)


def test_a_library_is_built_once_and_loaded(folder, source):
    library = answering(source)
    first, second = library.build(), library.build()
    assert first.path == second.path and first.path.parent == folder
    assert first.seconds > 0 and second.seconds == 0
    assert library.load()[1].answer() == 42


def test_the_name_follows_all_that_a_library_depends_on(folder, source, monkeypatch):
    names = {answering(source).file_name, answering(source, 43).file_name}
    monkeypatch.setattr(libraries, "torch_version", lambda home: "9.9.0")
    names.add(answering(source).file_name)
    monkeypatch.setattr(libraries, "find_compiler", lambda: "/bin/echo")
    names.add(answering(source).file_name)
    source.write_text(SOURCE + "\n")
    names.add(answering(source).file_name)
    assert len(names) == 5


def test_two_processes_at_once_build_once(folder, source, slow_compiler):
    processes = [start(source), start(source)]
    assert sorted(process.communicate(timeout=60)[0].strip() for process in processes) == ["False", "True"]
    assert len(slow_compiler.read_text().split()) == 1


def test_after_a_killed_builder_the_next_one_builds(folder, source, slow_compiler):
    process = start(source)
    while not slow_compiler.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(folder.glob("answer*"))
    assert answering(source).load()[1].answer() == 42 and len(slow_compiler.read_text().split()) == 2


def test_a_folder_that_cannot_be_written(folder, source, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, "/proc/kernels")
    with pytest.raises(
        EnvironmentProblem, match=rf"cannot make the folder /proc/kernels.*; set {libraries.VARIABLE}"
    ):
        answering(source).build()
    with pytest.raises(
        EnvironmentProblem, match=r"cannot make the folder /proc/other.*; name another --output"
    ):
        answering(source).build(Path("/proc/other"))


def test_without_a_compiler_what_another_one_built_is_taken(folder, source, monkeypatch):
    built = answering(source).build().path
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    assert answering(source).build().path == built
    with pytest.raises(
        EnvironmentProblem,
        match=r"no C\+\+ compiler for answer.cpp and PyTorch [\d.]+: install g\+\+, or set CXX",
    ):
        answering(source, 43).build()
    assert len(list(folder.iterdir())) == 1


def test_what_a_wheel_carries_wants_no_compiler_and_serves_a_minor_version(
    folder, source, tmp_path, monkeypatch
):
    home = tmp_path / "torch"
    home.mkdir()
    (home / "lib").symlink_to(libraries.torch_home() / "lib")
    (home / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    carried = answering(source, home=home).build(tmp_path / "carried").path
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    (home / "version.py").write_text("__version__ = '2.11.3'\n")
    assert answering(source, home=home).find() == carried
    (home / "version.py").write_text("__version__ = '2.12.0'\n")
    with pytest.raises(EnvironmentProblem, match=r"no C\+\+ compiler for answer.cpp and PyTorch 2.12.0"):
        answering(source, home=home).build()
    with pytest.raises(BadUse, match="nothing is not a PyTorch folder"):
        answering(source, home=tmp_path / "nothing")


def test_what_was_built_for_another_machine_is_found_by_its_folder(folder, source):
    elsewhere = answering(source).build(folder).path
    assert elsewhere.name == answering(source).carried_name and answering(source).find() == elsewhere


def test_a_source_that_does_not_compile(folder, source):
    source.write_text("int answer( { return 1; }\n")
    with pytest.raises(EnvironmentProblem, match=r"cannot build answer.cpp: .*answer.cpp:1:\d+: error: "):
        answering(source).build()
    assert not list(folder.glob("answer*"))


def test_a_damaged_library_is_built_again(folder, source):
    path = answering(source).build().path
    path.write_bytes(b"no library")
    assert answering(source).load()[1].answer() == 42


def test_a_library_that_the_system_refuses(folder, source, monkeypatch):
    source.write_text('extern "C" int missing(); ' + SHOWN + " { return missing() + ANSWER; }\n")
    library = answering(source)
    monkeypatch.setenv("LD_BIND_NOW", "1")
    run = subprocess.run(
        [sys.executable, "-c", PROCESS.replace("print(library.build().seconds > 0)", "library.load()"), str(source)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert f"EnvironmentProblem: cannot load {folder / library.file_name}" in run.stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_a_build_says_how_long_it_takes(folder, source, slow_compiler, monkeypatch, tmp_path):
    """First an estimate, then what the last one took; on a terminal as a line that moves."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    plain, terminal = io.StringIO(), Terminal()
    assert answering(source).build(progress=libraries.Progress(plain)).seconds >= 1
    name = answering(source).name
    assert plain.getvalue() == f"Building {name} (about {libraries.CPP_SECONDS} s, once) ...\n"
    answering(source, 43).build(progress=libraries.Progress(terminal))
    frames = terminal.getvalue().split("\r\033[K")
    assert (
        re.fullmatch(rf"Building {re.escape(name)} \(0 of about [1-9]\d* s\)", frames[1]) and frames[-1] == ""
    )


def test_several_are_built_in_the_order_they_were_asked_for(folder, source):
    wanted = [answering(source, number) for number in (1, 2, 3)]
    built = list(libraries.build_all(wanted, progress=libraries.Progress(io.StringIO())))
    assert [library for library, _ in built] == wanted and all(each.seconds > 0 for _, each in built)


@pytest.fixture
def fresh_runtime():
    """Mojo's libraries are looked for again, before and after."""
    libraries.load_runtime.cache_clear()
    yield
    libraries.load_runtime.cache_clear()


def test_without_max(monkeypatch, fresh_runtime):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="MAX is not installed"):
        libraries.load_runtime()


def test_without_mojo_s_libraries(monkeypatch, fresh_runtime):
    monkeypatch.setattr(libraries, "RUNTIME", ("libnothing.so",))
    with pytest.raises(EnvironmentProblem, match=r"libnothing.so is in neither .*; reinstall MAX"):
        libraries.load_runtime()


@pytest.fixture
def small(tmp_path):
    """A Mojo file that compiles in a moment."""
    (tmp_path / "small.mojo").write_text('@export("answer")\ndef answer() abi("C") -> Int64:\n    return 1\n')
    return tmp_path / "small.mojo"


@pytest.mark.compiles
def test_a_linker_that_is_missing(folder, small, monkeypatch, tmp_path):
    """The error is the environment's, and says the linker's last words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text("#!/bin/sh\necho 'cc: no room on the device' >&2\nexit 1\n")
    (tmp_path / "bin" / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match=r"small\.mojo cannot be built: ") as caught:
        mojo_library("small", [small], tmp_path, "sm_80").build()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.compiles
def test_it_links_without_a_c_compiler(folder, small, monkeypatch, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cp", "env"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    libraries.load_runtime()
    assert mojo_library("small", [small], tmp_path, "sm_80").load()[1].answer() == 1


@pytest.mark.compiles
def test_a_part_of_a_mojo_file(folder, tmp_path):
    """What PART names is compiled, and an error is the compiler's."""
    file = tmp_path / "part.mojo"
    file.write_text(
        "from std.sys.defines import get_defined_string\n\n\n"
        '@export("answer")\ndef answer() abi("C") -> Int64:\n'
        '    return 16 if get_defined_string["PART", ""]() == "float16" else 32\n'
    )
    answers = []
    for part in ("float16", "float32"):
        library = mojo_library(f"part_{part}", [file], tmp_path, "sm_90a", 3, PART=part)
        libraries.load_runtime()
        answers.append(library.load()[1].answer())
    assert answers == [16, 32]
    file.write_text("def broken(:\n")
    with pytest.raises(CompileFailed, match=r"part\.mojo does not compile"):
        mojo_library("part", [file], tmp_path, "sm_90a", 3).build()
