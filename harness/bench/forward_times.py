"""Time synchronized forward calls through MAX, for the report of a forward check."""

from dataclasses import replace

from harness.bench.timing import summarize, time_synchronized_calls
from harness.check.reference import Reference
from harness.check.runs import Run
from harness.devices import graphs
from harness.devices.targets import Target
from harness.spec.puzzle import Case
from harness.spec.rounding import as_tensor

MAX_CALLS = 50


def describe_times(run: Run) -> list[str]:
    """Return lines with each device's time and with the ratio of CPU to GPU time."""
    lines = []
    for variant in run.options.variants:
        times = {
            device.target.kind: time_forward(run, device.target, variant)
            for device in run.devices
            if device.target.kind != "virtual"
        }
        for kind, (microseconds, _) in times.items():
            measurement = f"{microseconds:,.1f} us, median of up to {MAX_CALLS} calls through MAX"
            lines.append(f"   {kind.upper()} time ({variant}): {measurement}")
        if variant in run.options.puzzle.cpu_variants:
            lines.append(f"   CPU / GPU ({variant}): {format_cpu_gpu_ratio(times)}")
    return lines


def time_forward(run: Run, target: Target, variant: str) -> tuple[float, float]:
    """Return a forward call's median microseconds at the run's sizes, and with all sizes 1 (overhead)."""
    options = run.options
    call = options.puzzle.variants[variant][0]
    program = graphs.load(run.package, (call,), options.dtype, target.device)
    case = run.cases[0]
    smallest_case = replace(case, dims=(1,) * len(case.dims))
    time, overhead = (time_program(run, program, c, target) for c in (case, smallest_case))
    return time, overhead


def time_program(run: Run, program: graphs.Program, case: Case, target: Target) -> float:
    inputs = Reference(run.options.puzzle, run.options.dtype, run.options.seed).get_inputs(case)
    tensors = {name: as_tensor(array) for name, array in inputs.items()}
    _, buffers = graphs.make_buffers(run.options.puzzle, program, target, tensors)
    times = time_synchronized_calls(lambda: program.run(buffers), target.device.synchronize, 10.0, MAX_CALLS)
    return summarize(times).median


def format_cpu_gpu_ratio(times: dict[str, tuple[float, float]]) -> str:
    """Format the ratio of CPU to GPU time, or the reason why there is none.

    `times` maps a device's kind to the results of `time_forward`. A GPU time below twice the overhead is
    mainly launch latency.
    """
    if "gpu" not in times:
        return "no GPU: ratio not measured"
    if "cpu" not in times:
        return "the CPU path was not run: ratio not measured"
    gpu_time, overhead = times["gpu"]
    if gpu_time < 2 * overhead:
        return f"launch-bound, no conclusion (with every size 1 the GPU takes {overhead:,.1f} us)"
    return f"{times['cpu'][0] / gpu_time:.1f}x"
