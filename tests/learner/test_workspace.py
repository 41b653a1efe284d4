"""`workbook init` and `workbook update`: a learner's folder without a checkout."""

import functools
import json
import shutil

import pytest
from command_lines import run_command

from harness.learner import blanks, workspace
from harness.toolchain import roots

DERIVE = "p20/graph.py"


@pytest.fixture
def command_line(capsys):
    """Return a function that runs a command in this process and the current folder."""
    return functools.partial(run_command, capsys)


@pytest.fixture
def folder(tmp_path, monkeypatch, command_line):
    """Enter a folder created by `init`."""
    monkeypatch.setattr(roots, "CHECKOUT", roots.CHECKOUT)
    monkeypatch.setenv(roots.FOLDER_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    result = command_line("init")
    assert result.code == 0 and "next: cd workbook && " in result.out, result
    monkeypatch.chdir(tmp_path / "workbook")
    return tmp_path / "workbook"


def solve_all_blanks(folder, file=DERIVE):
    """Fill every blank of a problem file with the solution."""
    problem, solution = folder / "problems" / file, folder / "solutions" / file
    problem.write_text(blanks.fill_blanks(problem.read_text(), solution.read_text()))
    return problem


def test_init_writes_the_files_of_a_checkout(folder):
    origin = roots.get_program_solutions().parent / "problems"
    written = {path.relative_to(folder / "problems") for path in (folder / "problems").rglob("*")}
    assert written == {
        path.relative_to(origin) for path in origin.rglob("*") if not path.name.endswith(".bak")
    }
    assert blanks.check_problems(folder / "solutions", folder / "problems") == 0
    assert not any(path.is_symlink() for path in (folder / "solutions").rglob("*"))


def test_commands_use_the_current_folder(folder, command_line, monkeypatch):
    solve_all_blanks(folder)
    monkeypatch.chdir(folder / "problems")  # any subfolder
    assert command_line("p20", "--rung", "derive").code == 0
    assert folder == roots.CHECKOUT
    saved = json.loads((folder / ".workbook-progress.json").read_text())
    assert "p20 edges" in saved["passed"]
    assert command_line("list", "p20").out.count("passed") == len(saved["passed"])
    assert command_line("dev", "check").err.startswith("error: dev works on a checkout")


def test_confirmed_reset_restores_the_file(folder, command_line, monkeypatch):
    problem = folder / "problems" / DERIVE
    untouched = problem.read_text()
    solve_all_blanks(folder)
    solved = problem.read_text()
    monkeypatch.setattr("builtins.input", lambda message: "y" if message == "Go on? [y/N] " else "")
    result = command_line("reset", "p20", "--rung", "derive")
    assert result.code == 0 and f"wrote problems/{DERIVE}, kept problems/{DERIVE}." in result.out
    assert problem.read_text() == untouched
    (backup,) = problem.parent.glob("*.bak")
    assert backup.read_text() == solved


def test_command_outside_a_workbook_prints_one_error_line(tmp_path, monkeypatch, command_line):
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in (["list"], ["hint", "p20"], ["verify"], ["diff", "p20"], ["p20", "--rung", "derive"]):
        result = command_line(*arguments)
        assert result.code == 2 and result.out == "", arguments
        assert result.err.count("\n") == 1 and "not a workbook folder: `" in result.err


@pytest.mark.parametrize(
    ("existing", "message"),
    [("mine.txt", "is not empty"), (None, "is a file"), (roots.MARKER_FILE, "is already a workbook")],
)
def test_init_rejects_existing_files(existing, message, tmp_path, command_line):
    target = tmp_path / "target"
    if existing:
        target.mkdir()
        (target / existing).write_text("mine")
    else:
        target.write_text("mine")
    result = command_line("init", str(target))
    assert result.code == 2 and message in result.err
    assert ((target / existing) if existing else target).read_text() == "mine"


def test_init_rejects_nested_and_read_only_folders(folder, command_line):
    inside = command_line("init", "again")
    assert inside.code == 2 and "would lie inside the workbook" in inside.err
    assert not (folder / "again").exists()
    nowhere = command_line("init", "/proc/none/workbook")
    assert nowhere.code == 2 and nowhere.err.startswith("error: /proc/none")


def test_missing_book_is_rejected_before_writing(tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(roots, "PACKAGE_ROOT", tmp_path / "harness")
    monkeypatch.setattr(roots, "BUNDLED_BOOK", tmp_path / "carried")
    result = command_line("init", str(tmp_path / "mine"), "--book")
    assert result.code == 2 and "--book: there is no built book" in result.err
    assert not (tmp_path / "mine").exists()


def test_init_copies_the_book(folder, command_line, monkeypatch, tmp_path):
    built_book = tmp_path / "carried" / "html"
    built_book.mkdir(parents=True)
    (built_book / "index.html").write_text("the book")
    monkeypatch.setattr(workspace, "find_built_book", lambda: built_book)
    assert command_line("update", "--book").code == 0
    assert (folder / workspace.BOOK_FOLDER / "index.html").read_text() == "the book"
    (built_book / "index.html").write_text("a newer book")  # updated again by each `update`
    assert command_line("update").code == 0
    assert (folder / workspace.BOOK_FOLDER / "index.html").read_text() == "a newer book"


@pytest.fixture
def newer_solutions(folder, tmp_path, monkeypatch):
    """Newer solutions with an additional line, a renamed blank and a new file."""
    new_solutions = tmp_path / "newer"
    shutil.copytree(folder / "solutions", new_solutions)
    file = new_solutions / DERIVE
    file.write_text("# newer\n" + file.read_text().replace(" edges", " lines"))
    (new_solutions / "p20" / "op" / "more.mojo").write_text("# more\n")
    (new_solutions / "p20" / "op" / "ops.mojo").unlink()
    monkeypatch.setattr(roots, "get_program_solutions", lambda: new_solutions)
    (folder / roots.MARKER_FILE).write_text('{"version": "0.0.1"}')
    return new_solutions


def test_update_replaces_hashes_in_start_markers_without_a_backup(folder, command_line):
    hunt = folder / "problems" / "p21" / "hunt.py"
    text = hunt.read_text()
    for id, blank in blanks.find_blanks(text).items():
        text = text.replace(f"BLANK-START {id}:", f"BLANK-START {id} (given {blank.provided_hash}):")
    hunt.write_text(blanks.PROVIDED_HASH.sub(lambda m: m[0] if "(given " in m[0] else "", text))
    assert "(given " in hunt.read_text() and blanks.HASH_LABEL not in hunt.read_text()
    result = command_line("update")
    assert result.code == 0 and "(given " not in hunt.read_text()
    assert not any(blank.size for blank in blanks.find_blanks(hunt.read_text()).values())
    assert not list(hunt.parent.glob("*.bak"))


def test_update_keeps_solved_blanks(folder, newer_solutions, command_line):
    problem = solve_all_blanks(folder)
    before = blanks.find_blanks(problem.read_text())
    assert "written by version 0.0.1" in command_line("list").out
    result = command_line("update")
    assert result.code == 0 and "0.0.1" in result.out.splitlines()[-1]
    text = problem.read_text()
    after = blanks.find_blanks(text)
    assert text.startswith("# newer\n")
    assert after["backward"].body == before["backward"].body
    assert after["lines"].size == 0  # a new blank; the lines of the old one are in the backup
    (backup,) = problem.parent.glob("graph.py.*.bak")
    assert blanks.find_blanks(backup.read_text())["edges"] == before["edges"] and backup.name in result.out
    op = folder / "problems" / "p20" / "op"
    assert (op / "more.mojo").resolve() == folder / "solutions" / "p20" / "op" / "more.mojo"
    assert not (op / "ops.mojo").is_symlink()
    assert "written by version" not in command_line("list").out
    second_output = command_line("update").out
    assert second_output.count("renewed") == 0 and "it was of" not in second_output


def test_update_backs_up_edits_outside_blanks(folder, newer_solutions, command_line):
    problem = folder / "problems" / DERIVE
    problem.write_text(problem.read_text() + "\n# a line of my own\n")
    edited_file = folder / "problems" / "p20" / "op" / "ops.mojo"
    edited_file.unlink()
    edited_file.write_text("mine")
    assert command_line("update").code == 0
    (backup,) = problem.parent.glob("graph.py.*.bak")
    assert "a line of my own" in backup.read_text() and "a line of my own" not in problem.read_text()
    assert edited_file.read_text() == "mine"


def test_damaged_file_stops_an_update_before_writing(folder, newer_solutions, command_line):
    problem = folder / "problems" / DERIVE
    problem.write_text(problem.read_text().replace("# BLANK-END edges", "# BLANK-END nothing"))
    result = command_line("update")
    assert result.code == 2 and "graph.py" in result.err
    assert not (folder / "solutions" / "p20" / "op" / "more.mojo").exists()
    assert json.loads((folder / roots.MARKER_FILE).read_text())["version"] == "0.0.1"


def test_update_outside_a_workbook_is_rejected(command_line):
    result = command_line("update")
    assert result.code == 2 and "not a workbook folder" in result.err


def test_doctor_reports_the_folder_and_missing_files(folder, newer_solutions, monkeypatch):
    from harness.screens import doctor

    monkeypatch.setattr(roots, "CHECKOUT", folder)
    workbook_check, book = doctor.check_workbook()
    assert workbook_check.state == "note" and "written by version 0.0.1" in workbook_check.description
    assert book.state == "note"
    monkeypatch.setattr(roots, "CHECKOUT", folder.parent)
    (outside,) = doctor.check_workbook()
    assert "init" in outside.remedy
