"""Gates one by one: the solution passes, the skeleton is unsolved, and nobody is blamed for another's mistake."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typed import stand_in

from harness.check import source_faults
from harness.check.checker import Checker, name_owner
from harness.check.results import GateResult
from harness.console import listening
from harness.devices.recorder import Order, RecordedLaunch, RecordedTensor, Recording, record_many
from harness.devices.replay import pointer
from harness.errors import BadUse, CompileFailed, DamagedFile
from harness.learner import blanks
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.checks.findings import mark_name
from harness.vgpu.ptx.parser import Instr, Location

FUSED = ("forward", "db", "dW", "dgamma", "dx")


@pytest.fixture(scope="module")
def checker(puzzle):
    """One warm checker for all."""
    return Checker(puzzle)


@pytest.fixture
def skeleton(tmp_path, solution):
    """gate ids -> a package with a learner's file in which only those blanks are filled in, as in the solution."""
    return lambda *filled: solved(solution, tmp_path / "learner", *filled)


def solved(solution, folder: Path, *filled: str, change: tuple[str, str] = ("", "")) -> OpPackage:
    """A copy of the solution's package with all blanks empty but those that are named, and these perhaps changed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(solution.path, folder)
    source = folder / "layernorm_linear.mojo"
    text = source.read_text()
    bodies = {id: blank.body for id, blank in blanks.find(text).items() if id in filled}
    old, new = change
    assert not old or text.count(old) == 1
    bodies = {id: tuple("\n".join(body).replace(old, new).split("\n")) for id, body in bodies.items()}
    source.write_text(blanks.join(blanks.split(blanks.skeleton(text)), bodies))
    return OpPackage(folder)


def without_markers(solution, folder: Path) -> OpPackage:
    """A copy of the solution's package without blanks, that adds dbeta up twice."""
    shutil.copytree(solution.path, folder)
    source = folder / "layernorm_linear.mojo"
    lines = [line for line in source.read_text().splitlines(True) if "# BLANK-" not in line]
    old = "atomic_add(grad_ln_bias, h, dln)"
    assert "".join(lines).count(old) == 1
    source.write_text("".join(lines).replace(old, "atomic_add(grad_ln_bias, h, 2 * dln)"))
    return OpPackage(folder)


ENDLESS = (
    "for o in range(O):\n            atomic_add(grad_bias",
    "var o = 0\n        while o < O:\n            atomic_add(grad_bias",
)


@pytest.fixture(scope="module")
def packages(puzzle, solution, tmp_path_factory) -> dict[str, OpPackage]:
    """The packages that the tests record, recorded together: the checker finds what it asks for in the cache."""
    folder = tmp_path_factory.mktemp("packages")
    by_name = {id: solved(solution, folder / id, id) for id in ("dx", "row_sums", "ln")}
    by_name["endless"] = solved(solution, folder / "endless", "db", change=ENDLESS)
    by_name["unmarked"] = without_markers(solution, folder / "unmarked")
    variants = {gate.id: gate.variant for gate in puzzle.kernel_gates}
    cases = {"endless": few(puzzle)[:1]}
    orders = [
        Order(
            package,
            tuple(dict.fromkeys(case.dims for case in cases.get(name, few(puzzle)))),
            (variants.get(name, "fused"),),
            small_grid=True,
        )
        for name, package in by_name.items()
    ]
    record_many(orders, puzzle.name, "float32")
    return by_name


def states(results):
    """Gate id -> state."""
    return {result.gate.id: result.state for result in results}


def few(puzzle):
    """The case of the chapter's size with hard values, and one with other sizes."""
    return [case for case in puzzle.cases(None) if case.name in ("hard values", "odd sizes")]


@pytest.mark.compiles
def test_the_solution_passes_every_gate_in_every_case(checker, puzzle, solution):
    results = checker.check(solution)
    assert [result.gate for result in results] == list(puzzle.kernel_gates)
    for result in results:
        assert result.state == "correct", (result.gate.id, result.diagnosis)
        assert [comparison.case for comparison in result.comparisons] == puzzle.cases(None)
        for comparison in result.comparisons:
            assert set(comparison.verdicts) == {*result.gate.quantities, *result.gate.given}
        assert (result.findings, result.diagnosis, result.mistake, result.hint) == ([], [], None, None)


