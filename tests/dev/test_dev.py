"""`workbook dev`: the check names what is missing, a skeleton passes it and is unsolved."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.dev import check, skeleton
from harness.errors import BadUse
from harness.spec.catalogue import puzzle_names
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]


def copy_of_checkout(folder: Path) -> Path:
    """The parts of the checkout that `dev` reads."""
    ignored = shutil.ignore_patterns("__pycache__", ".cache", "html", "template")
    for name in ("harness", "solutions", "problems", "tests", "book/src"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    shutil.copytree(
        skeleton.TEMPLATE,
        folder / "harness" / "dev" / "template",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "pixi.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the checkout with a new puzzle in it."""
    folder = copy_of_checkout(tmp_path_factory.mktemp("extended"))
    written = harness(folder, "dev", "new", "p77")
    assert written.returncode == 0, written.stderr
    return folder


@pytest.fixture
def spoiled(tmp_path) -> Path:
    """A copy of what belongs to puzzle 22, for a test to spoil."""
    ignored = shutil.ignore_patterns("__pycache__")
    parts = ("harness/puzzles", "solutions", "problems", "tests")
    for name in (*(f"{part}/p22" for part in parts), "solutions/shared", "book/src/puzzle_22"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    for name in ("pixi.toml", "book/src/SUMMARY.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def harness(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Calls the command line of a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


# ---- Check --------------------------------------------------------------------------------------------------


def test_every_puzzle_of_this_checkout_has_every_file(command_line):
    finished = command_line("dev", "check")
    assert finished.code == 0, finished.out
    assert finished.out == f"{', '.join(puzzle_names())}: every file is there\n"


def remove(*names):
    """A way to spoil a checkout: some paths are gone."""

    def spoil(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def replace(name, old, new):
    """A way to spoil a checkout: a text in a file is another."""

    def spoil(folder: Path) -> None:
        path = folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def add(name):
    """A way to spoil a checkout: a file is there that should not be."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")

    return spoil


SOURCE = "op/layernorm_linear.mojo"
HINTS = "solutions/p22/hints.toml"
ZOO = "solutions/p22/wrong/db_overwritten.toml"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (remove(HINTS), f"{HINTS} is missing"),
        (add("solutions/p22/notes.txt"), "solutions/p22/notes.txt is not part of a puzzle"),
        (remove("solutions/p22/wrong"), "solutions/p22/wrong holds no wrong solution"),
        (replace(ZOO, 'gate = "db"', 'gate = "bd"'), f"{ZOO}: bd is not a gate"),
        (replace(ZOO, "old = ", "older = "), f"{ZOO} has no old and has an unknown key older"),
        (replace(ZOO, 'gate = "db"', "gate = "), f"{ZOO}: Invalid value"),
        (replace(HINTS, "[[dx]]", "[[xd]]"), f"{HINTS}: dx has 0 rungs, at least 3 are required"),
        (replace(HINTS, "[[dx]]", "[[xd]]"), f"{HINTS}: xd is the ladder of no gate"),
        (add(HINTS), f"{HINTS} is damaged"),
        (remove(f"problems/p22/{SOURCE}"), f"problems/p22/{SOURCE} is missing; `workbook dev generate`"),
        (add("problems/p22/op/mine.mojo"), "problems/p22/op/mine.mojo is not part of the puzzle"),
        (replace(f"solutions/p22/{SOURCE}", "# BLANK-START dx", "# BLANK-START xd"),
         "BLANK-END dx without its"),
        (replace(f"solutions/p22/{SOURCE}", '"""', '"""A word more. '),
         f"problems/p22/{SOURCE} is out of step"),
        (remove("tests/p22"), "tests/p22 holds no test_*.py"),
        (remove("book/src/puzzle_22"), "book/src/puzzle_22/puzzle_22.md is missing"),
        (replace("book/src/SUMMARY.md", "puzzle_22/puzzle_22.md", "other.md"),
         "book/src/SUMMARY.md does not name"),
        (replace("pixi.toml", '"workbook p22"', '"workbook"'), "pixi.toml: the task p22"),
        (add("solutions/p98/hints.toml"),
         "solutions/p98 belongs to no puzzle: harness/puzzles/p98 is missing"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unexpected_is_named(spoiled, puzzle, spoil, said):
    spoil(spoiled)
    faults = [*check.faults(spoiled, puzzle), *check.strangers(spoiled, ["p22"])]
    assert any(fault.startswith(said) or (said in fault and said.startswith("BLANK")) for fault in faults), (
        faults
    )
    assert not any(str(spoiled) in fault for fault in faults)


def test_blanks_and_gates_of_one_name(spoiled, puzzle):
    path = spoiled / "solutions" / "p22" / SOURCE
    path.write_text(
        path.read_text().replace("BLANK-START dx:", "BLANK-START xd:").replace("BLANK-END dx", "BLANK-END xd")
    )
    faults = list(check.faults(spoiled, puzzle))
    assert f"solutions/p22/{SOURCE} has no blank dx" in faults
    assert f"solutions/p22/{SOURCE}: blank xd is not a gate of the rung" in faults


def test_a_wrong_kernel_that_no_longer_applies(spoiled, puzzle):
    text = (spoiled / ZOO).read_text()
    (spoiled / ZOO).write_text(re.sub(r"^old = .*?(?=^new)", 'old = "gone"\n', text, flags=re.M | re.S))
    faults = [fault for fault in check.faults(spoiled, puzzle) if fault.startswith(ZOO)]
    assert faults == [
        f"{ZOO}: wrong kernel db_overwritten no longer applies: its old text occurs 0 times in layernorm_linear.mojo"
    ]


def test_check_ends_with_1_where_something_is_named(spoiled, command_line, monkeypatch):
    (spoiled / HINTS).unlink()
    monkeypatch.setattr(roots, "CHECKOUT", spoiled)
    finished = command_line("dev", "check", "p22")
    assert finished.code == 1
    assert finished.out == f"{HINTS} is missing\np22: 1 fault\n"


# ---- New ----------------------------------------------------------------------------------------------------


def test_a_new_puzzle_has_every_file(extended):
    assert 'p28 = "workbook p28"\np77 = "workbook p77"\n' in (extended / "pixi.toml").read_text()
    finished = harness(extended, "dev", "check", "all")
    assert finished.returncode == 0, finished.stdout
    assert (
        "- [Puzzle 77: a stand-in](puzzle_77/puzzle_77.md)" in (extended / "book/src/SUMMARY.md").read_text()
    )


@pytest.mark.compiles
def test_a_new_puzzle_lists_hints_and_is_unsolved(extended):
    listed = harness(extended, "list", "p77").stdout
    assert "p77  A stand-in: square, forward and backward" in listed and "· dsquare" in listed
    assert "dx = 2 * x * dy" in harness(extended, "hint", "p77", "dsquare-2").stdout
    verified = harness(extended, "verify", "p77")
    assert verified.returncode == 3, verified.stdout + verified.stderr
    right = harness(extended, "p77", "--backward", "--solution", "--device", "virtual")
    assert right.returncode == 0 and "ALL CORRECT" in right.stdout, right.stdout + right.stderr


def test_the_tests_of_a_new_puzzle_pass(extended):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/p77"],
        cwd=extended, env={**os.environ, "PYTHONPATH": str(extended)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("27", "a puzzle is called p and two digits, for example p27"),
        (
            "p22",
            "harness/puzzles/p22, solutions/p22, problems/p22, tests/p22, book/src/puzzle_22 already exists",
        ),
    ],
)
def test_a_name_that_cannot_be(name, said):
    with pytest.raises(BadUse, match=f"dev new {name}: {said}"):
        list(skeleton.write(ROOT, name))


def test_an_installed_package_is_refused(command_line, monkeypatch, tmp_path):
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    finished = command_line("dev", "check")
    assert finished.code == 2 and finished.err.startswith("error: dev works on a checkout of the workbook")
