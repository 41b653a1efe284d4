"""Runs of a puzzle: package, quantities, unsolved blanks and exit code."""

from dataclasses import replace

import pytest
from typed import make_stub

from harness.check import runs
from harness.check.compare import Repeats, TensorResult
from harness.check.execution import Outcome
from harness.check.grading import Grader
from harness.check.options import Options
from harness.check.reference import Reference
from harness.check.results import Comparison, GateResult, VariantResult
from harness.check.runs import DeviceResult, Run
from harness.devices.targets import VIRTUAL, SkippedDevice, Target
from harness.errors import DamagedFile
from harness.learner.blanks import Blank
from harness.learner.exercise import read_package_blanks
from harness.screens import report
from harness.spec import catalogue
from harness.spec.puzzle import Case, Gate
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.errors import VirtualGPUError

CORRECT = TensorResult(True, 1e-8, 1e-8, 1e-6, 1e-8)
WRONG = TensorResult(False, 1e-2, 1e-8, 1e-6, 1e-2)
UNINITIALIZED_READ = Finding("uninitialised read", "reads an unwritten element", "a.mojo:1:1")
RACE = Finding("global race", "two blocks", "a.mojo:2:1")


def make_variant(result=CORRECT, unsolved=(), repeats=None, errors=()) -> VariantResult:
    case = make_stub(Case, name="chapter")
    results = {q: result for q in ("output", "grad_input") if q not in unsolved}
    waiting = {quantity: ("dx",) for quantity in unsolved}
    variant_result = VariantResult("fused", [Comparison(case, results)], waiting, repeats or {})
    variant_result.findings, variant_result.errors = list(errors), list(errors)
    return variant_result


def make_run(*kinds, result=CORRECT, unsolved=(), repeats=None, findings=(), size=3) -> Run:
    """Create a run on devices of these kinds with equal results."""
    blanks = {"dx": make_stub(Blank, body=("a line",) * size)}
    devices = []
    for kind in kinds:
        variants = {"fused": make_variant(result, unsolved, repeats, findings)}
        devices.append(DeviceResult(Target(kind, None, ""), True, 0.1, variants))
    waiting = ["dx"] if unsolved else []
    quantities = ["output", "grad_input"]
    return Run(make_stub(Options), make_stub(OpPackage), [], quantities, devices, [], blanks, None, waiting)


DX_UNSOLVED = {"unsolved": ["grad_input"], "size": 0}


@pytest.mark.parametrize(
    ("code", "kinds", "settings"),
    [
        (0, ["cpu", "gpu"], {}), (0, ["cpu", "virtual"], {}), (0, ["gpu"], {}), (0, ["virtual"], {}),
        (6, ["cpu"], {}), (6, [], {}),
        (1, ["cpu"], {"result": WRONG}), (1, ["cpu", "gpu"], {"result": WRONG, **DX_UNSOLVED}),
        (3, ["cpu"], DX_UNSOLVED), (3, ["cpu", "virtual"], DX_UNSOLVED),
        (1, ["virtual"], {"findings": [RACE]}),
        # one of the repeated runs is wrong, or results differ although the order of sums is fixed
        (1, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 3.0, 1, True)}}),
        (0, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 3.0, 0, True)}}),
        (1, ["gpu"], {"repeats": {"grad_input": Repeats(200, False, 1.0, 0)}}),
        (0, ["gpu"], {"repeats": {"grad_input": Repeats(200, True, 0.0, 0)}}),
    ],
)  # fmt: skip
def test_exit_code_summarizes_the_run(code, kinds, settings):
    """0: all correct, GPU kernels run; 1: anything wrong; 3: unsolved and nothing attempted wrong; 6: GPU kernels not run."""
    assert make_run(*kinds, **settings).compute_exit_code() == code


class StoppedDevice:
    """Stub of a virtual GPU that stops with findings in the first case."""

    target, cached, compile_seconds = VIRTUAL, True, 0.0

    def __init__(self, *findings, failure=None):
        self.findings, self.failure = list(findings), failure

    def run_cases(self, variant, cases, reference) -> Outcome:
        return Outcome({}, self.findings, self.failure)

    def run_case(self, variant, case, reference):
        raise AssertionError("no case must be run again")


def get_errors(puzzle, package, finding, *, empty=()) -> list[Finding]:
    """Return a variant's errors for a finding outside the blanks, with the `empty` blanks untouched."""
    by_id = {
        id: replace(blank, body=()) if id in empty else blank
        for id, blank in read_package_blanks(package, puzzle).items()
    }
    grader = Grader(Reference(puzzle, "float32", 0), package, by_id)
    return grader.grade_variant(StoppedDevice(finding), "fused").errors


