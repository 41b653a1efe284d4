"""The ladder of puzzle 28: the solution is right and keeps every limit, and the forms that blanks are given with cost what the
spec says."""

import shutil

import pytest

from harness.check.checker import Checker
from harness.learner import blanks
from harness.puzzles.p28.spec import GATES, PUZZLE
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

COUNTED = [case for case in PUZZLE.cases(None) if case.counted]
AROUND = ("layouts", "epilogue")
"""Steps whose given form has launches of its own around the product."""
SOLUTION = roots.solutions() / "p28" / "op"


@pytest.fixture(scope="module")
def first_forms(tmp_path_factory) -> OpPackage:
    """The solution's package with the code that blanks are given with, as if somebody had written it."""
    folder = tmp_path_factory.mktemp("first") / "op"
    shutil.copytree(SOLUTION, folder, symlinks=False)
    text = (folder / "fast.mojo").read_text()
    bodies = {id: blank.given for id, blank in blanks.find(text).items()}
    (folder / "fast.mojo").write_text(blanks.join(blanks.split(text), bodies))
    return OpPackage(folder)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_solution_keeps_every_limit(dtype):
    for result in Checker(PUZZLE, dtype=dtype).check(SOLUTION, cases=COUNTED):
        assert result.state == "correct", (result.gate.id, result.diagnosis)
        assert [cost.limit for cost in result.costs] == list(result.gate.limits)
        assert result.costs[0].value < result.costs[0].limit.first[dtype] / 1.5


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_forms_are_right_and_cost_what_the_spec_says(first_forms, dtype):
    for result in Checker(PUZZLE, dtype=dtype).check(first_forms, cases=COUNTED):
        assert all(verdict.ok for c in result.comparisons for verdict in c.verdicts.values()), result.gate.id
        for cost in result.costs:
            assert cost.value == pytest.approx(cost.limit.first[dtype], rel=0.01), (
                result.gate.id,
                cost.limit.id,
            )
        own = result.costs[0]
        assert (result.state, result.mistake) == ("wrong", own.limit.id)
        blank = blanks.find((first_forms.path / "fast.mojo").read_text())[result.gate.id]
        file, _, number = own.line.rpartition(":")
        if result.gate.id in AROUND:
            assert file.endswith("parts.mojo"), "what costs most is a launch that the blank makes needless"
        else:
            last = blank.line + len(blank.body)
            assert blank.line <= int(number) < last, "the line that costs most is the blank's"


@pytest.mark.compiles
def test_the_report_has_a_table_of_costs(command_line):
    finished = command_line("p28", "--backward", "--solution", "--device", "virtual")
    assert finished.code == 0, finished.out + finished.err
    rows = [line.split() for line in finished.out.splitlines()]
    for gate in GATES:
        of_gate = [row for row in rows if row and row[0] == gate.id and row[-1] == "✅"]
        assert len(of_gate) == len(gate.limits)
    assert "Overall Result: ✅ ALL CORRECT" in finished.out
