"""`p28 --bench`: time each step on a GPU against PyTorch's matmuls and the memory bandwidth.

Results are compared with PyTorch's before a step is timed. The steps of LayerNorm run on more rows than the L2 cache
holds, all others at the sizes of GPT-2's first MLP layer.
"""

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
"""Rows of the steps of LayerNorm: more than the L2 cache holds."""
PROTOCOL = Protocol(rounds=7, burst=4_000.0, idle=(0.06, 0.08))
METHOD = f"CUDA graphs, {PROTOCOL}, the median"
MANY = 10
"""Calls in a graph, except for slow steps."""
SLOW = (7, 8, 10)
"""Steps whose initial code is slow: one call in a graph."""
MATRICES = {"rows": 2, "once": 2, "vectors": 2, "shuffles": 2, "dx": 3, "dgamma": 2}
"""Number of [rows, hidden] matrices that a step has to move."""
PEAK = 4.8e6
"""Memory bandwidth of an H200 in bytes per microsecond, from its data sheet."""
ERROR = {"float32": 2e-5, "bfloat16": 1.2e-2}
"""Tolerance of a step's results, relative to the largest element."""


def graph(call: Callable[[], object], times: int = 1) -> Graph:
    """Capture several calls in a row as one graph."""

    def several() -> None:
        for _ in range(times):
            call()

    return Graph(lambda: several)


def check(problem: Problem, steps: Steps, form: str, number: int) -> float:
    """Return the largest error of a step, relative to each result's largest element. Raises ArithmeticError if wrong."""
    pairs = problem.result_pairs(number)
    for got, _ in pairs:
        got.fill_(torch.nan)
    problem.step(steps, number)
    torch.cuda.synchronize()
    error = max(((got.float() - truth).abs().max() / truth.abs().max()).item() for got, truth in pairs)
    name = str(problem.dtype).removeprefix("torch.")
    if not error <= ERROR[name]:
        raise ArithmeticError(f"{STEPS[number - 1]}, {form}, {name}: an error of {error:.1e}")
    return error


def of_dtype(dtype: str, forms: Mapping[str, Steps]) -> Iterator[dict[str, object]]:
    """Yield the rows of one dtype; all results are checked before anything is timed."""
    kind, last = getattr(torch, dtype), 12 if dtype == "bfloat16" else 8
    problem, tall = Problem(ROWS, HIDDEN, OUTPUTS, kind), Problem(MANY_ROWS, HIDDEN, 8, kind)
    ln_out, weight, dy = problem.ln_out, problem.weight, problem.dy
    bare = (lambda: ln_out @ weight.T, lambda: dy @ weight, lambda: dy.T @ ln_out)
    calls = {("bare", str(n)): graph(product, MANY) for n, product in enumerate(bare)}
    calls["bare", "all"] = graph(lambda: [product() for product in bare], MANY)
    times = dict.fromkeys(calls, MANY)
    errors: dict[tuple[str, str], float] = {}
    for number, step in enumerate(STEPS[:last], 1):
        of = tall if number <= 6 else problem
        for form, steps in forms.items():
            errors[form, step] = check(of, steps, form, number)
            times[form, step] = 1 if form == "first" and number in SLOW else MANY
            calls[form, step] = graph(partial(of.step, steps, number), times[form, step])
    if dtype == "bfloat16" and len(forms) == 2:  # the passes' own tensors are bfloat16 wherever a product is
        for done in range(last + 1):
            times["pass", str(done)] = 1
            calls["pass", str(done)] = graph(partial(problem.whole, *forms.values(), done))
    taken = take_turns(calls, CudaClock(), PROTOCOL)
    us = {key: statistics.median(each) / times[key] for key, each in taken.items()}
    for form, step in calls:
        number = STEPS.index(step) + 1 if step in STEPS else 0
        rows = MANY_ROWS if 1 <= number <= 6 else ROWS
        products = {11: us["bare", "1"] + us["bare", "2"], 12: us["bare", "0"] + us["bare", "2"]}
        base = us["bare", "all"] if form == "pass" else products.get(number, us["bare", "0"])
        moved = MATRICES.get(step, 0) * rows * HIDDEN * problem.x.element_size()
        yield {
            "dtype": dtype,
            "form": form,
            "step": step,
            "rows": rows,
            "hidden": HIDDEN,
            "outputs": OUTPUTS,
            "median_us": f"{us[form, step]:.2f}",
            "of_products": "" if form == "bare" or 1 <= number <= 6 else f"{us[form, step] / base:.3f}",
            "of_memory": f"{moved / PEAK / us[form, step]:.3f}" if moved else "",
            "largest_error": f"{errors[form, step]:.1e}" if (form, step) in errors else "",
            "protocol": METHOD,
        }


def main(console: Console, arguments: list[str]) -> int:
    """Print the times of the learner's steps. Returns 1 if a result is wrong."""
    flags = Parser(prog="p28 --bench", description=__doc__)
    flags.add_argument("puzzle", help="p28")
    flags.add_argument("--dtype", choices=[*ERROR], default="bfloat16", help="default: bfloat16")
    flags.add_argument("--solution", action="store_true", help="time the solution's kernels, not yours")
    chosen = flags.parse_args(arguments)
    if not torch.cuda.is_available():
        raise EnvironmentProblem(
            "p28 --bench needs an NVIDIA GPU, and PyTorch sees none: `p28 --backward` prints recorded times"
        )
    root = roots.solutions() if chosen.solution else roots.problems()
    steps = Steps(library(root / "p28" / "op", "solution" if chosen.solution else "yours", chosen.dtype))
    console.print(f"{torch.cuda.get_device_name()}, {chosen.dtype}, {METHOD}")
    row = "{:12}{:>8}{:>12}{:>16}{:>16}".format
    console.print(row("step", "rows", "us", "of products", "of memory"))
    try:
        for each in of_dtype(chosen.dtype, {"yours": steps}):
            cells = (each[name] for name in ("step", "rows", "median_us", "of_products", "of_memory"))
            console.print(row(*map(str, cells)))
    except ArithmeticError as error:
        console.print(f"wrong, and not timed: {error}")
        return 1
    return 0
