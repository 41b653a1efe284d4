"""`workbook diff`, `workbook reset`, damaged files, and broken links."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from checkouts import ROOT, Checkout, damage, get_single_error_line

from harness.learner import blanks, progress, restore
from harness.learner.exercise import Exercise
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.catalogue import find_puzzle

SOLUTION = ROOT / "solutions" / "p22"


def test_diff_requires_a_passed_gate(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("(0, 1)", "axis=(0, 1)"))
    before = checkout.run("diff", "p22", "db", "--rung", "numpy")
    assert before.code == 3 and "dy.sum" not in before.out and "--spoil" in before.out
    spoiled = checkout.run("diff", "p22", "db", "--rung", "numpy", "--spoil").out
    assert "> return dy.sum(axis=(0, 1))" in spoiled and "> return dy.sum((0, 1))" in spoiled
    checkout.run("p22", "--rung", "numpy")
    after = checkout.run("diff", "p22", "--rung", "numpy")
    assert after.code == 0
    assert "> return dy.sum(axis=(0, 1))" in after.out and "einsum" not in after.out


def test_diff_covers_all_rungs(checkout):
    shutil.copytree(ROOT / "solutions" / "p26", checkout.path / "solutions" / "p26", symlinks=True)
    blanks.generate_problems(checkout.path / "solutions", checkout.path / "problems")
    lines = checkout.run("diff", "p26").out.splitlines()
    rungs = find_puzzle("p26").rungs
    assert [line.partition(":")[0] for line in lines] == [gate for rung in rungs for gate in rung.gates]
    assert len(checkout.run("diff", "p26", "--rung", rungs[0].id).out.splitlines()) == len(rungs[0].gates)


def list_backups(checkout: Checkout) -> list[Path]:
    """List the backups written by resets."""
    return sorted((checkout.path / "problems").rglob("*.bak"))


def test_declined_reset_changes_nothing(checkout):
    checkout.fill(checkout.kernels, "dx")
    work = checkout.kernels.read_text()
    for answer in ("", "n\n", "what\n"):
        result = checkout.run("reset", "p22", say=answer)
        assert result.code == 0 and "Nothing was changed." in result.out
        assert checkout.kernels.read_text() == work and not list_backups(checkout)


def test_blank_reset_keeps_other_blanks_and_a_backup(checkout):
    checkout.fill(checkout.kernels, "dx", "db")
    work = checkout.kernels.read_text()
    result = checkout.run("reset", "p22", "dx", say="y\n")
    assert result.code == 0
    by_id = blanks.find_blanks(checkout.kernels.read_text())
    assert by_id["dx"].size == 0 and by_id["db"].size > 0
    (backup,) = list_backups(checkout)
    assert backup.read_text() == work and backup.parent == checkout.kernels.parent


def test_blank_reset_finds_the_edited_rung(checkout):
    """The blank's name can precede or follow a flag."""
    untouched = checkout.numpy.read_text()
    for flags in ((), ("--rung", "numpy")):
        checkout.fill(checkout.numpy, "dx")
        result = checkout.run("reset", "p22", *flags, "dx", say="y\n")
        assert result.code == 0 and "reset blank dx of problems/p22/backward.py" in result.out
        assert checkout.numpy.read_text() == untouched
    checkout.fill(checkout.kernels, "dx")
    checkout.fill(checkout.numpy, "dx")
    result = checkout.run("reset", "p22", "dx", say="n\n")
    assert "backward.py" not in result.out and "layernorm_linear.mojo" in result.out


def test_puzzle_reset_restores_changed_files(checkout):
    checkout.fill(checkout.kernels, "dx")
    link = checkout.kernels.with_name("launches.mojo")
    link.unlink()
    assert checkout.run("reset", "p22", "--yes").code == 0
    assert checkout.kernels.read_text() == blanks.make_skeleton((SOLUTION / "op" / PUZZLE.source).read_text())
    assert link.is_symlink() and link.read_text() == (SOLUTION / "op" / "launches.mojo").read_text()
    assert len(list_backups(checkout)) == 1
    second_reset = checkout.run("reset", "p22", "--yes")
    assert (
        second_reset.code == 0 and "Nothing to reset" in second_reset.out and len(list_backups(checkout)) == 1
    )


