"""Times the layer by who multiplies: `python -m book.measure.product_times FILE [SECONDS]`, once on each GPU.

bfloat16; each pass as a CUDA graph, shuffled turns, the median; and how long a call of both passes keeps its caller in a plain
loop. A row for each size and way, with what `harness/nn/products.py` chooses there. Its estimates come from such a file.
"""

import csv
import datetime
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch

from book.measure.cuda_graphs import capture
from harness.nn import autograd, direct, layernorm_plan, products
from harness.nn.layers import fused_layernorm_linear
from harness.nn.products import ALL_OWN, LIBRARY, OWN, PADDED, Products

ALIGNED = (ALL_OWN, Products(LIBRARY, OWN, LIBRARY), Products(LIBRARY, LIBRARY, LIBRARY))
UNALIGNED = (ALL_OWN, Products(LIBRARY, LIBRARY, LIBRARY), Products(PADDED, PADDED, PADDED))
SIZES = (
    *((4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 4096), (16384, 4096, 12288)),
    *((512, 768, 2304), (512, 256, 1024), (128, 64, 256), (5000, 1600, 4800), (12288, 5120, 5120)),
    *((2843, 192, 256), (19, 3328, 512), (32, 8960, 1408), (523, 8256, 3200), (7416, 16384, 1088)),
    *((333, 1152, 6912), (799, 5568, 1536), (4909, 1664, 256), (3717, 13120, 14592), (1142, 2624, 384)),
    *((183, 12510, 2316), (13544, 9143, 2008), (37, 5931, 775), (3968, 105, 1265), (410, 5482, 7826)),
    *((8189, 13325, 1165), (3796, 692, 141), (10412, 126, 3116)),
    *((256, 768, 768), (1024, 768, 3072), (2048, 768, 3072), (1024, 1024, 4096), (1024, 4096, 1024)),
    *((256, 4096, 4096), (4096, 768, 768), (4096, 2048, 512), (4096, 512, 12288)),
)
ROUNDS = 7
HOST_WORK = 2**33
"""Multiply-adds of a product above which the host is not what a loop waits for."""


def graph_time(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Microseconds of a replay."""
    time.sleep(0.004)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000)  # so that the host is ahead
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def host_time(call, repeats: int = 20) -> float:
    """Microseconds that a call keeps its caller, the least of four turns."""
    best = math.inf
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) * 1e6 / repeats)
    return best


def force(way: Products) -> None:
    """Makes every plan from now on take one way."""
    choice = products.same(ALL_OWN if way == ALL_OWN else way)
    layernorm_plan.choose = lambda *sizes, **facts: choice
    layernorm_plan.plan.cache_clear()
    autograd.checked_plan.cache_clear()


def measure(M: int, H: int, O: int) -> list[dict]:
    """A row for each way."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    tensors = (normal(M, H), 1 + 0.3 * normal(H), normal(H), normal(O, H) / math.sqrt(H), normal(O))
    *leaves, dy = (tensor.bfloat16() for tensor in (*tensors, normal(M, O)))
    given = [leaf.requires_grad_() for leaf in leaves]
    x, gamma, beta, W, b = (leaf.detach() for leaf in given)
    kernels = direct.kernels(x.device)
    assert kernels is not None
    unaligned = products.padded(H, x.dtype) != H or products.padded(O, x.dtype) != O
    graphs, host = {}, {}
    for way in UNALIGNED if unaligned else ALIGNED:
        force(way)
        plan = layernorm_plan.plan(x.shape, O, x.dtype, False, kernels.hopper)
        _, statistics_of_rows = kernels.forward(plan, 1e-5, True, x, gamma, beta, W, b)
        assert statistics_of_rows is not None

        def forward(plan=plan):
            return kernels.forward(plan, 1e-5, True, x, gamma, beta, W, b)

        def backward(plan=plan, kept=statistics_of_rows):
            return kernels.backward(plan, direct.ALL_GRADIENTS, dy, x, kept, gamma, beta, W)

        def both():
            x, gamma, beta, W, b = given
            return torch.autograd.grad(fused_layernorm_linear(x, gamma, beta, W, b), given, dy)

        both()
        host[way] = host_time(both) if M * H * O < HOST_WORK else math.nan
        graphs[way, "forward"], graphs[way, "backward"] = capture(forward), capture(backward)
    repeats = 10 if M * H * O < 2**36 else 2
    taken = {key: [] for key in graphs}
    for _ in range(ROUNDS):
        for key in random.sample(list(graphs), len(graphs)):
            taken[key].append(graph_time(graphs[key], repeats))
    chosen = products.choose(M, H, O, x.dtype, hopper=kernels.hopper)
    return [
        {"M": M, "H": H, "O": O, **way._asdict(), "host_us": f"{host[way]:.1f}"}
        | {f"{part}_us": f"{statistics.median(taken[way, part]):.1f}" for part in ("forward", "backward")}
        | {f"chosen_{name}": who for name, who in chosen.graph._asdict().items()}
        | {
            "loop": "own"
            if chosen.loop == ALL_OWN
            else "as a graph"
            if chosen.loop == chosen.graph
            else "library"
        }
        for way in host
    ]


def measure_all(tool: str, sizes: Iterable[tuple[int, int, int]], measure: Callable[..., list[dict]]) -> None:
    """Measures the sizes that there is time for, and writes the rows of each at once: into the file and within the seconds that
    the command line names."""
    stop = time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else "inf")
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    machine |= {"date": datetime.date.today().isoformat(), "command": f"python -m book.measure.{tool} FILE"}
    with open(sys.argv[1], "w", newline="") as file:
        writer = None
        for size in sizes:
            if time.monotonic() > stop:
                print(f"no time for {size} and what comes after", flush=True)
                break
            rows = [machine | row for row in measure(*size)]
            if writer is None:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
            writer.writerows(rows)
            file.flush()


if __name__ == "__main__":
    measure_all("product_times", SIZES, measure)
