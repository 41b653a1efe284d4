"""Puzzle 28: the solution is within every limit, and the initial code has the specified cost."""

import shutil

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import Checker
from harness.check.execution import VirtualDevice
from harness.check.reference import Reference
from harness.devices.recorder import record
from harness.learner import blanks
from harness.puzzles.p28.spec import GATES, PUZZLE, TENSOR_CORE_DIMS
from harness.puzzles.p28.whole_pass import CostTotal, compute_initial_costs, count_costs, sum_totals
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

COUNTED = [case for case in PUZZLE.list_cases(None) if case.checks_limits]
DTYPES = (pytest.param("float32", marks=pytest.mark.slow), "bfloat16")
STEPS_WITH_EXTRA_LAUNCHES = ("layouts", "epilogue")
"""Steps whose initial code has launches in addition to the GEMM."""
LAUNCHES = {
    "rows": ("rows",),
    "dx": ("dx",),
    "dgamma": ("clear", "dgamma", "second_stage"),
    "layouts": ("transpose",),
    "epilogue": ("bias", "column_sums"),
}
"""Step -> its launches in the initial full pass; the GEMMs are those of `tiled`."""
SOLUTION = roots.get_solutions() / "p28" / "op"


PRODUCTS = [
    Case("output", "", (128, 96, 32), "hard", checks_limits=True),
    Case("dln", "", (128, 32, 96), "hard", checks_limits=True),
    Case("dweight", "", (32, 128, 96), "hard", checks_limits=True),
]


def write_initial_package(folder) -> OpPackage:
    """Copy the solution's package, reset every blank to its initial code, and return the copy."""
    shutil.copytree(SOLUTION, folder, symlinks=False)
    text = (folder / "fast.mojo").read_text()
    bodies = {id: blank.provided for id, blank in blanks.find_blanks(text).items()}
    (folder / "fast.mojo").write_text(blanks.join_segments(blanks.split_blanks(text), bodies))
    return OpPackage(folder)


def list_orders(folder, tests):
    """Return the recordings to make: all cases of the command in both dtypes, and the fewer of other tests."""
    steps, initial = [gate.variant for gate in GATES], write_initial_package(folder / "op")
    orders = {
        f"solution {dtype}": make_order("p28", PUZZLE.list_cases(None), steps, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    }
    for dtype in list_values(tests, "dtype"):
        orders[f"steps {dtype}"] = make_order("p28", COUNTED, steps, initial, dtype)
        orders[f"pass {dtype}"] = make_order("p28", PRODUCTS, (*LAUNCHES, "tiled"), initial, dtype)
    return orders


@pytest.fixture(scope="module")
def initial_package(recorded) -> OpPackage:
    return next(order.package for name, order in recorded.items() if name.startswith("pass"))


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("dtype", DTYPES)
def test_solution_is_correct_within_all_limits(dtype):
    for result in Checker(PUZZLE, dtype=dtype).check(SOLUTION, cases=COUNTED):
        assert result.state == "correct", (result.gate.id, result.diagnosis)
        assert [cost.limit for cost in result.costs] == list(result.gate.limits)
        assert result.costs[0].value < result.costs[0].limit.initial_costs[dtype] / 1.5


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_initial_code_is_correct_with_the_specified_cost(initial_package, dtype):
    for result in Checker(PUZZLE, dtype=dtype).check(initial_package, cases=COUNTED):
        assert all(value.ok for c in result.comparisons for value in c.results.values()), result.gate.id
        for cost in result.costs:
            assert cost.value == pytest.approx(cost.limit.initial_costs[dtype], rel=0.01), (
                result.gate.id,
                cost.limit.id,
            )
        cost = result.costs[0]
        assert (result.state, result.mistake) == ("wrong", cost.limit.id)
        blank = blanks.find_blanks((initial_package.path / "fast.mojo").read_text())[result.gate.id]
        file, _, number = cost.line.rpartition(":")
        if result.gate.id in STEPS_WITH_EXTRA_LAUNCHES:
            assert file.endswith("parts.mojo"), (
                "the costliest launch is unnecessary after the blank is solved"
            )
        else:
            last = blank.line + len(blank.body)
            assert blank.line <= int(number) < last, "the costliest line is in the blank"


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
def test_report_has_a_cost_table(command_line):
    result = command_line("p28", "--backward", "--solution", "--device", "virtual")
    assert result.code == 0, result.out + result.err
    rows = [line.split() for line in result.out.splitlines()]
    for gate in GATES:
        of_gate = [row for row in rows if row and row[0] == gate.id and row[-1] == "✅"]
        assert len(of_gate) == len(gate.limits)
    assert "Overall Result: ✅ ALL CORRECT" in result.out
    totals = {row[0]: [int(cell.replace(",", "")) for cell in row[1:]] for row in rows
             if len(row) == 4 and row[0] in ("given", "yours")}  # fmt: skip
    rows, hidden, outputs = TENSOR_CORE_DIMS
    initial = sum_totals([*compute_initial_costs(TENSOR_CORE_DIMS, 4).values()])
    assert totals["given"] == [*initial] and initial.launches == 13
    assert totals["yours"][:2] == [8, count_bytes()]
    remainder = totals["yours"][2] - 3 * 2 * rows * hidden * outputs - 16 * rows * outputs
    assert 20 * rows * hidden < remainder < 40 * rows * hidden, "LayerNorm's, after db by mma"


def count_bytes() -> int:
    """Compute the bytes moved by the solution's full pass from the shapes."""
    rows, hidden, outputs = TENSOR_CORE_DIMS
    x, dy, weight = rows * hidden, rows * outputs, outputs * hidden
    layernorm = 4 * x  # x, y and for each row gamma and beta
    dx = 4 * x + 6 * 2 * 32 * rows  # a lane reads mean and rstd again for each of its 6 vectors
    sums = 2 * hidden * rows // 32
    dgamma = (
        2 * x + x // 2 + 3 * sums + 2 * 2 * hidden
    )  # mean and rstd for each vector; the results count twice
    output = (
        2 * x + weight + dy + 8 * 32 * 12
    )  # blocks of 128 x 96: two read x; a lane of 8 warps has 12 columns
    dln = 8 * dy + weight + x
    dweight = 8 * dy + 2 * x + weight + outputs  # blocks of 96 x 96
    return 4 * (layernorm + dx + dgamma) + 2 * (output + dln + dweight)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_initial_pass_cost_matches_the_counters(recorded, dtype):
    """The spec's formulas match each launch's counters with two slabs of rows."""
    order = recorded[f"pass {dtype}"]
    device = VirtualDevice(record(order), order.package.path / "fast.mojo")
    reference = Reference(PUZZLE, dtype, 0)
    got: dict[str, CostTotal] = {}
    for step, names in LAUNCHES.items():
        launches = device.run_cases(step, PRODUCTS[:1], reference).launches["output"]
        for name in names:
            got[name] = count_costs([launch for launch in launches if launch.name == name])
    expected = compute_initial_costs(PRODUCTS[0].dims, 2 if dtype == "bfloat16" else 4)
    if dtype == "bfloat16":  # in which the whole pass has its products
        naive = device.run_cases("tiled", PRODUCTS, reference).launches
        got |= {name: count_costs(launches) for name, launches in naive.items()}
    else:
        expected = {
            name: total for name, total in expected.items() if name not in {case.name for case in PRODUCTS}
        }
    assert got == expected
