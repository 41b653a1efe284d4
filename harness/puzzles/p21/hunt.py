"""Checker of puzzle 21's first rung: runs decisive checks, and reports which usual checks detect the bug."""

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.check import gradient_checks as checks
from harness.check import zoo
from harness.check.gradient_checks import Check
from harness.check.gradients import Subject
from harness.check.python_files import PythonChecker, load_module
from harness.check.results import GateResult
from harness.errors import DamagedFile
from harness.puzzles.p21.subjects import REFERENCES
from harness.spec.puzzle import Case, Gate

# `check_backward` runs these checks too, on more kinds of call, and diagnoses mistakes by known formulas.
# The puzzle does not call it: a gate reports the first of its checks that fails, in this order.
DECISIVE_CHECKS: dict[Check, str] = {
    checks.forward: "in its result",
    checks.inputs_unchanged: "in overwriting an input, its result or the incoming gradient",
    checks.differentiable_outputs: "in which of its outputs have a gradient",
    checks.against_autograd: "for a random gradient, at some sizes",
    checks.expanded_gradient: "for a gradient of stride 0, as from sum()",
    checks.strided_gradient: "for a gradient that is transposed, or a slice",
    checks.strided_inputs: "for inputs that are transposed, or slices",
    checks.frozen_inputs: "with some of its inputs frozen",
    checks.two_calls: "in the first of two calls, when the second comes before its backward pass",
    checks.under_checkpoint: "under torch.utils.checkpoint",
    checks.second_backward: "in a second backward pass of the same call",
    checks.written_between: "after an input or the result has been overwritten",
    checks.at_zero: "where an input is exactly 0",
    checks.infinite_gradient: "for a gradient with infinities",
    checks.far_from_zero: "for inputs whose exp is infinite or 0",
    checks.narrow_dtypes: "in float32 or a 16-bit dtype",
    checks.second_derivatives: "in the gradient of a gradient",
    checks.repeat_runs: "in a repeated call",
    checks.gradcheck_float64: "by finite differences in float64",
    checks.many_rows_bfloat16: "in bfloat16 with thousands of rows",
}
"""Check -> the kind of call in which a backward pass that fails it is wrong. The most informative come first.

The last check is only for backward passes that sum over rows.
"""
OP_NUMBERS = itertools.count()


def run_opcheck(subject: Subject) -> str | None:
    """Run torch.library.opcheck on the class, registered as an operator; return the tests that fail."""
    function = subject.function.__self__
    name = f"hunted::{function.__name__}{next(OP_NUMBERS)}"
    operator = torch.library.custom_op(name, mutates_args=())(function.forward)
    operator.register_fake(function.forward)
    operator.register_autograd(function.backward, setup_context=function.setup_context)
    results = torch.library.opcheck(operator, tuple(subject.inputs()), raise_exception=False)
    failed = [test for test, status in results.items() if status != "SUCCESS"]
    return f"{', '.join(failed)} failed" if failed else None


USUAL_CHECKS: dict[str, Check] = {
    "gradcheck float64": checks.gradcheck_float64,
    "gradcheck float32": checks.gradcheck_float32,
    "allclose on ones": checks.allclose_on_ones,
    "square shapes": checks.square_shapes,
    "opcheck": checks.catch_errors(run_opcheck),
    "random directions": checks.random_directions,
    "repeat runs": checks.repeat_runs,
}
"""Column name in the matrix -> a check that people commonly write."""


def find_function(gate: str, module: Mapping[str, object]) -> type[torch.autograd.Function]:
    function = module.get(REFERENCES[gate].name)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ValueError(f"the file defines no class {REFERENCES[gate].name}(torch.autograd.Function)")
    return function


def list_decisive_checks(gate: str) -> tuple[Check, ...]:
    return tuple(DECISIVE_CHECKS)[: None if REFERENCES[gate].sums_rows else -1]


def run_usual_checks(subject: Subject) -> dict[str, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: check(subject) is not None for name, check in USUAL_CHECKS.items()}


class HuntChecker(PythonChecker):
    """Checks each class of the first rung separately."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        try:
            subject = REFERENCES[gate.id].make_subject(find_function(gate.id, module).apply)
        except ValueError as error:
            return self.make_wrong_result(gate, [str(error)])
        checks_to_run = list_decisive_checks(gate.id)
        lines = {check.__name__: line for check in checks_to_run if (line := check(subject))}
        if not lines:
            return GateResult(gate, "correct", summary=f"{len(checks_to_run)} checks")
        first_failed, *other_failures = lines
        # The others mostly fail for the same reason, with misleading messages.
        diagnosis = [f"{first_failed}: {lines[first_failed]}"]
        if other_failures:
            diagnosis.append(f"{', '.join(other_failures)} fail{'s' * (len(other_failures) == 1)} too")
        detections = run_usual_checks(subject)
        for label, detected in (("detected by", True), ("not detected by", False)):
            names = [name for name, was_detected in detections.items() if was_detected is detected]
            diagnosis.append(f"{label}: {', '.join(names) or 'none'}")
        return self.make_wrong_result(gate, diagnosis, first_failed, hint=2)


# ---- The matrix ---------------------------------------------------------------------------------------------


def load_wrong_subjects(puzzle: str, rung: str) -> dict[str, Subject]:
    """Return the wrong backward passes of a rung's zoo by name."""
    subjects = {}
    for bug in zoo.load_wrong_solutions(puzzle):
        if bug.rung == rung:
            function = find_function(bug.gate, load_module(bug.build_target()))
            subjects[bug.name] = REFERENCES[bug.gate].make_subject(function.apply)
    return subjects


def build_matrix() -> dict[str, dict[str, bool]]:
    """Return which usual checks detect each wrong backward pass; raise DamagedFile if a class is missing."""
    try:
        subjects = load_wrong_subjects("p21", "torch")
        return {name: run_usual_checks(subject) for name, subject in subjects.items()}
    except ValueError as error:
        raise DamagedFile(str(error)) from error


def show_matrix(console: Console) -> int:
    """Run `p21 --matrix`: print a row per wrong backward pass and a column per usual check."""
    table = Table(box=None, pad_edge=False)
    table.add_column("wrong backward pass")
    for name in USUAL_CHECKS:
        table.add_column(name, justify="center")
    rows = build_matrix()
    for name, detections in rows.items():
        table.add_row(
            name.replace("_", " "), *("seen" if detections[column] else "·" for column in USUAL_CHECKS)
        )
    console.print(table, soft_wrap=not console.is_terminal)
    for column in USUAL_CHECKS:
        count = sum(detections[column] for detections in rows.values())
        console.print(Text(f"{column}: sees {count} of {len(rows)}"))
    return 0
