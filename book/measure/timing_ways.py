"""Times one product in several ways, right and wrong: `python -m book.measure timing_ways`, a minute on a GPU.

Each row of the CSV is one way: what was timed, the median and how far the times lie apart. The last lines printed are the
table of PyTorch's profiler for LayerNorm + Linear, forward and backward. For the chapter on measuring.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from book.measure.shared import write
from harness.bench.timing import ColdClock, CudaClock, Graph

M, H, O = 4096, 768, 3072
LARGE = (16384, 4096, 12288)
ROUNDS, MANY = 21, 100


def bfloat16(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def rounds(once: Callable[[], float], count: int = ROUNDS) -> list[float]:
    """Microseconds of some rounds; the stream is empty and has rested before each."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        time.sleep(0.02)
        times.append(once())
    return times


def wall(call: Callable, synchronize: bool) -> float:
    """Microseconds by the host's clock, to the end of the call or to the end of the work."""
    start = time.perf_counter()
    call()
    if synchronize:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def first_call(call: Callable) -> list[float]:
    """The very first call, with whatever is loaded and chosen in it."""
    return [wall(call, synchronize=True)]


def smi(what: str) -> str:
    """What the driver says about each GPU, a line for each, "" where it does not."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def under_load(call: Callable, seconds: float) -> tuple[list[float], str]:
    """Microseconds of a call after so long of nothing else, and what the driver says of power and clock meanwhile."""
    clock, end = CudaClock(), time.monotonic() + seconds
    while time.monotonic() < end:
        clock.measure(call, 20)
    for _ in range(100):  # work for the time in which the driver is asked
        call()
    said = smi("power.draw,clocks.sm,temperature.gpu")
    torch.cuda.synchronize()
    return [clock.measure(call, 20) for _ in range(5)], said


def measure() -> list[tuple[str, list[float], str]]:
    """Every way: what was timed, the microseconds of each round, and a remark."""
    x, W = bfloat16(M, H), bfloat16(O, H)
    gamma, clock = bfloat16(H), CudaClock()
    product = lambda: x @ W.T  # noqa: E731
    norm = lambda: F.layer_norm(x, (H,), gamma, gamma)  # noqa: E731
    measured = [("product, the first call of the process", first_call(product), "host's clock, synchronised")]
    measured.append(("product, the second call", first_call(product), "host's clock, synchronised"))
    for _ in range(10):
        product()
        norm()
    cold = ColdClock("cuda")
    measured += [
        ("product, not synchronised", rounds(lambda: wall(product, False)), "how long the host is kept"),
        ("product, synchronised", rounds(lambda: wall(product, True)), "host's clock"),
    ]
    for name, call in (("product", product), ("LayerNorm", norm)):
        graph = Graph(lambda call=call: lambda: tuple(call() for _ in range(MANY)))
        ways: dict[str, tuple[Callable[[], float], str]] = {
            "events around one call": (lambda call=call: clock.measure(call, 1), ""),
            f"events around {MANY} calls": (lambda call=call: clock.measure(call, MANY), "for each"),
            f"a graph of {MANY}": (lambda graph=graph: clock.measure(graph, 1) / MANY, "for each"),
            "L2 flushed before each": (lambda call=call: cold.measure(call, 20), "for each"),
        }
        measured += [(f"{name}, {way}", rounds(once), note) for way, (once, note) in ways.items()]
    rows, inner, outer = LARGE
    a, b = bfloat16(rows, inner), bfloat16(outer, inner)
    large = lambda: a @ b.T  # noqa: E731
    large()
    measured.append(
        ("large product, rested", rounds(lambda: clock.measure(large, 2), 9), smi("power.draw,clocks.sm"))
    )
    measured.append(("large product, after 4 s of it", *under_load(large, 4.0)))
    a.zero_()
    b.zero_()
    measured.append(("large product of zeros, after 4 s of it", *under_load(large, 4.0)))
    return measured


def profile() -> list[dict]:
    """Kernel, calls and microseconds of one forward and one backward pass of LayerNorm, then Linear."""
    pair = torch.nn.Sequential(torch.nn.LayerNorm(H), torch.nn.Linear(H, O)).to("cuda", torch.bfloat16)
    x, dy = bfloat16(M, H).requires_grad_(), bfloat16(M, O)
    for _ in range(3):
        pair(x).backward(dy)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        pair(x).backward(dy)
        torch.cuda.synchronize()
    kernels = [e for e in recorded.key_averages() if e.device_type.name == "CUDA"]
    return [
        {"kernel": event.key[:60], "calls": event.count, "us": f"{event.self_device_time_total:.1f}"}
        for event in sorted(kernels, key=lambda e: -e.self_device_time_total)
    ]


def rows() -> list[dict]:
    """A row for each way of timing."""
    return [
        {"what": way, "median_us": f"{statistics.median(times):.2f}", "least_us": f"{min(times):.2f}"}
        | {"most_us": f"{max(times):.2f}", "rounds": len(times), "note": note}
        for way, times, note in measure()
    ]


if __name__ == "__main__":
    write(profile() if sys.argv[2:] == ["profile"] else rows())
