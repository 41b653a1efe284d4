"""Blanks: cutting a file, making problems from solutions, and refusing files whose markers are broken."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.layout import layout

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


def without_anchors(text: str) -> list[str]:
    """The lines of a file that the book's anchors do not change."""
    return [line for line in text.splitlines() if "ANCHOR" not in line]


def test_skeleton_empties_the_blanks_and_nothing_else():
    assert blanks.skeleton(SOLUTION) == PROBLEM


def test_find_gives_id_task_size_and_line():
    by_id = blanks.find(SOLUTION)
    assert list(by_id) == ["one", "two"]
    assert (by_id["one"].task, by_id["one"].size, by_id["one"].line) == ("do the first thing", 2, 5)
    assert by_id["two"].body == ("    third()",)
    lines = SOLUTION.splitlines()
    assert lines[by_id["two"].line - 1] == "    third()"


def test_filling_the_skeleton_gives_the_solution_back():
    assert blanks.fill(PROBLEM, SOLUTION) == SOLUTION.replace("_solution", "")


def test_a_blank_with_only_comments_has_size_nought():
    assert [blank.size for blank in blanks.find(PROBLEM).values()] == [0, 0]
    worked_on = PROBLEM.replace("    # FILL IN (about 1 line)", "    # my idea:\n\n    third()")
    assert [blank.size for blank in blanks.find(worked_on).values()] == [0, 1]


def test_outside_does_not_depend_on_what_a_learner_writes():
    worked_on = PROBLEM.replace("    # FILL IN (about 1 line)", "    anything()\n    else_()")
    assert blanks.outside(worked_on) == blanks.outside(PROBLEM)
    assert blanks.outside(worked_on.replace("between()", "elsewhere()")) != blanks.outside(PROBLEM)


def test_windows_line_endings_make_no_difference():
    windows = SOLUTION.replace("\n", "\r\n")
    assert blanks.skeleton(windows) == PROBLEM
    assert blanks.find(windows) == blanks.find(SOLUTION)
    assert blanks.outside(PROBLEM.replace("\n", "\r\n")) == blanks.outside(PROBLEM)


def test_tabs_stand_as_indentation():
    tabbed = SOLUTION.replace("    ", "\t")
    assert blanks.skeleton(tabbed) == PROBLEM.replace("    ", "\t")
    assert blanks.find(tabbed)["one"].indent == "\t"


@pytest.mark.parametrize("trailing", ["  ", "\t"])
def test_trailing_space_after_a_marker_is_no_damage(trailing):
    padded = SOLUTION.replace("# BLANK-END one", "# BLANK-END one" + trailing)
    assert set(blanks.find(padded)) == {"one", "two"}


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
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
def test_damaged_markers_are_named_with_file_and_line(old, new, line, words):
    assert SOLUTION.count(old) == 1
    with pytest.raises(DamagedFile) as raised:
        blanks.split(SOLUTION.replace(old, new), "some/file.mojo")
    assert str(raised.value).startswith(f"some/file.mojo:{line}: ")
    assert words in str(raised.value)
    assert raised.value.exit_code == 2


