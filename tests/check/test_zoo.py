"""The checkers are checked: every wrong solution of every puzzle is rejected at its gate, and its mistake is named.

The wrong kernels of a puzzle are recorded by one Mojo program and judged in this one process, as are the wrong answers in
Python; one kernel goes through the command line to its exit code.
"""

import functools
import json
import re
import subprocess
import sys
from collections import defaultdict

import pytest
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker, make_checker
from harness.devices.recorder import Order, record_many
from harness.errors import DamagedFile
from harness.learner.work import Work
from harness.puzzles.p26.mistakes import FIXES
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

ROOT = roots.CHECKOUT
WRONG = [wrong for name in puzzle_names() for wrong in zoo.load(name)]
KERNELS = [wrong for wrong in WRONG if isinstance(wrong.of_rung, MojoRung)]
PYTHON = [wrong for wrong in WRONG if wrong not in KERNELS and wrong.rung != "catch"]
"""Without wrong tests of backward passes, which tests/p21/test_catch.py judges."""
OF_P22 = [kernel for kernel in KERNELS if kernel.puzzle == "p22"]
USUAL = {
    "p20": ("hard values", "odd sizes", "1 x 129", "3 x 257", "expanded", "huge logits"),
    "p22": ("hard values", "odd sizes", "wide", "many rows", "expanded"),
    "p23": ("hard values", "odd sizes", "square"),
    "p24": ("chapter", "hard values", "row by row", "squares", "odd sizes"),
    "p27": ("chapter", "large logits", "many places", "1 x 1 x 389", "1 x 513 x 1"),
}
"""The cases that a puzzle's wrong kernels are judged by unless they need others; elsewhere all."""
ALONE = {("p21", "torch"), ("p25", "numpy"), ("p25", "torch"), ("p26", "compose"), ("p26", "swap"),
    ("p27", "numpy"), ("p27", "tape")}  # fmt: skip
"""Rungs of whose wrong answers only the gates in question are judged, for their time."""
OF_THE_KERNELS = {("p22", "numpy"), ("p23", "numpy"), ("p23", "torch")}
"""Rungs whose gates have the same mistakes as the kernels."""
WAITS_FOR_EVER = {"read_too_early", "own_shape", "not_returned", "receives_first", "sends_first", "backwards"}
"""Wrong rings of which a rank waits in vain, however long it does."""
END_TO_END = "grad_output_ignored"
"""Several gates are wrong by it, of which one is to blame; what makes a verdict of it is the same for every kernel."""


def variant_of(kernel):
    """The variant whose kernels hold the mistake."""
    return next(g.variant for g in find_puzzle(kernel.puzzle).kernel_gates if g.id == kernel.gate)


def cases_for(kernel):
    """The cases that a kernel is judged by: those that it needs, where it says so, else the usual ones."""
    puzzle, names = find_puzzle(kernel.puzzle), kernel.cases or USUAL.get(kernel.puzzle)
    every = [*puzzle.cases(None), *(puzzle.gate_cases if names else ())]
    mine = [case for case in every if case.variant in ("", variant_of(kernel))]
    return [case for case in mine if names is None or case.name in names]


@functools.cache
def checker(puzzle, dtype):
    """One for all wrong kernels of a puzzle in a dtype."""
    return Checker(find_puzzle(puzzle), dtype=dtype)


@functools.cache
def checker_in_python(puzzle, rung):
    """One for all wrong answers of a rung: truth and baseline are computed once."""
    puzzle = find_puzzle(puzzle)
    return make_checker(Work(puzzle, puzzle.rung(rung), roots.solutions()))


@pytest.fixture(scope="module")
def recorded(request):
    """Puzzle -> None: records its wrong kernels that this run tests; the checkers find them in the cache."""
    orders = defaultdict(list)
    for kernel in chosen(request, "kernel"):
        dims = tuple(dict.fromkeys(case.dims for case in cases_for(kernel)))
        order = Order(kernel.package(), dims, (variant_of(kernel),), small_grid=True, dtype=kernel.dtype)
        orders[kernel.puzzle].append(order)
    return functools.cache(lambda puzzle: record_many(orders[puzzle], puzzle) and None)


def assert_named(wrong, results):
    """The gates of a wrong solution, and no others of `results`, are wrong, and its mistake and a hint are named."""
    named = results[wrong.gate]
    rejected = {id for id, result in results.items() if result.state == "wrong"}
    assert rejected == {wrong.gate, *wrong.also} & results.keys(), {
        id: results[id].diagnosis for id in rejected
    }
    assert named.hint.startswith(f"{find_puzzle(wrong.puzzle).ladder(wrong.of_rung, wrong.gate)}-")
    right = [result for id, result in results.items() if id not in rejected]
    assert not any(result.mistake or result.diagnosis for result in right)


def name_of(wrong):
    """The name of a case."""
    return f"{wrong.puzzle}-{wrong.rung}{'-' if wrong.rung else ''}{wrong.name}"


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, recorded):
    recorded(kernel.puzzle)
    gates = [g.id for g in find_puzzle(kernel.puzzle).kernel_gates if g.variant == variant_of(kernel)]
    judged = checker(kernel.puzzle, kernel.dtype).check(kernel.package(), gates, cases_for(kernel))
    results = {result.gate.id: result for result in judged}
    assert_named(kernel, results)
    named = results[kernel.gate]
    assert not kernel.mistake or named.mistake == kernel.mistake, "\n".join(named.diagnosis)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(w, marks=[pytest.mark.compiles] if w.puzzle == "p26" else [], id=name_of(w))
        for w in PYTHON
    ],
)
def test_a_wrong_answer_in_python_is_rejected_for_the_right_reason(wrong, monkeypatch):
    checker = checker_in_python(wrong.puzzle, wrong.rung)
    if wrong.puzzle == "p21":  # the usual checks, which take most of the time, decide nothing
        monkeypatch.setattr("harness.puzzles.p21.hunt.detections", lambda subject: {})
    if (wrong.puzzle, wrong.rung) == ("p25", "torch"):
        monkeypatch.setattr(checker, "patience", 1.0 if wrong.name in WAITS_FOR_EVER else 4.0)
    gates = [wrong.gate, *wrong.also] if (wrong.puzzle, wrong.rung) in ALONE else None
    results = {result.gate.id: result for result in checker.check(wrong.target(), gates)}
    assert_named(wrong, results)
    named = results[wrong.gate]
    assert named.mistake == (wrong.mistake or None), "\n".join(named.diagnosis)
    if wrong.puzzle == "p26":
        assert named.diagnosis[1] == f"what to do: {FIXES[wrong.mistake]}"


