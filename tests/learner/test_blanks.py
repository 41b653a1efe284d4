"""Blanks: parsing, generation of problems from solutions, and errors for damaged markers."""

import functools
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.layout import find_layout

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = """\
# ANCHOR: kernel_solution
def kernel():
    before()
    # BLANK-START one: do the first thing
    # a comment is not a line to write
    first()

    second()
    # BLANK-END one
    between()
    # BLANK-START two: do the other thing
    third()
    # BLANK-END two
# ANCHOR_END: kernel_solution
"""
PROBLEM = """\
# ANCHOR: kernel
def kernel():
    before()
    # BLANK-START one: do the first thing
    # FILL IN (about 2 lines)
    # BLANK-END one
    between()
    # BLANK-START two: do the other thing
    # FILL IN (about 1 line)
    # BLANK-END two
# ANCHOR_END: kernel
"""


def remove_anchors(text: str) -> list[str]:
    """Return a file's lines without the book's anchors."""
    return [line for line in text.splitlines() if "ANCHOR" not in line]


def test_skeleton_empties_only_the_blanks():
    assert blanks.make_skeleton(SOLUTION) == PROBLEM


def test_find_blanks_returns_id_task_size_and_line():
    by_id = blanks.find_blanks(SOLUTION)
    assert list(by_id) == ["one", "two"]
    assert (by_id["one"].task, by_id["one"].size, by_id["one"].line) == ("do the first thing", 2, 5)
    assert by_id["two"].body == ("    third()",)
    lines = SOLUTION.splitlines()
    assert lines[by_id["two"].line - 1] == "    third()"


def test_filled_skeleton_equals_the_solution():
    assert blanks.fill_blanks(PROBLEM, SOLUTION) == SOLUTION.replace("_solution", "")


def test_blank_with_only_comments_has_size_zero():
    assert [blank.size for blank in blanks.find_blanks(PROBLEM).values()] == [0, 0]
    edited = PROBLEM.replace("    # FILL IN (about 1 line)", "    # my idea:\n\n    third()")
    assert [blank.size for blank in blanks.find_blanks(edited).values()] == [0, 1]


def test_text_outside_blanks_does_not_depend_on_them():
    edited = PROBLEM.replace("    # FILL IN (about 1 line)", "    anything()\n    else_()")
    assert blanks.remove_blanks(edited) == blanks.remove_blanks(PROBLEM)
    assert blanks.remove_blanks(edited.replace("between()", "elsewhere()")) != blanks.remove_blanks(PROBLEM)


def test_windows_line_endings_are_equivalent():
    windows = SOLUTION.replace("\n", "\r\n")
    assert blanks.make_skeleton(windows) == PROBLEM
    assert blanks.find_blanks(windows) == blanks.find_blanks(SOLUTION)
    assert blanks.remove_blanks(PROBLEM.replace("\n", "\r\n")) == blanks.remove_blanks(PROBLEM)


def test_tabs_count_as_indentation():
    tabbed = SOLUTION.replace("    ", "\t")
    assert blanks.make_skeleton(tabbed) == PROBLEM.replace("    ", "\t")
    assert blanks.find_blanks(tabbed)["one"].indent == "\t"


@pytest.mark.parametrize("trailing", ["  ", "\t"])
def test_trailing_spaces_after_a_marker_are_accepted(trailing):
    padded = SOLUTION.replace("# BLANK-END one", "# BLANK-END one" + trailing)
    assert set(blanks.find_blanks(padded)) == {"one", "two"}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("# BLANK-START one: do", "# BLANK-START one do", 4, "damaged blank marker"),
        ("# BLANK-START one: do", "#BLANK-START one: do", 4, "damaged blank marker"),
        ("# BLANK-START one: do the first thing", "# BLANK-START", 4, "damaged blank marker"),
        ("# BLANK-END one", "# BLANK-END one here", 9, "damaged blank marker"),
        ("# BLANK-END one", "# BLANK-END two", 9, "BLANK-END two without its BLANK-START"),
        ("    # BLANK-END one\n", "", 10, "blank two starts inside blank one"),
        ("    # BLANK-START one: do the first thing\n", "", 8, "BLANK-END one without its BLANK-START"),
        ("    # BLANK-END two\n", "", 11, "blank two has no BLANK-END"),
        ("# BLANK-START two:", "# BLANK-START one:", 11, "blank one occurs twice"),
    ],
)
def test_damaged_marker_is_reported_with_file_and_line(old, new, line, message):
    assert SOLUTION.count(old) == 1
    with pytest.raises(DamagedFile) as raised:
        blanks.split_blanks(SOLUTION.replace(old, new), "some/file.mojo")
    assert str(raised.value).startswith(f"some/file.mojo:{line}: ")
    assert message in str(raised.value)
    assert raised.value.exit_code == 2


