"""The cache: where it is, what happens where it cannot be written, and that nothing half-made or cut is ever used."""

import errno
import json
import multiprocessing
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import CompileFailed, EnvironmentProblem
from harness.toolchain import cache, disk
from harness.toolchain.cache import STAGING, STALE, cache_folder, digest, discard, keep, whole
from harness.toolchain.packages import compile_failed


def test_the_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "here"))
    assert cache_folder("a", "b") == tmp_path / "here" / "a" / "b"
    assert (tmp_path / "here" / "a" / "b").is_dir()


@pytest.mark.parametrize("value", [None, ""])
def test_without_it_the_home_folder_has_the_cache(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("WORKBOOK_CACHE", raising=False)
    else:
        monkeypatch.setenv("WORKBOOK_CACHE", value)
    assert cache_folder("x") == tmp_path / ".cache" / "mojo-gpu-workbook" / "x"


def test_a_file_in_the_way_is_an_environment_problem(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentProblem, match=r"cannot make the cache folder .*; set WORKBOOK_CACHE to a"):
        cache_folder("graphs")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_even_root_cannot_make_a_folder_in_proc(monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", "/proc/self")
    with pytest.raises(EnvironmentProblem, match="cannot make the cache folder /proc/self/graphs"):
        cache_folder("graphs")


def test_a_folder_without_write_access_is_an_environment_problem(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="no write access to the cache folder"):
        cache_folder()


def test_digest_is_short_and_fixed():
    assert digest(["a", b"b"]) == digest(["a", "b"])
    assert len(digest([])) == 16 and int(digest([]), 16) >= 0


@settings(deadline=None)  # a busy machine
@given(st.lists(st.text()), st.lists(st.text()))
def test_different_parts_have_different_digests(one, other):
    """Also where the parts run together to the same text: ["ab", "c"] and ["a", "bc"]."""
    assert (digest(one) == digest(other)) == (one == other)


def test_digest_sees_where_parts_end():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["", "a"]) != digest(["a", ""])


# ---- Entries ------------------------------------------------------------------------------------------------


CONTENT = bytes(range(256)) * 40
CUTS = {"0 %": 0.0, "50 %": 0.5, "97 %": 0.97, "minus three bytes": -3}


def cut(path: Path, where: str) -> None:
    """Leaves the beginning of a file."""
    data = path.read_bytes()
    at = CUTS[where]
    path.write_bytes(data[:at] if at < 0 else data[: int(len(data) * at)])


def make_file(staged: Path) -> None:
    staged.write_bytes(CONTENT)


def make_folder(staged: Path) -> None:
    (staged / "inner").mkdir(parents=True)
    (staged / "one").write_bytes(CONTENT)
    (staged / "inner" / "two").write_bytes(CONTENT[::-1])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("make", [make_file, make_folder])
def test_an_entry_is_made_once_and_nothing_lies_beside_it(tmp_path, make):
    calls = []
    for _ in range(2):
        kept = keep(tmp_path / "entry", lambda staged: [calls.append(1), make(staged)], "it")
        assert kept == tmp_path / "entry"
    assert len(calls) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"entry", "entry.sum"}


@pytest.mark.parametrize("where", CUTS)
@pytest.mark.parametrize("make", [make_file, make_folder])
def test_an_entry_that_is_cut_is_made_again_without_a_word(tmp_path, make, where, capfd):
    keep(tmp_path / "entry", make, "it")
    right = tree(tmp_path)
    for name in right:  # the note is a file like any other
        cut(tmp_path / name, where)
        assert not whole(tmp_path / "entry"), name
        keep(tmp_path / "entry", make, "it")
        assert tree(tmp_path) == right
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.with_name("entry.sum").unlink(),
        lambda entry: entry.with_name("entry.sum").write_bytes(b"\xff"),
        lambda entry: (entry / "more").write_text("") if entry.is_dir() else entry.write_bytes(b"x"),
        lambda entry: (entry / "one").unlink() if entry.is_dir() else entry.unlink(),
        lambda entry: [entry.rename(entry.with_name("away")), entry.mkdir()],
        lambda entry: [entry.rename(entry.with_name("away")), entry.symlink_to("nowhere")],
    ],
    ids=["no note", "no text", "more", "less", "a folder in its place", "a dangling link in its place"],
)
@pytest.mark.parametrize("make", [make_file, make_folder])
def test_whatever_does_not_fit_the_note_is_made_again(tmp_path, make, damage):
    entry = keep(tmp_path / "entry", make, "it")
    right = tree(tmp_path)
    damage(entry)
    assert not whole(entry)
    keep(entry, make, "it")
    assert whole(entry) and {name: tree(tmp_path)[name] for name in right} == right


def test_an_entry_that_nobody_can_use_is_made_again(tmp_path):
    entry = keep(tmp_path / "entry", make_file, "it")
    discard(entry)
    assert not whole(entry)
    discard(entry)


