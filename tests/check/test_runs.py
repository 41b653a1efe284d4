"""A run as data: which package and quantities, what waits for a blank, and the verdict in one number."""

from dataclasses import replace

import pytest
from typed import stand_in

from harness.check import runs
from harness.check.compare import Repeats, TensorResult
from harness.check.execution import Outcome
from harness.check.grading import Grader
from harness.check.options import Options
from harness.check.reference import Reference
from harness.check.results import Comparison, GateResult, VariantResult
from harness.check.runs import DeviceResult, Run
from harness.devices.targets import VIRTUAL, Skipped, Target
from harness.errors import BadUse, DamagedFile
from harness.learner.blanks import Blank
from harness.learner.work import package_blanks
from harness.screens import report
from harness.spec import catalogue
from harness.spec.puzzle import Case, Gate
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.errors import VirtualGPUError

RIGHT = TensorResult(True, 1e-8, 1e-8, 1e-6, 1e-8)
WRONG = TensorResult(False, 1e-2, 1e-8, 1e-6, 1e-2)
READ = Finding("uninitialised read", "reads what nobody wrote", "a.mojo:1:1")
RACE = Finding("global race", "two blocks", "a.mojo:2:1")


def variant(verdict=RIGHT, unsolved=(), repeats=None, errors=()) -> VariantResult:
    """A variant that was compared in one case."""
    case = stand_in(Case, name="chapter")
    verdicts = {q: verdict for q in ("output", "grad_input") if q not in unsolved}
    waiting = {quantity: ("dx",) for quantity in unsolved}
    result = VariantResult("fused", [Comparison(case, verdicts)], waiting, repeats or {})
    result.findings, result.errors = list(errors), list(errors)
    return result


def run_of(*kinds, verdict=RIGHT, unsolved=(), repeats=None, findings=(), size=3) -> Run:
    """A run on devices of these kinds, all with the same result."""
    blanks = {"dx": stand_in(Blank, body=("a line",) * size)}
    devices = [
        DeviceResult(
            Target(kind, None, ""), True, 0.1, {"fused": variant(verdict, unsolved, repeats, findings)}
        )
        for kind in kinds
    ]
    waiting = ["dx"] if unsolved else []
    return Run(
        stand_in(Options),
        stand_in(OpPackage),
        [],
        ["output", "grad_input"],
        devices,
        [],
        blanks,
        None,
        waiting,
    )


# ---- The verdict in one number ------------------------------------------------------------------------------


DX_LEFT = {"unsolved": ["grad_input"], "size": 0}


@pytest.mark.parametrize(
    ("code", "kinds", "settings"),
    [
        (0, ["cpu", "gpu"], {}), (0, ["cpu", "virtual"], {}), (0, ["gpu"], {}), (0, ["virtual"], {}),
        (6, ["cpu"], {}), (6, [], {}),
        (1, ["cpu"], {"verdict": WRONG}), (1, ["cpu", "gpu"], {"verdict": WRONG, **DX_LEFT}),
        (3, ["cpu"], DX_LEFT), (3, ["cpu", "virtual"], DX_LEFT),
        (1, ["virtual"], {"findings": [RACE]}),
        # a wrong run among repeated ones, and a spread where the order of sums is fixed
        (1, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 3.0, 1, True)}}),
        (0, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 3.0, 0, True)}}),
        (1, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 1.0, 0)}}),
        (0, ["gpu"], {"repeats": {"grad_input": Repeats(200, True, 0.0, 0)}}),
    ],
)  # fmt: skip
def test_exit_code(code, kinds, settings):
    """0: all correct, GPU kernels run; 1: anything wrong; 3: unsolved and nothing attempted wrong; 6: GPU kernels not run."""
    assert run_of(*kinds, **settings).exit_code() == code


def test_a_variant_that_did_not_end_is_wrong():
    result = variant()
    result.failure = "a launch did not end"
    assert result.state(["output"]) == "wrong"


class Stopped:
    """A virtual GPU that has found something in the first case, and come no further."""

    target, cached, seconds = VIRTUAL, True, 0.0

    def __init__(self, *findings, failure=None):
        self.findings, self.failure = list(findings), failure

    def outcome(self, variant, cases, reference) -> Outcome:
        return Outcome({}, self.findings, self.failure)

    def outputs(self, variant, case, reference):
        raise AssertionError("nothing runs again")


