"""Blanks: cutting a file, making problems from solutions, and refusing files whose markers are broken."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import DamagedFile
from harness.learner import blanks

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
    found = blanks.find(SOLUTION)
    assert list(found) == ["one", "two"]
    assert (found["one"].task, found["one"].size, found["one"].line) == ("do the first thing", 2, 5)
    assert found["two"].body == ("    third()",)
    lines = SOLUTION.splitlines()
    assert lines[found["two"].line - 1] == "    third()"


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
        ("# BLANK-START two:", "# BLANK-START one:", 11, "blank one stands twice"),
    ],
)
def test_damaged_markers_are_named_with_file_and_line(old, new, line, words):
    assert SOLUTION.count(old) == 1
    with pytest.raises(DamagedFile) as raised:
        blanks.split(SOLUTION.replace(old, new), "some/file.mojo")
    assert str(raised.value).startswith(f"some/file.mojo:{line}: ")
    assert words in str(raised.value)
    assert raised.value.exit_code == 2


code_lines = st.lists(st.sampled_from(["    x = 1", "    # note", "", "\ty()", "    # ANCHOR: a_solution"]))


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
    """A solutions folder with one Mojo file, a picture and a wrong kernel, and where problems go."""
    solutions, problems = tmp_path / "solutions", tmp_path / "problems"
    (solutions / "p1" / "op").mkdir(parents=True)
    (solutions / "p1" / "wrong").mkdir()
    (solutions / "p1" / "op" / "kernel.mojo").write_text(SOLUTION)
    (solutions / "p1" / "op" / "picture.png").write_bytes(b"\x89PNG")
    (solutions / "p1" / "wrong" / "bug.mojo").write_text("bug\n")
    return solutions, problems


def test_generate_writes_skeletons_of_sources_only(folders):
    solutions, problems = folders
    assert blanks.generate(solutions, problems) == [problems / "p1" / "op" / "kernel.mojo"]
    assert [path for path in problems.rglob("*") if path.is_file()] == [
        problems / "p1" / "op" / "kernel.mojo"
    ]
    assert (problems / "p1" / "op" / "kernel.mojo").read_text() == PROBLEM
    assert blanks.generate(solutions, problems) == []


def test_generate_follows_a_changed_solution_where_nothing_is_filled_in(folders):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    source = solutions / "p1" / "op" / "kernel.mojo"
    source.write_text(SOLUTION.replace("between()", "elsewhere()"))
    blanks.generate(solutions, problems)
    assert "elsewhere()" in (problems / "p1" / "op" / "kernel.mojo").read_text()


def test_generate_never_overwrites_work_without_force(folders, capsys):
    solutions, problems = folders
    blanks.generate(solutions, problems)
    target = problems / "p1" / "op" / "kernel.mojo"
    work = target.read_text().replace("    # FILL IN (about 1 line)", "    my_work()")
    target.write_text(work)
    arguments = ["--solutions", str(solutions), "--problems", str(problems)]
    assert blanks.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {target}: a blank holds work; --force overwrites it\n"
    assert target.read_text() == work
    assert blanks.main([*arguments, "--force"]) == 0
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
    arguments = ["--solutions", str(solutions), "--problems", str(problems), "--check"]
    assert blanks.main(arguments) == 1
    assert "+    before()" in capsys.readouterr().out
    assert not problems.exists()
    blanks.generate(solutions, problems)
    assert blanks.main(arguments) == 0
    assert capsys.readouterr().out == ""


# ---- The checkout's own problems ----------------------------------------------------------------------------

PAIRS = blanks.sources(ROOT / "solutions")


def test_the_solution_has_the_seven_blanks_and_the_gates_have_their_ids(puzzle):
    found = blanks.find((ROOT / "solutions" / "p22" / "op" / puzzle.source).read_text())
    assert set(found) == {"ln", "forward", "row_sums", "db", "dW", "dgamma", "dx"}
    assert {gate.id for gate in puzzle.gates} == set(found)
    assert all(blank.size > 0 for blank in found.values())


@pytest.mark.parametrize("relative", PAIRS, ids=str)
def test_problems_equal_the_skeleton_outside_the_blanks(relative):
    problem = (ROOT / "problems" / relative).read_text()
    wanted = blanks.skeleton((ROOT / "solutions" / relative).read_text())
    assert blanks.outside(problem) == blanks.outside(wanted)


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


def test_problems_hold_no_file_that_solutions_lack():
    assert blanks.sources(ROOT / "problems") == PAIRS
