"""`workbook init` and `update`: a learner's folder without a checkout, and what stands in its blanks."""

import json
import shutil
from typing import NamedTuple

import pytest

from harness.cli import main
from harness.learner import blanks, workspace
from harness.toolchain import roots

DERIVE = "p20/graph.py"


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def command_line(capsys):
    """Runs a command in this process, in whatever folder it is."""

    def run(*arguments):
        capsys.readouterr()
        return Said(main(list(arguments)), *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path, monkeypatch, command_line):
    """A folder that init has made, in which commands run."""
    monkeypatch.setattr(roots, "CHECKOUT", roots.CHECKOUT)
    monkeypatch.setenv(roots.FOLDER, "")
    monkeypatch.chdir(tmp_path)
    finished = command_line("init")
    assert finished.code == 0 and "next: cd workbook && " in finished.out, finished
    monkeypatch.chdir(tmp_path / "workbook")
    return tmp_path / "workbook"


def solve(folder, file=DERIVE):
    """Writes the solution's lines into every blank of a problem file."""
    problem, solution = folder / "problems" / file, folder / "solutions" / file
    problem.write_text(blanks.fill(problem.read_text(), solution.read_text()))
    return problem


def test_init_writes_what_a_checkout_has(folder):
    there = roots.origin().parent / "problems"
    written = {path.relative_to(folder / "problems") for path in (folder / "problems").rglob("*")}
    assert written == {path.relative_to(there) for path in there.rglob("*") if not path.name.endswith(".bak")}
    assert blanks.check(folder / "solutions", folder / "problems") == 0
    assert not any(path.is_symlink() for path in (folder / "solutions").rglob("*"))


def test_commands_work_on_the_folder_that_they_are_called_in(folder, command_line, monkeypatch):
    solve(folder)
    monkeypatch.chdir(folder / "problems")  # any folder below will do
    assert command_line("p20", "--rung", "derive").code == 0
    assert folder == roots.CHECKOUT
    noted = json.loads((folder / ".workbook-progress.json").read_text())
    assert "p20 edges" in noted["passed"]
    assert command_line("list", "p20").out.count("passed") == len(noted["passed"])
    assert command_line("dev", "check").err.startswith("error: dev works on a checkout")


def test_reset_asks_in_a_folder_of_one_s_own_and_a_yes_puts_the_file_back(folder, command_line, monkeypatch):
    problem = folder / "problems" / DERIVE
    untouched = problem.read_text()
    solve(folder)
    worked = problem.read_text()
    monkeypatch.setattr("builtins.input", lambda words: "y" if words == "Go on? [y/N] " else "")
    said = command_line("reset", "p20", "--rung", "derive")
    assert said.code == 0 and f"wrote problems/{DERIVE}, kept problems/{DERIVE}." in said.out
    assert problem.read_text() == untouched
    (kept,) = problem.parent.glob("*.bak")
    assert kept.read_text() == worked


def test_outside_of_a_workbook_a_command_is_one_line(tmp_path, monkeypatch, command_line):
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in (["list"], ["hint", "p20"], ["verify"], ["diff", "p20"], ["p20", "--rung", "derive"]):
        said = command_line(*arguments)
        assert said.code == 2 and said.out == "", arguments
        assert said.err.count("\n") == 1 and "not a workbook folder: `" in said.err


@pytest.mark.parametrize(
    ("there", "said"),
    [("mine.txt", "is not empty"), (None, "is a file"), (roots.MARK, "is a workbook already")],
)
def test_init_refuses_what_is_there(there, said, tmp_path, command_line):
    target = tmp_path / "target"
    if there:
        target.mkdir()
        (target / there).write_text("mine")
    else:
        target.write_text("mine")
    refused = command_line("init", str(target))
    assert refused.code == 2 and said in refused.err
    assert ((target / there) if there else target).read_text() == "mine"


def test_init_refuses_a_folder_inside_a_workbook_and_one_it_cannot_write(folder, command_line):
    inside = command_line("init", "again")
    assert inside.code == 2 and "would lie inside the workbook" in inside.err
    assert not (folder / "again").exists()
    nowhere = command_line("init", "/proc/none/workbook")
    assert nowhere.code == 2 and nowhere.err.startswith("error: /proc/none")


