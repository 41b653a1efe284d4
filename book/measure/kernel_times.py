"""Measures every kernel of the layer's passes on a GPU: `python -m book.measure ladder`, for the chapter about the fast variant.

Each pass is called a few times under PyTorch's profiler, one call at a time with a pause behind it, so that the GPU neither waits
for the host nor gets hot. A row of the CSV is one launch: its place in the pass, the kernel and the median of its durations. The
sizes are those of GPT-2 small's first MLP layer, the benchmark's smallest.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from book.measure.shared import write
from harness.nn.layers import fused_layernorm_linear

DIMS = (4, 1024, 768, 3072)
CALLS = 30
NAME = re.compile(r"^(\w+)_[0-9a-f]{8}$")
"""A layer's kernel: its name, before a hash."""


def profiled(step: Callable[[], object]) -> list[tuple[str, float]]:
    """The launches of a function, in order, with the median of their durations in microseconds over CALLS calls.

    Raises RuntimeError where the calls differ.
    """
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            step()
            torch.cuda.synchronize()
            time.sleep(0.02)
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    kernels = sorted((e for e in events if not e.name.startswith("Mem")), key=lambda e: e.time_range.start)
    length, rest = divmod(len(kernels), CALLS)
    launches = [kernels[place::length] for place in range(length)]
    if not launches or rest or any(len({event.name for event in each}) > 1 for each in launches):
        raise RuntimeError(f"{len(kernels)} kernels in {CALLS} calls, or calls that differ")
    return [
        (NAME.sub(r"\1", each[0].name), statistics.median(event.time_range.elapsed_us() for event in each))
        for each in launches
    ]


def passes() -> dict[str, Callable[[], object]]:
    """The forward and the backward pass as functions without arguments, on random numbers."""
    B, S, H, O = DIMS
    torch.manual_seed(0)
    shapes = ((B, S, H), (H,), (H,), (O, H), (O,))
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    x, gamma, beta, W, b = tensors
    grad_output = torch.randn(B, S, O, device="cuda", dtype=torch.bfloat16)
    output = fused_layernorm_linear(x, gamma, beta, W, b)

    def forward():
        with torch.no_grad():
            fused_layernorm_linear(x, gamma, beta, W, b)

    def backward():
        torch.autograd.grad(output, tensors, grad_output, retain_graph=True)

    return {"forward": forward, "backward": backward}


def rows() -> Iterator[dict]:
    """A row for each launch."""
    for direction, step in passes().items():
        for position, (kernel, median) in enumerate(profiled(step)):
            yield {
                "dtype": "bfloat16", **dict(zip("BSHO", DIMS, strict=True)), "algorithm": "fast", "pass": direction,
                "position": position, "kernel": kernel, "median_us": f"{median:.2f}", "calls": CALLS,
            }  # fmt: skip


if __name__ == "__main__":
    write(rows())
