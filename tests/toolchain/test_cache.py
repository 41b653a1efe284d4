"""The cache: folder, error messages, entries built once, and broken entries rebuilt."""

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
from harness.toolchain.cache import (
    STAGING_PREFIX,
    STALE_AFTER_S,
    cache_file,
    cache_text,
    compute_digest,
    discard,
    get_cache_folder,
    read_cached_text,
)
from harness.toolchain.packages import OpPackage, make_compile_error

CONTENT = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("value", "expected"),
    [("here", "here/x"), ("~/there", "home/there/x"), (None, "home/.cache/mojo-gpu-workbook/x")],
)
def test_environment_variable_sets_the_folder(monkeypatch, tmp_path, value, expected):
    """A relative path becomes absolute, since other programs load the virtual GPU's libraries from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBOOK_CACHE", value or "")
    assert get_cache_folder("x") == tmp_path / expected and (tmp_path / expected).is_dir()


def test_full_disk_exits_with_code_5(command_line, monkeypatch, tmp_path):
    """Only PyTorch's reference results and locks remain, no partial output."""

    def write(path, *arguments, **options):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", write)
    result = command_line("p22", "--solution", "--gate", "ln")
    assert (result.code, result.err.count("\n")) == (5, 1) and os.strerror(errno.ENOSPC) in result.err
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all({"answers", "locks"} & {*path.parts} for path in left)


@pytest.mark.parametrize("output", ["LLVM ERROR: IO failure on output stream: No space left on device", '{"kind":"error","message":"cannot write to file to filesystem cache since available space(45056) is not enough"}'])  # fmt: skip
def test_full_disk_in_the_compiler_is_an_environment_problem(tmp_path, output):
    assert isinstance(make_compile_error(tmp_path, output), EnvironmentProblem)
    located_entry = '{"diagnostic": {"file": "a.mojo", "location": {"line": 3, "column": 7}}, "kind": "error", "message": "x"}\n'
    assert isinstance(make_compile_error(tmp_path, located_entry + output), CompileFailed)


def test_error_without_home_folder_mentions_the_variable(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WORKBOOK_CACHE", raising=False)
    monkeypatch.setattr(cache.Path, "home", fail)
    with pytest.raises(EnvironmentProblem, match="WORKBOOK_CACHE"):
        get_cache_folder()


@settings(deadline=None)  # a busy machine
@given(st.lists(st.text()), st.lists(st.text()))
def test_different_parts_have_different_digests(a, b):
    """Include parts with equal concatenations: ["ab", "c"] and ["a", "bc"]."""
    assert (compute_digest(a) == compute_digest(b)) == (a == b)


def test_digest_is_short_and_deterministic():
    assert compute_digest(["a", b"b"]) == compute_digest(["a", "b"]) != compute_digest(["ab"])
    assert compute_digest(["f\udcfc"]) == compute_digest([b"f\xfc"]) != compute_digest(["f"]), (
        "an undecodable name"
    )
    assert len(compute_digest([])) == 16 and int(compute_digest([]), 16) >= 0


def make_file(staged: Path) -> None:
    staged.write_bytes(CONTENT)


def make_folder(staged: Path) -> None:
    (staged / "inner").mkdir(parents=True)
    (staged / "inner" / "one").write_bytes(CONTENT)


@pytest.mark.parametrize("make", [make_file, make_folder])
def test_entry_is_built_once_and_again_after_discard(tmp_path, make):
    calls = []
    for times in (1, 1, 2):
        if times == 2:
            discard(tmp_path / "entry")
        path = cache_file(tmp_path / "entry", lambda staged: [calls.append(1), make(staged)], "it")
        assert path == tmp_path / "entry" and len(calls) == times
    assert {path.name for path in tmp_path.iterdir()} == {"entry"}


def test_failed_build_leaves_no_files(tmp_path):
    def fail(staged: Path) -> None:
        staged.write_bytes(CONTENT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache_file(tmp_path / "entry", fail, "it")
    assert not {path.name for path in tmp_path.iterdir()}


def test_stale_staging_folders_are_removed(tmp_path):
    for name, age in (("old", STALE_AFTER_S + 60), ("young", 60)):
        folder = tmp_path / f"{STAGING_PREFIX}{name}"
        folder.mkdir()
        (folder / "half").write_text("")
        mtime = time.time() - age
        os.utime(folder, (mtime, mtime))
    cache_file(tmp_path / "entry", make_file, "it")
    assert {path.name for path in tmp_path.glob(f"{STAGING_PREFIX}*")} == {f"{STAGING_PREFIX}young"}


def build_slowly(folder: Path) -> bytes:
    """Slowly build an entry with random content; return its bytes."""

    def make(staging_path: Path) -> None:
        time.sleep(0.2)
        staging_path.write_bytes(os.urandom(1000))

    return cache_file(folder / "entry", make, "it").read_bytes()


def test_concurrent_processes_and_threads_build_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as processes, ThreadPoolExecutor(3) as threads:
        results = processes.map_async(build_slowly, [tmp_path] * 3)
        assert len({*threads.map(build_slowly, [tmp_path] * 3), *results.get(60)}) == 1


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 0.999])
def test_truncated_text_is_rebuilt(tmp_path, share):
    calls = []
    for _ in range(2):
        assert cache_text(
            tmp_path / "x.txt", lambda: calls.append(1) or "launch 05000000 07000000\n" * 99, "it"
        )
        data = (tmp_path / "x.txt").read_bytes()
        (tmp_path / "x.txt").write_bytes(data[: int(len(data) * share)])
        assert read_cached_text(tmp_path / "x.txt") is None
    assert len(calls) == 2
    (tmp_path / "x.txt").write_bytes(b"\xff")
    assert read_cached_text(tmp_path / "x.txt") is None