@pytest.mark.parametrize("missing", ["problems", "problems/p22", "problems/p22/op"])
def test_puzzle_reset_restores_missing_files(checkout, missing):
    other_puzzles = [path for path in (checkout.path / "problems").iterdir() if path.name != "p22"]
    for path in other_puzzles:  # a reset restores one puzzle
        shutil.rmtree(path)
    before = {path: path.read_bytes() for path in (checkout.path / "problems").rglob("*") if path.is_file()}
    shutil.rmtree(checkout.path / missing)
    assert "the file is missing; `workbook reset p22` puts" in get_single_error_line(
        checkout.run("p22", "--backward")
    )
    assert checkout.run("list").code == 0
    assert checkout.run("reset", "p22", "--yes").code == 0
    after = {path: path.read_bytes() for path in (checkout.path / "problems").rglob("*") if path.is_file()}
    assert after == before and checkout.numpy in after
    assert "Nothing to reset" in checkout.run("reset", "p22", "--yes").out


def test_kernel_reset_keeps_numpy_edits(checkout):
    checkout.fill(checkout.numpy, "db")
    checkout.fill(checkout.kernels, "dx")
    work = checkout.numpy.read_text()
    assert checkout.run("reset", "p22", "--yes").code == 0
    assert checkout.numpy.read_text() == work and len(list_backups(checkout)) == 1


@pytest.mark.parametrize("file", ["kernels", "numpy"])
def test_blank_reset_keeps_windows_line_endings(checkout, file):
    path = getattr(checkout, file)
    flags = ["--rung", "numpy"] if file == "numpy" else []
    checkout.fill(path, "db", "dx")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    lines = path.read_bytes().count(b"\n")
    assert checkout.run("reset", "p22", "dx", "--yes", *flags).code == 0
    data = path.read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n") <= lines
    by_id = blanks.find_blanks(data.decode())
    assert by_id["dx"].size == 0 and by_id["db"].size > 0


