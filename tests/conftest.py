"""Shared fixtures: puzzle 22, its op package, a compiled graph per dtype, the command line, a browser.

Graphs are stored in the workbook's cache, so a test run compiles each once.
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
from command_lines import CommandResult, run_command

# Without bytecode each of the hundreds of processes would compile PyTorch's Python sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The tests run one process per core on small tensors, so more PyTorch threads would only contend.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Huge pages save about 6% of the CPU time of Mojo's compiler, which runs hundreds of times.
os.environ.setdefault("MALLOC_CONF", "thp:always")
# Shells start background jobs with SIGINT ignored, which the tests' processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Messages show commands as the user started them: use the default form, however the tests are
# run. Use a pipe's output width, although some test runners set COLUMNS.
for mark in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH", "COLUMNS"):
    os.environ.pop(mark, None)

pytest_plugins = ["cpu_graphs", "gpu_runs", "marks", "public_ops", "recordings", "virtual_runs"]

ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # until collection ends, since imported modules and tests are never freed


def pytest_collection_finish():
    """Exclude all existing objects from garbage collection: a full pass over them took half a second."""
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
    """Return a function dtype -> CPU graph of the solution's default variants, shared by all tests."""
    return lambda dtype: cpu_graphs()[dtype]


@pytest.fixture(scope="session")
def browser_process():
    """Browser shared by all tests that open pages; without one they are skipped."""
    sys.path.insert(0, str(ROOT / "tests" / "book"))
    from browser import Browser, find_browser

    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome")
    browser = Browser(executable)
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def default_invocation(monkeypatch):
    """Make messages show commands in the default form, `workbook`."""
    for name in ("PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command_line(capsys) -> Callable[..., CommandResult]:
    """Return a function that runs the command line in this process and checkout."""

    def call(*arguments: object) -> CommandResult:
        with contextlib.chdir(ROOT):
            return run_command(capsys, *arguments)

    return call


@pytest.fixture
def copied_package(tmp_path, solution) -> "PackageCopy":
    """A modifiable copy of the solution's op package."""
    copy = PackageCopy(tmp_path / "op")
    shutil.copytree(solution.path, copy.path)
    return copy


@dataclass
class PackageCopy:
    """A modifiable copy of a folder of Mojo files."""

    path: Path
    source: str = field(default="layernorm_linear.mojo")

    def replace(self, old: str, new: str, file: str = "") -> int:
        """Replace a string that occurs exactly once in the file; return its line number."""
        path = self.path / (file or self.source)
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new))
        return text[: text.index(old)].count("\n") + 1
