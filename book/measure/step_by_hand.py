"""Measures a training step of GPT-2, 124M, by hand and by PyTorch, and where the step by hand spends its time:
`python -m book.measure.step_by_hand FILE`.

Whole steps, AdamW and clipping included, in bfloat16 with float32 parameters, in turns. The floor of a kind of kernel is what
its arithmetic takes at the rate of a large product measured here, or its bytes at the rate of a copy, whichever is longer.
"""

import csv
import datetime
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from harness.bench.timing import CudaClock, summary
from harness.puzzles.p27 import bench_gpt
from harness.puzzles.p27.gpt import SIZES

CHAPTERS = Path(__file__).absolute().parents[1] / "src"
ROUNDS = 12
KINDS = {
    "products": ("nvjet", "gemm", "splitK"),
    "attention": (
        "hopper_forward",
        "hopper_key",
        "hopper_query",
        "hopper_numbers",
        "fast_delta",
        "op_fast_kernels",
    ),
    "LayerNorm": ("fast_forward", "fast_backward", "fast_sums"),
    "GELU": ("fast_step_gelu",),
    "cross-entropy": ("fast_cross_entropy",),
    "AdamW and the norm": ("adamw", "square_sums"),
    "token table": ("token_gradient",),
}
"""Kind -> what the names of its kernels hold; the first that fits."""
REST = "PyTorch's sums, additions and copies"


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


def floors(flops: float, copied: float) -> dict[str, float]:
    """Kind -> microseconds that a step's work takes at these rates."""
    s = SIZES["gpt2"]
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


def taken_by_kind(step) -> dict[str, float]:
    """Kind -> microseconds of its kernels in one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    taken = dict.fromkeys((*KINDS, REST), 0.0)
    for event in profiler.key_averages():
        taken[kind_of(event.key)] += event.self_device_time_total
    return taken


def rows(device: torch.device) -> Iterator[dict[str, object]]:
    """A row for each way to make a step, then one for each kind of kernel of the step by hand."""
    timed = bench_gpt.measure(SIZES["gpt2"], device, 0, ROUNDS, CHAPTERS)
    for name, one in timed.items():
        times = summary(one.times)
        yield {
            "what": name,
            "median_us": f"{times.median:.1f}",
            "p20_us": f"{times.p20:.1f}",
            "p80_us": f"{times.p80:.1f}",
            "peak_bytes": one.peak,
            "loss": f"{one.losses[-1]:.4f}",
        }
    least = floors(*rates(device))
    for kind, microseconds in taken_by_kind(timed["by hand"].step).items():
        floor = f"{least[kind]:.1f}" if kind in least else ""
        yield {"what": kind, "median_us": f"{microseconds:.1f}", "floor_us": floor}


def main(file: Path) -> None:
    """Measures and writes the CSV."""
    facts = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
    }
    columns = ("what", "median_us", "p20_us", "p80_us", "floor_us", "peak_bytes", "loss")
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [*facts, *columns])
        writer.writeheader()
        for row in rows(torch.device("cuda:0")):
            writer.writerow(facts | row)
            print(row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
