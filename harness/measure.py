"""Times forward and backward of every variant from puzzle size to GPT-2 size: `python -m harness.measure --csv FILE`.

Each call goes through MAX and is waited for, so that small sizes show the cost of a call, not of the kernel. PyTorch's
own two operations run beside them in the same process, at the same sizes, in the same way. A row of the CSV is one
(sizes, pass, who): the median and the 20 % and 80 % quantiles in microseconds, the number of calls, and the machine.
"""

import argparse
import csv
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from harness import roots, running
from harness.devices import graphs
from harness.devices.targets import Target, cpu, gpu
from harness.errors import BadUse
from harness.puzzles.p22 import PUZZLE
from harness.puzzles.spec import Case

SIZES = [(4, 4, 8, 16), (4, 64, 64, 64), (8, 128, 256, 256), (8, 512, 768, 768), (8, 1024, 768, 3072)]
PASSES = ("forward", "backward")
FIELDS = ("device", "dtype", "B", "S", "H", "O", "pass", "who", "median_us", "p20_us", "p80_us", "calls")
FIELDS += ("date", "torch", "max")
SECONDS = 2.0


def sample(call: Callable[[], None], wait: Callable[[], None]) -> list[float]:
    """Microseconds of single calls, each waited for: two unseen, then for SECONDS, at least 3 and at most 200."""
    microseconds: list[float] = []
    began = time.perf_counter()
    while len(microseconds) < 5 or (time.perf_counter() - began < SECONDS and len(microseconds) < 202):
        start = time.perf_counter()
        call()
        wait()
        microseconds.append((time.perf_counter() - start) * 1e6)
    return microseconds[2:]


def kernels(target: Target, dtype: str) -> dict[str, graphs.Program]:
    """A graph for each pass of each variant, compiled as one unit: "fused forward" and so on."""
    calls = {
        f"{variant} {direction}": (PUZZLE.variants[variant][number],)
        for variant in PUZZLE.variants
        for number, direction in enumerate(PASSES)
    }
    package = roots.op_package(roots.solutions(), PUZZLE.name)
    return graphs.load_each(package, calls, dtype, target.device, kind=target.kind)


def ours(program: graphs.Program, target: Target, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """One call of a program on buffers made beforehand; mean and rstd come from PyTorch, as inputs of the backward."""
    statistics_ = PUZZLE.reference({name: tensor.float() for name, tensor in inputs.items()})
    given = {**inputs, "mean": statistics_["mean"], "rstd": statistics_["rstd"]}
    _, buffers = running.make_buffers(PUZZLE, program, target, given)
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
    device = running.torch_device(target)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU {platform.machine()}"
    programs = kernels(target, dtype)
    rows = []
    for dims in sizes:
        inputs = running.Reference(PUZZLE, dtype, 0).inputs(Case("timed", "", dims, "hard"))
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        for direction in PASSES:
            calls = {
                variant: (ours(programs[f"{variant} {direction}"], target, inputs), target.device.synchronize)
                for variant in PUZZLE.variants
            }
            calls["PyTorch"] = (pytorch(direction, inputs, device), wait)
            for who, (call, waited) in calls.items():
                taken = sample(call, waited)
                low, *_, high = statistics.quantiles(taken, n=5, method="inclusive")
                figures = (statistics.median(taken), low, high)
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
    parser = argparse.ArgumentParser(prog="python -m harness.measure", description=main.__doc__)
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
