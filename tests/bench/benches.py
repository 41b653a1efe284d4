"""What the tests of `--bench` share: a run at a tiny size on the CPU."""

import math

import torch
import typed
from typed import text_console

from harness.bench import command, runner
from harness.bench.report import Show
from harness.puzzles.p22 import candidates
from harness.puzzles.p22.candidates import BENCHMARK, Sizes

TINY = Sizes(6, 5, 7)

EAGER = next(candidate for candidate in candidates.CANDIDATES if candidate.name == "eager")
FLOOR = next(candidate for candidate in candidates.CANDIDATES if candidate.role == "floor")


def a_bench(
    *chosen, columns=("loop", "memory"), passes=("both",), seconds=math.inf, benchmark=BENCHMARK, **further
):
    """A run of some candidates at a tiny size, printing into a string."""
    options = command.Options(
        benchmark=benchmark,
        sizes=[TINY],
        dtype="float32",
        passes=passes,
        columns=columns,
        candidates=chosen,
        rounds=2,
        cold=False,
        seconds=seconds,
        device=torch.device("cpu"),
    )
    return runner.Bench(options, Show(text_console()), **further)


def printed(run):
    """What a run has printed."""
    return typed.printed(run.show.console)
