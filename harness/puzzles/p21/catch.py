"""Checker of puzzle 21's second rung, a test: run on correct and wrong backward passes, some of them hidden.

The learner's `check(op)` runs in a subprocess, so that a hang or an exit fails one line only.
"""

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
from harness.check.python_files import PythonChecker, describe, load
from harness.check.results import GateResult
from harness.devices.processes import START, RankFailed, run_ranks
from harness.puzzles.p21.hunt import DECISIVE, decisive, function_of
from harness.puzzles.p21.rights import Op, correct_ops, op_of
from harness.puzzles.p21.subjects import WANTED
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

SECONDS = 20.0
"""Time limit of `check` on one op."""
TOGETHER = 300.0
"""Time limit of `check` on all ops."""
SHOWN = 3
"""Number of false alarms that are quoted."""
KINDS_SHOWN = 6
"""Number of kinds of call listed for an op that was not caught."""
LONGEST = 80
"""Characters of an exception or an answer that are quoted."""


class CheckTimeout(BaseException):
    """`check` timed out; derived from BaseException so that the learner's `except Exception` does not catch
    it."""


class NoTest(Exception):
    """The file has no test to run."""


@dataclass(frozen=True)
class Try:
    """One op that `check` ran on.

    Attributes:
        name: The op's name.
        right: Whether it is correct.
        held_back: Whether it is wrong and hidden from the learner.
        said: What `check` reported; "" for nothing.
        late: Whether it timed out.
        kind: The kind of call in which a wrong op that passed is wrong.
    """

    name: str
    right: bool
    held_back: bool = False
    said: str = ""
    late: bool = False
    kind: str = ""


def run_check(check: Callable[[Op], object], op: Op, path: Path, seconds: float) -> tuple[str, bool]:
    """Run `check` on an op; return its report ("" for none) and whether it timed out. Raise NoTest for no
    answer."""

    def stop(*_) -> None:
        raise CheckTimeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        answer = check(op)
    except CheckTimeout as late:
        where = describe(late, path).removesuffix(": CheckTimeout: ").removesuffix("CheckTimeout: ")
        return f"{where}: stopped after {seconds:g} s", True
    except Exception as error:
        return describe(error, path, longest=LONGEST), False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if answer is None or answer is True:
        return "", False
    if answer is False:
        return "check returned False", False
    if isinstance(answer, str):
        return answer[:LONGEST], False
    raise NoTest(
        f"check returned {type(answer).__name__}; it should raise, or return a line, where an op is wrong"
    )


def wrong_ops(puzzle: str) -> list[tuple[Op, str, bool]]:
    """Return every wrong backward pass of the first rung, its gate, and whether it is hidden (it has its own
    edit)."""
    return [
        (op_of(bug.gate, function_of(bug.gate, load(bug.target())).apply, bug.name), bug.gate, bool(bug.old))
        for bug in zoo.load(puzzle)
        if bug.rung == "torch"
    ]


def failing_call_kind(op: Op, gate: str) -> str:
    """Return the kind of call in which a wrong op of a gate is wrong."""
    subject = WANTED[gate].subject(op.function)
    return next(DECISIVE[check] for check in decisive(gate) if check(subject))


def tries(path: Path, puzzle: str, seconds: float = SECONDS) -> list[Try]:
    """Run the learner's `check` on every op, correct ones first. Raise NoTest if it cannot run, and
    DamagedFile."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check = load(path).get("check")
        if not callable(check):
            raise NoTest(f"{path}: there is no function check")
        solution = load(roots.solutions() / puzzle / "hunt.py")
        todo = [(op, "", False) for op in correct_ops(solution)] + wrong_ops(puzzle)
        done = []
        for op, gate, held_back in todo:
            torch.manual_seed(0)
            text, late = run_check(check, op, path, seconds)
            kind = failing_call_kind(op, gate) if gate and not text else ""
            done.append(Try(op.name, not gate, held_back, text, late, kind))
            if late:
                break  # a hang on one repeats on the next
        return done


class CatchChecker(PythonChecker):
    """Checks the test, which has no cases; `seconds` is its time limit for one op."""

    seconds = SECONDS

    def limit(self, cases: list[Case]) -> float:
        return START + 2 * TOGETHER

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        arguments, describing = (path, self.puzzle.name, self.seconds), functools.partial(describe, path=path)
        try:
            (done,) = run_ranks(tries, [arguments], describe=describing, source=path, seconds=TOGETHER)
        except RankFailed as error:
            words = str(error).replace("rank 0 of 1: ", "").replace("rank 0 of 1", "check")
            return self.wrong(gate, [words], "no-verdict")
        return self.result_of(gate, done)

    def result_of(self, gate: Gate, done: Sequence[Try]) -> GateResult:
        """Return the result of a test from its reports."""
        right = [each for each in done if each.right]
        wrong = [each for each in done if not each.right]
        alarms = [each for each in right if each.said]
        missed = [each for each in wrong if not each.said]
        if late := next((each for each in done if each.late), None):
            return self.wrong(
                gate, [f"on {late.name} {late.said}; one op may take so long, no more"], "too-slow"
            )
        arguments, held = ([each for each in wrong if each.held_back is value] for value in (False, True))
        caught = f"caught {len(wrong) - len(missed)} of {len(wrong)} wrong ones"
        parts = f"{count(arguments)} of those in your folder, {count(held)} held back"
        if not alarms and not missed:
            words = f"{caught} ({len(held)} of them held back), no false alarm in {len(right)} right ones"
            return GateResult(gate, "correct", summary=words)
        lines = [f"false alarm on {each.name}: {each.said}" for each in alarms[:SHOWN]]
        if len(alarms) > SHOWN:
            lines.append(f"... and {len(alarms) - SHOWN} more false alarms in {len(right)} right ones")
        lines += [f"{caught}: {parts}", *kind_lines(missed)]
        return self.wrong(gate, lines, "false-alarm" if alarms else "missed", hint=2 if alarms else 1)


def kind_lines(missed: Sequence[Try]) -> list[str]:
    """List the wrong ops that passed by the kind of call in which they are wrong; hidden ones without names."""
    kinds = [kind for kind in DECISIVE.values() if any(each.kind == kind for each in missed)]
    lines = []
    for kind in kinds[:KINDS_SHOWN]:
        names = [each.name for each in missed if each.kind == kind and not each.held_back]
        hidden = sum(each.held_back for each in missed if each.kind == kind)
        lines.append(
            f"not caught, wrong {kind}: {', '.join([*names, *([f'{hidden} held back'] if hidden else [])])}"
        )
    if more := sum(each.kind in kinds[KINDS_SHOWN:] for each in missed):
        lines.append(f"... and {more} that are wrong in other kinds of call")
    return lines


def count(tried: Sequence[Try]) -> str:
    """Return how many wrong ops were caught, "9 of 13"."""
    return f"{sum(bool(each.said) for each in tried)} of {len(tried)}"
