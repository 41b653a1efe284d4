"""The checker is checked: every wrong kernel is rejected for the right reason, and the solution is not.

The wrong kernels are recorded by one Mojo program a variant and judged in this one process; one goes through the
command line to its exit code.
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
from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.errors import DamagedFile
from harness.toolchain import roots

ROOT = roots.CHECKOUT
KERNELS = [kernel for kernel in zoo.load("p22") if not kernel.rung]
END_TO_END = "grad_output_ignored"
"""Several gates are wrong by it, of which one is to blame; what makes a verdict of it is the same for every kernel."""


@pytest.fixture(scope="module")
def checkers(puzzle):
    """One warm checker for all wrong kernels of a dtype."""
    return {dtype: Checker(puzzle, dtype=dtype) for dtype in {kernel.dtype for kernel in KERNELS}}


def variant_of(puzzle, kernel):
    """The variant whose kernels hold the mistake."""
    return next(gate.variant for gate in puzzle.kernel_gates if gate.id == kernel.gate)


def cases_for(puzzle, kernel):
    """The cases that the kernel is judged by: those that it needs, where it says so, else the usual ones."""
    usual = ("hard values", "odd sizes", "wide", "many rows", "expanded")
    return [case for case in puzzle.cases(None) if case.name in (kernel.cases or usual)]


@pytest.fixture(scope="module")
def recorded(request, puzzle):
    """dtype -> None: records its wrong kernels that this run tests; the checker finds them in the cache."""
    orders = defaultdict(list)
    for kernel in chosen(request, "kernel"):
        dims = tuple(dict.fromkeys(case.dims for case in cases_for(puzzle, kernel)))
        variant = variant_of(puzzle, kernel)
        orders[kernel.dtype].append(Order(kernel.package(), dims, (variant,), small_grid=True))
    return functools.cache(lambda dtype: record_many(orders[dtype], puzzle.name, dtype) and None)


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, puzzle, checkers, recorded):
    recorded(kernel.dtype)
    gates = [gate.id for gate in puzzle.kernel_gates if gate.variant == variant_of(puzzle, kernel)]
    results = {
        result.gate.id: result
        for result in checkers[kernel.dtype].check(kernel.package(), gates, cases_for(puzzle, kernel))
    }
    wrong = {id for id, result in results.items() if result.state == "wrong"}
    assert wrong == {kernel.gate, *kernel.also} & set(gates)
    named = results[kernel.gate]
    assert named.mistake == kernel.mistake, "\n".join(named.diagnosis)
    assert named.hint.startswith(f"{kernel.gate}-") and any(named.hint in line for line in named.diagnosis)
    assert all(
        result.mistake is None and not result.diagnosis for id, result in results.items() if id not in wrong
    )


def test_the_zoo_is_large_and_covers_every_gate(puzzle):
    assert len(KERNELS) >= 24
    assert {kernel.gate for kernel in KERNELS} == {gate.id for gate in puzzle.kernel_gates}
    assert len({kernel.mistake for kernel in KERNELS}) >= 15
    assert all(len(kernel.story.splitlines()) == 1 for kernel in KERNELS)


@pytest.mark.compiler
def test_a_wrong_kernel_fails_the_command_line(puzzle):
    """In a process of its own: one that has run MAX without the virtual GPU cannot switch it on."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == END_TO_END)
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
    assert variant["diagnosis"][puzzle.printed(named)]["mistake"] == kernel.mistake
    assert variant["diagnosis"][puzzle.printed(named)]["hint"].startswith(f"{kernel.gate}-")
    assert "equals the reference" in finished.stderr, "the report says it in words"
    wrong = {
        gate.id
        for gate in puzzle.kernel_gates
        if {puzzle.printed(q) for q in gate.quantities} & variant["diagnosis"].keys()
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
        DamagedFile, match=f"some no longer applies: its old text stands {count} times in layernorm"
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
    assert "wrong()" in bug.edited(source) and "right()" not in bug.edited(source)
    source.write_text("# BLANK-START dx: t\nright()\n# BLANK-END dx\n")
    with pytest.raises(DamagedFile, match="no blank dx that is given wrong"):
        bug.edited(source)


def test_the_package_of_a_wrong_kernel_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    first = KERNELS[0].package()
    stamp = (first.path / KERNELS[0].file).stat().st_mtime_ns
    assert KERNELS[0].package().path == first.path
    assert (first.path / KERNELS[0].file).stat().st_mtime_ns == stamp
    assert KERNELS[1].package().path != first.path
