"""`p28 --bench`: check each step on a GPU, then time it against PyTorch's matmuls and the memory bandwidth."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from rich.console import Console

from harness.bench.timing import CudaClock, Graph, TimingProtocol, time_interleaved
from harness.console import Parser
from harness.errors import EnvironmentProblem
from harness.puzzles.p28.timing import STEPS, Problem, StepLibrary, build_library
from harness.toolchain import roots

ROWS, HIDDEN, OUTPUTS = 4096, 768, 3072
LARGE_ROWS = 65536
"""Rows for the LayerNorm steps: more than fit into the L2 cache."""
PROTOCOL = TimingProtocol(rounds=7, burst_us=4_000.0, pause_s=(0.06, 0.08))
METHOD = f"CUDA graphs, {PROTOCOL}, the median"
CALLS_PER_GRAPH = 10
"""Calls per CUDA graph, except for slow steps."""
SLOW_STEPS = (7, 8, 10)
"""Steps with slow initial code, which get one call per graph."""
MATRICES_MOVED = {"rows": 2, "once": 2, "vectors": 2, "shuffles": 2, "dx": 3, "dgamma": 2}
"""Number of [rows, hidden] matrices that a step must read or write."""
GRADIENTS = "dln", "dW"
"""The matmuls of the backward pass, in the order in which the bare ones are numbered."""
PEAK_BANDWIDTH = 4.8e6
"""Memory bandwidth of an H200, in bytes per microsecond, from its data sheet."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2}
"""Tolerance for a step's results, relative to the largest element."""


def capture_calls(call: Callable[[], object], num_calls: int = 1) -> Graph:
    def run_calls() -> None:
        for _ in range(num_calls):
            call()

    return Graph(lambda: run_calls)


def check_step(problem: Problem, steps: StepLibrary, form: str, number: int) -> float:
    """Return a step's largest error, relative to the largest element. Raises ArithmeticError if too large."""
    pairs = problem.get_result_pairs(number)
    for got, _ in pairs:
        got.fill_(torch.nan)
    problem.enqueue_step(steps, number)
    torch.cuda.synchronize()
    error = max(((got.float() - truth).abs().max() / truth.abs().max()).item() for got, truth in pairs)
    name = str(problem.dtype).removeprefix("torch.")
    if not error <= TOLERANCE[name]:
        raise ArithmeticError(f"{STEPS[number - 1]}, {form}, {name}: an error of {error:.1e}")
    return error


def capture_pytorch(problem: Problem, use_compile: bool) -> Graph:
    """Return both passes of PyTorch's own LayerNorm and Linear as a CUDA graph."""
    tensors = problem.x, problem.gamma, problem.beta, problem.weight, problem.bias
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def function(x, gamma, beta, weight, bias):
        ln_out = torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)
        return torch.nn.functional.linear(ln_out, weight, bias)

    layer = torch.compile(function, dynamic=False, fullgraph=True) if use_compile else function

    def run_both_passes() -> object:
        output = layer(*leaves)
        return output, torch.autograd.grad(output, leaves, problem.dy)

    return Graph(lambda: run_both_passes)