@pytest.mark.parametrize("where", ["the copy", "the file"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_failed_reset_prints_one_line_and_changes_nothing(checkout, monkeypatch, where, number):
    checkout.fill(checkout.kernels, "dx")
    work = checkout.kernels.read_bytes()

    def fail(*arguments):
        if where == "the copy":
            Path(arguments[1]).write_text("half")
        raise OSError(number, os.strerror(number))

    target, name = (restore.shutil, "copy2") if where == "the copy" else (os, "fsync")
    monkeypatch.setattr(target, name, fail)
    result = checkout.run("reset", "p22", "--yes")
    assert checkout.kernels.read_bytes() == work and not list(checkout.kernels.parent.glob("*.tmp"))
    assert result.err.count("\n") == 1
    assert result.code == (5 if number == errno.ENOSPC else 2)
    assert os.strerror(number) in result.err
    if where == "the copy":
        assert not list_backups(checkout), "no partial copy"


def test_editor_lock_is_not_part_of_the_package(checkout):
    """Emacs creates a hidden dangling link next to a file that is being edited."""
    exercise = Exercise(PUZZLE, PUZZLE.find_rung("mojo"))
    before, digest = exercise.package.files, exercise.package.digest
    (checkout.kernels.parent / ".#layernorm_linear.mojo").symlink_to("someone@somewhere.4711:1")
    os.mkfifo(checkout.kernels.parent / "pipe.mojo")
    assert (exercise.package.files, exercise.package.digest) == (before, digest)


def test_backups_do_not_overwrite_each_other(checkout):
    for n in range(3):
        checkout.numpy.write_text(f"work {n}")
        assert checkout.run("reset", "p22", "--rung", "numpy", "--yes").code == 0
    assert {path.read_text() for path in list_backups(checkout)} == {"work 0", "work 1", "work 2"}


def test_git_ignores_progress_and_list_backups(checkout):
    rules = (ROOT / ".gitignore").read_text().splitlines()
    assert progress.FILE_NAME in rules and "problems/**/*.bak" in rules


DAMAGE = {
    "one marker deleted": "blank dx",
    "both markers deleted": "the markers of blank dx are gone",
    "every marker deleted": "the markers of blank",
    "duplicated": "occurs twice",
    "half-written": "blank dx has no BLANK-END",
    "empty": "the markers of blank",
    "not text": "is not UTF-8 text",
    "folder": "there is a folder in place of the file",
    "missing": "the file is missing",
    "byte order mark": ":1: begins with a byte order mark, which Mojo does not take: save it as UTF-8 without BOM",
    "NUL": "is NUL, so this is not text",
    "huge": "has 1,099,511,627,776 bytes, which no source file needs",
    "link to nowhere": "links to nowhere, which is not there",
    "link to itself": "cannot be read (Too many levels of symbolic links)",
    "pipe": "is not a regular file",
    "device": "is not a regular file",
}


@pytest.mark.parametrize(
    ("file", "kind"), [*(("kernels", kind) for kind in DAMAGE), ("numpy", "half-written")]
)
def test_damaged_file_is_reported_and_reset_repairs_it(checkout, kind, file):
    path = getattr(checkout, file)
    flags = ["--rung", "numpy"] if file == "numpy" else []
    damage(path, kind)
    for command in (("diff", "p22", *flags), ("p22", *flags)):
        line = get_single_error_line(checkout.run(*command))
        assert DAMAGE[kind] in line and path.name in line
    listed = checkout.run("list")
    assert listed.code == 0 and DAMAGE[kind] in listed.out
    assert checkout.run("reset", "p22", "--yes", *flags).code == 0
    assert path.read_text() == blanks.make_skeleton(
        (ROOT / "solutions" / path.relative_to(checkout.path / "problems")).read_text()
    )
    backups = list_backups(checkout)
    assert not path.is_symlink()
    if kind in ("missing", "link to nowhere", "link to itself"):
        assert not backups
    elif kind == "folder":
        assert (backups[0] / "notes").read_text() == "mine"
    else:
        assert len(backups) == 1


BROKEN = {
    "missing": "launches.mojo is missing",
    "dangling": "launches.mojo links to ../nowhere.mojo, which is not there",
    "text": "launches.mojo is a text file instead of a link",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_link_is_reported_and_reset_restores_it(checkout, kind):
    link = checkout.kernels.with_name("launches.mojo")
    target = os.readlink(link)
    link.unlink()
    if kind == "dangling":
        link.symlink_to("../nowhere.mojo")
    elif kind == "text":
        link.write_text(target)
    line = get_single_error_line(checkout.run("p22", "--backward"))
    assert BROKEN[kind] in line and line.endswith("; `workbook reset p22` puts it back\n")
    verified = checkout.run("verify", "p22")
    assert verified.code == 2 and BROKEN[kind] in verified.out
    assert checkout.run("reset", "p22", "--yes").code == 0
    assert os.readlink(link) == target
    assert [backup.read_text() for backup in list_backups(checkout)] == ([target] if kind == "text" else [])


def test_learner_file_replacing_a_link_is_compiled_and_preserved(checkout, monkeypatch):
    link = checkout.kernels.with_name("launches.mojo")
    target = os.readlink(link)
    text = link.read_text() + "\n# mine\n"
    link.unlink()
    link.write_text(text)
    (link.parent / "helper.mojo").write_text("# mine too\n")
    files = Exercise(PUZZLE, PUZZLE.find_rung("mojo")).package.files
    assert {"launches.mojo", "helper.mojo"} <= {file.name for file in files if not file.is_symlink()}
    notes = [
        "   note: problems/p22/op/launches.mojo is your own, not the link to the solution's",
        "   note: problems/p22/op/helper.mojo is not part of the puzzle",
    ]
    verified = checkout.run("verify", "p22").out.splitlines()
    assert [line for line in verified if "note:" in line] == notes
    assert checkout.run("reset", "p22", "--yes").code == 0
    assert os.readlink(link) == target
    assert [backup.read_text() for backup in list_backups(checkout)] == [text]
    verified = checkout.run("verify", "p22").out.splitlines()
    assert [line for line in verified if "note:" in line] == notes[1:]


def test_blank_of_a_damaged_file_is_not_reset(checkout):
    damage(checkout.kernels, "one marker deleted")
    before = checkout.kernels.read_text()
    assert "one blank of a damaged file cannot be found" in get_single_error_line(
        checkout.run("reset", "p22", "db", "--yes")
    )
    assert checkout.kernels.read_text() == before and not list_backups(checkout)


def test_windows_line_endings_and_tabs_are_accepted(checkout):
    checkout.fill(checkout.numpy, "db", "dW", "dgamma", "row_sums", "dx")
    checkout.numpy.write_bytes(checkout.numpy.read_bytes().replace(b"\n", b"\r\n").replace(b"    ", b"\t"))
    result = checkout.run("p22", "--rung", "numpy")
    assert result.code == 0, result.out + result.err
    checkout.kernels.write_bytes(checkout.kernels.read_bytes().replace(b"\n", b"\r\n"))
    assert f"0/{len(PUZZLE.kernel_gates)}  Mojo kernels" in checkout.run("list", "p22").out


def test_syntax_error_reports_the_line(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line + ")")
    line = get_single_error_line(checkout.run("p22", "--rung", "numpy"))
    number = blanks.find_blanks(checkout.numpy.read_text())["db"].line
    assert f"backward.py:{number}: " in line and "unmatched ')'" in line
