"""`workbook dev check` reports missing files; `dev new` writes an unsolved puzzle that passes the check."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.dev import check, skeleton
from harness.errors import UsageError
from harness.spec.catalogue import list_puzzle_names
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]


def copy_checkout(folder: Path) -> Path:
    """Copy the parts of the checkout that `dev` uses; return the folder."""
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
def checkout_with_new_puzzle(tmp_path_factory) -> Path:
    """A copy of the checkout with a new puzzle."""
    folder = copy_checkout(tmp_path_factory.mktemp("extended"))
    written = run_command(folder, "dev", "new", "p77")
    assert written.returncode == 0, written.stderr
    return folder


@pytest.fixture
def damaged_copy(tmp_path) -> Path:
    """A copy of puzzle 22's files that tests may damage."""
    ignored = shutil.ignore_patterns("__pycache__")
    parts = ("harness/puzzles", "solutions", "problems", "tests")
    for name in (*(f"{part}/p22" for part in parts), "solutions/shared", "book/src/puzzle_22"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    for name in ("pixi.toml", "book/src/SUMMARY.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the command line of a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_all_puzzles_have_all_files(command_line):
    result = command_line("dev", "check")
    assert result.code == 0, result.out
    assert result.out == f"{', '.join(list_puzzle_names())}: every file is there\n"


def remove(*names):
    """Return a function that deletes paths."""

    def damage(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def replace(name, old, new):
    """Return a function that replaces a string in a file."""

    def damage(folder: Path) -> None:
        path = folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return damage


def add(name):
    """Return a function that writes an unexpected file."""

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")

    return damage


SOURCE = "op/layernorm_linear.mojo"
HINTS = "solutions/p22/hints.toml"
ZOO = "solutions/p22/wrong/db_overwritten.toml"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove(HINTS), f"{HINTS} is missing"),
        (add("solutions/p22/notes.txt"), "solutions/p22/notes.txt is not part of a puzzle"),
        (remove("solutions/p22/wrong"), "solutions/p22/wrong holds no wrong solution"),
        (replace(ZOO, 'gate = "db"', 'gate = "bd"'), f"{ZOO}: bd is not a gate"),
        (replace(ZOO, "old = ", "older = "), f"{ZOO} has no old and has an unknown key older"),
        (replace(ZOO, "gate = ", 'hint = "db-1"\ngate = '), f"{ZOO} has an unknown key hint"),
        (replace(ZOO, 'gate = "db"', "gate = "), f"{ZOO}: Invalid value"),
        (replace(HINTS, "[[dx]]", "[[xd]]"), f"{HINTS}: dx has 0 rungs, at least 3 are required"),
        (replace(HINTS, "[[dx]]", "[[xd]]"), f"{HINTS}: xd is the ladder of no gate"),
        (add(HINTS), f"{HINTS} is damaged"),
        (remove(f"problems/p22/{SOURCE}"), f"problems/p22/{SOURCE} is missing; `workbook dev generate`"),
        (add("problems/p22/op/mine.mojo"), "problems/p22/op/mine.mojo is not part of the puzzle"),
        (replace(f"solutions/p22/{SOURCE}", "# BLANK-START dx", "# BLANK-START xd"),
         "BLANK-END dx without its"),
        (replace(f"solutions/p22/{SOURCE}", '"""', '"""Another word. '),
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
def test_missing_and_unexpected_files_are_reported(damaged_copy, puzzle, damage, message):
    damage(damaged_copy)
    errors = [*check.find_errors(damaged_copy, puzzle), *check.find_unknown_folders(damaged_copy, ["p22"])]
    assert any(
        error.startswith(message) or (message in error and message.startswith("BLANK")) for error in errors
    ), errors
    assert not any(str(damaged_copy) in error for error in errors)


def test_blank_and_gate_names_must_match(damaged_copy, puzzle):
    path = damaged_copy / "solutions" / "p22" / SOURCE
    path.write_text(
        path.read_text().replace("BLANK-START dx:", "BLANK-START xd:").replace("BLANK-END dx", "BLANK-END xd")
    )
    errors = list(check.find_errors(damaged_copy, puzzle))
    assert f"solutions/p22/{SOURCE} has no blank dx" in errors
    assert f"solutions/p22/{SOURCE}: blank xd is not a gate of the rung" in errors


def test_check_exits_with_1_on_a_fault(damaged_copy, command_line, monkeypatch):
    (damaged_copy / HINTS).unlink()
    monkeypatch.setattr(roots, "CHECKOUT", damaged_copy)
    result = command_line("dev", "check", "p22")
    assert result.code == 1
    assert result.out == f"{HINTS} is missing\np22: 1 fault\n"


def test_new_puzzle_has_all_files(checkout_with_new_puzzle):
    assert (
        'p28 = "workbook p28"\np77 = "workbook p77"\n' in (checkout_with_new_puzzle / "pixi.toml").read_text()
    )
    result = run_command(checkout_with_new_puzzle, "dev", "check", "all")
    assert result.returncode == 0, result.stdout
    assert (
        "- [Puzzle 77: a placeholder](puzzle_77/puzzle_77.md)"
        in (checkout_with_new_puzzle / "book/src/SUMMARY.md").read_text()
    )


@pytest.mark.slow
@pytest.mark.compiles
def test_new_puzzle_is_listed_with_hints_and_unsolved(checkout_with_new_puzzle):
    list_output = run_command(checkout_with_new_puzzle, "list", "p77").stdout
    assert "p77  A placeholder: square, forward and backward" in list_output and "· dsquare" in list_output
    assert "dx = 2 * x * dy" in run_command(checkout_with_new_puzzle, "hint", "p77", "dsquare-2").stdout
    verify_run = run_command(checkout_with_new_puzzle, "verify", "p77")
    assert verify_run.returncode == 3, verify_run.stdout + verify_run.stderr
    solution_run = run_command(
        checkout_with_new_puzzle, "p77", "--backward", "--solution", "--device", "virtual"
    )
    assert solution_run.returncode == 0 and "ALL CORRECT" in solution_run.stdout, (
        solution_run.stdout + solution_run.stderr
    )


def test_new_puzzle_tests_pass(checkout_with_new_puzzle):
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/p77"],
        cwd=checkout_with_new_puzzle, env={**os.environ, "PYTHONPATH": str(checkout_with_new_puzzle)}, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("27", "a puzzle's name is p and two digits, for example p27"),
        (
            "p22",
            "harness/puzzles/p22, solutions/p22, problems/p22, tests/p22, book/src/puzzle_22 already exists",
        ),
    ],
)
def test_invalid_puzzle_name_is_rejected(name, message):
    with pytest.raises(UsageError, match=f"dev new {name}: {message}"):
        list(skeleton.write(ROOT, name))
