"""Measures a training step of GPT-2, 124M, by hand and by PyTorch, and where the step by hand spends its time:
`python -m book.measure step_by_hand`.

Whole steps, AdamW and clipping included, in bfloat16 with float32 parameters, in turns; floors as in
`harness.puzzles.p27.kernel_times`.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from book.measure.shared import write
from harness.bench.timing import summary
from harness.puzzles.p27 import bench_gpt, kernel_times
from harness.puzzles.p27.gpt import SIZES

CHAPTERS = Path(__file__).absolute().parents[1] / "src"
ROUNDS = 12


def rows(device: torch.device) -> Iterator[dict]:
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
    least = kernel_times.floors(SIZES["gpt2"], *kernel_times.rates(device))
    for kind, microseconds in kernel_times.by_kind(kernel_times.taken(timed["by hand"].step)).items():
        floor = f"{least[kind]:.1f}" if kind in least else ""
        yield {"what": kind, "median_us": f"{microseconds:.1f}", "floor_us": floor}


if __name__ == "__main__":
    columns = ("what", "median_us", "p20_us", "p80_us", "floor_us", "peak_bytes", "loss")
    write(rows(torch.device("cuda:0")), columns)
