"""Checker of puzzle 21's second rung, which runs the learner's test on correct and wrong ops, some hidden."""

import contextlib
import functools
import io
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.check import zoo
from harness.check.python_files import PythonChecker, describe_exception, load_module
from harness.check.results import GateResult
from harness.devices.processes import START_TIMEOUT_S, RankError, run_ranks
from harness.puzzles.p21.correct_ops import Op, list_correct_ops, make_op
from harness.puzzles.p21.hunt import DECISIVE_CHECKS, find_function, list_decisive_checks
from harness.puzzles.p21.subjects import REFERENCES
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

OP_TIMEOUT_S = 20.0
"""Time limit of `check` on one op."""
TOTAL_TIMEOUT_S = 300.0
"""Time limit of `check` on all ops."""
MAX_FALSE_ALARMS = 3
"""Maximum number of false alarms that are reported."""
MAX_KINDS = 6
"""Maximum number of kinds of call that are listed for missed ops."""
MAX_QUOTED_CHARACTERS = 80
"""Maximum number of characters quoted from an exception or a report."""


class CheckTimeout(BaseException):
    """`check` timed out. A BaseException, so that the learner's `except Exception` does not catch it."""


class InvalidCheck(Exception):
    """The file has no function `check`, or `check` returns something other than a report."""


@dataclass(frozen=True)
class OpReport:
    """The `report` of `check` on one op, "" if it reported nothing.

    `hidden` ops are wrong and not in the learner's folder; `kind` is the kind of call in which a missed op is
    wrong.
    """

    name: str
    correct: bool
    hidden: bool = False
    report: str = ""
    timed_out: bool = False
    kind: str = ""


def run_check(check: Callable[[Op], object], op: Op, path: Path, timeout_s: float) -> tuple[str, bool]:
    """Return `check`'s report on an op, "" if nothing, and whether it timed out.

    Raises InvalidCheck if `check` returns neither a bool, a string nor None.
    """

    def stop(*_) -> None:
        raise CheckTimeout

    old_handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        returned = check(op)
    except CheckTimeout as timed_out:
        location = describe_exception(timed_out, path).removesuffix("CheckTimeout: ").removesuffix(": ")
        return f"{location}: timed out after {timeout_s:g} s", True
    except Exception as error:
        return describe_exception(error, path, max_length=MAX_QUOTED_CHARACTERS), False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
    if returned is None or returned is True:
        return "", False
    if returned is False:
        return "check returned False", False
    if isinstance(returned, str):
        return returned[:MAX_QUOTED_CHARACTERS], False
    expectation = "it should raise an exception or return a message if an op is wrong"
    raise InvalidCheck(f"check returned {type(returned).__name__}; {expectation}")


def load_wrong_ops(puzzle: str) -> list[tuple[Op, str, bool]]:
    """Return every wrong backward pass of the first rung, its gate, and whether it is hidden."""
    ops = []
    for bug in zoo.load_wrong_solutions(puzzle):
        if bug.rung == "torch":
            function = find_function(bug.gate, load_module(bug.build_target()))
            ops.append((make_op(bug.gate, function.apply, bug.name), bug.gate, bool(bug.old)))
    return ops


def find_failing_call_kind(op: Op, gate: str) -> str:
    subject = REFERENCES[gate].make_subject(op.function)
    return next(DECISIVE_CHECKS[check] for check in list_decisive_checks(gate) if check(subject))