def measure_dtype(dtype: str, forms: Mapping[str, StepLibrary]) -> Iterator[dict[str, object]]:
    """Yield the rows of one dtype; check all results before timing anything."""
    torch_dtype, num_steps = getattr(torch, dtype), 12 if dtype == "bfloat16" else 8
    problem, tall_problem = (
        Problem(ROWS, HIDDEN, OUTPUTS, torch_dtype),
        Problem(LARGE_ROWS, HIDDEN, 8, torch_dtype),
    )
    ln_out, weight, dy = problem.ln_out, problem.weight, problem.dy
    matmuls = (lambda: ln_out @ weight.T, lambda: dy @ weight, lambda: dy.T @ ln_out)
    calls = {("bare", str(n)): capture_calls(product, CALLS_PER_GRAPH) for n, product in enumerate(matmuls)}
    num_calls = dict.fromkeys(calls, CALLS_PER_GRAPH)
    # One call per graph, as in the graphs of both passes, to which it is compared.
    calls["bare", "all"], num_calls["bare", "all"] = (
        capture_calls(lambda: [product() for product in matmuls]),
        1,
    )
    errors: dict[tuple[str, str], float] = {}
    for number, step in enumerate(STEPS[:num_steps], 1):
        step_problem = tall_problem if number <= 6 else problem
        for form, steps in forms.items():
            errors[form, step] = check_step(step_problem, steps, form, number)
            num_calls[form, step] = 1 if form == "first" and number in SLOW_STEPS else CALLS_PER_GRAPH
            calls[form, step] = capture_calls(
                partial(step_problem.enqueue_step, steps, number), num_calls[form, step]
            )
    if dtype == "bfloat16" and len(forms) == 2:  # the passes' matmuls are in bfloat16
        for num_done in range(num_steps + 1):
            num_calls["pass", str(num_done)] = 1
            both_passes = partial(problem.enqueue_both_passes, *forms.values(), num_done)
            calls["pass", str(num_done)] = capture_calls(both_passes)
        for form, steps in forms.items():
            for number in (8, 9):
                for name in GRADIENTS:
                    key = f"{form} {name}", STEPS[number - 1]
                    num_calls[key] = 1
                    calls[key] = capture_calls(partial(problem.enqueue_gradient, steps, number, name))
        for compiled, name in enumerate(("eager", "compile")):
            num_calls["pytorch", name] = 1
            calls["pytorch", name] = capture_pytorch(problem, bool(compiled))
    samples = time_interleaved(calls, CudaClock(), PROTOCOL)
    median_us = {key: statistics.median(samples_us) / num_calls[key] for key, samples_us in samples.items()}
    for form, step in calls:
        number = STEPS.index(step) + 1 if step in STEPS else 0
        rows = LARGE_ROWS if 1 <= number <= 6 else ROWS
        matmul_us = {
            11: median_us["bare", "1"] + median_us["bare", "2"],
            12: median_us["bare", "0"] + median_us["bare", "2"],
        }
        baseline_us = (
            median_us["bare", "all"]
            if form in ("pass", "pytorch")
            else matmul_us.get(number, median_us["bare", "0"])
        )
        if form.endswith(GRADIENTS):
            baseline_us = median_us["bare", str(1 + GRADIENTS.index(form.split()[1]))]
        num_bytes = MATRICES_MOVED.get(step, 0) * rows * HIDDEN * problem.x.element_size()
        yield {
            "dtype": dtype,
            "form": form,
            "step": step,
            "rows": rows,
            "hidden": HIDDEN,
            "outputs": OUTPUTS,
            "median_us": f"{median_us[form, step]:.2f}",
            "of_products": ""
            if form == "bare" or 1 <= number <= 6
            else f"{median_us[form, step] / baseline_us:.3f}",
            "of_memory": f"{num_bytes / PEAK_BANDWIDTH / median_us[form, step]:.3f}" if num_bytes else "",
            "largest_error": f"{errors[form, step]:.1e}" if (form, step) in errors else "",
            "protocol": METHOD,
        }


def main(console: Console, arguments: list[str]) -> int:
    flags = Parser(prog="p28 --bench", description=__doc__)
    flags.add_argument("puzzle", help="p28")
    flags.add_argument("--dtype", choices=[*TOLERANCE], default="bfloat16", help="default: bfloat16")
    flags.add_argument("--solution", action="store_true", help="time the solution's kernels instead of yours")
    options = flags.parse_args(arguments)
    if not torch.cuda.is_available():
        error_text = "p28 --bench needs an NVIDIA GPU, and PyTorch sees none"
        raise EnvironmentProblem(f"{error_text}: `p28 --backward` prints recorded times")
    root = roots.get_solutions() if options.solution else roots.get_problems()
    steps = StepLibrary(
        build_library(root / "p28" / "op", "solution" if options.solution else "yours", options.dtype)
    )
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