GIVEN = """\
def kernel():
    # BLANK-START one: mend it
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


def test_given_code_stands_in_the_problem_and_is_no_work_of_the_learner_s():
    problem = blanks.skeleton(GIVEN)
    by_id = blanks.find(problem)
    assert by_id["one"].body == ("    if True:", "        wrong()", "") and by_id["one"].task == "mend it"
    assert "right()" not in problem and "BLANK-GIVEN" not in problem and "FILL IN" in problem
    assert [by_id["one"].size, by_id["two"].size] == [0, 0]
    assert blanks.find(GIVEN)["one"].body == ("    right()",), "the solution's blank holds the right code"
    assert blanks.find(problem.replace("wrong()", "mended()"))["one"].size == 2
    emptied = problem.replace("    if True:\n        wrong()\n", "")
    assert blanks.find(emptied)["one"].size == 0
    assert blanks.find(blanks.fill(problem, GIVEN))["one"].body == ("    right()",)


def test_the_hash_of_given_code_stands_after_it_and_says_what_it_is_for():
    lines = blanks.skeleton(GIVEN).split("\n")
    assert lines[1] == "    # BLANK-START one: mend it"
    assert lines[5] == f"    # BLANK-END one (unsolved while it reads as given: {blanks.mark_of(lines[2:5])})"
    assert lines[8] == "    # BLANK-END two"


def test_a_file_of_an_older_version_bears_the_hash_in_the_start_marker():
    lines = blanks.skeleton(GIVEN).split("\n")
    mark = blanks.mark_of(lines[2:5])
    lines[1], lines[5] = f"    # BLANK-START one (given {mark}): mend it", "    # BLANK-END one"
    there = blanks.find("\n".join(lines))["one"]
    assert there.is_provided and there.size == 0 and there.task == "mend it"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("        wrong()\n", "        wrong()   \n\n    # is it this one?\n"),
    ],
    ids=["line endings", "spaces, empty lines and comments"],
)
def test_what_is_no_code_does_not_make_given_code_one_s_own(change):
    problem = change(blanks.skeleton(GIVEN))
    assert blanks.find(problem)["one"].size == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("    # if True:", "    if True:", 5, "the provided code of blank one must be in comments"),
        ("    # BLANK-GIVEN one\n", "    # BLANK-GIVEN two\n", 4, "BLANK-GIVEN two without its BLANK-START"),
        ("    #     wrong()\n", "    # BLANK-GIVEN one\n", 6, "BLANK-GIVEN one without its BLANK-START"),
        ("    second()\n", "    # BLANK-GIVEN\n", 10, "damaged blank marker"),
    ],
)
def test_damage_to_given_code_is_named(old, new, line, words):
    assert GIVEN.count(old) == 1
    with pytest.raises(DamagedFile) as raised:
        blanks.split(GIVEN.replace(old, new), "some/file.py")
    assert str(raised.value).startswith(f"some/file.py:{line}: ") and words in str(raised.value)


AS_ANOTHER = """\
# BLANK-START one: the first
one()
# BLANK-END one
# BLANK-START two: the second
two()
# BLANK-GIVEN two as one
# BLANK-END two
"""


def test_a_blank_may_be_given_with_the_code_of_another():
    found = blanks.find(AS_ANOTHER)
    assert found["two"].body == ("two()",) and found["two"].given == ("one()",)
    problem = blanks.find(blanks.skeleton(AS_ANOTHER))
    assert problem["two"].body == ("one()",) and problem["two"].is_provided and problem["one"].size == 0


def test_a_blank_given_as_one_that_is_not_there_is_named():
    with pytest.raises(
        DamagedFile, match=r"some/file\.py:4: blank two is given as six, which is not a blank here"
    ):
        blanks.split(AS_ANOTHER.replace("two as one", "two as six"), "some/file.py")


code_lines = st.lists(st.sampled_from(["    x = 1", "    # note", "", "\ty()", "    # ANCHOR: a_solution"]))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine
@given(st.lists(st.tuples(code_lines, code_lines), max_size=5), code_lines)
def test_any_file_comes_back_from_its_skeleton(regions, last):
    lines = []
    for number, (outside, inside) in enumerate(regions):
        lines += [*outside, f"  # BLANK-START b{number}: task {number}", *inside, f"  # BLANK-END b{number}"]
    text = "\n".join([*lines, *last])
    problem = blanks.skeleton(text)
    assert without_anchors(blanks.fill(problem, text)) == without_anchors(text)
    assert [blank.size for blank in blanks.find(problem).values()] == [0] * len(regions)


# ---- Generation ---------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    """A solutions folder with one puzzle, and where problems go.

    A file with blanks, a file and a folder without, a link to a folder that puzzles share, a picture, a wrong kernel.
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


