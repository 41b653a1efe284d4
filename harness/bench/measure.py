"""What one waited call through MAX takes: the lines of a forward check, and `python -m harness.bench.measure --csv FILE`.

The command times forward and backward of the chapter's kernels from puzzle size to GPT-2 size. Each call is waited
for, so that small sizes show the cost of a call, not of the kernel. PyTorch's own two operations run beside them in
the same process, at the same sizes, in the same way. A row of the CSV is one (sizes, pass, who): the median and the
20 % and 80 % quantiles in microseconds, the number of calls, and the machine. `p22 --bench` compares with more.
"""

import argparse
import csv
import datetime
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from harness.bench.timing import summary, waited
from harness.check import tensors
from harness.check.runs import Run
from harness.devices import graphs
from harness.devices.targets import Target, cpu, gpu
from harness.errors import BadUse
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain import roots

SIZES = [(4, 4, 8, 16), (4, 64, 64, 64), (8, 128, 256, 256), (8, 512, 768, 768), (8, 1024, 768, 3072)]
PASSES = ("forward", "backward")
FIELDS = ("device", "dtype", "B", "S", "H", "O", "pass", "who", "median_us", "p20_us", "p80_us", "calls")
FIELDS += ("date", "torch", "max")
VARIANTS = ("fused", "unfused")
SECONDS = 2.0
CALLS = 50


# ---- The lines of a forward check ---------------------------------------------------------------------------


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
        lines.append(f"   CPU / GPU ({variant}): {cpu_to_gpu(times)}")
    return lines


def forward_microseconds(run: Run, target: Target, variant: str) -> tuple[float, float]:
    """The median time of one forward call in microseconds: at the sizes of the run, and with every size 1.

    The second is what a call costs that computes next to nothing.
    """
    options = run.options
    call = options.puzzle.variants[variant][0]
    program = graphs.load(run.package, (call,), options.dtype, target.device, kind=target.kind)
    case = run.cases[0]
    smallest = replace(case, dims=(1,) * len(case.dims))
    return tuple(median_microseconds(run, program, c, target) for c in (case, smallest))


def median_microseconds(run: Run, program: graphs.Program, case: Case, target: Target) -> float:
    """The median of waited calls, CALLS of them where they do not take long."""
    buffers = forward_buffers(run, program, case, target)
    return summary(waited(lambda: program.run(buffers), target.device.synchronize, 10.0, CALLS)).median


def forward_buffers(run: Run, program: graphs.Program, case: Case, target: Target) -> dict[str, object]:
    """The buffers of one forward call on one device."""
    inputs = tensors.Reference(run.options.puzzle, run.options.dtype, run.options.seed).inputs(case)
    return tensors.make_buffers(run.options.puzzle, program, target, inputs)[1]


def cpu_to_gpu(times: dict[str, tuple[float, float]]) -> str:
    """The ratio, or why there is none. `times` holds (at the run's sizes, with every size 1) by kind of device.

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


# ---- From size to size --------------------------------------------------------------------------------------


def kernels(target: Target, dtype: str) -> dict[str, graphs.Program]:
    """A graph for each pass of each variant, compiled as one unit: "fused forward" and so on."""
    calls = {
        f"{variant} {direction}": (PUZZLE.variants[variant][number],)
        for variant in VARIANTS
        for number, direction in enumerate(PASSES)
    }
    package = roots.op_package(roots.solutions(), PUZZLE.name)
    return graphs.load_each(package, calls, dtype, target.device, kind=target.kind)


def ours(program: graphs.Program, target: Target, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """One call of a program on buffers made beforehand; mean and rstd come from PyTorch, as inputs of the backward."""
    statistics_ = PUZZLE.reference({name: tensor.float() for name, tensor in inputs.items()})
    given = {**inputs, "mean": statistics_["mean"], "rstd": statistics_["rstd"]}
    _, buffers = tensors.make_buffers(PUZZLE, program, target, given)
    return lambda: program.run(buffers)


def pytorch(direction: str, inputs: dict[str, torch.Tensor], device: torch.device) -> Callable[[], None]:
    """One call of F.layer_norm and F.linear, or of their backward pass."""
    F = torch.nn.functional
    names = ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
    x, gamma, beta, W, b = (inputs[name].detach().clone().to(device).requires_grad_(True) for name in names)
    dy = inputs["grad_output"].to(device)

    def forward() -> torch.Tensor:
        return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5), W, b)

    if direction == "forward":
        return forward
    output = forward()
    return lambda: torch.autograd.grad(output, (x, gamma, beta, W, b), dy, retain_graph=True)


def measure(target: Target, dtype: str, sizes: list[tuple[int, ...]]) -> list[dict]:
    """The rows of the CSV."""
    device = tensors.torch_device(target)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU {platform.machine()}"
    programs = kernels(target, dtype)
    rows = []
    for dims in sizes:
        inputs = tensors.Reference(PUZZLE, dtype, 0).inputs(Case("timed", "", dims, "hard"))
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        for direction in PASSES:
            calls = {
                variant: (ours(programs[f"{variant} {direction}"], target, inputs), target.device.synchronize)
                for variant in VARIANTS
            }
            calls["PyTorch"] = (pytorch(direction, inputs, device), wait)
            for who, (call, done) in calls.items():
                taken = waited(call, done, SECONDS)
                found = summary(taken)
                figures = (found.median, found.p20, found.p80)
                rows.append(
                    dict(
                        zip(
                            FIELDS,
                            (name, dtype, *dims, direction, who, *(f"{f:.1f}" for f in figures), len(taken)),
                            strict=False,
                        ),
                        date=datetime.date.today().isoformat(),
                        torch=torch.__version__,
                        max=version("max"),
                    )
                )
                print(
                    *dims,
                    direction,
                    who,
                    *(f"{figure:,.1f} us" for figure in figures),
                    len(taken),
                    flush=True,
                )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures on the GPU, or on the CPU where there is none, and writes the CSV."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.measure", description=main.__doc__)
    parser.add_argument("--csv", type=Path, help="write the rows here")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--largest", type=int, default=len(SIZES), help="leave out sizes behind the Nth")
    options = parser.parse_args(argv)
    rows = measure(gpu() or cpu(), options.dtype, SIZES[: options.largest])
    if options.csv:
        try:
            with options.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise BadUse(f"--csv {options.csv}: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
