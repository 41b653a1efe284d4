"""Shared by the tests of the harness: the puzzle, its op packages, one compiled graph a dtype, and a command line to call.

Graphs come from and go to the workbook's own cache, so that a test run compiles each of them once.
"""

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# The tests start hundreds of processes: without bytecode each would compile PyTorch's sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The tests run in as many processes as there are cores, on small tensors: threads of torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Mojo's compiler, which the tests start hundreds of times, takes some 6% less processor time on huge pages.
os.environ.setdefault("MALLOC_CONF", "thp:always")
# A shell starts a run in the background with SIGINT ignored, and all that a test starts would inherit that and be deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A command that a message names has the form of the one that started the process: here the plain one, whoever runs the tests.
# And its output is as wide as in a pipe: some runners of tests set the width of their own lines.
for mark in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH", "COLUMNS"):
    os.environ.pop(mark, None)

pytest_plugins = ["cpu_graphs", "gpu_runs", "marks", "public_ops", "virtual_runs"]

ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # until all is collected: what is imported and the thousands of tests stay to the end


def pytest_collection_finish():
    """Let the garbage collector never look at those again: each full pass through them took half a second."""
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
def program(puzzle, solution, cpu_graphs) -> Callable:
    """dtype -> the CPU graph of the solution's default variants; every test that asks for it shares it.

    In float32 it is the one that a run of the command line uses.
    """
    from harness.devices import graphs
    from harness.devices.targets import cpu

    @functools.cache
    def load(dtype: str):
        if dtype != "float32":
            return cpu_graphs()[dtype]
        calls = puzzle.calls_of(puzzle.compiled_with(puzzle.default_variants))
        return graphs.load(solution, calls, dtype, cpu().device)

    return load


@pytest.fixture(scope="session")
def started():
    """One browser for all tests that read pages; they skip where there is none."""
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
    """Let messages name commands in the form in which the user started; here that is plain `workbook`."""
    for name in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Finished:
    """The outcome of a command line."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Standard output, line by line."""
        return self.out.splitlines()


@pytest.fixture
def command_line(capsys) -> Callable[..., Finished]:
    """Return what calls the command line in this process, in the checkout: arguments -> exit code and output."""
    from harness.cli import main

    def call(*arguments: str) -> Finished:
        before = os.getcwd()
        os.chdir(ROOT)
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # --help
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            os.chdir(before)
        return Finished(code, *capsys.readouterr())

    return call


@pytest.fixture
def copied_package(tmp_path, solution) -> "PackageCopy":
    """A copy of the solution's op package that a test may damage."""
    copy = PackageCopy(tmp_path / "op")
    shutil.copytree(solution.path, copy.path)
    return copy


@dataclass
class PackageCopy:
    """A folder with Mojo files and how to change them."""

    path: Path
    source: str = field(default="layernorm_linear.mojo")

    def replace(self, old: str, new: str, file: str = "") -> int:
        """Replace a text that stands in the file exactly once; return the number of its first line."""
        path = self.path / (file or self.source)
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new))
        return text[: text.index(old)].count("\n") + 1