def test_read_of_output_of_untouched_blank_is_ignored(puzzle, solution):
    assert get_errors(puzzle, solution, UNINITIALIZED_READ, empty=["db"]) == []
    assert get_errors(puzzle, solution, UNINITIALIZED_READ) == [UNINITIALIZED_READ], (
        "with every blank solved it is an error"
    )
    assert get_errors(puzzle, solution, RACE, empty=["db"]) == [RACE]


def test_error_outside_blanks_fails_every_gate(puzzle, solution):
    note = Finding("global race", "two blocks", "library", is_error=False)
    assert get_errors(puzzle, solution, note) == []
    grader = Grader(Reference(puzzle, "float32", 0), solution, read_package_blanks(solution, puzzle))
    result = grader.grade_variant(StoppedDevice(RACE), "fused")
    assert {gate.gate.id: gate.state for gate in result.gates} == dict.fromkeys(
        ("forward", "db", "dW", "dgamma", "dx"), "wrong"
    )
    assert all("global race" in " ".join(gate.diagnosis) for gate in result.gates)


def test_hanging_launch_is_not_repeated(puzzle, solution):
    grader = Grader(
        Reference(puzzle, "float32", 0), solution, {}, ["fused"], puzzle.list_cases(None)[:1], num_runs=3
    )
    grader.repeated_quantities = ["grad_input"]
    result = grader.grade_device(StoppedDevice(failure=VirtualGPUError("a launch did not end")))["fused"]
    assert result.failure == "a launch did not end" and result.repeats == {}
    assert {gate.state for gate in result.gates} == {"wrong"}


def test_gate_state_is_its_worst_quantity():
    quantities = ["output", "grad_input"]
    assert make_variant().get_state(quantities) == "correct"
    assert make_variant(unsolved=["grad_input"]).get_state(quantities) == "unsolved"
    assert make_variant(unsolved=["grad_input"]).get_state(["output"]) == "correct"
    assert make_variant(WRONG, unsolved=["grad_input"]).get_state(quantities) == "wrong"


def test_quantities_depend_on_the_options(puzzle):
    assert Options(puzzle, backward=False).quantities == ["output", "mean", "rstd"]
    all_quantities = Options(puzzle).quantities
    assert all_quantities[:3] == ["output", "mean", "rstd"] and {"grad_input", "row_sums"} <= set(
        all_quantities
    )
    assert Options(puzzle, gate="dgamma").quantities == ["grad_ln_weight", "grad_ln_bias"]


def test_only_gpu_kernels_depend_on_blanks(puzzle, solution):
    by_id = {
        id: replace(blank, body=()) if id in ("dx", "ln") else blank
        for id, blank in read_package_blanks(solution, puzzle).items()
    }
    quantities = [*puzzle.forward, *puzzle.backward]
    grader = Grader(Reference(puzzle, "float32", 0), solution, by_id, quantities=quantities)

    def get_unsolved(kind, variant_name):
        device = StoppedDevice()
        device.target = Target(kind, None, "")
        return grader.grade_variant(device, variant_name).unsolved

    assert get_unsolved("cpu", "fused") == {}
    assert get_unsolved("gpu", "fused") == get_unsolved("virtual", "fused") == {"grad_input": ("dx",)}
    assert get_unsolved("gpu", "unfused") == {"output": ("ln",), "grad_weight": ("ln",)}


def test_package_without_the_puzzles_file_has_no_blanks(puzzle, solution, copied_package):
    assert list(read_package_blanks(solution, puzzle)) == [gate.id for gate in puzzle.kernel_gates]
    (copied_package.path / copied_package.source).unlink()
    assert read_package_blanks(OpPackage(copied_package.path), puzzle) == {}


def test_damaged_marker_stops_a_run_before_compilation(puzzle, copied_package):
    copied_package.replace("    # BLANK-END row_sums\n", "")
    compiled = []
    options = Options(puzzle, root=str(copied_package.path))
    with pytest.raises(DamagedFile), runs.start_run(options, on_compile=compiled.append):
        pass
    assert not compiled


TRANSFER = {"rms_grad_input", "grad_rms_weight", "rms_grad_weight"}
"""Quantities computed only by the last gate's optional variant."""


@pytest.mark.compiles
def test_cpu_run_checks_every_quantity(puzzle, cpu_graphs):
    cpu_graphs()  # compile the graph of this run
    ready = []
    options = Options(puzzle, root="solutions", device="cpu", dims=(2, 3, 5, 7), seed=9, repeat=2)
    with runs.start_run(options, on_ready=lambda target: ready.append(target.kind)) as run:
        assert [*report.format_report(run)]
    assert ready == ["cpu"] and run.compute_exit_code() == 6 and run.unsolved == []
    (device,) = run.devices
    assert set(device.variants) == {"fused", "unfused"}
    for name, result in device.variants.items():
        assert [c.case.name for c in result.comparisons] == ["chapter", "hard values"]
        compared = set(result.comparisons[0].results)
        variant_quantities = {"row_sums"} if name == "fused" else set()
        assert compared == set(run.quantities) - TRANSFER - variant_quantities
        assert set(result.repeats) == set(puzzle.backward) - TRANSFER
        assert all(
            repeats.runs == 2 and repeats.bit_equal and not repeats.wrong_runs
            for repeats in result.repeats.values()
        )


