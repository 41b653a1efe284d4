"""Times each step of puzzle 28 in the form that its blank is given with and in the solution's, both passes after each step, the
launches of the last passes and the pauses between them, and step 2 for rows of other lengths:
`python -m book.measure fast_steps fast_launches fast_gaps fast_widths`, some minutes on a GPU.

Each as a CUDA graph, in shuffled turns, the median; every step's values are compared with PyTorch's first. Single launches are
timed by PyTorch's profiler while such a graph runs. On a machine without Mojo $WORKBOOK_FAST_STEPS names the folder with the libraries.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from book.measure.kernel_times import CALLS, profiled
from book.measure.shared import write
from harness.bench.timing import CudaClock, Graph, time_interleaved
from harness.learner import blanks
from harness.puzzles.p28.bench import (
    CALLS_PER_GRAPH,
    HIDDEN,
    LARGE_ROWS,
    METHOD,
    OUTPUTS,
    PROTOCOL,
    ROWS,
    capture_calls,
    capture_pytorch,
    check_step,
    measure_dtype,
)
from harness.puzzles.p28.timing import Problem, StepLibrary, build_library
from harness.toolchain import roots

BURSTS, BURST_GRAPHS, SKIPPED = 10, 20, 3
"""Bursts of graphs under the profiler, graphs in each, and how many at a burst's start do not count."""
WIDTHS = (256, 384, 512, 640, 768, 896, 1024)
"""Lengths of a row, up to the longest that a warp's registers hold."""


def first_forms(solution: Path, folder: Path) -> Path:
    """A copy of the solution's package in which every blank holds the code that it is given with."""
    package = folder / "op"
    shutil.copytree(solution, package, symlinks=False)
    file = package / "fast.mojo"
    text = file.read_text("utf-8")
    given = {id: blank.provided for id, blank in blanks.find_blanks(text).items()}
    file.write_text(blanks.join_segments(blanks.split_blanks(text), given), "utf-8")
    return package


def capture_passes(last_steps: tuple[int, ...]) -> dict[str, Graph]:
    """Return graphs of both passes after some steps, and of PyTorch's layers."""
    problem = Problem(ROWS, HIDDEN, OUTPUTS, torch.bfloat16)
    forms = load_forms("bfloat16")
    return {
        f"pass {last}": capture_calls(partial(problem.enqueue_both_passes, *forms.values(), last))
        for last in last_steps
    } | {name: capture_pytorch(problem, name == "compile") for name in ("eager", "compile")}


def measure_launches() -> Iterator[dict[str, object]]:
    """Yield a row for each launch of both passes after steps 10, 11 and 12, and of PyTorch's layers, in order."""
    for name, graph in capture_passes((10, 11, 12)).items():
        for number, (kernel, us) in enumerate(profiled(graph), 1):
            yield {
                "of": name, "launch": number, "kernel": kernel[:60], "median_us": f"{us:.2f}", "rows": ROWS, "hidden": HIDDEN,
                "outputs": OUTPUTS, "protocol": f"PyTorch's profiler, {CALLS} CUDA graphs, 20 ms idle before each, the median",
            }  # fmt: skip


def profile_bursts(graph: Graph) -> list[list[tuple[float, float, str]]]:
    """Return what the GPU does in each graph of the bursts, in order: start, end and name.

    Raises RuntimeError where graphs differ.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(BURSTS):
            for _ in range(BURST_GRAPHS):
                graph()
            torch.cuda.synchronize()
            time.sleep(0.02)
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    graphs = BURSTS * BURST_GRAPHS
    length = len(events) // graphs
    names = [name for *_, name in events]
    if not events or names != names[:length] * graphs:
        raise RuntimeError(f"{len(events)} launches in {graphs} graphs, or graphs that differ")
    return [events[place : place + length] for place in range(0, len(events), length)]


def measure_gaps() -> Iterator[dict[str, object]]:
    """Yield a row for both passes after step 12 and for each of PyTorch's layers: what fills the time of a graph in a burst."""
    for name, graph in capture_passes((12,)).items():
        samples: dict[str, list[float]] = {}
        fills = 0
        for number, (launches, following) in enumerate(pairwise(profile_bursts(graph))):
            place = number % BURST_GRAPHS
            if place < SKIPPED or place == BURST_GRAPHS - 1:
                continue
            fills = sum(is_fill(each) for each in launches)
            pauses = [(b[0] - a[1], is_fill(a) or is_fill(b)) for a, b in pairwise(launches)]
            for column, us in {
                "kernels_us": sum(each[1] - each[0] for each in launches if not is_fill(each)),
                "fills_us": sum(each[1] - each[0] for each in launches if is_fill(each)),
                "pauses_us": sum(pause for pause, _ in pauses),
                "pauses_at_fills_us": sum(pause for pause, at_fill in pauses if at_fill),
                "next_us": following[0][0] - launches[-1][1],
                "period_us": following[0][0] - launches[0][0],
            }.items():
                samples.setdefault(column, []).append(us)
        yield {
            "of": name, "fills": fills, **{column: f"{statistics.median(each):.2f}" for column, each in samples.items()},
            "rows": ROWS, "hidden": HIDDEN, "outputs": OUTPUTS,
            "protocol": f"PyTorch's profiler, {BURSTS} bursts of {BURST_GRAPHS} CUDA graphs without the first {SKIPPED} and the last, "
            "20 ms idle after each burst, the median",
        }  # fmt: skip


def is_fill(launch: tuple[float, float, str]) -> bool:
    """Whether a launch fills or copies memory."""
    return launch[2].startswith("Mem")


def measure_widths() -> Iterator[dict[str, object]]:
    """Yield a row for step 2's form, dtype and length of a row, with as many elements in all; values are compared first."""
    calls = {}
    for dtype in ("bfloat16", "float32"):
        forms = load_forms(dtype)
        for hidden in WIDTHS:
            problem = Problem(LARGE_ROWS * HIDDEN // hidden, hidden, 8, getattr(torch, dtype))
            for form, steps in forms.items():
                check_step(problem, steps, form, 2)
                call = partial(problem.enqueue_step, steps, 2)
                calls[dtype, form, problem.rows, hidden] = capture_calls(call, CALLS_PER_GRAPH)
    samples = time_interleaved(calls, CudaClock(), PROTOCOL)
    for (dtype, form, rows, hidden), each in samples.items():
        yield {
            "dtype": dtype, "form": form, "step": "once", "rows": rows, "hidden": hidden,
            "median_us": f"{statistics.median(each) / CALLS_PER_GRAPH:.2f}", "protocol": METHOD,
        }  # fmt: skip


def load_forms(dtype: str) -> dict[str, StepLibrary]:
    """Load the kernels of a dtype as given ("first") and as the solution has them."""
    solution = roots.get_solutions() / "p28" / "op"
    with tempfile.TemporaryDirectory() as folder:
        packages = {"first": first_forms(solution, Path(folder)), "solution": solution}
        return {form: StepLibrary(build_library(package, form, dtype)) for form, package in packages.items()}


def measure() -> Iterator[dict[str, object]]:
    """A row for each step, form and dtype, for the bare products, and for both passes after each step."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in ("bfloat16", "float32"):
        yield from measure_dtype(dtype, load_forms(dtype))


if __name__ == "__main__":
    others = {"launches": measure_launches, "gaps": measure_gaps, "widths": measure_widths}
    write(others.get(sys.argv[-1], measure)())
