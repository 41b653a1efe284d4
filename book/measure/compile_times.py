"""Measures what torch.compile costs and gains here: `python -m book.measure compile_times`.

LayerNorm + Linear in float32, forward and backward. The first call compiles, with nothing taken from a cache; the later
ones are timed one by one, in turns with the other ways. On a GPU a call is over when the GPU is done. The page
about torch.compile shows the record `compile_times`.
"""

import os
import statistics
import time

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = (
    "1"  # else the second run of this file measures no compiler
)

import torch
from torch import nn
from torch._dynamo.utils import counters

from book.measure.shared import write
from harness.bench.machine import cpu_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((4, 4, 8, 16), (8, 128, 256, 1024))
WAYS = {"eager": None, "compile": "default", "reduce-overhead": "reduce-overhead"}
CALLS = 50


def seconds(step) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def training_step(model, x):
    """One forward and backward pass as a function without arguments."""

    def step():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def measure(dims: tuple[int, int, int, int]) -> list[dict]:
    """A row for each way at sizes (B, S, H, O)."""
    B, S, H, O = dims
    torch.compiler.reset()
    x = torch.randn(B, S, H, device=DEVICE)
    steps, rows = {}, {}
    for way, mode in WAYS.items():
        model = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O)).to(DEVICE)
        steps[way] = training_step(torch.compile(model, mode=mode) if mode else model, x)
        counters.clear()
        rows[way] = {"way": way, "first_s": f"{seconds(steps[way]):.3f}"}
        rows[way]["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
    times = {way: [] for way in WAYS}
    for _ in range(CALLS):
        for way, step in steps.items():
            times[way].append(seconds(step) * 1e6)
    for way, row in rows.items():
        fifths = statistics.quantiles(times[way], n=5)
        row |= {"median_us": f"{statistics.median(times[way]):.1f}", "calls": CALLS}
        row |= {"p20_us": f"{fifths[0]:.1f}", "p80_us": f"{fifths[3]:.1f}"}
        row |= dict(zip("BSHO", dims, strict=True))
    return list(rows.values())


if __name__ == "__main__":
    torch.set_num_threads(1)  # a small and steady part of a machine that others may be using
    machine = {} if DEVICE == "cuda" else {"machine": cpu_name()}
    write(machine | row for dims in SIZES for row in measure(dims))