PROVIDED = """\
def kernel():
    # BLANK-START one: correct it
    right()
    # BLANK-GIVEN one
    # if True:
    #     wrong()
    #
    # BLANK-END one
    # BLANK-START two: do the other thing
    second()
    # BLANK-END two
"""


def test_provided_code_counts_as_unsolved():
    problem = blanks.make_skeleton(PROVIDED)
    by_id = blanks.find_blanks(problem)
    assert by_id["one"].body == ("    if True:", "        wrong()", "") and by_id["one"].task == "correct it"
    assert "right()" not in problem and "BLANK-GIVEN" not in problem and "FILL IN" in problem
    assert [by_id["one"].size, by_id["two"].size] == [0, 0]
    assert blanks.find_blanks(PROVIDED)["one"].body == ("    right()",), (
        "the solution's blank has the correct code"
    )
    assert blanks.find_blanks(problem.replace("wrong()", "corrected()"))["one"].size == 2
    emptied = problem.replace("    if True:\n        wrong()\n", "")
    assert blanks.find_blanks(emptied)["one"].size == 0
    assert blanks.find_blanks(blanks.fill_blanks(problem, PROVIDED))["one"].body == ("    right()",)


def test_provided_code_is_followed_by_its_hash():
    lines = blanks.make_skeleton(PROVIDED).split("\n")
    assert lines[1] == "    # BLANK-START one: correct it"
    assert (
        lines[5] == f"    # BLANK-END one (unsolved while it reads as given: {blanks.hash_code(lines[2:5])})"
    )
    assert lines[8] == "    # BLANK-END two"


def test_older_file_has_the_hash_in_its_start_marker():
    lines = blanks.make_skeleton(PROVIDED).split("\n")
    digest = blanks.hash_code(lines[2:5])
    lines[1], lines[5] = f"    # BLANK-START one (given {digest}): correct it", "    # BLANK-END one"
    blank = blanks.find_blanks("\n".join(lines))["one"]
    assert blank.is_provided and blank.size == 0 and blank.task == "correct it"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("        wrong()\n", "        wrong()   \n\n    # is it this one?\n"),
    ],
    ids=["line endings", "spaces, empty lines and comments"],
)
def test_comments_and_blank_lines_are_not_an_edit(change):
    problem = change(blanks.make_skeleton(PROVIDED))
    assert blanks.find_blanks(problem)["one"].size == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("    # if True:", "    if True:", 5, "the provided code of blank one must be in comments"),
        ("    # BLANK-GIVEN one\n", "    # BLANK-GIVEN two\n", 4, "BLANK-GIVEN two without its BLANK-START"),
        ("    #     wrong()\n", "    # BLANK-GIVEN one\n", 6, "BLANK-GIVEN one without its BLANK-START"),
        ("    second()\n", "    # BLANK-GIVEN\n", 10, "damaged blank marker"),
    ],
)
def test_damaged_provided_code_is_reported(old, new, line, message):
    assert PROVIDED.count(old) == 1
    with pytest.raises(DamagedFile) as raised:
        blanks.split_blanks(PROVIDED.replace(old, new), "some/file.py")
    assert str(raised.value).startswith(f"some/file.py:{line}: ") and message in str(raised.value)


PROVIDED_BY_ANOTHER = """\
# BLANK-START one: the first
one()
# BLANK-END one
# BLANK-START two: the second
two()
# BLANK-GIVEN two as one
# BLANK-END two
"""


def test_blank_can_provide_the_code_of_another():
    solved = blanks.find_blanks(PROVIDED_BY_ANOTHER)
    assert solved["two"].body == ("two()",) and solved["two"].provided == ("one()",)
    problem = blanks.find_blanks(blanks.make_skeleton(PROVIDED_BY_ANOTHER))
    assert problem["two"].body == ("one()",) and problem["two"].is_provided and problem["one"].size == 0


def test_unknown_provided_blank_is_reported():
    with pytest.raises(
        DamagedFile, match=r"some/file\.py:4: blank two is given as six, which is not a blank here"
    ):
        blanks.split_blanks(PROVIDED_BY_ANOTHER.replace("two as one", "two as six"), "some/file.py")