def test_every_quantity_of_every_variant_is_judged_by_some_gate(puzzle):
    judged = {(gate.variant, q) for gate in puzzle.kernel_gates for q in (*gate.quantities, *gate.given)}
    assert judged == {
        (name, q)
        for name in {gate.variant for gate in puzzle.kernel_gates}  # the others hold no blanks
        for call in puzzle.variants[name]
        for q in call.op.writes
    }


@pytest.mark.compiles
def test_the_solution_passes_in_bfloat16(puzzle, solution):
    results = Checker(puzzle, dtype="bfloat16", seed=3).check(solution, ["db", "dx"], few(puzzle))
    assert states(results) == {"db": "correct", "dx": "correct"}


def test_an_untouched_problem_is_unsolved_and_nothing_is_run(checker, puzzle, skeleton, monkeypatch):
    monkeypatch.setattr("harness.check.checker.record_dtypes", None)
    results = checker.check(skeleton())
    assert states(results) == {gate.id: "unsolved" for gate in puzzle.kernel_gates}
    assert not any(result.comparisons or result.diagnosis for result in results)


@pytest.mark.compiles
def test_one_solved_blank_among_untouched_ones(checker, puzzle, packages):
    results = checker.check(packages["dx"], FUSED, few(puzzle))
    assert states(results) == {id: "unsolved" for id in FUSED} | {"dx": "correct"}


@pytest.mark.compiles
def test_what_an_untouched_blank_leaves_unwritten_is_not_put_down_to_the_next_one(checker, puzzle, packages):
    results = checker.check(packages["row_sums"], cases=few(puzzle))
    assert states(results) == {gate.id: "unsolved" for gate in puzzle.kernel_gates} | {"row_sums": "correct"}
    results = checker.check(packages["ln"], ["ln", "row_sums"], few(puzzle))
    assert states(results) == {"ln": "correct", "row_sums": "unsolved"}


@pytest.mark.compiles
def test_an_endless_loop_ends_and_says_where(checker, puzzle, packages):
    (db,) = checker.check(packages["endless"], ["db"], few(puzzle)[:1])
    assert db.state == "wrong" and db.mistake == "endless-loop" and db.hint == "db-2"
    name, place = db.diagnosis[:2]
    assert name.endswith(": see hint db-2") and "minimal_fused_backward did not end" in place
    assert "layernorm_linear.mojo:" in place or "common.mojo:" in place


@pytest.mark.compiles
def test_a_package_without_markers_is_judged_as_a_whole(checker, puzzle, packages):
    results = checker.check(packages["unmarked"], FUSED, few(puzzle))
    assert states(results) == {id: "correct" for id in FUSED} | {"dgamma": "wrong"}
    (dgamma,) = (result for result in results if result.gate.id == "dgamma")
    assert dgamma.mistake == "doubled" and dgamma.hint == "dgamma-3"
    assert not any(line.startswith("grad_ln_weight[") for line in dgamma.diagnosis)
    assert "grad_ln_weight itself is right in every case" in dgamma.diagnosis
    assert any(line.startswith("grad_ln_bias[0] got ") for line in dgamma.diagnosis)


@pytest.mark.compiles
def test_a_package_that_does_not_compile(checker, copied_package):
    copied_package.replace("atomic_add(grad_ln_bias, h, dln)", "atomic_add(grad_ln_bias, h, no_such_name)")
    with pytest.raises(CompileFailed, match="use of unknown declaration 'no_such_name'"):
        checker.check(OpPackage(copied_package.path), ["dgamma"])


def test_a_damaged_marker(checker, copied_package):
    copied_package.replace("# BLANK-END dx", "# BLANK-END dy")
    with pytest.raises(DamagedFile, match="BLANK-END dy"):
        checker.check(OpPackage(copied_package.path), ["db"])