def test_skipped_device_is_not_a_result():
    run = make_run("cpu")
    run.skipped.append(SkippedDevice("gpu", "no GPU"))
    assert run.compute_exit_code() == 6 and run.list_errors() == []


def test_virtual_gpu_runs_puzzle_cases_of_any_size(monkeypatch):
    """Only `--dims` can be too large for the virtual GPU."""
    monkeypatch.setattr(runs, "create_device", lambda *args: None)
    monkeypatch.setattr("harness.devices.targets.may_have_gpu", lambda: False)
    puzzle = catalogue.find_puzzle("p28")
    for dims, kinds in ((None, ["virtual"]), ((512, 768, 512), [])):
        with runs.start_run(Options(puzzle, root="solutions", dims=dims)) as run:
            assert [device.target.kind for device in run.devices] == kinds


def get_passed_gates(state, *kinds) -> dict[str, bool]:
    """Return the gate states of a run in which every device except the CPU reports `state`."""
    run = make_run(*kinds)
    gate = Gate("dx", "fused", ("grad_input",), provided_quantities=("output",))
    for device in run.devices:
        (result,) = device.variants.values()
        if device.target.kind != "cpu":
            result.gates = [GateResult(gate, state, result.comparisons)]
    return runs.collect_gate_states(run)


def test_only_gpu_runs_pass_gates():
    assert get_passed_gates("correct", "cpu", "virtual") == get_passed_gates("correct", "gpu") == {"dx": True}
    assert get_passed_gates("correct", "cpu") == {}, "the CPU path has no blanks"
    assert get_passed_gates("wrong", "virtual") == {"dx": False}


KERNELS = [name for name in catalogue.list_puzzle_names() if catalogue.find_puzzle(name).mojo_rung]


@pytest.mark.parametrize("kind", ["virtual", "gpu"])
@pytest.mark.parametrize("name", KERNELS)
def test_run_checks_all_cases_of_a_gate(name, kind, monkeypatch):
    """A run also checks the gate's additional cases, in bfloat16 if supported; a failure fails the run."""
    puzzle, settings_used = catalogue.find_puzzle(name), {}
    options = Options(puzzle, root="solutions")
    checked = [gate for gate in options.gates if gate.quantities]

    class RecordingChecker:
        def __init__(self, puzzle, **settings):
            settings_used.update(settings)

        def check(self, package, gates, cases):
            settings_used.update(gates=gates, cases=cases)
            return [GateResult(gate, "wrong" if gate is checked[0] else "correct") for gate in checked]

    monkeypatch.setattr(runs, "Checker", RecordingChecker)
    compared = [Comparison(case, {}) for case in puzzle.list_cases(None)]
    variants = {
        variant: VariantResult(
            variant, gates=[GateResult(g, "correct", compared) for g in checked if g.variant == variant]
        )
        for variant in options.variants
    }
    devices = [DeviceResult(Target(kind, None, ""), variants=variants)]
    run = runs.LazyRun(
        options, make_stub(OpPackage), puzzle.list_cases(None), options.quantities, devices, [], {}, None, []
    )  # fmt: skip
    gate_cases = [*puzzle.list_cases(None), *puzzle.gate_cases]
    assert runs.collect_gate_states(run) == {gate.id: True for gate in checked}
    run.compute_gates()
    remaining = {case.name for case in gate_cases} - {case.name for case in run.cases if kind == "virtual"}
    cases_in_16_bits = {case.name for case in gate_cases if case.in_16_bits}
    if not remaining | cases_in_16_bits:
        assert not settings_used, "the run checked all cases"
        return
    assert {*settings_used["gates"]} == {gate.id for gate in checked} and settings_used[
        "second_dtype"
    ] == "bfloat16"
    assert {case.name for case in settings_used["cases"]} == remaining | cases_in_16_bits
    assert runs.collect_gate_states(run) == {gate.id: gate is not checked[0] for gate in checked}
    assert run.compute_exit_code() == 1 and [result.gate for result in run.rejected_gates] == checked[:1]


@pytest.mark.parametrize("settings", [{"dims": (2, 3, 8, 4)}, {"dtype": "bfloat16"}])
def test_run_with_other_sizes_or_dtype_checks_no_further_gate(settings, puzzle, monkeypatch):
    run = make_run("virtual")
    run.options = Options(puzzle, **settings)
    monkeypatch.setattr(runs, "collect_gate_states", lambda run: {"dx": True})
    assert run.list_remaining_gates() == []