def counted(puzzle, package, finding, *, empty=()) -> list[Finding]:
    """The errors that a judge counts where a finding lies in no blank, and some blanks are untouched."""
    by_id = {
        id: replace(blank, body=()) if id in empty else blank
        for id, blank in package_blanks(package, puzzle).items()
    }
    judge = Grader(Reference(puzzle, "float32", 0), package, by_id)
    return judge.variant(Stopped(finding), "fused").errors


def test_what_an_untouched_blank_left_unwritten_may_be_read(puzzle, solution):
    assert counted(puzzle, solution, READ, empty=["db"]) == []
    assert counted(puzzle, solution, READ) == [READ], "with every blank worked on it is a mistake"
    assert counted(puzzle, solution, RACE, empty=["db"]) == [RACE]


def test_a_note_is_no_error_and_an_error_in_no_blank_is_every_gate_s(puzzle, solution):
    note = Finding("global race", "two blocks", "library", is_error=False)
    assert counted(puzzle, solution, note) == []
    judge = Grader(Reference(puzzle, "float32", 0), solution, package_blanks(solution, puzzle))
    result = judge.variant(Stopped(RACE), "fused")
    assert {gate.gate.id: gate.state for gate in result.gates} == dict.fromkeys(
        ("forward", "db", "dW", "dgamma", "dx"), "wrong"
    )
    assert all("global race" in " ".join(gate.diagnosis) for gate in result.gates)


def test_what_did_not_end_is_not_run_again(puzzle, solution):
    judge = Grader(Reference(puzzle, "float32", 0), solution, {}, ["fused"], puzzle.cases(None)[:1], runs=3)
    judge.repeated = ["grad_input"]
    result = judge.on(Stopped(failure=VirtualGPUError("a launch did not end")))["fused"]
    assert result.failure == "a launch did not end" and result.repeats == {}
    assert {gate.state for gate in result.gates} == {"wrong"}


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
    assert Options(puzzle, backward=False).quantities == ["output", "mean", "rstd"]
    whole = Options(puzzle).quantities
    assert whole[:3] == ["output", "mean", "rstd"] and {"grad_input", "row_sums"} <= set(whole)
    assert Options(puzzle, gate="dgamma").quantities == ["grad_ln_weight", "grad_ln_bias"]


def test_only_gpu_kernels_wait_for_blanks(puzzle, solution):
    by_id = {
        id: replace(blank, body=()) if id in ("dx", "ln") else blank
        for id, blank in package_blanks(solution, puzzle).items()
    }
    quantities = [*puzzle.forward, *puzzle.backward]
    judge = Grader(Reference(puzzle, "float32", 0), solution, by_id, quantities=quantities)

    def waits(kind, variant):
        device = Stopped()
        device.target = Target(kind, None, "")
        return judge.variant(device, variant).unsolved

    assert waits("cpu", "fused") == {}
    assert waits("gpu", "fused") == waits("virtual", "fused") == {"grad_input": ("dx",)}
    assert waits("gpu", "unfused") == {"output": ("ln",), "grad_weight": ("ln",)}


def test_a_package_without_the_puzzle_s_file_has_no_blanks(puzzle, solution, copied_package):
    assert list(package_blanks(solution, puzzle)) == [gate.id for gate in puzzle.kernel_gates]
    (copied_package.path / copied_package.source).unlink()
    from harness.toolchain.packages import OpPackage

    assert package_blanks(OpPackage(copied_package.path), puzzle) == {}


def test_a_damaged_marker_stops_a_run_before_anything_compiles(puzzle, copied_package):
    copied_package.replace("    # BLANK-END row_sums\n", "")
    compiled = []
    options = Options(puzzle, root=str(copied_package.path))
    with pytest.raises(DamagedFile), runs.run(options, on_compile=compiled.append):
        pass
    assert not compiled


TRANSFER = {"rms_grad_input", "grad_rms_weight", "rms_grad_weight"}
"""What the last gate's variant alone computes, which runs on request."""