def test_a_book_that_was_not_built_is_refused_before_anything_is_written(tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(roots, "HERE", tmp_path / "harness")
    monkeypatch.setattr(roots, "CARRIED_BOOK", tmp_path / "carried")
    refused = command_line("init", str(tmp_path / "mine"), "--book")
    assert refused.code == 2 and "--book: there is no built book" in refused.err
    assert not (tmp_path / "mine").exists()


def test_the_book_comes_along(folder, command_line, monkeypatch, tmp_path):
    carried = tmp_path / "carried" / "html"
    carried.mkdir(parents=True)
    (carried / "index.html").write_text("the book")
    monkeypatch.setattr(workspace, "built_book", lambda: carried)
    assert command_line("update", "--book").code == 0
    assert (folder / workspace.BOOK / "index.html").read_text() == "the book"
    (carried / "index.html").write_text("a newer book")  # once there, every update renews it
    assert command_line("update").code == 0
    assert (folder / workspace.BOOK / "index.html").read_text() == "a newer book"


@pytest.fixture
def newer(folder, tmp_path, monkeypatch):
    """The solutions of a newer version: a line more at the top of a file, a blank of another name, a file more."""
    fresh = tmp_path / "newer"
    shutil.copytree(folder / "solutions", fresh)
    file = fresh / DERIVE
    file.write_text("# newer\n" + file.read_text().replace(" edges", " lines"))
    (fresh / "p20" / "op" / "more.mojo").write_text("# more\n")
    (fresh / "p20" / "op" / "ops.mojo").unlink()
    monkeypatch.setattr(roots, "origin", lambda: fresh)
    (folder / roots.MARK).write_text('{"version": "0.0.1"}')
    return fresh


def test_update_of_a_file_with_hashes_in_start_markers_renews_them_and_keeps_no_copy(folder, command_line):
    hunt = folder / "problems" / "p21" / "hunt.py"
    text = hunt.read_text()
    for id, blank in blanks.find(text).items():
        text = text.replace(f"BLANK-START {id}:", f"BLANK-START {id} (given {blank.mark}):")
    hunt.write_text(blanks.MARKED.sub(lambda m: m[0] if "(given " in m[0] else "", text))
    assert "(given " in hunt.read_text() and blanks.AS_GIVEN not in hunt.read_text()
    said = command_line("update")
    assert said.code == 0 and "(given " not in hunt.read_text()
    assert not any(blank.size for blank in blanks.find(hunt.read_text()).values())
    assert not list(hunt.parent.glob("*.bak"))


def test_update_brings_the_new_version_and_keeps_what_is_solved(folder, newer, command_line):
    mine = solve(folder)
    before = blanks.find(mine.read_text())
    assert "written by version 0.0.1" in command_line("list").out
    said = command_line("update")
    assert said.code == 0 and "0.0.1" in said.out.splitlines()[-1]
    text = mine.read_text()
    after = blanks.find(text)
    assert text.startswith("# newer\n")
    assert after["backward"].body == before["backward"].body
    assert after["lines"].size == 0  # a blank that is new; the old one's lines lie beside it
    (copy,) = mine.parent.glob("graph.py.*.bak")
    assert blanks.find(copy.read_text())["edges"] == before["edges"] and copy.name in said.out
    op = folder / "problems" / "p20" / "op"
    assert (op / "more.mojo").resolve() == folder / "solutions" / "p20" / "op" / "more.mojo"
    assert not (op / "ops.mojo").is_symlink()
    assert "written by version" not in command_line("list").out
    again = command_line("update").out
    assert again.count("renewed") == 0 and "it was of" not in again


def test_update_keeps_a_copy_of_lines_outside_of_blanks_and_a_file_in_the_place_of_a_link(
    folder, newer, command_line
):
    mine = folder / "problems" / DERIVE
    mine.write_text(mine.read_text() + "\n# a line of my own\n")
    own = folder / "problems" / "p20" / "op" / "ops.mojo"
    own.unlink()
    own.write_text("mine")
    assert command_line("update").code == 0
    (copy,) = mine.parent.glob("graph.py.*.bak")
    assert "a line of my own" in copy.read_text() and "a line of my own" not in mine.read_text()
    assert own.read_text() == "mine"


def test_a_damaged_file_stops_an_update_before_anything_is_written(folder, newer, command_line):
    mine = folder / "problems" / DERIVE
    mine.write_text(mine.read_text().replace("# BLANK-END edges", "# BLANK-END nothing"))
    refused = command_line("update")
    assert refused.code == 2 and "graph.py" in refused.err
    assert not (folder / "solutions" / "p20" / "op" / "more.mojo").exists()
    assert json.loads((folder / roots.MARK).read_text())["version"] == "0.0.1"


def test_update_outside_of_such_a_folder_is_refused(command_line):
    refused = command_line("update")
    assert refused.code == 2 and "not a workbook folder" in refused.err


def test_the_doctor_names_the_folder_and_what_is_missing(folder, newer, monkeypatch):
    from harness.screens import doctor

    monkeypatch.setattr(roots, "CHECKOUT", folder)
    here, book = doctor.files()
    assert here.state == "note" and "written by version 0.0.1" in here.words
    assert book.state == "note" and "update --book" in book.remedy
    monkeypatch.setattr(roots, "CHECKOUT", folder.parent)
    (outside,) = doctor.files()
    assert "init" in outside.remedy
