"""How long a forward pass takes on the devices of a run: medians of repeated calls, and one honest ratio."""

import statistics
import time

from harness.devices import graphs
from harness.devices.graphs import Program, to_device
from harness.devices.targets import Target
from harness.workbook import Run

CALLS = 50
LAUNCH_BOUND_US = 50.0


def forward_microseconds(run: Run, target: Target, variant: str) -> float:
    """The median time of one forward call at the sizes of the run, in microseconds, on a warm graph of its own."""
    import torch

    from harness import running

    options = run.options
    call = options.puzzle.variants[variant][0]
    program = graphs.load(run.package, (call,), options.dtype, target.device, kind=target.kind)
    case = run.cases[0]
    inputs = running.Reference(options.puzzle, options.dtype, options.seed).inputs(case)
    shapes = options.puzzle.shapes(case.dims)
    buffers: dict[str, object] = {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for name in program.arguments:
        quantity = name.split(".")[-1]
        if "." in name:
            dtype = running.written_dtype(options.puzzle, quantity, options.dtype)
            buffers[name] = to_device(running.poisoned(shapes[quantity], dtype), target.device)
        elif name != "eps":
            buffers[name] = to_device(inputs[name], target.device)
    return median_microseconds(program, buffers, target)


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
        for kind, microseconds in times.items():
            lines.append(
                f"   {kind.upper()} time ({variant}): {microseconds:,.1f} us, median of up to {CALLS} calls through MAX"
            )
        lines.append(f"   CPU / GPU ({variant}): {ratio(times)}")
    return lines


def ratio(times: dict[str, float]) -> str:
    """The ratio, or why there is none. A simulated GPU has no time."""
    if "gpu" not in times:
        return "no GPU: ratio not measured"
    if "cpu" not in times:
        return "the CPU path was not run: ratio not measured"
    if times["gpu"] < LAUNCH_BOUND_US:
        return "launch-bound, no conclusion (most of the GPU time is the cost of the call)"
    return f"{times['cpu'] / times['gpu']:.1f}x"