LINKS = ("launches.mojo", "shared", "steps")


def test_generate_writes_skeletons_and_links_to_the_rest_of_the_package(folders):
    solutions, problems = folders
    op = problems / "p1" / "op"
    assert blanks.generate(solutions, problems) == [op / "kernel.mojo", *(op / name for name in LINKS)]
    assert sorted(problems.rglob("*")) == sorted(
        [problems / "p1", op, op / "kernel.mojo", *(op / name for name in LINKS)]
    )
    assert (op / "kernel.mojo").read_text() == PROBLEM
    for name in LINKS:
        assert os.readlink(op / name) == f"../../../solutions/p1/op/{name}"
    assert (op / "shared" / "common.mojo").read_text() == "shared\n"
    assert (op / "steps" / "one.mojo").read_text() == "a step\n"
    assert blanks.generate(solutions, problems) == []


def test_generate_never_writes_through_a_link_into_the_solution(folders):
    """A file without blanks gets one: what was a link becomes a problem file."""
    solutions, problems = folders
    blanks.generate(solutions, problems)
    source, target = (root / "p1" / "op" / "launches.mojo" for root in (solutions, problems))
    source.write_text(SOLUTION)
    assert blanks.generate(solutions, problems) == [target]
    assert source.read_text() == SOLUTION
    assert target.read_text() == PROBLEM and not target.is_symlink()
    source.write_text("given\n")
    assert blanks.generate(solutions, problems, force=True) == [target]
    assert target.is_symlink()


def test_generate_puts_links_in_the_place_of_copies_but_not_of_a_learner_s_own_file(folders):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    target = problems / "p1" / "op" / "launches.mojo"
    target.unlink()
    target.write_text("given\n")
    assert blanks.generate(solutions, problems) == [target]
    assert target.is_symlink()
    target.unlink()
    target.write_text("mine\n")
    with pytest.raises(
        DamagedFile, match=r"launches\.mojo: there is a file of your own in place of the link; --force"
    ):
        blanks.generate(solutions, problems)
    assert target.read_text() == "mine\n"
    assert blanks.generate(solutions, problems, force=True) == [target]
    folder = problems / "p1" / "op" / "steps"
    folder.unlink()
    folder.mkdir()
    with pytest.raises(DamagedFile, match="steps: there is a folder in place of the link; move it away"):
        blanks.generate(solutions, problems, force=True)


def spoil_link(op, how: str) -> None:
    """Does to the links of a package what happens to them."""
    link = op / "launches.mojo"
    if how == "added":
        (op / "helper.mojo").write_text("mine\n")
        (op.parent / "notes").mkdir()
        (op.parent / "notes" / "todo.md").write_text("mine\n")
        (op / "kernel.mojo.2026-01-01-000000.bak").write_text("kept\n")
        (op / ".editor").mkdir()
        (op / ".editor" / "state").write_text("hidden\n")
        (op.parent / "__pycache__").mkdir()
        return
    link.unlink()
    if how == "own":
        link.write_text("mine\n")
    elif how == "text":
        link.write_text("../../../solutions/p1/op/launches.mojo")
    elif how == "dangling":
        link.symlink_to("../../nowhere.mojo")
    elif how == "elsewhere":
        link.symlink_to("kernel.mojo")


FAULTS = {
    "missing": ["launches.mojo is missing"],
    "own": ["launches.mojo is your own, not the link to the solution's"],
    "text": [
        "launches.mojo is a text file instead of a link: check out again with `git config core.symlinks true`"
    ],
    "dangling": ["launches.mojo links to ../../nowhere.mojo, which is not there"],
    "elsewhere": ["launches.mojo links to kernel.mojo, not to the solution's"],
    "added": ["../notes/todo.md is not part of the puzzle", "helper.mojo is not part of the puzzle"],
}


