"""`p28 --bench`: check each step on a GPU, then time it against PyTorch's matmuls and the memory bandwidth."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from rich.console import Console

from harness.bench.timing import CudaClock, Graph, Protocol, take_turns
from harness.console import Parser
from harness.errors import EnvironmentProblem
from harness.puzzles.p28.timing import STEPS, Problem, Steps, library
from harness.toolchain import roots

ROWS, HIDDEN, OUTPUTS = 4096, 768, 3072
MANY_ROWS = 65536
"""Rows for the LayerNorm steps: more than fit into the L2 cache."""
PROTOCOL = Protocol(rounds=7, burst=4_000.0, idle=(0.06, 0.08))
METHOD = f"CUDA graphs, {PROTOCOL}, the median"
MANY = 10
"""Calls per CUDA graph, except for slow steps."""
SLOW = (7, 8, 10)
"""Steps with slow initial code, which get one call per graph."""
MATRICES = {"rows": 2, "once": 2, "vectors": 2, "shuffles": 2, "dx": 3, "dgamma": 2}
"""Number of [rows, hidden] matrices that a step must move."""
GRADIENTS = "dln", "dW"
"""The matmuls of the backward pass, in the order in which the bare ones are numbered."""
PEAK = 4.8e6
"""Memory bandwidth of an H200, in bytes per microsecond, from its data sheet."""
ERROR = {"float32": 2e-5, "bfloat16": 1.2e-2}
"""Tolerance for a step's results, relative to the largest element."""


def capture_calls(call: Callable[[], object], times: int = 1) -> Graph:
    def several() -> None:
        for _ in range(times):
            call()

    return Graph(lambda: several)


def check_step(problem: Problem, steps: Steps, form: str, number: int) -> float:
    """Return a step's largest error, relative to the largest element. Raises ArithmeticError if too large."""
    pairs = problem.result_pairs(number)
    for got, _ in pairs:
        got.fill_(torch.nan)
    problem.enqueue_step(steps, number)
    torch.cuda.synchronize()
    error = max(((got.float() - truth).abs().max() / truth.abs().max()).item() for got, truth in pairs)
    name = str(problem.dtype).removeprefix("torch.")
    if not error <= ERROR[name]:
        raise ArithmeticError(f"{STEPS[number - 1]}, {form}, {name}: an error of {error:.1e}")
    return error


def pytorch(problem: Problem, compiled: bool) -> Graph:
    """Return both passes of PyTorch's own LayerNorm and Linear as a CUDA graph."""
    tensors = problem.x, problem.gamma, problem.beta, problem.weight, problem.bias
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def function(x, gamma, beta, weight, bias):
        ln_out = torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)
        return torch.nn.functional.linear(ln_out, weight, bias)

    run = torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

    def both() -> object:
        output = run(*leaves)
        return output, torch.autograd.grad(output, leaves, problem.dy)

    return Graph(lambda: both)


