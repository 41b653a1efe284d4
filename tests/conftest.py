"""Fixtures for the harness's tests: the puzzle, its op package, a compiled graph per dtype, a command line.

Graphs are kept in the workbook's cache, so that a test run compiles each of them once.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_lines import Finished, run_command

# The tests start hundreds of processes, each of which would compile PyTorch's sources again without bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The tests run in one process per core, on small tensors, where PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Mojo's compiler, which the tests start hundreds of times, takes about 6% less CPU time with huge pages.
os.environ.setdefault("MALLOC_CONF", "thp:always")
# A shell starts background jobs with SIGINT ignored, which processes started by tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Messages name commands in the form that started the process: make that the plain form, however the tests are
# run. Output is as wide as in a pipe, although some test runners set a line width.
for mark in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH", "COLUMNS"):
    os.environ.pop(mark, None)

pytest_plugins = ["cpu_graphs", "gpu_runs", "marks", "public_ops", "virtual_runs"]

ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # until collection ends: imported modules and the thousands of tests live to the end


def pytest_collection_finish():
    """Exempt what exists now from garbage collection: each full pass over it took half a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def puzzle():
    """Puzzle 22."""
    from harness.puzzles.p22.spec import PUZZLE

    return PUZZLE


@pytest.fixture(scope="session")
def solution():
    """The solution's op package."""
    from harness.toolchain.packages import OpPackage

    return OpPackage(ROOT / "solutions" / "p22" / "op")


@pytest.fixture(scope="session")
def program(cpu_graphs) -> Callable:
    """dtype -> the CPU graph of the solution's default variants, shared by all tests that use it."""
    return lambda dtype: cpu_graphs()[dtype]


@pytest.fixture(scope="session")
def started():
    """One browser for all tests that read pages; without a browser they are skipped."""
    sys.path.insert(0, str(ROOT / "tests" / "book"))
    from browser import Browser, find_browser

    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome")
    browser = Browser(executable)
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def started_plainly(monkeypatch):
    """Make messages name commands in their plain form, `workbook`."""
    for name in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command_line(capsys) -> Callable[..., Finished]:
    """Return a function that calls the command line in this process and checkout: arguments -> `Finished`."""

    def call(*arguments: object) -> Finished:
        with contextlib.chdir(ROOT):
            return run_command(capsys, *arguments)

    return call


@pytest.fixture
def copied_package(tmp_path, solution) -> "PackageCopy":
    """A copy of the solution's op package that a test may damage."""
    copy = PackageCopy(tmp_path / "op")
    shutil.copytree(solution.path, copy.path)
    return copy


@dataclass
class PackageCopy:
    """A copied folder of Mojo files, which tests change."""

    path: Path
    source: str = field(default="layernorm_linear.mojo")

    def replace(self, old: str, new: str, file: str = "") -> int:
        """Replace a text that occurs in the file exactly once; return the number of its first line."""
        path = self.path / (file or self.source)
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new))
        return text[: text.index(old)].count("\n") + 1
