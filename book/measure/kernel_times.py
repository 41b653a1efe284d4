"""Measures every kernel of a pass on a GPU: `python -m book.measure ladder`, for the chapter about the fast variant.

Each pass of each algorithm is called a few times under PyTorch's profiler, one call at a time with a pause behind it, so
that the GPU neither waits for the host nor gets hot. A row of the CSV is one launch: its place in the pass, the kernel
and the median of its durations. The sizes are those of GPT-2 small's first MLP layer, the benchmark's smallest. Beside the
algorithms stand the bare products of each pass, PyTorch's own without a bias.
"""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from book.measure import ledger
from book.measure.shared import write
from harness.nn.layers import fused_layernorm_linear
from harness.puzzles.p22.candidates import MAX_VARIANTS, Sizes, build_max_graphs, make_problem

BARE = "bare product"
DIMS = (4, 1024, 768, 3072)
CALLS = {"fused": 3, "unfused": 12, "fast": 30, BARE: 30}

# Mojo cuts the names of a puzzle's kernels: package, file and the first letters of the function, about 30 in all, then types.
OURS = re.compile(r"^op_layernorm_linear_(\w+?)_?(?:\d+A\d*A|_[0-9a-f]{16})")
# The layers' kernels have names of their own, before a hash.
NAMED = re.compile(
    r"^((?:layernorm|ln_out|ln_backward|column_partials|finish_sums|copy_rows|gemm_hopper)\w*)_[0-9a-f]{8}$"
)
# In a MAX graph nothing is left of a kernel's name but the package and the file.
NAMELESS = re.compile(r"^ops_[0-9a-f]{16}_")


def kernel_name(mangled: str) -> str:
    """What is left of a kernel's name in the source: nothing in a MAX graph; "other" and the name where it is none of
    ours."""
    if NAMELESS.match(mangled):
        return ""
    matched = OURS.match(mangled) or NAMED.match(mangled)
    return matched[1] if matched else f"other {mangled[:60]}"


def named(launches: list[tuple[str, float]], algorithm: str, direction: str) -> list[tuple[str, float]]:
    """The launches, those without a name called what the ledger calls the launch in their place.

    Raises RuntimeError where there are more or fewer of them than the ledger has.
    """
    steps = [step.name for step in ledger.LAUNCHES.get((direction, algorithm), ())]
    nameless = sum(not kernel for kernel, _ in launches)
    if nameless and nameless != len(steps):
        raise RuntimeError(f"{algorithm}, {direction}: {nameless} launches, the ledger has {len(steps)}")
    names = iter(steps)
    return [(kernel or next(names), median) for kernel, median in launches]


def sequence(events: list[dict], calls: int) -> list[tuple[str, float]]:
    """The launches of one call, in order, with the median of their durations in microseconds.

    Args:
        events: Those of a chrome trace; kernels have the category "kernel", a name, and ts and dur in microseconds.
        calls: How many equal calls they come from.

    Raises RuntimeError where they are no equal calls.
    """
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    if not kernels or len(kernels) % calls:
        raise RuntimeError(f"{len(kernels)} kernels in {calls} calls")
    length = len(kernels) // calls
    rows = [kernels[start : start + length] for start in range(0, len(kernels), length)]
    launches = []
    for place in zip(*rows, strict=True):
        names = {event["name"] for event in place}
        if len(names) > 1:
            raise RuntimeError(f"calls differ: {sorted(names)}")
        launches.append((kernel_name(names.pop()), statistics.median(event["dur"] for event in place)))
    return launches


def profile_of(step, calls: int) -> torch.profiler.profile:
    """PyTorch's profile of what runs on the GPU in calls of a function that has been warmed up, a pause behind each."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            step()
            torch.cuda.synchronize()
            time.sleep(0.02)
    return profile


def profiled(step, calls: int) -> list[tuple[str, float]]:
    """The launches of a function that is called again and again."""
    for _ in range(3):
        step()
    profile = profile_of(step, calls)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return sequence(json.loads(Path(file.name).read_text())["traceEvents"], calls)


def passes(dtype: torch.dtype, algorithm: str) -> dict:
    """The forward and the backward pass as functions without arguments, on random numbers; puzzle 22's own go through MAX."""
    B, S, H, O = DIMS
    if algorithm in MAX_VARIANTS:
        through = build_max_graphs(algorithm)(make_problem(Sizes(B * S, H, O), dtype, torch.device("cuda")))
        return {direction: through.prepare(direction) for direction in ("forward", "backward")}
    torch.manual_seed(0)
    shapes = ((B, S, H), (H,), (H,), (O, H), (O,))
    tensors = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    x, gamma, beta, W, b = tensors
    grad_output = torch.randn(B, S, O, device="cuda", dtype=dtype)
    output = fused_layernorm_linear(x, gamma, beta, W, b)

    def forward():
        with torch.no_grad():
            fused_layernorm_linear(x, gamma, beta, W, b)

    def backward():
        torch.autograd.grad(output, tensors, grad_output, retain_graph=True)

    return {"forward": forward, "backward": backward}


def bare_products(dtype: torch.dtype) -> dict:
    """The products of both passes alone, as PyTorch multiplies: y = x W^T; dln = dy W and dW = dy^T ln."""
    B, S, H, O = DIMS
    torch.manual_seed(0)
    x, W, dy = (torch.randn(s, device="cuda", dtype=dtype) for s in ((B * S, H), (O, H), (B * S, O)))
    return {"forward": lambda: x @ W.T, "backward": lambda: (dy @ W, dy.T @ x)}


def rows() -> Iterator[dict]:
    """A row for each launch of every algorithm."""
    for algorithm, calls in CALLS.items():
        bare = algorithm == BARE
        steps = bare_products(torch.bfloat16) if bare else passes(torch.bfloat16, algorithm)
        for direction, step in steps.items():
            launches = profiled(step, calls)
            launches = launches if bare else named(launches, algorithm, direction)
            for position, (kernel, median) in enumerate(launches):
                yield {
                    "dtype": "bfloat16", **dict(zip("BSHO", DIMS, strict=True)), "algorithm": algorithm, "pass": direction,
                    "position": position, "kernel": kernel, "median_us": f"{median:.2f}", "calls": calls,
                }  # fmt: skip


if __name__ == "__main__":
    write(rows())
