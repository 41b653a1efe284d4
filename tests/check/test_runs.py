"""A run as data: which package and quantities, what waits for a blank, and the verdict in one number."""

import pytest
from typed import stand_in

from harness.check import runs
from harness.check.compare import Repeats, Verdict
from harness.check.results import Comparison
from harness.check.runs import DeviceResult, Options, Run, VariantResult
from harness.devices.targets import Skipped, Target
from harness.devices.virtual import Finding
from harness.errors import BadUse, DamagedFile
from harness.learner.blanks import Blank
from harness.learner.work import package_blanks
from harness.spec import catalogue
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import MojoRung
from harness.toolchain.packages import OpPackage

RIGHT = Verdict(True, 1e-8, 1e-8, 1e-6, 1e-8)
WRONG = Verdict(False, 1e-2, 1e-8, 1e-6, 1e-2)
READ = Finding("uninitialised read", True, "a.mojo:1:1", 1, "error: uninitialised read")
RACE = Finding("global race", True, "a.mojo:2:1", 1, "error: global race")
NOTE = Finding("global race", False, "library", 1, "note: global race")


def variant(verdict=RIGHT, unsolved=(), repeats=None) -> VariantResult:
    """A variant that was compared in one case."""
    case = stand_in(Case, name="chapter")
    verdicts = {q: verdict for q in ("output", "grad_input") if q not in unsolved}
    waiting = {quantity: ("dx",) for quantity in unsolved}
    return VariantResult("fused", [Comparison(case, verdicts)], waiting, repeats or {})


def run_of(*kinds, verdict=RIGHT, unsolved=(), repeats=None, findings=(), size=3, gpu=True) -> Run:
    """A run on devices of these kinds, all with the same result, of a puzzle with kernels for GPUs or without."""
    blanks = {"dx": stand_in(Blank, body=("a line",) * size)}
    devices = [
        DeviceResult(
            Target(kind, None, ""),
            True,
            0.1,
            0.1,
            {"fused": variant(verdict, unsolved, repeats)},
            list(findings),
        )
        for kind in kinds
    ]
    waiting = ["dx"] if unsolved else []
    gate = Gate("dx", "fused", ("grad_input",), given=("output",))
    puzzle = stand_in(Puzzle, gpu=gpu, gates=(gate,), rungs=(stand_in(MojoRung, gates=("dx",)),))
    options = stand_in(Options, puzzle=puzzle)
    return Run(options, stand_in(OpPackage), [], ["output", "grad_input"], devices, [], blanks, None, waiting)


# ---- The verdict in one number ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpu", "virtual"])
def test_0_is_all_correct_with_gpu_kernels_run(kind):
    assert run_of("cpu", kind).exit_code() == 0
    assert run_of(kind).exit_code() == 0


def test_6_is_all_correct_with_gpu_kernels_run_nowhere():
    assert run_of("cpu").exit_code() == 6
    assert run_of().exit_code() == 6


def test_0_is_all_correct_where_there_are_no_gpu_kernels():
    assert run_of("cpu", gpu=False).exit_code() == 0
    assert run_of("cpu", gpu=False, verdict=WRONG).exit_code() == 1


def test_1_is_anything_wrong_before_unsolved():
    assert run_of("cpu", verdict=WRONG).exit_code() == 1
    assert run_of("cpu", "gpu", verdict=WRONG, unsolved=["grad_input"], size=0).exit_code() == 1


def test_3_is_unsolved_with_nothing_attempted_wrong():
    assert run_of("cpu", unsolved=["grad_input"], size=0).exit_code() == 3
    assert run_of("cpu", "virtual", unsolved=["grad_input"], size=0).exit_code() == 3


def test_a_wrong_run_among_repeated_ones_is_wrong():
    assert run_of("gpu", repeats={"grad_input": Repeats(200, False, 3.0, 1, True)}).exit_code() == 1
    assert run_of("gpu", repeats={"grad_input": Repeats(200, False, 3.0, 0, True)}).exit_code() == 0


def test_a_spread_is_wrong_where_the_order_of_sums_is_fixed():
    assert run_of("gpu", repeats={"grad_input": Repeats(200, False, 1.0, 0)}).exit_code() == 1
    assert run_of("gpu", repeats={"grad_input": Repeats(200, True, 0.0, 0)}).exit_code() == 0


def test_a_finding_is_wrong_and_a_note_is_not():
    assert run_of("virtual", findings=[RACE]).exit_code() == 1
    assert run_of("virtual", findings=[NOTE]).exit_code() == 0


def test_what_an_untouched_blank_left_unwritten_may_be_read():
    waiting = {"unsolved": ["grad_input"], "size": 0}
    assert run_of("virtual", findings=[READ], **waiting).exit_code() == 3
    assert run_of("virtual", findings=[READ]).exit_code() == 1, "with every blank worked on it is a mistake"
    assert run_of("virtual", findings=[READ, RACE], **waiting).exit_code() == 1