def test_an_unknown_gate(checker, solution):
    with pytest.raises(BadUse, match="unknown gate 'dZ'; there is ln, forward, row_sums, db, dW, dgamma, dx"):
        checker.check(solution, ["dx", "dZ"])


def test_a_change_of_the_file_is_seen_by_the_same_package_object(checker, copied_package, puzzle):
    """The checker hashes the files anew at every call, whatever the package object remembers."""
    package = OpPackage(copied_package.path)
    assert package.digest
    text = (copied_package.path / copied_package.source).read_text()
    (copied_package.path / copied_package.source).write_text(blanks.skeleton(text))
    assert states(checker.check(package)) == {gate.id: "unsolved" for gate in puzzle.kernel_gates}


# ---- What is said -------------------------------------------------------------------------------------------


def test_a_finding_in_a_helper_is_put_at_the_learner_s_line():
    source, blank = Path("/x/kernel.mojo"), blanks.Blank("dx", "the task", "", ("a", "b"), 40)
    inside = Location("/x/shared/common.mojo", 170, 5, Location(str(source), 41, 5))
    finding = Finding(
        "out-of-bounds atomic", "an atomic past the end", "/x/shared/common.mojo:170:5",
        instr=stand_in(Instr, loc=inside),
    )  # fmt: skip
    lines = source_faults.finding_lines(finding, source, blank)
    assert lines[0] == (
        "error: out-of-bounds atomic at /x/kernel.mojo:41:5 (in a helper, /x/shared/common.mojo:170:5)"
    )
    assert not any("called from" in line for line in lines)
    assert source_faults.finding_lines(finding, source, None)[0].endswith("at /x/shared/common.mojo:170:5")


def test_a_finding_calls_a_tensor_what_the_kernel_calls_it(tmp_path):
    source = tmp_path / "kernel.mojo"
    source.write_text(
        "def add[\n    dtype: DType\n](\n    grad: MutPtr[dtype],  # [n]\n    n: Int32,\n):\n    f()\n"
    )
    memory = RecordedTensor("sums_grad", 0x1000, 64, scratch=True)
    launch = RecordedLaunch(
        "adding", "op_add", (1, 1, 1), (1, 1, 1), (pointer(0x1000), (16).to_bytes(4, "little"))
    )
    recording = Recording({("fused", (1,)): [memory, launch]})

    def said(line, kernel="adding"):
        at = Location("/x/shared/common.mojo", 3, 5, Location(str(source), line, 5))
        finding = Finding(
            "out-of-bounds atomic",
            f"past the end of {mark_name('sums_grad')} (16 of sums_grad)",
            "",
            kernel,
            "sums_grad",
        )
        return source_faults.with_kernel_names(
            dataclasses.replace(finding, instr=stand_in(Instr, loc=at)), recording, source
        )

    assert (said(7).message, said(7).tensor) == ("past the end of grad (16 of sums_grad)", "grad")
    assert said(7, "another").message == said(99).message == "past the end of sums_grad (16 of sums_grad)"


def test_a_load_that_the_compiler_has_moved_out_of_its_loop_is_put_at_its_line(tmp_path):
    source = tmp_path / "kernel.mojo"
    code = "    for row in range(R):\n        var h = x[row, c] - mean[unsafe_offset=c]\n        sum += h\n    total = sum\n"
    source.write_text(code)
    blank = blanks.Blank("dw", "the task", "", tuple(code.split("\n")), 1)

    def said(tensor, line=1):
        at = stand_in(Instr, loc=Location(str(source), line, 5))
        finding = Finding(
            "out-of-bounds load", "a load past the end", f"{source}:{line}:5", tensor=tensor, instr=at
        )
        return source_faults.finding_lines(finding, source, blank)

    assert said("mean")[1] == "  the compiler has moved it out of the loop: it is in line 2"
    assert said("rstd")[1] == said("mean", line=2)[1] == "  a load past the end"