def make_fake_mojo(builds: list, output: str = "", data: bytes = b"") -> Callable:
    """Create a stub of `run_mojo` that prints and writes the file after -o."""

    def run(*arguments, **options):
        builds.append(arguments)
        if "-o" in arguments:
            Path(arguments[arguments.index("-o") + 1]).write_bytes(data)
        return subprocess.CompletedProcess(arguments, 0, output, "")

    return run


def test_broken_recording_is_rebuilt(monkeypatch, tmp_path, solution):
    """Without its last three bytes the text can be parsed, since it ends in an argument of a launch."""
    text = "//@ package\n//@ case fused 2 3 5 7\n//@ ptx kernel\n.version 8.0\n//@ launch forward kernel 1 1 1 64 1 1 0 05000000 07000000\n"
    builds = []
    monkeypatch.setattr(recorder, "run_mojo", make_fake_mojo(builds, text))
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    for times in (1, 2):
        recording = recorder.record(recorder.RecordRequest(solution, "p22", ((2, 3, 5, 7),)))
        assert recording.list_launches()[0].arguments[-1] == b"\x07\0\0\0" and len(builds) == times
        (file,) = (tmp_path / "recordings").glob("*.txt")
        file.write_bytes(file.read_bytes().removesuffix(cache.END_MARKER.encode())[:-3])


@pytest.mark.compiles
def test_broken_package_is_recompiled(monkeypatch, tmp_path, solution):
    data = solution.compile().read_bytes()
    builds = []
    package = OpPackage(solution.path)
    monkeypatch.setattr(packages, "run_mojo", make_fake_mojo(builds, data=data))
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    for times, cut in ((1, -3), (2, len(data) // 2), (3, 0)):
        assert "layernorm_linear" in graphs.load_kernel_library(package)
        assert len(builds) == times
        package.compile().write_bytes(data[:cut])


@pytest.mark.compiles
def test_broken_graph_is_discarded(program, tmp_path, puzzle, solution):
    program("float32")
    file = max(get_cache_folder("graphs").glob("*.mef"), key=lambda path: path.stat().st_mtime)
    data = file.read_bytes()
    for cut in (0, len(data) // 2, int(len(data) * 0.97), -3):
        (tmp_path / "x.mef").write_bytes(data[:cut])
        assert graphs.read_cached(tmp_path / "x.mef") is None and not (tmp_path / "x.mef").exists()
    assert read(file) and CPU()
