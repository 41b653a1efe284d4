"""Every wrong solution is rejected at its gate, and its mistake is named.

One kernel is also checked by the command line.
"""

import functools
import json
import subprocess
import sys

import pytest
from marks import list_values
from recordings import make_order

from harness.check import zoo
from harness.check.checker import Checker, load_checker
from harness.errors import DamagedFile
from harness.learner.exercise import Exercise
from harness.puzzles.p26.mistakes import FIXES
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

ROOT = roots.CHECKOUT
WRONG_SOLUTIONS = [wrong for name in list_puzzle_names() for wrong in zoo.load_wrong_solutions(name)]
WRONG_KERNELS = [wrong for wrong in WRONG_SOLUTIONS if isinstance(wrong.target_rung, MojoRung)]
WRONG_PYTHON_FILES = [
    wrong for wrong in WRONG_SOLUTIONS if wrong not in WRONG_KERNELS and wrong.rung != "catch"
]
"""Except for the `catch` rung, which tests/p21/test_catch.py covers."""
P22_KERNELS = [kernel for kernel in WRONG_KERNELS if kernel.puzzle == "p22"]
DEFAULT_CASES = {
    "p20": ("hard values", "odd sizes", "1 x 129", "3 x 257", "expanded", "huge logits"),
    "p22": ("hard values", "odd sizes", "wide", "many rows", "expanded"),
    "p23": ("hard values", "odd sizes", "square"),
    "p24": ("chapter", "hard values", "row by row", "squares", "odd sizes"),
    "p27": ("chapter", "large logits", "many places", "1 x 1 x 389", "1 x 513 x 1"),
}
"""Puzzle -> default case names for its wrong kernels; other puzzles use all cases."""
AFFECTED_GATES_ONLY = {("p21", "torch"), ("p25", "numpy"), ("p25", "torch"), ("p26", "compose"), ("p26", "swap"),
    ("p27", "numpy"), ("p27", "tape")}  # fmt: skip
"""Slow rungs: only the gates affected by a wrong solution are checked."""
COVERED_BY_KERNELS = {("p22", "numpy"), ("p23", "numpy"), ("p23", "torch")}
"""Rungs whose mistakes are covered by wrong kernels."""
DEADLOCKS = {"read_too_early", "own_shape", "not_returned", "receives_first", "sends_first", "backwards"}
"""Wrong ring implementations that deadlock."""
COMMAND_LINE_KERNEL = "grad_output_ignored"
"""A kernel with several wrong gates, one of which is blamed."""


def find_variant(kernel):
    return next(g.variant for g in find_puzzle(kernel.puzzle).kernel_gates if g.id == kernel.gate)


def choose_cases(kernel):
    """Return the kernel's cases, or its puzzle's default cases."""
    puzzle, names = find_puzzle(kernel.puzzle), kernel.cases or DEFAULT_CASES.get(kernel.puzzle)
    all_cases = [*puzzle.list_cases(None), *(puzzle.gate_cases if names else ())]
    variant_cases = [case for case in all_cases if case.variant in ("", find_variant(kernel))]
    return [case for case in variant_cases if names is None or case.name in names]


@functools.cache
def make_kernel_checker(puzzle, dtype):
    """Create a checker, cached per puzzle and dtype."""
    return Checker(find_puzzle(puzzle), dtype=dtype)


@functools.cache
def make_python_checker(puzzle, rung):
    """Create a checker, cached per rung so that references are computed once."""
    puzzle = find_puzzle(puzzle)
    return load_checker(Exercise(puzzle, puzzle.find_rung(rung), roots.get_solutions()))


def list_orders(folder, tests):
    return {
        make_id(kernel): make_order(
            kernel.puzzle, choose_cases(kernel), [find_variant(kernel)], kernel.build_package(), kernel.dtype
        )
        for kernel in list_values(tests, "kernel")
    }


def assert_rejected(wrong, results):
    """Assert that exactly the expected gates are wrong, and that the report has a hint."""
    result = results[wrong.gate]
    rejected = {id for id, result in results.items() if result.state == "wrong"}
    assert rejected == {wrong.gate, *wrong.also} & results.keys(), {
        id: results[id].diagnosis for id in rejected
    }
    assert result.hint.startswith(
        f"{find_puzzle(wrong.puzzle).get_ladder_name(wrong.target_rung, wrong.gate)}-"
    )
    correct = [result for id, result in results.items() if id not in rejected]
    assert not any(result.mistake or result.diagnosis for result in correct)


