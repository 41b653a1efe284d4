"""Times LayerNorm + Linear on one core of a CPU: `python -m book.measure cpu_times`, for the chapter on measuring.

PyTorch's own operations in float32, one thread, in processor time, so that other programs on the machine count as little as
can be; medians of several rounds, at the sizes of the chapter and GPT-2 small's.
"""

import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from book.measure.shared import write
from harness.bench.machine import cpu_name

SIZES = {(4, 4, 8, 16): 2000, (8, 1024, 768, 3072): 1}
ROUNDS = 7


def rounds(call, repeats: int) -> list[float]:
    """Microseconds of processor time for a call, in each of ROUNDS rounds after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append((time.process_time() - start) * 1e6 / repeats)
    return times[1:]


def rows() -> Iterator[dict]:
    """A row for each pass at both sizes."""
    for (B, S, H, O), repeats in SIZES.items():
        shapes = ((B, S, H), (H,), (H,), (O, H), (O,))
        x, gamma, beta, W, b = tensors = [torch.randn(shape).requires_grad_() for shape in shapes]
        pair = lambda: F.linear(F.layer_norm(x, (H,), gamma, beta), W, b)  # noqa: B023, E731
        y, dy = pair(), torch.randn(B, S, O)
        calls = {
            "forward": torch.no_grad()(pair),
            "backward": lambda: torch.autograd.grad(y, tensors, dy, retain_graph=True),  # noqa: B023
        }
        for direction, call in calls.items():
            times = rounds(call, repeats)
            shown = {"median_us": statistics.median(times), "least_us": min(times), "most_us": max(times)}
            yield {
                "machine": cpu_name(), "B": B, "S": S, "H": H, "O": O, "pass": direction,
                **{name: f"{value:.1f}" for name, value in shown.items()}, "rounds": ROUNDS, "repeats": repeats,
            }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(rows())
