"""Checks of single gates: solutions pass, skeletons are unsolved, and errors blame the correct gate."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from recordings import make_order
from typed import make_stub

from harness.check import source_errors
from harness.check.checker import Checker, add_blank_note
from harness.check.results import GateResult
from harness.console import receive_progress
from harness.devices.recorder import RecordedLaunch, RecordedTensor, Recording
from harness.devices.replay import encode_pointer
from harness.errors import CompileFailed, UsageError
from harness.learner import blanks
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.checks.findings import mark_name
from harness.vgpu.ptx.parser import Instr, Location

FUSED = ("forward", "db", "dW", "dgamma", "dx")


@pytest.fixture(scope="module")
def checker(puzzle):
    return Checker(puzzle)


def write_package(solution, folder: Path, *filled: str, change: tuple[str, str] = ("", "")) -> OpPackage:
    """Copy the solution's package with only the blanks `filled` solved, after an optional edit."""
    shutil.copytree(solution.path, folder)
    source = folder / "layernorm_linear.mojo"
    text = source.read_text()
    bodies = {id: blank.body for id, blank in blanks.find_blanks(text).items() if id in filled}
    old, new = change
    assert not old or text.count(old) == 1
    bodies = {id: tuple("\n".join(body).replace(old, new).split("\n")) for id, body in bodies.items()}
    source.write_text(blanks.join_segments(blanks.split_blanks(blanks.make_skeleton(text)), bodies))
    return OpPackage(folder)


def write_unmarked_package(solution, folder: Path) -> OpPackage:
    """Copy the solution's package without markers and with dbeta doubled."""
    shutil.copytree(solution.path, folder)
    source = folder / "layernorm_linear.mojo"
    lines = [line for line in source.read_text().splitlines(True) if "# BLANK-" not in line]
    old = "atomic_add(grad_ln_bias, h, dln)"
    assert "".join(lines).count(old) == 1
    source.write_text("".join(lines).replace(old, "atomic_add(grad_ln_bias, h, 2 * dln)"))
    return OpPackage(folder)


ENDLESS_LOOP = (
    "for o in range(O):\n            atomic_add(grad_bias",
    "var o = 0\n        while o < O:\n            atomic_add(grad_bias",
)


def list_orders(folder, tests):
    solution = roots.make_op_package(roots.get_solutions(), PUZZLE.name)
    by_name = {id: write_package(solution, folder / id, id) for id in ("dx", "row_sums", "ln")}
    by_name["endless"] = write_package(solution, folder / "endless", "db", change=ENDLESS_LOOP)
    by_name["unmarked"] = write_unmarked_package(solution, folder / "unmarked")
    variants = {gate.id: gate.variant for gate in PUZZLE.kernel_gates}
    return {
        name: make_order("p22", choose_cases(PUZZLE), [variants.get(name, "fused")], package)
        for name, package in by_name.items()
    }


def map_states(results):
    return {result.gate.id: result.state for result in results}


def choose_cases(puzzle):
    """Return a case with adversarial inputs and one with odd sizes."""
    return [case for case in puzzle.list_cases(None) if case.name in ("hard values", "odd sizes")]


def test_every_quantity_is_checked_by_a_gate(puzzle):
    checked_quantities = {
        (gate.variant, q)
        for gate in puzzle.kernel_gates
        for q in (*gate.quantities, *gate.provided_quantities)
    }
    assert checked_quantities == {
        (name, q)
        for name in {gate.variant for gate in puzzle.kernel_gates}  # other variants have no blanks
        for call in puzzle.variants[name]
        for q in call.op.writes
    }


def test_empty_file_is_unsolved_without_execution(checker, puzzle, copied_package, monkeypatch):
    """The checker hashes the files on every call, regardless of the package object's cache."""
    monkeypatch.setattr("harness.check.checker.record_dtypes", None)
    package, source = OpPackage(copied_package.path), copied_package.path / copied_package.source
    assert package.digest
    source.write_text(blanks.make_skeleton(source.read_text()))
    results = checker.check(package)
    assert map_states(results) == {gate.id: "unsolved" for gate in puzzle.kernel_gates}
    assert not any(result.comparisons or result.diagnosis for result in results)


