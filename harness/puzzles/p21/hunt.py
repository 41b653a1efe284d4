"""Checker of puzzle 21's first rung: each backward pass by named checks, and which common checks detect its
bug.

There are two sets of checks. DECISIVE must pass for a backward pass to be correct. USUAL are the common ones:
for a wrong pass a line lists which of them detect it and which do not, and `--matrix` shows this for the
whole zoo.
"""

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
from harness.check.python_files import PythonChecker, load
from harness.check.results import GateResult
from harness.errors import DamagedFile
from harness.puzzles.p21.subjects import WANTED
from harness.spec.puzzle import Case, Gate

DECISIVE: dict[Check, str] = {
    checks.forward: "in its result",
    checks.inputs_unchanged: "in what it writes to: an input, its result or the gradient coming in",
    checks.differentiable_outputs: "in which of its outputs have a gradient",
    checks.against_autograd: "for a random gradient, at some of its sizes",
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
    checks.repeat_runs: "in the same call once more",
    checks.gradcheck_float64: "by finite differences in float64",
    checks.many_rows_bfloat16: "in bfloat16 with thousands of rows",
}
"""Checks of every backward pass, the most informative first, and the kind of call in which a failing one is wrong.

The last is for passes that sum over rows.
"""
COUNTER = itertools.count()


def opcheck(subject: Subject) -> str | None:
    """Run torch.library.opcheck on the class as an operator: schema, fake tensors, autograd, ahead-of-time
    compilation."""
    function = subject.function.__self__
    operator = torch.library.custom_op(f"hunted::{function.__name__}{next(COUNTER)}", mutates_args=())(
        function.forward
    )
    operator.register_fake(function.forward)
    operator.register_autograd(function.backward, setup_context=function.setup_context)
    results = torch.library.opcheck(operator, tuple(subject.inputs()), raise_exception=False)
    failed = [test for test, words in results.items() if words != "SUCCESS"]
    return f"{', '.join(failed)} failed" if failed else None


USUAL: dict[str, Check] = {
    "gradcheck float64": checks.gradcheck_float64,
    "gradcheck float32": checks.gradcheck_float32,
    "allclose on ones": checks.allclose_on_ones,
    "square shapes": checks.square_shapes,
    "opcheck": checks.guard(opcheck),
    "random directions": checks.random_directions,
    "repeat runs": checks.repeat_runs,
}
"""Common checks, by the names of the matrix's columns."""


def function_of(gate: str, module: Mapping[str, object]) -> type[torch.autograd.Function]:
    function = module.get(WANTED[gate].name)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ValueError(f"the file defines no class {WANTED[gate].name}(torch.autograd.Function)")
    return function


def decisive(gate: str) -> tuple[Check, ...]:
    return tuple(DECISIVE)[: None if WANTED[gate].sums else -1]


def detections(subject: Subject) -> dict[str, bool]:
    """Map each usual check to whether it detects an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: check(subject) is not None for name, check in USUAL.items()}


class HuntChecker(PythonChecker):
    """Checks each class of the first rung separately."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        try:
            subject = WANTED[gate.id].subject(function_of(gate.id, module).apply)
        except ValueError as error:
            return self.wrong(gate, [str(error)])
        requested = decisive(gate.id)
        lines = {check.__name__: line for check in requested if (line := check(subject))}
        if not lines:
            return GateResult(gate, "correct", summary=f"{len(requested)} checks")
        first, *others = lines
        # The others mostly fail for the same reason, and their words would mislead.
        shown = [f"{first}: {lines[first]}"]
        if others:
            shown.append(f"{', '.join(others)} fail{'s' * (len(others) == 1)} too")
        catches = detections(subject)
        for words, wanted_value in (("seen by", True), ("not seen by", False)):
            shown.append(
                f"{words}: {', '.join(n for n, s in catches.items() if s is wanted_value) or 'none'}"
            )
        return self.wrong(gate, shown, first, hint=2)


# ---- The matrix ---------------------------------------------------------------------------------------------


def wrong_subjects(puzzle: str, rung: str) -> dict[str, Subject]:
    """Return every wrong backward pass of the zoo in PyTorch, by name."""
    subjects = {}
    for bug in zoo.load(puzzle):
        if bug.rung == rung:
            path = bug.target()
            subjects[bug.name] = WANTED[bug.gate].subject(function_of(bug.gate, load(path)).apply)
    return subjects


def matrix() -> dict[str, dict[str, bool]]:
    """Map each wrong backward pass and usual check to whether it detects it. Raise DamagedFile if one cannot
    be built."""
    try:
        return {name: detections(subject) for name, subject in wrong_subjects("p21", "torch").items()}
    except ValueError as error:
        raise DamagedFile(str(error)) from error


def show_matrix(console: Console) -> int:
    """Run `p21 --matrix`: a row per wrong backward pass, a column per usual check."""
    table = Table(box=None, pad_edge=False)
    table.add_column("wrong backward pass")
    for name in USUAL:
        table.add_column(name, justify="center")
    rows = matrix()
    for name, catches in rows.items():
        table.add_row(name.replace("_", " "), *("seen" if catches[column] else "·" for column in USUAL))
    console.print(table, soft_wrap=not console.is_terminal)
    for column in USUAL:
        count = sum(catches[column] for catches in rows.values())
        console.print(Text(f"{column}: sees {count} of {len(rows)}"))
    return 0
