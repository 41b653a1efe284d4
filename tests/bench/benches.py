"""Helpers for tests of `--bench`: a benchmark at a tiny size on the CPU."""

import dataclasses

import torch
import typed
from typed import make_text_console

from harness.bench import runner
from harness.puzzles.p22.candidates import BENCHMARK, CANDIDATES, Sizes

TINY = Sizes(6, 5, 7)
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
EAGER, FLOOR = BY_NAME["eager"], BY_NAME["bare GEMMs"]


def make_bench(*selected, columns=("loop", "memory"), benchmark=BENCHMARK, device=None):
    """Create a benchmark of some candidates at a tiny size that prints into a string."""
    return runner.BenchmarkRun(
        benchmark=dataclasses.replace(benchmark, candidates=selected),
        sizes=[TINY],
        dtype="float32",
        columns=columns,
        device=device or torch.device("cpu"),
        console=make_text_console(),
    )


def get_output(run):
    """Return a benchmark's printed output."""
    return typed.read_output(run.console)