@pytest.mark.compiles
@pytest.mark.parametrize(("solved", "gates"), [("dx", FUSED), ("row_sums", None), ("ln", ["ln", "row_sums"])])
def test_only_solved_blanks_are_correct(checker, puzzle, recorded, solved, gates):
    """Gates that depend on an untouched blank are unsolved, too."""
    states = map_states(checker.check(recorded[solved].package, gates, choose_cases(puzzle)))
    assert states == dict.fromkeys(gates or [gate.id for gate in puzzle.kernel_gates], "unsolved") | {
        solved: "correct"
    }


@pytest.mark.compiles
def test_endless_loop_is_stopped_and_located(checker, puzzle, recorded):
    (db,) = checker.check(recorded["endless"].package, ["db"], choose_cases(puzzle)[:1])
    assert db.state == "wrong" and db.mistake == "endless-loop" and db.hint == "db-2"
    message, location = db.diagnosis[:2]
    assert message.endswith(": see hint db-2") and "minimal_fused_backward did not end" in location
    assert "layernorm_linear.mojo:" in location or "common.mojo:" in location


@pytest.mark.compiles
def test_package_without_markers_is_checked_completely(checker, puzzle, recorded):
    results = checker.check(recorded["unmarked"].package, FUSED, choose_cases(puzzle))
    assert map_states(results) == {id: "correct" for id in FUSED} | {"dgamma": "wrong"}
    (dgamma,) = (result for result in results if result.gate.id == "dgamma")
    assert dgamma.mistake == "doubled" and dgamma.hint == "dgamma-3"
    assert not any(line.startswith("grad_ln_weight[") for line in dgamma.diagnosis)
    assert "grad_ln_weight itself is right in every case" in dgamma.diagnosis
    assert any(line.startswith("grad_ln_bias[0] got ") for line in dgamma.diagnosis)


def test_unknown_gate_is_rejected(checker, solution):
    with pytest.raises(
        UsageError, match="unknown gate 'dZ'; there is ln, forward, row_sums, db, dW, dgamma, dx"
    ):
        checker.check(solution, ["dx", "dZ"])


def test_finding_in_a_helper_is_reported_at_the_learners_line():
    source, blank = Path("/x/kernel.mojo"), blanks.Blank("dx", "the task", "", ("a", "b"), 40)
    location = Location("/x/shared/common.mojo", 170, 5, Location(str(source), 41, 5))
    finding = Finding(
        "out-of-bounds atomic", "an atomic past the end", "/x/shared/common.mojo:170:5",
        instr=make_stub(Instr, loc=location),
    )  # fmt: skip
    lines = source_errors.format_finding(finding, source, blank)
    assert lines[0] == (
        "error: out-of-bounds atomic at /x/kernel.mojo:41:5 (in a helper, /x/shared/common.mojo:170:5)"
    )
    assert not any("called from" in line for line in lines)
    assert source_errors.format_finding(finding, source, None)[0].endswith("at /x/shared/common.mojo:170:5")


def test_finding_uses_the_kernels_tensor_names(tmp_path):
    source = tmp_path / "kernel.mojo"
    source.write_text(
        "def add[\n    dtype: DType\n](\n    grad: MutPtr[dtype],  # [n]\n    n: Int32,\n):\n    f()\n"
    )
    memory = RecordedTensor("sums_grad", 0x1000, 64, is_workspace=True)
    launch = RecordedLaunch(
        "adding", "op_add", (1, 1, 1), (1, 1, 1), (encode_pointer(0x1000), (16).to_bytes(4, "little"))
    )
    recording = Recording({("fused", (1,)): [memory, launch]})

    def rename(line, kernel="adding"):
        at = Location("/x/shared/common.mojo", 3, 5, Location(str(source), line, 5))
        finding = Finding(
            "out-of-bounds atomic",
            f"past the end of {mark_name('sums_grad')} (16 of sums_grad)",
            "",
            kernel,
            "sums_grad",
        )
        return source_errors.use_kernel_names(
            dataclasses.replace(finding, instr=make_stub(Instr, loc=at)), recording, source
        )

    assert (rename(7).message, rename(7).tensor) == ("past the end of grad (16 of sums_grad)", "grad")
    assert rename(7, "another").message == rename(99).message == "past the end of sums_grad (16 of sums_grad)"


