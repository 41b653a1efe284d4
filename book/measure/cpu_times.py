"""Times LayerNorm + Linear on one core of a CPU: `python -m book.measure.cpu_times FILE`, for the chapter on measuring.

PyTorch's own operations in float32, one thread, in processor time, so that other programs on the machine count as little as
can be; medians of several rounds, at the sizes of the chapter and GPT-2 small's.
"""

import csv
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

SIZES = {(4, 4, 8, 16): 2000, (8, 1024, 768, 3072): 1}
ROUNDS = 7
FIELDS = (
    "machine", "date", "torch", "B", "S", "H", "O", "pass", "median_us", "least_us", "most_us", "rounds",
    "repeats",
)  # fmt: skip


def processor() -> str:
    """The name of the CPU, as Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, one core"


def rounds(call, repeats: int) -> list[float]:
    """Microseconds of processor time for a call, in each of ROUNDS rounds after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append((time.process_time() - start) * 1e6 / repeats)
    return times[1:]


def main(file: Path) -> None:
    """Times both passes at both sizes and writes the CSV."""
    torch.set_num_threads(1)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(FIELDS)
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
                shown = (f"{value:.1f}" for value in (statistics.median(times), min(times), max(times)))
                facts = (processor(), datetime.date.today().isoformat(), torch.__version__, B, S, H, O)
                writer.writerow((*facts, direction, *shown, ROUNDS, repeats))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
