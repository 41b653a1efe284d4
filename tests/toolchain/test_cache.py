"""The cache: where it is, one line where it cannot be written, entries built once and whole, and again where one is broken."""

import errno
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from max.driver import CPU
from max.engine import read

from harness.devices import graphs, recorder
from harness.errors import CompileFailed, EnvironmentProblem
from harness.toolchain import cache, packages
from harness.toolchain.cache import STAGING, STALE, cache_folder, digest, discard, keep, keep_text, read_text
from harness.toolchain.packages import OpPackage, compile_failed

CONTENT = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("value", "where"),
    [("here", "here/x"), ("~/there", "home/there/x"), (None, "home/.cache/mojo-gpu-workbook/x")],
)
def test_the_variable_names_the_folder(monkeypatch, tmp_path, value, where):
    """A relative one is meant from here: programs that run in other folders look for the virtual GPU's libraries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBOOK_CACHE", value or "")
    assert cache_folder("x") == tmp_path / where and (tmp_path / where).is_dir()


def test_a_folder_that_cannot_be_written_is_one_line_with_exit_code_5(command_line, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file"))
    done = command_line("p22", "--solution", "--gate", "ln")
    assert (done.code, done.err.count("\n")) == (5, 1) and "WORKBOOK_CACHE" in done.err


def test_a_full_disk_is_one_line_with_exit_code_5(command_line, monkeypatch, tmp_path):
    """The compiler's output does not fit; nothing half-built is left, only PyTorch's answers and locks."""

    def write(path, *arguments, **options):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", write)
    done = command_line("p22", "--solution", "--gate", "ln")
    assert (done.code, done.err.count("\n")) == (5, 1) and os.strerror(errno.ENOSPC) in done.err
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all({"answers", "locks"} & {*path.parts} for path in left)


@pytest.mark.parametrize("said", ["LLVM ERROR: IO failure on output stream: No space left on device", '{"kind":"error","message":"cannot write to file to filesystem cache since available space(45056) is not enough"}'])  # fmt: skip
def test_a_compiler_on_a_full_disk_is_not_the_package_s_failure(tmp_path, said):
    assert isinstance(compile_failed(tmp_path, said), EnvironmentProblem)
    located = '{"diagnostic": {"file": "a.mojo", "location": {"line": 3, "column": 7}}, "kind": "error", "message": "x"}\n'
    assert isinstance(compile_failed(tmp_path, located + said), CompileFailed)


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    def none_known():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WORKBOOK_CACHE", raising=False)
    monkeypatch.setattr(cache.Path, "home", none_known)
    with pytest.raises(EnvironmentProblem, match="WORKBOOK_CACHE"):
        cache_folder()


def test_a_name_that_is_no_text_has_a_digest():
    assert digest(["f\udcfc"]) == digest([b"f\xfc"]) != digest(["f"])


@settings(deadline=None)  # a busy machine
@given(st.lists(st.text()), st.lists(st.text()))
def test_different_parts_have_different_digests(one, other):
    """Also where the parts run together to the same text: ["ab", "c"] and ["a", "bc"]."""
    assert (digest(one) == digest(other)) == (one == other)


def test_digest_is_short_and_fixed():
    assert digest(["a", b"b"]) == digest(["a", "b"]) != digest(["ab"])
    assert len(digest([])) == 16 and int(digest([]), 16) >= 0


# ---- Entries ------------------------------------------------------------------------------------------------


def make_file(staged: Path) -> None:
    staged.write_bytes(CONTENT)


def make_folder(staged: Path) -> None:
    (staged / "inner").mkdir(parents=True)
    (staged / "inner" / "one").write_bytes(CONTENT)


@pytest.mark.parametrize("make", [make_file, make_folder])
def test_an_entry_is_built_once_and_again_where_it_was_discarded(tmp_path, make):
    calls = []
    for times in (1, 1, 2):
        if times == 2:
            discard(tmp_path / "entry")
        kept = keep(tmp_path / "entry", lambda staged: [calls.append(1), make(staged)], "it")
        assert kept == tmp_path / "entry" and len(calls) == times
    assert {path.name for path in tmp_path.iterdir()} == {"entry"}


def test_a_make_that_fails_leaves_nothing(tmp_path):
    def fail(staged: Path) -> None:
        staged.write_bytes(CONTENT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keep(tmp_path / "entry", fail, "it")
    assert not {path.name for path in tmp_path.iterdir()}


def test_what_an_interrupted_process_left_goes_after_a_day(tmp_path):
    for name, age in (("old", STALE + 60), ("young", 60)):
        left = tmp_path / f"{STAGING}{name}"
        left.mkdir()
        (left / "half").write_text("")
        then = time.time() - age
        os.utime(left, (then, then))
    keep(tmp_path / "entry", make_file, "it")
    assert {path.name for path in tmp_path.glob(f"{STAGING}*")} == {f"{STAGING}young"}


def keep_slowly(folder: Path) -> bytes:
    """Builds an entry with content of its own, slowly."""

    def make(staged: Path) -> None:
        time.sleep(0.2)
        staged.write_bytes(os.urandom(1000))

    return keep(folder / "entry", make, "it").read_bytes()


def test_of_several_processes_and_threads_one_builds_and_all_get_the_same(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as processes, ThreadPoolExecutor(3) as threads:
        waiting = processes.map_async(keep_slowly, [tmp_path] * 3)
        assert len({*threads.map(keep_slowly, [tmp_path] * 3), *waiting.get(60)}) == 1


# ---- Broken entries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 0.999])
def test_a_text_that_is_cut_short_is_built_again(tmp_path, share):
    made = []
    for _ in range(2):
        assert keep_text(
            tmp_path / "x.txt", lambda: made.append(1) or "launch 05000000 07000000\n" * 99, "it"
        )
        whole = (tmp_path / "x.txt").read_bytes()
        (tmp_path / "x.txt").write_bytes(whole[: int(len(whole) * share)])
        assert read_text(tmp_path / "x.txt") is None
    assert len(made) == 2
    (tmp_path / "x.txt").write_bytes(b"\xff")
    assert read_text(tmp_path / "x.txt") is None


def answered(builds: list, output: str = "", data: bytes = b"") -> Callable:
    """Stands in for the Mojo compiler: prints, and writes the file after -o."""

    def run(*arguments, **options):
        builds.append(arguments)
        if "-o" in arguments:
            Path(arguments[arguments.index("-o") + 1]).write_bytes(data)
        return subprocess.CompletedProcess(arguments, 0, output, "")

    return run


def test_a_broken_recording_is_built_again(monkeypatch, tmp_path, solution):
    """The last digits of the text are an argument of the last launch: with three bytes less it can still be parsed."""
    text = "//@ package\n//@ case fused 2 3 5 7\n//@ ptx kernel\n.version 8.0\n//@ launch forward kernel 1 1 1 64 1 1 0 05000000 07000000\n"
    builds = []
    monkeypatch.setattr(recorder, "run_mojo", answered(builds, text))
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    for times in (1, 2):
        recording = recorder.record(solution, "p22", "float32", [(2, 3, 5, 7)])
        assert recording.launches()[0].arguments[-1] == b"\x07\0\0\0" and len(builds) == times
        (file,) = (tmp_path / "recordings").glob("*.txt")
        file.write_bytes(file.read_bytes().removesuffix(cache.END.encode())[:-3])


@pytest.mark.compiles
def test_a_broken_package_is_compiled_again(monkeypatch, tmp_path, solution):
    data = solution.compile().read_bytes()
    builds = []
    package = OpPackage(solution.path)
    monkeypatch.setattr(packages, "run_mojo", answered(builds, data=data))
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    for times, cut in ((1, -3), (2, len(data) // 2), (3, 0)):
        assert "layernorm_linear" in graphs.kernel_library(package)
        assert len(builds) == times
        package.compile().write_bytes(data[:cut])


@pytest.mark.compiles
def test_a_broken_graph_is_discarded(program, tmp_path, puzzle, solution):
    program("float32")
    file = max(cache_folder("graphs").glob("*.mef"), key=lambda path: path.stat().st_mtime)
    data = file.read_bytes()
    for cut in (0, len(data) // 2, int(len(data) * 0.97), -3):
        (tmp_path / "x.mef").write_bytes(data[:cut])
        assert graphs.read_cached(tmp_path / "x.mef") is None and not (tmp_path / "x.mef").exists()
    assert read(file) and CPU()
