"""Times the layer by who multiplies: `python -m book.measure products`.

bfloat16; each pass as a CUDA graph, shuffled turns, the median; and how long a call of both passes keeps its caller in a plain
loop. A row for each size and way, with what `harness/nn/layernorm_plan.py` chooses there. Its estimates come from such a file.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from book.measure.shared import capture, write
from harness.nn import extension_kernels, layernorm_direct, layernorm_plan, layers
from harness.nn.layernorm_plan import ALL_OWN, LIBRARY, OWN, PADDED, Products, choose
from harness.nn.layers import fused_layernorm_linear

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
Key = TypeVar("Key", bound=Hashable)
HOST_WORK = 2**33
"""Multiply-adds of a product above which the host is not what a loop waits for."""


def graph_time(replay: Callable[[], object], repeats: int) -> float:
    """Microseconds of a replay."""
    time.sleep(0.004)
    replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000)  # so that the host is ahead
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def in_turns(graphs: Mapping[Key, Callable[[], object]], rounds: int, work: int) -> dict[Key, float]:
    """The median microseconds of each graph; `work` are the multiply-adds of a product, so many replays make a turn."""
    taken: dict[Key, list[float]] = {key: [] for key in graphs}
    for _ in range(rounds):
        for key in random.sample(list(graphs), len(graphs)):
            taken[key].append(graph_time(graphs[key], 10 if work < 2**36 else 2))
    return {key: statistics.median(times) for key, times in taken.items()}


def make(M: int, H: int, O: int) -> list[torch.Tensor]:
    """x, gamma, beta, W, b and the gradient of the output, in bfloat16."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    tensors = (normal(M, H), 1 + 0.3 * normal(H), normal(H), normal(O, H) / math.sqrt(H), normal(O))
    return [tensor.bfloat16() for tensor in (*tensors, normal(M, O))]


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
    choice = layernorm_plan.same(ALL_OWN if way == ALL_OWN else way)
    layernorm_plan.choose = lambda *sizes, **facts: choice
    layernorm_plan.make_plan.cache_clear()
    layers.checked_plan.cache_clear()


def measure(M: int, H: int, O: int) -> list[dict]:
    """A row for each way."""
    *leaves, dy = make(M, H, O)
    given = [leaf.requires_grad_() for leaf in leaves]
    x, gamma, beta, W, b = (leaf.detach() for leaf in given)
    kernels = layernorm_direct.kernels(x.device)
    assert kernels is not None
    unaligned = extension_kernels.padded(H, x.dtype) != H or extension_kernels.padded(O, x.dtype) != O
    graphs, host = {}, {}
    for way in UNALIGNED if unaligned else ALIGNED:
        force(way)
        plan = layernorm_plan.make_plan(x.shape, O, x.dtype, False, kernels.hopper)
        _, statistics_of_rows = kernels.forward(plan, 1e-5, True, x, gamma, beta, W, b)
        assert statistics_of_rows is not None

        def forward(plan=plan):
            return kernels.forward(plan, 1e-5, True, x, gamma, beta, W, b)

        def backward(plan=plan, kept=statistics_of_rows):
            return kernels.backward(plan, layernorm_direct.ALL_GRADIENTS, dy, x, kept, gamma, beta, W)

        def both():
            x, gamma, beta, W, b = given
            return torch.autograd.grad(fused_layernorm_linear(x, gamma, beta, W, b), given, dy)

        both()
        host[way] = host_time(both) if M * H * O < HOST_WORK else math.nan
        graphs[way, "forward"], graphs[way, "backward"] = capture(forward), capture(backward)
    taken = in_turns(graphs, ROUNDS, M * H * O)
    chosen = choose(M, H, O, x.dtype, hopper=kernels.hopper)
    return [
        {"M": M, "H": H, "O": O, **way._asdict(), "host_us": f"{host[way]:.1f}"}
        | {f"{part}_us": f"{taken[way, part]:.1f}" for part in ("forward", "backward")}
        | {f"chosen_{name}": who for name, who in chosen.captured._asdict().items()}
        | {
            "loop": "own"
            if chosen.plain == ALL_OWN
            else "as a graph"
            if chosen.plain == chosen.captured
            else "library"
        }
        for way in host
    ]


if __name__ == "__main__":
    write(row for size in SIZES for row in measure(*size))