def measure_dtype(dtype: str, forms: Mapping[str, Steps]) -> Iterator[dict[str, object]]:
    """Yield the rows of one dtype; check all results before timing anything."""
    kind, last = getattr(torch, dtype), 12 if dtype == "bfloat16" else 8
    problem, tall = Problem(ROWS, HIDDEN, OUTPUTS, kind), Problem(MANY_ROWS, HIDDEN, 8, kind)
    ln_out, weight, dy = problem.ln_out, problem.weight, problem.dy
    bare = (lambda: ln_out @ weight.T, lambda: dy @ weight, lambda: dy.T @ ln_out)
    calls = {("bare", str(n)): capture_calls(product, MANY) for n, product in enumerate(bare)}
    times = dict.fromkeys(calls, MANY)
    # One call per graph, as in the graphs of both passes, to which it is compared.
    calls["bare", "all"], times["bare", "all"] = capture_calls(lambda: [product() for product in bare]), 1
    errors: dict[tuple[str, str], float] = {}
    for number, step in enumerate(STEPS[:last], 1):
        sized = tall if number <= 6 else problem
        for form, steps in forms.items():
            errors[form, step] = check_step(sized, steps, form, number)
            times[form, step] = 1 if form == "first" and number in SLOW else MANY
            calls[form, step] = capture_calls(partial(sized.enqueue_step, steps, number), times[form, step])
    if dtype == "bfloat16" and len(forms) == 2:  # the passes' matmuls are in bfloat16
        for last_step in range(last + 1):
            times["pass", str(last_step)] = 1
            both_passes = partial(problem.enqueue_both_passes, *forms.values(), last_step)
            calls["pass", str(last_step)] = capture_calls(both_passes)
        for form, steps in forms.items():
            for number in (8, 9):
                for name in GRADIENTS:
                    key = f"{form} {name}", STEPS[number - 1]
                    times[key] = 1
                    calls[key] = capture_calls(partial(problem.enqueue_gradient, steps, number, name))
        for compiled, name in enumerate(("eager", "compile")):
            times["pytorch", name] = 1
            calls["pytorch", name] = pytorch(problem, bool(compiled))
    samples = take_turns(calls, CudaClock(), PROTOCOL)
    us = {key: statistics.median(times_us) / times[key] for key, times_us in samples.items()}
    for form, step in calls:
        number = STEPS.index(step) + 1 if step in STEPS else 0
        rows = MANY_ROWS if 1 <= number <= 6 else ROWS
        products = {11: us["bare", "1"] + us["bare", "2"], 12: us["bare", "0"] + us["bare", "2"]}
        base = us["bare", "all"] if form in ("pass", "pytorch") else products.get(number, us["bare", "0"])
        if form.endswith(GRADIENTS):
            base = us["bare", str(1 + GRADIENTS.index(form.split()[1]))]
        num_bytes = MATRICES.get(step, 0) * rows * HIDDEN * problem.x.element_size()
        yield {
            "dtype": dtype,
            "form": form,
            "step": step,
            "rows": rows,
            "hidden": HIDDEN,
            "outputs": OUTPUTS,
            "median_us": f"{us[form, step]:.2f}",
            "of_products": "" if form == "bare" or 1 <= number <= 6 else f"{us[form, step] / base:.3f}",
            "of_memory": f"{num_bytes / PEAK / us[form, step]:.3f}" if num_bytes else "",
            "largest_error": f"{errors[form, step]:.1e}" if (form, step) in errors else "",
            "protocol": METHOD,
        }


def main(console: Console, arguments: list[str]) -> int:
    flags = Parser(prog="p28 --bench", description=__doc__)
    flags.add_argument("puzzle", help="p28")
    flags.add_argument("--dtype", choices=[*ERROR], default="bfloat16", help="default: bfloat16")
    flags.add_argument("--solution", action="store_true", help="time the solution's kernels instead of yours")
    options = flags.parse_args(arguments)
    if not torch.cuda.is_available():
        error_text = "p28 --bench needs an NVIDIA GPU, and PyTorch sees none"
        raise EnvironmentProblem(f"{error_text}: `p28 --backward` prints recorded times")
    root = roots.solutions() if options.solution else roots.problems()
    steps = Steps(library(root / "p28" / "op", "solution" if options.solution else "yours", options.dtype))
    console.print(f"{torch.cuda.get_device_name()}, {options.dtype}, {METHOD}")
    row = "{:12}{:>8}{:>12}{:>16}{:>16}".format
    console.print(row("step", "rows", "us", "of products", "of memory"))
    try:
        for result in measure_dtype(options.dtype, {"yours": steps}):
            cells = (result[name] for name in ("step", "rows", "median_us", "of_products", "of_memory"))
            console.print(row(*map(str, cells)))
    except ArithmeticError as error:
        console.print(f"wrong, and not timed: {error}")
        return 1
    return 0