code_lines = st.lists(st.sampled_from(["    x = 1", "    # note", "", "\ty()", "    # ANCHOR: a_solution"]))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine
@given(st.lists(st.tuples(code_lines, code_lines), max_size=5), code_lines)
def test_skeleton_round_trip(blank_lines_by_id, last):
    lines = []
    for number, (provided, body) in enumerate(blank_lines_by_id):
        lines += [*provided, f"  # BLANK-START b{number}: task {number}", *body, f"  # BLANK-END b{number}"]
    text = "\n".join([*lines, *last])
    problem = blanks.make_skeleton(text)
    assert remove_anchors(blanks.fill_blanks(problem, text)) == remove_anchors(text)
    assert [blank.size for blank in blanks.find_blanks(problem).values()] == [0] * len(blank_lines_by_id)


@pytest.fixture
def folders(tmp_path):
    """Return a solutions folder with one puzzle, and the path of its problems.

    The puzzle has a file with blanks, a file and a folder without, a link, a picture and a wrong kernel.
    """
    solutions, problems = tmp_path / "solutions", tmp_path / "problems"
    for folder in ("shared", "p1/op/steps", "p1/wrong"):
        (solutions / folder).mkdir(parents=True)
    (solutions / "p1" / "op" / "kernel.mojo").write_text(SOLUTION)
    (solutions / "p1" / "op" / "launches.mojo").write_text("given\n")
    (solutions / "p1" / "op" / "steps" / "one.mojo").write_text("a step\n")
    (solutions / "p1" / "op" / "picture.png").write_bytes(b"\x89PNG")
    (solutions / "p1" / "wrong" / "bug.mojo").write_text("bug\n")
    (solutions / "shared" / "common.mojo").write_text("shared\n")
    (solutions / "p1" / "op" / "shared").symlink_to("../../shared")
    return solutions, problems


@pytest.fixture
def generated_folders(folders):
    """Return `folders` after generate_problems(), and the problem's op package."""
    solutions, problems = folders
    blanks.generate_problems(solutions, problems)
    return solutions, problems, problems / "p1" / "op"


LINKS = ("launches.mojo", "shared", "steps")


def test_generate_writes_skeletons_and_links(folders):
    solutions, problems = folders
    op = problems / "p1" / "op"
    assert blanks.generate_problems(solutions, problems) == [
        op / "kernel.mojo",
        *(op / name for name in LINKS),
    ]
    assert sorted(problems.rglob("*")) == sorted(
        [problems / "p1", op, op / "kernel.mojo", *(op / name for name in LINKS)]
    )
    assert (op / "kernel.mojo").read_text() == PROBLEM
    for name in LINKS:
        assert os.readlink(op / name) == f"../../../solutions/p1/op/{name}"
    assert (op / "shared" / "common.mojo").read_text() == "shared\n"
    assert (op / "steps" / "one.mojo").read_text() == "a step\n"
    assert blanks.generate_problems(solutions, problems) == []


def test_generate_does_not_write_through_links(generated_folders):
    """Adding a blank to a linked file replaces the link by a problem file."""
    solutions, problems, op = generated_folders
    source, target = solutions / "p1" / "op" / "launches.mojo", op / "launches.mojo"
    source.write_text(SOLUTION)
    assert blanks.generate_problems(solutions, problems) == [target]
    assert source.read_text() == SOLUTION
    assert target.read_text() == PROBLEM and not target.is_symlink()
    source.write_text("given\n")
    assert blanks.generate_problems(solutions, problems, force=True) == [target]
    assert target.is_symlink()


def test_generate_replaces_copies_but_not_learner_files(generated_folders):
    solutions, problems, op = generated_folders
    target = op / "launches.mojo"
    target.unlink()
    target.write_text("given\n")
    assert blanks.generate_problems(solutions, problems) == [target]
    assert target.is_symlink()
    target.unlink()
    target.write_text("mine\n")
    with pytest.raises(
        DamagedFile, match=r"launches\.mojo: there is a file of your own in place of the link; --force"
    ):
        blanks.generate_problems(solutions, problems)
    assert target.read_text() == "mine\n"
    assert blanks.generate_problems(solutions, problems, force=True) == [target]
    folder = op / "steps"
    folder.unlink()
    folder.mkdir()
    with pytest.raises(DamagedFile, match="steps: there is a folder in place of the link; move it away"):
        blanks.generate_problems(solutions, problems, force=True)