def test_the_first_case_is_told_before_the_others_are_run(checker, puzzle, solution, monkeypatch):
    """Without a compiler: the verdicts are those of a stand-in."""
    told, judged, cases = [], [], len(puzzle.cases(None))

    def verdicts(judge, device):
        judged.append(len(judge.cases))
        return [stand_in(GateResult, gate=len(judge.cases), state="wrong")]

    monkeypatch.setattr(checker, "_record", lambda *_: {"float32": None})
    monkeypatch.setattr("harness.check.grading.Grader.by_gate", verdicts)
    (result,) = checker.check(solution, ["dx"], on_first=lambda first: told.append(first[0].gate))
    assert (result.gate, told, judged) == (cases, [1], [1, cases])


@pytest.mark.parametrize("planned", [False, True])
def test_the_first_compile_says_that_it_is_the_slow_one(planned, puzzle, solution, monkeypatch):
    def refuse(orders, name):
        raise CompileFailed("no")

    monkeypatch.setattr("harness.check.checker.record_dtypes", refuse)
    if planned:
        monkeypatch.setattr("harness.devices.recorder._read_plans", lambda order, name: ("", {}))
    else:
        monkeypatch.setattr("harness.devices.recorder.read_text", lambda file: None)
    said: list[str] = []
    with listening(said.append), pytest.raises(CompileFailed):
        Checker(puzzle).check(solution, ["dW"])
    first = ", the first time: up to a minute"
    assert f"compiling the kernels{'' if planned else first}" in said


def test_this_module_is_light_until_it_is_asked():
    code = "import sys, harness.check.checker; sys.exit('torch' in sys.modules or 'max' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=roots.CHECKOUT).returncode == 0


@pytest.mark.parametrize(
    ("asked", "owner"),
    [(["dx"], "db"), (["dx", "dW"], "db"), (["db"], None), (None, None)],
    ids=["another's", "another's of two", "its own", "all"],
)
def test_an_error_of_the_compiler_in_another_s_blank_says_whose_it_is(asked, owner, puzzle, solution):
    source = solution.path / puzzle.source
    line = blanks.find(source.read_text())["db"].line

    class Broken(Checker):
        def _record(self, *_, **__):
            raise CompileFailed(f"it does not compile\n{source}:{line}:9: error: no such name", "all of it")

    with pytest.raises(CompileFailed) as caught:
        Broken(puzzle).check(solution, asked)
    said = str(caught.value).splitlines()
    words = f"   -> the line is in the blank of {owner}, and the file compiles as a whole: fix {owner} first, or empty it by `reset`"
    assert said[2:] == ([words] if owner else []) and caught.value.details == "all of it"


def test_an_error_outside_of_blanks_is_explained_by_an_index_by_parts(puzzle, solution, tmp_path):
    """For `y[row][column] = ...` the compiler says no more than that it failed."""
    package = solved(
        solution, tmp_path / "op", "db", change=("grad_bias, o, dy[row, o]", "grad_bias, o, dy[row][o]")
    )
    source = package.path / puzzle.source
    by_id = blanks.find(source.read_text())
    words = f"it does not compile\nerror: failed to run the pass manager\nalso {source}:1:4: error: function instantiation failed"
    error = CompileFailed(words, "all of it")
    said = name_owner(error, source, by_id, ["db"])
    assert str(said).splitlines()[-1].endswith("takes both indices at once, `dy[row, o]`")
    assert f"   -> line {by_id['db'].line + 1}: " in str(said) and said.details == "all of it"
    right = solution.path / puzzle.source
    assert name_owner(error, right, blanks.find(right.read_text()), ["db"]) is error


def test_an_error_outside_of_blanks_is_nobody_s(puzzle, solution):
    error = CompileFailed(f"{solution.path / puzzle.source}:1:1: error: no such name")
    by_id = blanks.find((solution.path / puzzle.source).read_text())
    assert name_owner(error, solution.path / puzzle.source, by_id, ["dx"]) is error