@pytest.mark.parametrize("name", puzzle_names())
def test_the_zoo_covers_every_gate(name):
    puzzle, mine = find_puzzle(name), [wrong for wrong in WRONG if wrong.puzzle == name]
    for rung in puzzle.rungs:
        covered = {wrong.gate for wrong in mine if wrong.of_rung == rung}
        assert covered == {*rung.gates} or (name, rung.id) in OF_THE_KERNELS, rung.id
    assert all(len(wrong.story.splitlines()) == 1 for wrong in mine)


@pytest.mark.compiles
def test_a_wrong_kernel_fails_the_command_line(puzzle):
    """In a process of its own: one that has run MAX without the virtual GPU cannot switch it on."""
    kernel = next(kernel for kernel in OF_P22 if kernel.name == END_TO_END)
    flags = ("p22", "--backward", "--fused", "--device", "virtual", "--json", "-")
    finished = subprocess.run(
        [sys.executable, "-m", "harness", *flags, "--ops", str(kernel.package().path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1, finished.stderr
    run = json.loads(finished.stdout)
    (variant,) = run["devices"][0]["variants"].values()
    named = next(gate for gate in puzzle.kernel_gates if gate.id == kernel.gate).quantities[0]
    assert variant["state"] == "wrong"
    assert variant["diagnosis"][puzzle.printed_name(named)]["mistake"] == kernel.mistake
    assert variant["diagnosis"][puzzle.printed_name(named)]["hint"].startswith(f"{kernel.gate}-")
    assert "equals the reference" in finished.stderr, "the report says it in words"
    wrong = {
        gate.id
        for gate in puzzle.kernel_gates
        if {puzzle.printed_name(q) for q in gate.quantities} & variant["diagnosis"].keys()
    }
    assert wrong & {"forward", "db", "dW", "dgamma", "dx"} == {kernel.gate, *kernel.also}


# ---- The files ----------------------------------------------------------------------------------------------

GOOD = """\
story = "A story."
gate = "dx"
mistake = "m"
file = "layernorm_linear.mojo"
old = "row_rstd * (g - c2"
new = "row_rstd * (g - 2 * c2"
"""


def written(folder, text):
    """A wrong kernel's file."""
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_an_edit_changes_the_copy_and_nothing_else(tmp_path, solution):
    before = {file: file.read_text() for file in solution.files}
    package = zoo.read(written(tmp_path, GOOD), "p22").apply(tmp_path / "op")
    names = [file.relative_to(solution.path) for file in solution.files]
    changed = [str(n) for n in names if (package.path / n).read_text() != before[solution.path / n]]
    assert changed == ["layernorm_linear.mojo"]
    assert "row_rstd * (g - 2 * c2" in (package.path / changed[0]).read_text()
    assert {file: file.read_text() for file in solution.files} == before


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("var H = ", 10)])
def test_an_edit_that_does_not_apply_once_is_an_error(tmp_path, solution, old, times):
    kernel = zoo.read(written(tmp_path, GOOD.replace("row_rstd * (g - c2", old, 1)), "p22")
    count = (solution.path / "layernorm_linear.mojo").read_text().count(old)
    assert (count > 1) == (times > 1)
    with pytest.raises(
        DamagedFile, match=f"some no longer applies: its old text occurs {count} times in layernorm"
    ):
        kernel.apply(tmp_path / "op")
    assert not (tmp_path / "op").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace('gate = "dx"\n', ""), "some.toml has no gate"),
        (re.sub("old = .*\n", "", GOOD), "some.toml has no old"),
        (GOOD + 'hint = "dx-1"\n', "some.toml has an unknown key hint"),
        (GOOD + "hint\n", "some.toml: "),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    with pytest.raises(DamagedFile, match=message):
        zoo.read(written(tmp_path, text), "p22")


def test_what_a_learner_is_given_is_a_wrong_solution_without_further_words(tmp_path):
    source = tmp_path / "some.py"
    source.write_text("# BLANK-START dx: t\nright()\n# BLANK-GIVEN dx\n# wrong()\n# BLANK-END dx\n")
    bug = zoo.WrongKernel("p22", "some", "dx", "m", "some.py")
    assert "wrong()" in bug.apply_edits(source) and "right()" not in bug.apply_edits(source)
    source.write_text("# BLANK-START dx: t\nright()\n# BLANK-END dx\n")
    with pytest.raises(DamagedFile, match="no blank dx that is given wrong"):
        bug.apply_edits(source)


def test_the_package_of_a_wrong_kernel_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    first = OF_P22[0].package()
    stamp = (first.path / OF_P22[0].file).stat().st_mtime_ns
    assert OF_P22[0].package().path == first.path
    assert (first.path / OF_P22[0].file).stat().st_mtime_ns == stamp
    assert OF_P22[1].package().path != first.path