def damage_link(op, kind: str) -> None:
    """Damage a package's links; `kind` is a key of LAYOUT_ERRORS."""
    link = op / "launches.mojo"
    if kind == "added":
        (op / "helper.mojo").write_text("mine\n")
        (op.parent / "notes").mkdir()
        (op.parent / "notes" / "todo.md").write_text("mine\n")
        (op / "kernel.mojo.2026-01-01-000000.bak").write_text("kept\n")
        (op / ".editor").mkdir()
        (op / ".editor" / "state").write_text("hidden\n")
        (op.parent / "__pycache__").mkdir()
        return
    link.unlink()
    if kind == "own":
        link.write_text("mine\n")
    elif kind == "text":
        link.write_text("../../../solutions/p1/op/launches.mojo")
    elif kind == "dangling":
        link.symlink_to("../../nowhere.mojo")
    elif kind == "elsewhere":
        link.symlink_to("kernel.mojo")


LAYOUT_ERRORS = {
    "missing": ["launches.mojo is missing"],
    "own": ["launches.mojo is your own, not the link to the solution's"],
    "text": [
        "launches.mojo is a text file instead of a link: check out again with `git config core.symlinks true`"
    ],
    "dangling": ["launches.mojo links to ../../nowhere.mojo, which is not there"],
    "elsewhere": ["launches.mojo links to kernel.mojo, not to the solution's"],
    "added": ["../notes/todo.md is not part of the puzzle", "helper.mojo is not part of the puzzle"],
}


@pytest.mark.parametrize("kind", LAYOUT_ERRORS)
def test_check_reports_all_wrong_paths(generated_folders, capsys, kind):
    solutions, problems, op = generated_folders
    damage_link(op, kind)
    assert blanks.check_problems(solutions, problems) == 1
    printed = capsys.readouterr().out.splitlines()
    expected = [
        f"{os.path.normpath(op / error.split()[0])} {error.split(' ', 1)[1]}" for error in LAYOUT_ERRORS[kind]
    ]
    assert sorted(printed) == sorted(expected)


def test_generate_keeps_learner_work_without_force(folders):
    solutions, problems = folders
    source, target = (root / "p1" / "op" / "kernel.mojo" for root in (solutions, problems))
    source.write_text(SOLUTION.replace("between()", "elsewhere()"))
    blanks.generate_problems(solutions, problems)
    source.write_text(SOLUTION)
    blanks.generate_problems(solutions, problems)
    assert target.read_text() == PROBLEM, "a file without edits is regenerated"
    work = target.read_text().replace("    # FILL IN (about 1 line)", "    my_work()")
    target.write_text(work)
    with pytest.raises(DamagedFile) as raised:
        blanks.generate_problems(solutions, problems)
    assert str(raised.value) == f"{target}: a blank holds work; --force overwrites it"
    assert target.read_text() == work
    blanks.generate_problems(solutions, problems, force=True)
    assert target.read_text() == PROBLEM


def test_generate_keeps_a_damaged_problem_file(generated_folders):
    solutions, problems, op = generated_folders
    target = op / "kernel.mojo"
    damaged = target.read_text().replace("    # BLANK-END two\n", "    my_work()\n")
    target.write_text(damaged)
    with pytest.raises(DamagedFile, match="blank two has no BLANK-END"):
        blanks.generate_problems(solutions, problems)
    assert target.read_text() == damaged


def test_check_prints_the_diff_and_writes_nothing(folders, capsys):
    solutions, problems = folders
    assert blanks.check_problems(solutions, problems) == 1
    assert "+    before()" in capsys.readouterr().out
    assert not problems.exists()
    blanks.generate_problems(solutions, problems)
    assert blanks.check_problems(solutions, problems) == 0
    assert capsys.readouterr().out == ""


LAYOUT = find_layout(ROOT / "solutions")
PAIRS = LAYOUT.problem_files


@functools.cache
def list_edited_problems() -> str:
    """List the problem files that differ from git's."""
    command = ["git", "status", "--porcelain", "--", "problems"]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return status.stdout if status.returncode == 0 else pytest.skip("this folder is not in a git repository")


@pytest.mark.parametrize("relative", PAIRS, ids=str)
def test_unmodified_problems_equal_the_skeletons(relative):
    problem = ROOT / "problems" / relative
    if f"problems/{relative}\n" in list_edited_problems():
        pytest.skip("this problem file is edited")
    assert problem.read_bytes() == blanks.make_skeleton((ROOT / "solutions" / relative).read_text()).encode()


def test_learner_files_have_at_most_700_lines():
    files = [ROOT / "problems" / relative for relative in PAIRS if relative.suffix == ".mojo"]
    assert max(len(file.read_text().splitlines()) for file in files) <= 700
