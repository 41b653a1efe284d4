"""The ladder of puzzle 28: the solution is right and keeps every limit, and the forms that blanks are given with cost what the
spec says."""

import shutil

import pytest

from harness.check.checker import Checker
from harness.check.execution import VirtualDevice
from harness.check.reference import Reference
from harness.devices.recorder import Order, record_one
from harness.learner import blanks
from harness.puzzles.p28.spec import GATES, LARGE, PUZZLE
from harness.puzzles.p28.whole_pass import Total, add_up, costs_of_first_forms, count_costs
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

COUNTED = [case for case in PUZZLE.cases(None) if case.counted]
AROUND = ("layouts", "epilogue")
"""Steps whose given form has launches of its own around the product."""
LAUNCHES = {
    "rows": ("rows",),
    "dx": ("dx",),
    "dgamma": ("clear", "dgamma", "second_stage"),
    "layouts": ("transpose",),
    "epilogue": ("bias", "column_sums"),
}
"""Launches of the whole pass in its first form, by the step that makes them; its products are those of `tiled`."""
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
    whole = {row[0]: [int(cell.replace(",", "")) for cell in row[1:]] for row in rows
             if len(row) == 4 and row[0] in ("given", "yours")}  # fmt: skip
    rows, hidden, outputs = LARGE
    given = add_up([*costs_of_first_forms(LARGE, 4).values()])
    assert whole["given"] == [*given] and given.launches == 13
    assert whole["yours"][:2] == [8, bytes_by_hand()]
    beside = whole["yours"][2] - 3 * 2 * rows * hidden * outputs - (16 + 1) * rows * outputs
    assert 20 * rows * hidden < beside < 40 * rows * hidden, "LayerNorm's, after db by mma and the bias"


def bytes_by_hand() -> int:
    """Count the bytes of the solution's whole pass: each matrix as often as it is read or written."""
    rows, hidden, outputs = LARGE
    x, dy, weight = rows * hidden, rows * outputs, outputs * hidden
    layernorm = 4 * x  # x, y and for each row gamma and beta
    dx = 4 * x + 6 * 2 * 32 * rows  # a lane reads mean and rstd again for each of its 6 vectors
    sums = 2 * hidden * rows // 64
    dgamma = 4 * x + 3 * sums + 2 * 2 * hidden  # mean and rstd for each element; the results count twice
    output = 2 * x + weight + 2 * dy  # blocks of 128 x 96: two read x; and the bias for every result
    dln = 8 * dy + weight + x
    dweight = 8 * dy + 2 * x + weight + outputs  # blocks of 96 x 96
    return 4 * (layernorm + dx + dgamma) + 2 * (output + dln + dweight)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_forms_of_the_whole_pass_cost_what_counters_say(first_forms, dtype):
    """The formulas from shapes are each launch's counters, here with two slabs of rows."""
    dims = rows, hidden, outputs = 128, 96, 32
    products = {"output": dims, "dln": (rows, outputs, hidden), "dweight": (outputs, rows, hidden)}
    cases = [Case(name, "", sizes, "hard", counted=True) for name, sizes in products.items()]
    order = Order(first_forms, tuple(products.values()), (*LAUNCHES, "tiled"), True, dtype)
    device = VirtualDevice(record_one(order, "p28"), first_forms.path / "fast.mojo")
    reference = Reference(PUZZLE, dtype, 0)
    got: dict[str, Total] = {}
    for step, names in LAUNCHES.items():
        launches = device.outcome(step, cases[:1], reference).launches["output"]
        for name in names:
            got[name] = count_costs([launch for launch in launches if launch.name == name])
    expected = costs_of_first_forms(dims, 2 if dtype == "bfloat16" else 4)
    if dtype == "bfloat16":  # in which the whole pass has its products
        naive = device.outcome("tiled", cases, reference).launches
        got |= {name: count_costs(launches) for name, launches in naive.items()}
    else:
        expected = {name: total for name, total in expected.items() if name not in products}
    assert got == expected