def make_id(wrong):
    return f"{wrong.puzzle}-{wrong.rung}{'-' if wrong.rung else ''}{wrong.name}"


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", WRONG_KERNELS, ids=make_id)
@pytest.mark.usefixtures("recorded")
def test_wrong_kernel_is_rejected(kernel):
    gates = [g.id for g in find_puzzle(kernel.puzzle).kernel_gates if g.variant == find_variant(kernel)]
    checked = make_kernel_checker(kernel.puzzle, kernel.dtype).check(
        kernel.build_package(), gates, choose_cases(kernel)
    )
    results = {result.gate.id: result for result in checked}
    assert_rejected(kernel, results)
    named = results[kernel.gate]
    assert not kernel.mistake or named.mistake == kernel.mistake, "\n".join(named.diagnosis)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(w, marks=[pytest.mark.compiles] if w.puzzle == "p26" else [], id=make_id(w))
        for w in WRONG_PYTHON_FILES
    ],
)
def test_wrong_python_file_is_rejected(wrong, monkeypatch):
    python_checker = make_python_checker(wrong.puzzle, wrong.rung)
    if wrong.puzzle == "p21":  # the slow comparison with usual checks does not affect the result
        monkeypatch.setattr("harness.puzzles.p21.hunt.run_usual_checks", lambda subject: {})
    if (wrong.puzzle, wrong.rung) == ("p25", "torch"):
        monkeypatch.setattr(python_checker, "timeout_s", 1.0 if wrong.name in DEADLOCKS else 4.0)
    gates = [wrong.gate, *wrong.also] if (wrong.puzzle, wrong.rung) in AFFECTED_GATES_ONLY else None
    results = {result.gate.id: result for result in python_checker.check(wrong.build_target(), gates)}
    assert_rejected(wrong, results)
    named = results[wrong.gate]
    assert named.mistake == (wrong.mistake or None), "\n".join(named.diagnosis)
    if wrong.puzzle == "p26":
        assert named.diagnosis[1] == f"what to do: {FIXES[wrong.mistake]}"


@pytest.mark.parametrize("name", list_puzzle_names())
def test_zoo_covers_every_gate(name):
    puzzle, entries = find_puzzle(name), [wrong for wrong in WRONG_SOLUTIONS if wrong.puzzle == name]
    for rung in puzzle.rungs:
        covered = {wrong.gate for wrong in entries if wrong.target_rung == rung}
        assert covered == {*rung.gates} or (name, rung.id) in COVERED_BY_KERNELS, rung.id
    assert all(len(wrong.story.splitlines()) == 1 for wrong in entries)


@pytest.mark.slow
@pytest.mark.compiles
def test_wrong_kernel_fails_the_command_line(puzzle):
    """Use a new process: the virtual GPU cannot be enabled after MAX has run."""
    kernel = next(kernel for kernel in P22_KERNELS if kernel.name == COMMAND_LINE_KERNEL)
    flags = ("p22", "--backward", "--fused", "--device", "virtual", "--json", "-")
    result = subprocess.run(
        [sys.executable, "-m", "harness", *flags, "--ops", str(kernel.build_package().path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stderr
    run = json.loads(result.stdout)
    (variant,) = run["devices"][0]["variants"].values()
    named = next(gate for gate in puzzle.kernel_gates if gate.id == kernel.gate).quantities[0]
    assert variant["state"] == "wrong"
    assert variant["diagnosis"][puzzle.get_printed_name(named)]["mistake"] == kernel.mistake
    assert variant["diagnosis"][puzzle.get_printed_name(named)]["hint"].startswith(f"{kernel.gate}-")
    assert "equals the reference" in result.stderr, "the report explains the mistake"
    wrong = {
        gate.id
        for gate in puzzle.kernel_gates
        if {puzzle.get_printed_name(q) for q in gate.quantities} & variant["diagnosis"].keys()
    }
    assert wrong & {"forward", "db", "dW", "dgamma", "dx"} == {kernel.gate, *kernel.also}


VALID_ENTRY = """\
story = "A story."
gate = "dx"
mistake = "m"
file = "layernorm_linear.mojo"
old = "row_rstd * (g - c2"
new = "row_rstd * (g - 2 * c2"
"""


def write_toml(folder, text):
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_edit_changes_only_the_copy(tmp_path, solution):
    before = {file: file.read_text() for file in solution.files}
    package = zoo.read_entry(write_toml(tmp_path, VALID_ENTRY), "p22").copy_package(tmp_path / "op")
    names = [file.relative_to(solution.path) for file in solution.files]
    changed = [str(n) for n in names if (package.path / n).read_text() != before[solution.path / n]]
    assert changed == ["layernorm_linear.mojo"]
    assert "row_rstd * (g - 2 * c2" in (package.path / changed[0]).read_text()
    assert {file: file.read_text() for file in solution.files} == before


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("var H = ", 10)])
def test_edit_must_apply_exactly_once(tmp_path, solution, old, times):
    kernel = zoo.read_entry(write_toml(tmp_path, VALID_ENTRY.replace("row_rstd * (g - c2", old, 1)), "p22")
    count = (solution.path / "layernorm_linear.mojo").read_text().count(old)
    assert (count > 1) == (times > 1)
    with pytest.raises(
        DamagedFile, match=f"some no longer applies: its old text occurs {count} times in layernorm"
    ):
        kernel.copy_package(tmp_path / "op")
    assert not (tmp_path / "op").exists()


def test_provided_code_of_a_blank_is_a_wrong_solution(tmp_path):
    source = tmp_path / "some.py"
    source.write_text("# BLANK-START dx: t\nright()\n# BLANK-GIVEN dx\n# wrong()\n# BLANK-END dx\n")
    bug = zoo.WrongSolution("p22", "some", "dx", "m", "some.py")
    assert "wrong()" in bug.edit_text(source) and "right()" not in bug.edit_text(source)
    source.write_text("# BLANK-START dx: t\nright()\n# BLANK-END dx\n")
    with pytest.raises(DamagedFile, match="no blank dx that is given wrong"):
        bug.edit_text(source)


def test_package_of_a_wrong_kernel_is_created_once(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    first = P22_KERNELS[0].build_package()
    mtime = (first.path / P22_KERNELS[0].file).stat().st_mtime_ns
    assert P22_KERNELS[0].build_package().path == first.path
    assert (first.path / P22_KERNELS[0].file).stat().st_mtime_ns == mtime
    assert P22_KERNELS[1].build_package().path != first.path