def test_hoisted_load_is_reported_at_its_source_line(tmp_path):
    source = tmp_path / "kernel.mojo"
    code = "    for row in range(R):\n        var h = x[row, c] - mean[unsafe_offset=c]\n        sum += h\n    total = sum\n"
    source.write_text(code)
    blank = blanks.Blank("dw", "the task", "", tuple(code.split("\n")), 1)

    def get_lines(tensor, line=1):
        at = make_stub(Instr, loc=Location(str(source), line, 5))
        finding = Finding(
            "out-of-bounds load", "a load past the end", f"{source}:{line}:5", tensor=tensor, instr=at
        )
        return source_errors.format_finding(finding, source, blank)

    assert get_lines("mean")[1] == "  the compiler has moved it out of the loop: it is in line 2"
    assert get_lines("rstd")[1] == get_lines("mean", line=2)[1] == "  a load past the end"


def test_first_case_is_reported_before_the_others_run(checker, puzzle, solution, monkeypatch):
    """The grader is a stub, so nothing is compiled."""
    reported, checked, cases = [], [], len(puzzle.list_cases(None))

    def return_case_count(grader, device):
        checked.append(len(grader.cases))
        return [make_stub(GateResult, gate=len(grader.cases), state="wrong")]

    monkeypatch.setattr(checker, "_record", lambda *_: {"float32": None})
    monkeypatch.setattr("harness.check.grading.Grader.grade_gates", return_case_count)
    (result,) = checker.check(solution, ["dx"], on_first_case=lambda first: reported.append(first[0].gate))
    assert (result.gate, reported, checked) == (cases, [1], [1, cases])


@pytest.mark.parametrize("has_plans", [False, True])
def test_first_compile_is_announced_as_slow(has_plans, puzzle, solution, monkeypatch):
    def fail(orders):
        raise CompileFailed("no")

    monkeypatch.setattr("harness.check.checker.record_dtypes", fail)
    if has_plans:
        monkeypatch.setattr("harness.devices.recorder._read_plans", lambda order: ("", {}))
    else:
        monkeypatch.setattr("harness.devices.recorder.read_cached_text", lambda file: None)
    messages: list[str] = []
    with receive_progress(messages.append), pytest.raises(CompileFailed):
        Checker(puzzle).check(solution, ["dW"])
    suffix = ", the first time: up to a minute"
    assert f"compiling the kernels{'' if has_plans else suffix}" in messages


@pytest.mark.parametrize(
    ("gates", "owner"),
    [(["dx"], "db"), (["dx", "dW"], "db"), (["db"], None), (None, None)],
    ids=["another blank", "another of two", "own blank", "all gates"],
)
def test_compile_error_in_another_blank_is_attributed_to_it(gates, owner, puzzle, solution):
    source = solution.path / puzzle.source
    line = blanks.find_blanks(source.read_text())["db"].line

    class Broken(Checker):
        def _record(self, *_, **__):
            raise CompileFailed(f"it does not compile\n{source}:{line}:9: error: no such name", "all of it")

    with pytest.raises(CompileFailed) as caught:
        Broken(puzzle).check(solution, gates)
    message = str(caught.value).splitlines()
    expected = f"   -> the line is in the blank of {owner}, and the file compiles as a whole: fix {owner} first, or empty it by `reset`"
    assert message[2:] == ([expected] if owner else []) and caught.value.details == "all of it"


def test_error_outside_blanks_is_explained_by_double_index(puzzle, solution, tmp_path):
    """The compiler's message for `y[row][column] = ...` has no line number."""
    package = write_package(
        solution, tmp_path / "op", "db", change=("grad_bias, o, dy[row, o]", "grad_bias, o, dy[row][o]")
    )
    source = package.path / puzzle.source
    by_id = blanks.find_blanks(source.read_text())
    message = f"it does not compile\nerror: failed to run the pass manager\nalso {source}:1:4: error: function instantiation failed"
    error = CompileFailed(message, "all of it")
    explanation = add_blank_note(error, source, by_id, ["db"])
    assert str(explanation).splitlines()[-1].endswith("takes both indices at once, `dy[row, o]`")
    assert f"   -> line {by_id['db'].line + 1}: " in str(explanation) and explanation.details == "all of it"
    solution_source = solution.path / puzzle.source
    assert (
        add_blank_note(error, solution_source, blanks.find_blanks(solution_source.read_text()), ["db"])
        is error
    )
