"""A new puzzle, added to a copy of the checkout as CONTRIBUTING.md says: new files, and not one line of the harness changed."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.learner import blanks

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "tests" / "toy_puzzle"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A checkout with the toy puzzle in it."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("harness", "solutions"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    solution = folder / "solutions" / "p90"
    shutil.copytree(TOY, solution, ignore=ignored)
    (solution / "p90.py").rename(folder / "harness" / "puzzles" / "p90.py")
    (solution / "op" / "shared").symlink_to("../../shared")
    finished = subprocess.run(
        [sys.executable, "-m", "harness", "dev", "generate"], cwd=folder, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return folder


def harness(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Calls the command line of the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def solve(checkout: Path, change=lambda text: text) -> None:
    """Writes the solution into the blanks of the problem, changed by a function."""
    problem = checkout / "problems" / "p90" / "op" / "square.mojo"
    solution = (checkout / "solutions" / "p90" / "op" / "square.mojo").read_text()
    problem.write_text(blanks.fill(blanks.skeleton(solution), change(solution)))


def test_the_puzzle_is_listed_with_its_gates_and_hints(checkout):
    listed = harness(checkout, "list").stdout
    assert "p90  A toy: square, forward and backward" in listed
    assert "0/2  Mojo kernels" in listed and "· dsquare" in listed
    assert harness(checkout, "hint", "p90", "dsquare-2").stdout.endswith("`dx = 2 * x * dy`.\n")
    refused = harness(checkout, "p90", "--numpy")
    assert refused.returncode == 2 and refused.stderr == "error: p90 has no NumPy rung\n"


def test_its_gates_are_unsolved_then_wrong_then_right(checkout):
    assert harness(checkout, "verify", "p90").returncode == 3
    bug = tomllib.loads((TOY / "wrong" / "two_forgotten.toml").read_text())
    solve(checkout, lambda text: text.replace(bug["old"], bug["new"]))
    wrong = harness(checkout, "verify", "p90")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "✅ square" in wrong.stdout and "❌ dsquare" in wrong.stdout
    assert "without the factor 2" in wrong.stdout and "hint p90 dsquare-2" in wrong.stdout
    solve(checkout)
    right = harness(checkout, "verify", "p90")
    assert right.returncode == 0, right.stdout + right.stderr
    assert "2/2  Mojo kernels" in harness(checkout, "list").stdout


def test_its_ops_run_through_max(checkout):
    finished = harness(checkout, "p90", "--backward", "--solution", "--device", "cpu")
    assert finished.returncode == 6, finished.stdout + finished.stderr
    assert "✅ CPU CORRECT, GPU NOT RUN" in finished.stdout