@pytest.mark.compiles
def test_a_run_on_the_cpu_judges_everything(puzzle):
    ready = []
    options = Options(puzzle, root="solutions", device="cpu", dims=(2, 3, 5, 7), seed=9, repeat=2)
    with runs.run(options, on_ready=lambda target: ready.append(target.kind)) as run:
        assert [*report.lines(run)]
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
            repeats.runs == 2 and repeats.bit_equal and not repeats.wrong_runs
            for repeats in result.repeats.values()
        )


def test_a_skipped_device_is_no_result():
    run = run_of("cpu")
    run.skipped.append(Skipped("gpu", "no GPU"))
    assert run.exit_code() == 6 and run.errors() == []


# ---- What counts as passed ----------------------------------------------------------------------------------


def passed(state, *kinds) -> dict[str, bool]:
    """The gates that a run has judged, of a puzzle with one whose verdict on every device but the CPU is given."""
    run = run_of(*kinds)
    gate = Gate("dx", "fused", ("grad_input",), given=("output",))
    for device in run.devices:
        (result,) = device.variants.values()
        if device.target.kind != "cpu":
            result.gates = [GateResult(gate, state, result.comparisons)]
    return runs.checked_gates(run)


def test_a_run_on_a_gpu_passes_its_gates_and_one_on_the_cpu_none():
    assert passed("correct", "cpu", "virtual") == passed("correct", "gpu") == {"dx": True}
    assert passed("correct", "cpu") == {}, "the CPU path holds no blank"
    assert passed("wrong", "virtual") == {"dx": False}


KERNELS = [name for name in catalogue.puzzle_names() if catalogue.find_puzzle(name).mojo_rung]


@pytest.mark.parametrize("kind", ["virtual", "gpu"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_whole_run_passes_a_gate_in_nothing_less_than_the_gate_s_own_check(name, kind, monkeypatch):
    """Of every gate of every puzzle: its own cases, and bfloat16 where the gate has it; what fails there fails the run."""
    puzzle, asked = catalogue.find_puzzle(name), {}
    options = Options(puzzle, root="solutions")
    judged = [gate for gate in options.gates if gate.quantities]

    class Asked:
        def __init__(self, puzzle, **settings):
            asked.update(settings)

        def check(self, package, gates, cases):
            asked.update(gates=gates, cases=cases)
            return [GateResult(gate, "wrong" if gate is judged[0] else "correct") for gate in judged]

    monkeypatch.setattr(runs, "Checker", Asked)
    compared = [Comparison(case, {}) for case in puzzle.cases(None)]
    variants = {
        each: VariantResult(
            each, gates=[GateResult(g, "correct", compared) for g in judged if g.variant == each]
        )
        for each in options.variants
    }
    devices = [DeviceResult(Target(kind, None, ""), variants=variants)]
    run = runs.Running(
        options, stand_in(OpPackage), puzzle.cases(None), options.quantities, devices, [], {}, None, []
    )  # fmt: skip
    own = [*puzzle.cases(None), *puzzle.gate_cases]
    assert runs.checked_gates(run) == {gate.id: True for gate in judged}
    run.compute_gates()
    further = {case.name for case in own} - {case.name for case in run.cases if kind == "virtual"}
    narrow = {case.name for case in own if case.in_16_bits}
    if not further | narrow:
        assert not asked, "the run has shown all"
        return
    assert {*asked["gates"]} == {gate.id for gate in judged} and asked["other"] == "bfloat16"
    assert {case.name for case in asked["cases"]} == further | narrow
    assert runs.checked_gates(run) == {gate.id: gate is not judged[0] for gate in judged}
    assert run.exit_code() == 1 and [result.gate for result in run.rejected] == judged[:1]


@pytest.mark.parametrize("settings", [{"dims": (2, 3, 8, 4)}, {"dtype": "bfloat16"}])
def test_a_run_of_other_sizes_or_in_another_dtype_judges_no_gate_further(settings, puzzle, monkeypatch):
    run = run_of("virtual")
    run.options = Options(puzzle, **settings)
    monkeypatch.setattr(runs, "checked_gates", lambda run: {"dx": True})
    assert run.gates_left() == []