def run_on_all_ops(path: Path, puzzle: str, timeout_s: float = OP_TIMEOUT_S) -> list[OpReport]:
    """Run the learner's `check` on every op, correct ones first; raise InvalidCheck if there is no `check`."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check = load_module(path).get("check")
        if not callable(check):
            raise InvalidCheck(f"{path}: there is no function check")
        solution = load_module(roots.get_solutions() / puzzle / "hunt.py")
        ops = [(op, "", False) for op in list_correct_ops(solution)] + load_wrong_ops(puzzle)
        reports = []
        for op, gate, hidden in ops:
            torch.manual_seed(0)
            report, timed_out = run_check(check, op, path, timeout_s)
            kind = find_failing_call_kind(op, gate) if gate and not report else ""
            reports.append(OpReport(op.name, not gate, hidden, report, timed_out, kind))
            if timed_out:
                break  # it would probably time out on the next op as well
        return reports


class CatchChecker(PythonChecker):
    """Checks the learner's test, which has no cases; `op_timeout_s` is the time limit of one op."""

    op_timeout_s = OP_TIMEOUT_S

    def get_time_limit(self, cases: list[Case]) -> float:
        return START_TIMEOUT_S + 2 * TOTAL_TIMEOUT_S

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        arguments = [(path, self.puzzle.name, self.op_timeout_s)]
        describe = functools.partial(describe_exception, path=path)
        try:
            (reports,) = run_ranks(
                run_on_all_ops, arguments, format_error=describe, source_file=path, timeout_s=TOTAL_TIMEOUT_S
            )
        except RankError as error:
            message = str(error).replace("rank 0 of 1: ", "").replace("rank 0 of 1", "check")
            return self.make_wrong_result(gate, [message], "no-verdict")
        return self.make_result(gate, reports)

    def make_result(self, gate: Gate, reports: Sequence[OpReport]) -> GateResult:
        """Return the gate's result from the reports on all ops."""
        correct = [op for op in reports if op.correct]
        wrong = [op for op in reports if not op.correct]
        false_alarms = [op for op in correct if op.report]
        missed_ops = [op for op in wrong if not op.report]
        if timed_out := next((op for op in reports if op.timed_out), None):
            line = f"on {timed_out.name} {timed_out.report}, the time limit of one op"
            return self.make_wrong_result(gate, [line], "too-slow")
        visible, hidden = ([op for op in wrong if op.hidden is value] for value in (False, True))
        caught = f"caught {len(wrong) - len(missed_ops)} of {len(wrong)} wrong ops"
        caught_counts = f"{format_caught(visible)} in your folder, {format_caught(hidden)} held back"
        if not false_alarms and not missed_ops:
            held_back = f"{caught} ({len(hidden)} of them held back)"
            summary = f"{held_back}, no false alarm in {len(correct)} correct ops"
            return GateResult(gate, "correct", summary=summary)
        lines = [f"false alarm on {op.name}: {op.report}" for op in false_alarms[:MAX_FALSE_ALARMS]]
        if len(false_alarms) > MAX_FALSE_ALARMS:
            num_more = len(false_alarms) - MAX_FALSE_ALARMS
            lines.append(f"... and {num_more} more false alarms in {len(correct)} correct ops")
        lines += [f"{caught}: {caught_counts}", *list_missed_by_kind(missed_ops)]
        mistake, hint = ("false-alarm", 2) if false_alarms else ("missed", 1)
        return self.make_wrong_result(gate, lines, mistake, hint=hint)


def list_missed_by_kind(missed_ops: Sequence[OpReport]) -> list[str]:
    """List missed ops by the kind of call in which they are wrong; hidden ops are only counted."""
    kinds = [kind for kind in DECISIVE_CHECKS.values() if any(op.kind == kind for op in missed_ops)]
    lines = []
    for kind in kinds[:MAX_KINDS]:
        names = [op.name for op in missed_ops if op.kind == kind and not op.hidden]
        hidden = sum(op.hidden for op in missed_ops if op.kind == kind)
        names += [f"{hidden} held back"] if hidden else []
        lines.append(f"not caught, wrong {kind}: {', '.join(names)}")
    if num_more := sum(op.kind in kinds[MAX_KINDS:] for op in missed_ops):
        lines.append(f"... and {num_more} that are wrong in other kinds of call")
    return lines


def format_caught(reports: Sequence[OpReport]) -> str:
    return f"{sum(bool(op.report) for op in reports)} of {len(reports)}"
