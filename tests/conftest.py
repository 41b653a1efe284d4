"""Shared by the tests of the harness: the puzzle, its op packages, one compiled graph a dtype, and a command line to call.

Graphs come from and go to the workbook's own cache, so that a test run compiles each of them once.
"""

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# The tests run in as many processes as there are cores, on small tensors: threads of torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A command that a message names has the form of the one that started the process: here the plain one, whoever runs the tests.
for mark in ("POE_ACTIVE", "PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH"):
    os.environ.pop(mark, None)

pytest_plugins = ["both_engines", "folder_times", "gpu_runs", "order", "quick_run"]

ROOT = Path(__file__).resolve().parents[1]


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
def program(puzzle, solution, other_programs) -> Callable:
    """dtype -> the CPU graph of the solution's default variants; every test that asks for it shares it.

    In float32 it is the one that a run of the command line uses.
    """
    from harness.check import runs
    from harness.devices.targets import cpu

    @functools.cache
    def load(dtype: str):
        if dtype != "float32":
            return other_programs()[dtype]
        return runs.load(runs.Options(puzzle, root="solutions"), solution, cpu(), lambda target: None)

    return load


@pytest.fixture(scope="session")
def fast_program(puzzle, solution, other_programs) -> Callable:
    """dtype -> the CPU graph of the solution's fast variant, likewise."""
    from harness.devices.graphs import load
    from harness.devices.targets import cpu

    @functools.cache
    def load_fast(dtype: str):
        if dtype != "float32":
            return other_programs()[f"fast_{dtype}"]
        return load(solution, puzzle.variants["fast"], dtype, cpu().device)

    return load_fast


@pytest.fixture(scope="session")
def other_programs(puzzle, solution) -> Callable:
    """() -> the CPU graphs of all dtypes but float32, compiled as one unit: alone each costs nearly what all cost."""
    from harness.devices.targets import cpu

    @functools.cache
    def load():
        dtypes = ("bfloat16", "float16", "float64")
        default = puzzle.calls_of(puzzle.default_variants)
        calls = {dtype: default for dtype in dtypes} | {f"fast_{d}": puzzle.variants["fast"] for d in dtypes}
        dtype_of = {name: name.removeprefix("fast_") for name in calls}
        return load_as_one("other_programs", solution, calls, dtype_of, cpu().device, kind="cpu")

    return load


def load_as_one(name: str, *arguments, **options):
    """Some graphs, compiled as one unit: the first process of the run compiles them, the others read them.

    So do the processes that the tests start, where they ask for one of them.
    """
    from harness.devices.graphs import load_each
    from harness.toolchain.cache import cache_folder, only_one

    with only_one(cache_folder("tests") / name):
        return load_each(*arguments, **options)


@pytest.fixture(scope="session")
def started():
    """One browser for all tests that read pages; they skip where there is none."""
    sys.path.insert(0, str(ROOT / "tests" / "book"))
    from browser import Browser, find_browser

    browser = Browser(find_browser())
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def layer_graphs():
    """Puts the layer's graphs on the CPU that the tests use where it looks for them, compiled as one unit."""
    import torch
    from max.driver import CPU

    from harness.nn import autograd
    from harness.nn.ops import BACKWARD, FORWARD
    from harness.spec.ops import Call

    keys = [(algorithm, torch.float32) for algorithm in autograd.IN_GRAPHS]
    keys += [("fast", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]
    keys += [("unfused", torch.bfloat16), ("fused", torch.float64)]
    directions = {"forward": FORWARD, "backward": BACKWARD}
    calls, dtypes = {}, {}
    for algorithm, dtype in keys:
        for direction, op in directions.items():
            name = f"{direction}_{algorithm}_{autograd.DTYPES[dtype]}"
            calls[name] = (Call(op, (("algorithm", algorithm),)),)
            dtypes[name] = autograd.DTYPES[dtype]
    loaded = load_as_one("layer_graphs", autograd.package(), calls, dtypes, CPU())
    for algorithm, dtype in keys:
        autograd.programs[algorithm, dtype, torch.device("cpu")] = {
            direction: loaded[f"{direction}_{algorithm}_{autograd.DTYPES[dtype]}"] for direction in directions
        }


@pytest.fixture(scope="session")
def attention_graphs():
    """Puts the graphs of attention on the CPU where it looks for them, of three dtypes, compiled as one unit."""
    import torch
    from max.driver import CPU

    from harness.nn import attention_autograd, autograd

    dtypes = {autograd.DTYPES[kind]: kind for kind in (torch.float32, torch.float64, torch.bfloat16)}
    names = [(direction, dtype) for direction in attention_autograd.GRAPHS for dtype in dtypes]
    calls = {f"{direction}_{dtype}": attention_autograd.GRAPHS[direction] for direction, dtype in names}
    kinds = {f"{direction}_{dtype}": dtype for direction, dtype in names}
    loaded = load_as_one("attention_graphs", attention_autograd.package(), calls, kinds, CPU())
    for dtype, kind in dtypes.items():
        autograd.programs["attention", kind, torch.device("cpu")] = {
            direction: loaded[f"{direction}_{dtype}"] for direction in attention_autograd.GRAPHS
        }


@pytest.fixture(autouse=True)
def started_plainly(monkeypatch):
    """Messages name commands in the form in which the user started; here that is `python -m harness`, however pytest came."""
    for name in ("POE_ACTIVE", "PIXI_PROJECT_ROOT", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Finished:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Standard output, line by line."""
        return self.out.splitlines()


@pytest.fixture
def command_line(capsys) -> Callable[..., Finished]:
    """Calls the command line in this process, in the checkout: arguments -> exit code and output."""
    from harness.cli import main

    def call(*arguments: str) -> Finished:
        before = os.getcwd()
        os.chdir(ROOT)
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # --help
            code = stop.code or 0
        finally:
            os.chdir(before)
        return Finished(code, *capsys.readouterr())

    return call


@pytest.fixture
def copied_package(tmp_path, solution) -> Iterator["PackageCopy"]:
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
        """Replaces a text that stands in the file exactly once; returns the number of its first line."""
        path = self.path / (file or self.source)
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new))
        return text[: text.index(old)].count("\n") + 1
