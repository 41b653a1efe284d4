"""Time one waited forward call through MAX: the lines under a forward check, one for each device and variant."""

from dataclasses import replace

from max.driver import Buffer

from harness.bench.timing import summary, time_waited_calls
from harness.check.reference import Reference
from harness.check.runs import Run
from harness.devices import graphs
from harness.devices.targets import Target
from harness.spec.puzzle import Case
from harness.spec.rounding import as_tensor

CALLS = 50


def describe(run: Run) -> list[str]:
    """Return the lines with the times of each device, and the ratio of CPU to GPU for a variant with a CPU
    path, if it is meaningful."""
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
        if variant in run.options.puzzle.on_cpu:
            lines.append(f"   CPU / GPU ({variant}): {cpu_to_gpu(times)}")
    return lines


def forward_microseconds(run: Run, target: Target, variant: str) -> tuple[float, float]:
    """Return the median time of one forward call in microseconds: at the sizes of the run, and with every
    size 1.

    The second is the overhead of a call.
    """
    options = run.options
    call = options.puzzle.variants[variant][0]
    program = graphs.load(run.package, (call,), options.dtype, target.device)
    case = run.cases[0]
    smallest = replace(case, dims=(1,) * len(case.dims))
    at_sizes, at_ones = (median_microseconds(run, program, c, target) for c in (case, smallest))
    return at_sizes, at_ones


def median_microseconds(run: Run, program: graphs.Program, case: Case, target: Target) -> float:
    """Return the median of synchronized calls, CALLS of them unless they are slow."""
    buffers = forward_buffers(run, program, case, target)
    return summary(
        time_waited_calls(lambda: program.run(buffers), target.device.synchronize, 10.0, CALLS)
    ).median


def forward_buffers(run: Run, program: graphs.Program, case: Case, target: Target) -> dict[str, Buffer]:
    """Return the buffers of one forward call on one device."""
    inputs = Reference(run.options.puzzle, run.options.dtype, run.options.seed).inputs(case)
    tensors = {name: as_tensor(array) for name, array in inputs.items()}
    return graphs.make_buffers(run.options.puzzle, program, target, tensors)[1]


def cpu_to_gpu(times: dict[str, tuple[float, float]]) -> str:
    """Return the ratio, or why there is none. `times` holds (at the run's sizes, with every size 1) by kind
    of device.

    A simulated GPU has no time. A GPU time below twice that of an empty problem measures the launches.
    """
    if "gpu" not in times:
        return "no GPU: ratio not measured"
    if "cpu" not in times:
        return "the CPU path was not run: ratio not measured"
    gpu_time, empty = times["gpu"]
    if gpu_time < 2 * empty:
        return f"launch-bound, no conclusion (with every size 1 the GPU takes {empty:,.1f} us)"
    return f"{times['cpu'][0] / gpu_time:.1f}x"
