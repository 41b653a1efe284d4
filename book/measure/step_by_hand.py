"""Measures a training step of GPT-2, 124M, by hand and by PyTorch, and where the step by hand spends its time:
`python -m book.measure step_by_hand`.

Whole steps, AdamW and clipping included, in bfloat16 with float32 parameters, in turns. The floor of a kind of kernel is what its
arithmetic takes at the rate of a large product measured here, or its bytes at the rate of a copy, whichever is longer.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from book.measure.shared import write
from harness.bench.timing import CudaClock, TimingProtocol, summarize, time_interleaved
from harness.puzzles.p27.gpt import SIZES, Sizes, State
from harness.puzzles.p27.gpt_autograd import AutogradTrainer
from harness.puzzles.p27.gpt_step import ManualTrainer, make_trainer
from harness.puzzles.p27.train_gpt import run_step
from harness.puzzles.p27.training import draw_excerpts

CHAPTERS = Path(__file__).absolute().parents[1] / "src"
ROUNDS, EXCERPTS = 12, 4
"""Steps of each candidate that are timed, and excerpts that it is given in turn."""
RATE = 1e-5
CANDIDATES: dict[str, Callable[[State], ManualTrainer | AutogradTrainer]] = {
    "by hand": make_trainer,
    "autograd": AutogradTrainer,
    "torch.compile": partial(AutogradTrainer, use_compile=True),
}
KINDS = {
    "products": ("nvjet", "gemm", "splitK"),
    "attention": ("attention_",),
    "LayerNorm": ("layernorm_", "ln_", "column_partials", "finish_sums"),
    "GELU": ("step_gelu",),
    "cross-entropy": ("cross_entropy_",),
    "AdamW and the norm": ("adamw", "square_sums"),
    "token table": ("token_gradient",),
}
"""Kind -> what the names of its kernels hold; the first that fits."""
REST = "PyTorch's sums, additions and copies"


def rates(device: torch.device) -> tuple[float, float]:
    """Floating-point operations of a large product, and bytes of a copy, a microsecond."""
    clock, n = CudaClock(), 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    product, copy = (
        statistics.median(clock.measure(call, 5) for _ in range(7))
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
        # x to y; dy, x, dx there and the stream's gradient
        "LayerNorm": (2 * s.layers + 1) * (2 + 4) * stream / copied,
        "GELU": s.layers * 4 * (2 + 4) * stream / copied,
        "cross-entropy": 2 * 2 * s.tokens * s.vocabulary / copied,  # logits read, their gradient written
        "AdamW and the norm": count * (3 * 8 + 2 + 2 + 2) / copied,
        "token table": (stream + 2 * 2 * s.vocabulary * s.width) / copied,
    }


def kernels_of(step: Callable[[], object]) -> dict[str, float]:
    """Kind -> microseconds of its kernels in one step, as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    times = dict.fromkeys((*KINDS, REST), 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), REST)
        times[kind] += event.self_device_time_total
    return times


def rows(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    """A row for each way to make a step, then one for each kind of kernel of the step by hand."""
    texts = list(islice(draw_excerpts(sizes, 0, CHAPTERS, device), EXCERPTS))
    steps: dict[str, Callable[[], float]] = {}
    seen = {}
    for name, make in CANDIDATES.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained, following = make(State.initialize(sizes, 0, device)), cycle(texts)
        steps[name] = lambda trained=trained, following=following: run_step(trained, next(following), RATE)
        losses = [steps[name]() for _ in texts]
        seen[name] = torch.cuda.max_memory_allocated() - before, losses[-1]
    taken = time_interleaved(steps, CudaClock(), TimingProtocol(ROUNDS, burst_us=1.0))
    for name, (peak, loss) in seen.items():
        times = summarize(taken[name])
        median, low, high = (f"{value:.1f}" for value in (times.median, times.p20, times.p80))
        yield {
            "what": name,
            "median_us": median,
            "p20_us": low,
            "p80_us": high,
            "peak_bytes": peak,
            "loss": f"{loss:.4f}",
        }
    least = floors(sizes, *rates(device))
    for kind, microseconds in kernels_of(steps["by hand"]).items():
        floor = f"{least[kind]:.1f}" if kind in least else ""
        yield {"what": kind, "median_us": f"{microseconds:.1f}", "floor_us": floor}


if __name__ == "__main__":
    columns = ("what", "median_us", "p20_us", "p80_us", "floor_us", "peak_bytes", "loss")
    write(rows(SIZES["gpt2"], torch.device("cuda:0")), columns)