def test_state_names_the_worst():
    quantities = ["output", "grad_input"]
    assert variant().state(quantities) == "correct"
    assert variant(unsolved=["grad_input"]).state(quantities) == "unsolved"
    assert variant(unsolved=["grad_input"]).state(["output"]) == "correct"
    assert variant(WRONG, unsolved=["grad_input"]).state(quantities) == "wrong"


# ---- What a run takes ---------------------------------------------------------------------------------------


def test_puzzles_are_found_by_name(puzzle):
    assert "p22" in catalogue.puzzle_names()
    assert catalogue.find_puzzle("p22") is puzzle
    with pytest.raises(BadUse, match=r"unknown puzzle 'p1'; there is p.*p22"):
        catalogue.find_puzzle("p1")


def test_quantities_follow_the_question(puzzle):
    assert runs.quantities_of(Options(puzzle, backward=False)) == ["output", "mean", "rstd"]
    whole = runs.quantities_of(Options(puzzle))
    assert whole[:3] == ["output", "mean", "rstd"] and {"grad_input", "row_sums"} <= set(whole)
    assert runs.quantities_of(Options(puzzle, gate="dgamma")) == ["grad_ln_weight", "grad_ln_bias"]


def test_only_gpu_kernels_wait_for_blanks(puzzle):
    gpu, cpu = Target("gpu", None, ""), Target("cpu", None, "")
    quantities = [*puzzle.forward, *puzzle.backward]
    empty = {"dx", "ln"}
    assert runs.unsolved(puzzle, "fused", cpu, quantities, empty) == {}
    assert runs.unsolved(puzzle, "fused", gpu, quantities, empty) == {"grad_input": ("dx",)}
    assert runs.unsolved(puzzle, "unfused", gpu, quantities, empty) == {
        "output": ("ln",),
        "grad_weight": ("ln",),
    }
    assert runs.unsolved(puzzle, "fused", gpu, quantities, set()) == {}


def test_a_package_without_the_puzzle_s_file_has_no_blanks(puzzle, solution, copied_package):
    assert list(package_blanks(solution, puzzle)) == [gate.id for gate in puzzle.kernel_gates]
    (copied_package.path / copied_package.source).unlink()
    from harness.toolchain.packages import OpPackage

    assert package_blanks(OpPackage(copied_package.path), puzzle) == {}


def test_a_damaged_marker_stops_a_run_before_anything_compiles(puzzle, copied_package):
    copied_package.replace("    # BLANK-END row_sums\n", "")
    compiled = []
    with pytest.raises(DamagedFile):
        runs.run(Options(puzzle, root=str(copied_package.path)), on_compile=compiled.append)
    assert not compiled


TRANSFER = {"rms_grad_input", "grad_rms_weight", "rms_grad_weight"}
"""What the last gate's variant alone computes, which runs on request."""


@pytest.mark.compiler
def test_a_run_on_the_cpu_judges_everything(puzzle):
    ready = []
    options = Options(puzzle, root="solutions", device="cpu", dims=(2, 3, 5, 7), seed=9, repeat=2)
    run = runs.run(options, on_ready=lambda target, program: ready.append(target.kind))
    assert ready == ["cpu"] and run.exit_code() == 6 and run.unsolved == []
    (device,) = run.devices
    assert set(device.variants) == {"fused", "unfused"}
    for name, result in device.variants.items():
        assert [c.case.name for c in result.comparisons] == ["chapter", "hard values"]
        compared = set(result.comparisons[0].verdicts)
        own = {"row_sums"} if name == "fused" else set()
        assert compared == set(run.quantities) - TRANSFER - own
        assert set(result.repeats) == set(puzzle.backward) - TRANSFER
        assert all(
            seen.runs == 2 and seen.bit_equal and not seen.wrong_runs for seen in result.repeats.values()
        )


def test_a_skipped_device_is_no_result():
    run = run_of("cpu")
    run.skipped.append(Skipped("gpu", "no GPU"))
    assert run.exit_code() == 6 and run.errors() == []


def test_kernels_that_are_chosen_by_size_are_recorded_at_every_size():
    from harness.check.runs import Options, recorded_dims
    from harness.puzzles.p22.spec import PUZZLE

    cases = PUZZLE.cases(None)
    assert recorded_dims(Options(puzzle=PUZZLE, variants=("fused", "unfused")), cases) == [PUZZLE.dims]
    fast = recorded_dims(Options(puzzle=PUZZLE, variants=("fast",)), cases)
    assert set(fast) == {PUZZLE.dims, *(case.dims for case in cases)} and len(fast) == len(set(fast))


# ---- What counts as passed ----------------------------------------------------------------------------------


def test_a_run_on_a_gpu_passes_its_gates_and_one_on_the_cpu_none():
    assert runs.judged_gates(run_of("cpu", "virtual")) == runs.judged_gates(run_of("gpu")) == {"dx": True}
    assert runs.judged_gates(run_of("cpu")) == {}, "the CPU path holds no blank"
    assert runs.judged_gates(run_of("virtual", verdict=WRONG)) == {"dx": False}
    assert runs.judged_gates(run_of("virtual", findings=[RACE])) == {"dx": False}
    assert runs.judged_gates(run_of("virtual", unsolved=["grad_input"], size=0)) == {}
