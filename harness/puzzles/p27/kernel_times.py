"""Where a step by hand spends its time on a GPU, kernel by kernel, beside the floor of each kind of kernel.

The floor is what the arithmetic of a kind takes at the rate of a large product measured here, or its bytes at the rate of a copy,
whichever is longer.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from harness.bench.timing import CudaClock
from harness.puzzles.p27.gpt import Sizes

WIDTH = 48
"""Of a kernel's name in the list."""
KINDS = {
    "products": ("nvjet", "gemm", "splitK"),
    "attention": (
        "hopper_forward",
        "hopper_key",
        "hopper_query",
        "hopper_numbers",
        "fast_delta",
        "op_fast_kernels",
        "op_fast_keys",
    ),
    "LayerNorm": ("fast_forward", "fast_backward", "fast_sums"),
    "GELU": ("fast_step_gelu",),
    "cross-entropy": ("fast_cross_entropy",),
    "AdamW and the norm": ("adamw", "square_sums"),
    "token table": ("token_gradient",),
}
"""Kind -> what the names of its kernels hold; the first that fits."""
REST = "PyTorch's sums, additions and copies"


@dataclass(frozen=True)
class Kernel:
    """What all launches of one kernel in a step take."""

    name: str
    launches: int
    microseconds: float


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), REST)


def rates(device: torch.device) -> tuple[float, float]:
    """Floating-point operations of a large product, and bytes of a copy, a microsecond."""
    clock, n = CudaClock(), 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    product, copy = (
        statistics.median(clock.elapsed(call, 5) for _ in range(7))
        for call in (lambda: a @ b, lambda: y.copy_(x))
    )
    return 2 * n**3 / product, 2 * x.nbytes / copy


def floors(s: Sizes, flops: float, copied: float) -> dict[str, float]:
    """Kind -> microseconds that a step's work takes at these rates, in bfloat16."""
    stream = 2 * s.tokens * s.width  # bytes of a matrix [rows, C]
    matrices = s.layers * 12 * s.width**2 + s.vocabulary * s.width
    count = matrices + s.context * s.width + s.layers * 13 * s.width + 2 * s.width
    scores = s.batch * s.context**2 * s.width / 2  # multiplications of one product, half of them hidden
    return {
        "products": 6 * matrices * s.tokens / flops,
        "attention": s.layers * 7 * 2 * scores / flops,
        "LayerNorm": (2 * s.layers + 1)
        * (2 + 4)
        * stream
        / copied,  # x to y; dy, x, dx there and the stream's gradient
        "GELU": s.layers * 4 * (2 + 4) * stream / copied,
        "cross-entropy": 2 * 2 * s.tokens * s.vocabulary / copied,  # logits read, their gradient written
        "AdamW and the norm": count * (3 * 8 + 2 + 2 + 2) / copied,
        "token table": (stream + 2 * 2 * s.vocabulary * s.width) / copied,
    }


def taken(step: Callable[[], object]) -> list[Kernel]:
    """The kernels of one step, as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return [Kernel(event.key, event.count, event.self_device_time_total) for event in profiler.key_averages()]


def by_kind(kernels: list[Kernel]) -> dict[str, float]:
    """Kind -> microseconds of its kernels."""
    times = dict.fromkeys((*KINDS, REST), 0.0)
    for kernel in kernels:
        times[kind_of(kernel.name)] += kernel.microseconds
    return times


def lines_of(kernels: list[Kernel], least: dict[str, float]) -> Iterator[str]:
    """A line for each kind, with its floor, and under it one for each kernel that takes a hundredth of the step or more."""
    times = by_kind(kernels)
    whole = sum(times.values())
    for kind, microseconds in times.items():
        floor = f"   floor {least[kind] / 1e3:6.2f} ms" if kind in least else ""
        yield f"   {kind:<{WIDTH + 3}} {microseconds / 1e3:6.2f} ms{floor}"
        own = [each for each in kernels if kind_of(each.name) == kind and each.microseconds >= whole / 100]
        for each in sorted(own, key=lambda each: -each.microseconds):
            yield f"      {each.name[:WIDTH]:<{WIDTH}} {each.microseconds / 1e3:6.2f} ms   {each.launches} launches"
