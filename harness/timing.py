"""How long a forward pass takes on the devices of a run: medians of repeated calls, and one honest ratio."""

import statistics
import time
from dataclasses import replace

from harness.devices import graphs
from harness.devices.graphs import Program
from harness.devices.targets import Target
from harness.puzzles.spec import Case
from harness.workbook import Run

CALLS = 50


def forward_microseconds(run: Run, target: Target, variant: str) -> tuple[float, float]:
    """The median time of one forward call in microseconds: at the sizes of the run, and with every size 1.

    The second is what a call costs that computes next to nothing.
    """
    options = run.options
    call = options.puzzle.variants[variant][0]
    program = graphs.load(run.package, (call,), options.dtype, target.device, kind=target.kind)
    case = run.cases[0]
    smallest = replace(case, dims=(1,) * len(case.dims))
    return tuple(
        median_microseconds(program, forward_buffers(run, program, c, target), target)
        for c in (case, smallest)
    )


def forward_buffers(run: Run, program: Program, case: Case, target: Target) -> dict[str, object]:
    """The buffers of one forward call on one device."""
    from harness import running

    inputs = running.Reference(run.options.puzzle, run.options.dtype, run.options.seed).inputs(case)
    return running.make_buffers(run.options.puzzle, program, target, inputs)[1]


def median_microseconds(program: Program, buffers: dict[str, object], target: Target) -> float:
    """The median of CALLS calls, each waited for, after two that are not counted."""
    seconds = []
    for _ in range(CALLS + 2):
        started = time.perf_counter()
        program.run(buffers)
        target.device.synchronize()
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > 10 and len(seconds) > 4:
            break
    return statistics.median(seconds[2:]) * 1e6


def describe(run: Run) -> list[str]:
    """Lines that say what each device took, and the ratio of CPU to GPU where it means something."""
    lines = []
    for variant in run.options.variants:
        times = {
            device.target.kind: forward_microseconds(run, device.target, variant)
            for device in run.devices
            if device.target.kind != "virtual"
        }
        for kind, (microseconds, _) in times.items():
            lines.append(
                f"   {kind.upper()} time ({variant}): {microseconds:,.1f} us, median of up to {CALLS} calls through MAX"
            )
        lines.append(f"   CPU / GPU ({variant}): {ratio(times)}")
    return lines


def ratio(times: dict[str, tuple[float, float]]) -> str:
    """The ratio, or why there is none. `times` holds (at the run's sizes, with every size 1) by kind of device.

    A simulated GPU has no time. A GPU time below twice that of an empty problem measures the launches.
    """
    if "gpu" not in times:
        return "no GPU: ratio not measured"
    if "cpu" not in times:
        return "the CPU path was not run: ratio not measured"
    gpu, empty = times["gpu"]
    if gpu < 2 * empty:
        return f"launch-bound, no conclusion (with every size 1 the GPU takes {empty:,.1f} us)"
    return f"{times['cpu'][0] / gpu:.1f}x"