@pytest.mark.parametrize("how", FAULTS)
def test_check_names_every_path_that_is_not_as_it_should_be(folders, capsys, how):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    op = problems / "p1" / "op"
    spoil_link(op, how)
    assert blanks.check(solutions, problems) == 1
    said = capsys.readouterr().out.splitlines()
    wanted = [f"{os.path.normpath(op / fault.split()[0])} {fault.split(' ', 1)[1]}" for fault in FAULTS[how]]
    assert sorted(said) == sorted(wanted)


def test_generate_follows_a_changed_solution_where_nothing_is_filled_in(folders):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    source = solutions / "p1" / "op" / "kernel.mojo"
    source.write_text(SOLUTION.replace("between()", "elsewhere()"))
    blanks.generate(solutions, problems)
    assert "elsewhere()" in (problems / "p1" / "op" / "kernel.mojo").read_text()


def test_generate_never_overwrites_work_without_force(folders):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    target = problems / "p1" / "op" / "kernel.mojo"
    work = target.read_text().replace("    # FILL IN (about 1 line)", "    my_work()")
    target.write_text(work)
    with pytest.raises(DamagedFile) as refused:
        blanks.generate(solutions, problems)
    assert str(refused.value) == f"{target}: a blank holds work; --force overwrites it"
    assert target.read_text() == work
    blanks.generate(solutions, problems, force=True)
    assert target.read_text() == PROBLEM


def test_generate_does_not_overwrite_a_damaged_problem_file(folders):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    target = problems / "p1" / "op" / "kernel.mojo"
    damaged = target.read_text().replace("    # BLANK-END two\n", "    my_work()\n")
    target.write_text(damaged)
    with pytest.raises(DamagedFile, match="blank two has no BLANK-END"):
        blanks.generate(solutions, problems)
    assert target.read_text() == damaged


def test_check_prints_the_difference_and_writes_nothing(folders, capsys):
    solutions, problems = folders
    assert blanks.check(solutions, problems) == 1
    assert "+    before()" in capsys.readouterr().out
    assert not problems.exists()
    blanks.generate(solutions, problems)
    assert blanks.check(solutions, problems) == 0
    assert capsys.readouterr().out == ""


# ---- The checkout's own problems ----------------------------------------------------------------------------

LAYOUT = layout(ROOT / "solutions")
PAIRS = LAYOUT.edited


def test_the_solution_has_its_blanks_and_the_gates_have_their_ids(puzzle):
    by_id = blanks.find((ROOT / "solutions" / "p22" / "op" / puzzle.source).read_text())
    assert set(by_id) == {"ln", "forward", "row_sums", "db", "dW", "dgamma", "dx", "transfer"}
    assert {gate.id for gate in puzzle.kernel_gates} == set(by_id)
    assert all(blank.size > 0 for blank in by_id.values())


@pytest.mark.parametrize("relative", PAIRS, ids=str)
def test_unmodified_problems_are_the_skeleton_byte_for_byte(relative):
    problem = ROOT / "problems" / relative
    status = subprocess.run(
        ["git", "status", "--porcelain", "--", str(problem)], cwd=ROOT, capture_output=True, text=True
    )
    if status.returncode:
        pytest.skip("git knows nothing about this folder")
    if status.stdout:
        pytest.skip("git sees edits in this problem file")
    assert problem.read_bytes() == blanks.skeleton((ROOT / "solutions" / relative).read_text()).encode()


def test_problems_hold_what_a_learner_edits_and_links_to_the_rest():
    edited = [str(path) for path in PAIRS if path.parts[0] == "p22"]
    assert edited == ["p22/backward.py", "p22/derive.py", "p22/op/layernorm_linear.mojo"]
    assert {path.name for path in LAYOUT.linked} >= {"shared", "__init__.mojo", "cpu_reference.mojo"}


def test_a_learner_opens_at_most_700_lines_of_mojo():
    files = [ROOT / "problems" / relative for relative in PAIRS if relative.suffix == ".mojo"]
    assert max(len(file.read_text().splitlines()) for file in files) <= 700
