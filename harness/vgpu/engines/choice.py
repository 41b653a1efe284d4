"""Which engine runs a launch: NumPy over the threads of many blocks at once (interpreter/executor.py), or
machine code (native/).

Machine code is 10 to 100 times faster and takes a second to make, or twenty where there are many products of
matrices, so that it pays for long launches only. A launch begins in NumPy. Where it is not done when it has
taken as long as its machine code takes to make (`patience`), its kernel is translated, memory is put back, and
it starts again as machine code; a note in the cache says so for the next process. What the native engine does
not know, and everything that needs counters or events, stays in NumPy, and so does the report of every finding.

The environment variable WORKBOOK_VGPU_ENGINE says otherwise: "numpy" never makes machine code, "native" uses
it wherever it can. The results are the same, byte for byte."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.errors import BadUse, EnvironmentProblem
from harness.toolchain.cache import cache_folder, digest, keep

from .launch import Overdue, Run
from .native import engine, machine_code

VARIABLE = "WORKBOOK_VGPU_ENGINE"
CHOICES = ("auto", "numpy", "native")
PATIENCE = 0.5
"""Seconds that a launch of a small kernel may take in NumPy before machine code is made."""
SECONDS_OF = {"instruction": 0.001, "mma": 0.11}
"""To make machine code of one, measured on one core at 2 to 3 GHz: a product of matrices is thousands of instructions of LLVM."""


def chosen() -> str:
    """The engine that the environment asks for. Raises BadUse, and EnvironmentProblem where it cannot be
    had."""
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise BadUse(f"{VARIABLE} is '{wanted}', expected {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")
    if wanted == "native" and (why := machine_code.unavailable()):
        raise EnvironmentProblem(f"{VARIABLE} asks for the native engine of the virtual GPU, but {why}")
    return wanted


def execute(run: Run) -> None:
    """Run a launch to its end; `run.launch.engine` says by what. Raises what Run.execute raises."""
    wanted = chosen()
    able = wanted != "numpy" and not machine_code.unavailable()
    if not able or run.checks.counters or engine.refusal(run):
        run.execute()
    elif wanted == "native" or is_long(run):
        if not engine.ran(run):
            run.execute()
    else:
        _begin_in_numpy(run)


def _begin_in_numpy(run: Run) -> None:
    """Run a launch in NumPy, and as machine code where that takes long."""
    if not engine.may_translate(run.kernel):
        run.execute()
        return
    deadline = time.perf_counter() + patience(run.kernel)
    run.allow(deadline, lambda: not isinstance(engine.native_of(run.kernel), str))
    try:
        run.execute()
    except Overdue:
        run.undo()
        note_long(run)
        again = run.fresh()
        if not engine.ran(again):
            again.execute()


def patience(kernel) -> float:
    """The seconds that a launch may take in NumPy: about as many as its machine code takes to make, so that together they are at
    most twice what the better engine takes."""
    opcodes = kernel.code.program.opcodes
    products = opcodes["mma"]
    others = opcodes.total() - products
    return max(PATIENCE, SECONDS_OF["instruction"] * others + SECONDS_OF["mma"] * products)


def _note(run: Run) -> Path:
    """Where it is noted that a kernel takes long with as many threads as this launch has, or more."""
    size = (run.grid[0] * run.grid[1] * run.grid[2] * run.threads).bit_length()
    name = digest([machine_code.setting(), run.kernel.name, run.kernel.module.text, str(size)])
    return cache_folder("native") / f"{name}.long"


def note_long(run: Run) -> None:
    """Remember that such a launch takes long in NumPy."""
    keep(_note(run), lambda path: path.write_bytes(b""), "a note of the virtual GPU")


def is_long(run: Run) -> bool:
    """Whether such a launch has taken long in NumPy before, or its kernel is machine code already."""
    return isinstance(run.kernel.native, engine.Native) or _note(run).exists()
