"""What judges a learner's file: the checker that its rung names, imported when it is asked for."""

import pkgutil
from pathlib import Path
from typing import Protocol

from harness.check.results import Cases, GateIds, GateResult, OnFirst
from harness.learner.work import Work
from harness.spec.rungs import MojoRung

NARROW = "bfloat16"
"""In what a few cases of a gate that is right are judged too."""


class RungChecker(Protocol):
    """What `harness.spec.rungs` says that every checker can do."""

    def check(
        self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """The verdict on each gate; `on_first` is called by a checker that judges case after case."""
        ...


def checker_of(work: Work, *, at_terminal: bool = False, **options: object) -> RungChecker:
    """What judges a file that a learner writes: Python runs in a process of its own, where leaving ends no verdict.

    `at_terminal`: whether that code may read from the terminal.
    """
    from harness.check.apart import Apart

    if work.in_package:
        return make_checker(work, **options)
    return Apart(work, at_terminal=at_terminal, **options)


def make_checker(work: Work, **options: object) -> RungChecker:
    """The checker of a file; `options` are its keywords, as `seed`. Importing it may take seconds.

    Kernels are judged in NARROW too where nothing says which dtype is meant.
    """
    if isinstance(work.rung, MojoRung):
        options = {"other": NARROW, **options} if "dtype" not in options else options
    return pkgutil.resolve_name(work.rung.checker)(work.puzzle, work.rung, **options)
