"""Bytecode is kept in the cache where Python is told to keep none, and left alone where there is a place for it."""

import os
import subprocess
import sys

import pytest

from harness.toolchain import bytecode
from harness.toolchain.bytecode import FORBID, PLACE
from harness.toolchain.roots import CHECKOUT

pytestmark = pytest.mark.long


@pytest.fixture
def forbidden(tmp_path, monkeypatch):
    """Says that none is written, with an empty cache and a torch that nobody has compiled yet; the folder of both."""
    monkeypatch.setenv(FORBID, "1")
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "torch.py").touch()
    monkeypatch.setattr(bytecode, "find_spec", lambda name: spec_in(tmp_path, name))
    return tmp_path


def spec_in(folder, name):
    """Where a module of a folder lies."""
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(name, [str(folder)])


def test_a_command_keeps_it_in_the_cache_and_writes_it_once(forbidden):
    path = os.pathsep.join([str(forbidden), os.environ.get("PYTHONPATH", "")])
    written = []
    for _ in range(2):
        command = [sys.executable, "-m", "harness", "list"]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0 and not done.stderr
        files = (forbidden / "cache" / "bytecode").rglob("*.pyc")
        written.append({file: file.stat().st_mtime_ns for file in files})
    assert written[0] == written[1]
    assert {"commands", "progress"} <= {file.name.split(".")[0] for file in written[0]}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_a_full_disk_has_left_of_it_is_made_anew_without_a_word(forbidden, share):
    """Every file of bytecode is cut; Python itself would fail at each start."""
    environment = {**os.environ, "PYTHONPATH": str(forbidden)}
    folder = forbidden / "cache" / "bytecode"

    def run(*words):
        command = [sys.executable, "-m", "harness", *words]
        return subprocess.run(
            command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120
        )

    right = run("list")
    files = [*folder.rglob("*.pyc")]
    sizes = {file: file.stat().st_size for file in files}
    assert right.returncode == 0 and len(files) > 50 and not bytecode.spoiled(folder)
    for file in files:
        file.write_bytes(file.read_bytes()[: int(sizes[file] * share)])
    assert len(bytecode.spoiled(folder)) == len(files)
    again = run("list")
    assert (again.returncode, again.stdout, again.stderr) == (0, right.stdout, "")
    loaded = {file for file, size in sizes.items() if file.stat().st_size == size}
    assert len(loaded) > 0.9 * len(files), "what was imported is whole again"


def test_the_doctor_counts_what_is_damaged(forbidden, monkeypatch):
    from harness.screens import doctor
    from harness.toolchain.cache import cache_folder, keep

    def said():
        return [f.words for f in doctor.caches() if f.part == "workbook cache" and f.state == "note"]

    entry = keep(cache_folder("packages") / "entry", lambda staged: staged.write_bytes(b"whole"), "an entry")
    assert not said()
    entry.write_bytes(b"who")
    (cache_folder("bytecode") / "module.cpython-311.pyc").write_bytes(b"half")
    assert said() == [f"2 damaged, the first {entry}: each is made anew when it is asked for"]


def test_processes_that_are_started_keep_it_too(forbidden):
    bytecode.keep_bytecode()
    assert not sys.dont_write_bytecode
    assert sys.pycache_prefix == os.environ[PLACE] == str(forbidden / "cache" / "bytecode")
    assert FORBID not in os.environ


@pytest.mark.parametrize("why", ["nobody forbids it", "it has a place", "it is there", "the cache is a file"])
def test_it_is_left_as_it_is(forbidden, monkeypatch, why):
    if why == "nobody forbids it":
        monkeypatch.delenv(FORBID)
    if why == "it has a place":
        monkeypatch.setenv(PLACE, "/elsewhere")
    if why == "it is there":
        import py_compile

        py_compile.compile(str(forbidden / "torch.py"))
    if why == "the cache is a file":
        (forbidden / "cache").touch()
    before = (os.environ.get(FORBID), os.environ.get(PLACE))
    bytecode.keep_bytecode()
    assert sys.dont_write_bytecode and sys.pycache_prefix is None
    assert before == (os.environ.get(FORBID), os.environ.get(PLACE))