def test_a_make_that_fails_leaves_nothing(tmp_path):
    def fail(staged: Path) -> None:
        staged.write_bytes(CONTENT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keep(tmp_path / "entry", fail, "it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, number):
    def fail(staged: Path) -> None:
        staged.write_bytes(CONTENT)
        raise OSError(number, os.strerror(number))

    with pytest.raises(EnvironmentProblem) as raised:
        keep(tmp_path / "entry", fail, "the recorded launches")
    said = str(raised.value)
    assert re.fullmatch(
        rf"disk full: no room for the recorded launches in {tmp_path} \([\d,]+ bytes are free there\); "
        "make room there, or set WORKBOOK_CACHE to a folder you can write",
        said,
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_folder_that_takes_no_files_is_one_line():
    with pytest.raises(EnvironmentProblem, match=r"cannot write it to /proc/self \(.*\); set WORKBOOK_CACHE"):
        keep(Path("/proc/self/entry"), make_file, "it")


def test_what_an_interrupted_process_left_goes_after_a_day(tmp_path):
    for name, age in (("old", STALE + 60), ("young", 60), ("from-the-future", -STALE)):
        left = tmp_path / f"{STAGING}{name}"
        left.mkdir()
        (left / "half").write_text("")
        then = time.time() - age
        os.utime(left, (then, then))
    keep(tmp_path / "entry", make_file, "it")
    assert {path.name for path in tmp_path.glob(f"{STAGING}*")} == {
        f"{STAGING}young",
        f"{STAGING}from-the-future",
    }


def keep_slowly(folder: Path) -> bytes:
    """Makes an entry with content of its own, slowly; in a process of its own."""

    def make(staged: Path) -> None:
        (staged.parent.parent / f"made-{os.getpid()}").touch()
        time.sleep(0.2)
        staged.write_bytes(os.urandom(1000))

    return keep(folder / "entry", make, "it").read_bytes()


def test_of_several_processes_one_makes_and_all_get_the_same(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(keep_slowly, [tmp_path] * 4)
    assert len(set(results)) == 1 and len(list(tmp_path.glob("made-*"))) == 1
    assert whole(tmp_path / "entry") and not list(tmp_path.glob("*.lock"))


def test_of_several_threads_one_makes(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(keep_slowly, [tmp_path] * 4))
    assert len(set(results)) == 1 and len(list(tmp_path.glob("*.lock"))) == 0


@pytest.mark.parametrize("why", ["no locks here", "the holder sleeps"])
def test_without_a_lock_several_makers_come_to_a_whole_entry(tmp_path, monkeypatch, why):
    monkeypatch.setattr(cache, "PATIENCE", 0)
    if why == "no locks here":

        def refuse(lock, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(cache.fcntl, "flock", refuse)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(keep_slowly, [tmp_path] * 4))
    assert all(len(result) == 1000 for result in results)
    keep(tmp_path / "entry", make_file, "it")
    assert whole(tmp_path / "entry")


# ---- A disk that is full ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "LLVM ERROR: IO failure on output stream: No space left on device",
        '{"kind":"error","message":"cannot write to file to filesystem cache since available space(45056) is not '
        'enough to write 965208 bytes"}',
        "cannot write: Disk quota exceeded",
    ],
)
def test_a_compiler_that_finds_no_room_is_not_the_package_s_failure(tmp_path, said):
    failure = compile_failed(tmp_path / "op", said, tmp_path)
    assert isinstance(failure, EnvironmentProblem)
    assert str(failure).startswith("disk full: no room for the Mojo compiler in ")


def test_a_compiler_that_says_nothing_of_use_on_a_full_disk_is_not_the_package_s_failure(
    tmp_path, monkeypatch
):
    said = '{"kind":"error","message":"failed to run the pass manager"}'
    assert isinstance(compile_failed(tmp_path, said), CompileFailed)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary" / "not made yet"))
    monkeypatch.setattr(disk, "free", lambda folder: 4096 if "temporary" in folder.parts else 1 << 40)
    failure = compile_failed(tmp_path, said)
    assert (
        isinstance(failure, EnvironmentProblem)
        and "temporary" in str(failure)
        and "4,096 bytes" in str(failure)
    )


def test_a_line_that_does_not_compile_is_the_package_s_failure_on_a_full_disk_too(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free", lambda folder: 0)
    place = {"file": "a.mojo", "location": {"line": 3, "column": 7}}
    said = json.dumps({"diagnostic": place, "kind": "error", "message": "no such name"})
    assert isinstance(compile_failed(tmp_path, said, tmp_path), CompileFailed)


def test_a_relative_cache_is_meant_from_here(monkeypatch, tmp_path):
    """The virtual GPU's libraries lie in it, and programs that run in other folders look for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBOOK_CACHE", "relative/cache")
    assert cache_folder("x") == tmp_path / "relative" / "cache" / "x"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBOOK_CACHE", "~/cache")
    assert cache_folder("x") == tmp_path / "home" / "cache" / "x"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    def none_known():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WORKBOOK_CACHE", raising=False)
    monkeypatch.setattr(cache.Path, "home", none_known)
    with pytest.raises(
        EnvironmentProblem, match="this user has no home folder; set WORKBOOK_CACHE to a folder"
    ):
        cache_folder()
