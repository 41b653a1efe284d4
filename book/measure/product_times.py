"""Times the layer by who multiplies: `python -m book.measure products`.

bfloat16; each pass as a CUDA graph, shuffled turns, the median; and how long a call of both passes keeps its caller in a plain
loop. A row for each size and way, with what `harness/nn/kernels/layernorm_linear/plan.mojo` chooses there. Its
estimates come from such a file.
"""

import math
from collections.abc import Callable

import torch

from book.measure.record import sizes
from book.measure.shared import capture, medians, write
from harness.bench.timing import CudaClock, LaunchClock
from harness.nn import host
from harness.nn.layers import EPS, LAYER, MATMUL_BACKENDS, decode_plan

OWN, LIBRARY, PADDED = MATMUL_BACKENDS
NAMES = ("output", "dln", "dW")
ALIGNED = ((OWN, OWN, OWN), (LIBRARY, OWN, LIBRARY), (LIBRARY, LIBRARY, LIBRARY))
UNALIGNED = ((OWN, OWN, OWN), (LIBRARY, LIBRARY, LIBRARY), (PADDED, OWN, OWN))
GIVEN, ABOVE, OF_CHOICE = 4, 3, 2**7 - 1
"""The operator's option for products that are given, in the bits above it; the bits of a choice."""
ALL_GRADIENTS = 15
ROUNDS, BURST, PAUSE = 7, 2_000, 0.004
"""Turns of each way, the microseconds of a turn, and the seconds of pause before it."""
HOST_WORK = 2**33
"""Multiply-adds of a product above which the host is not what a loop waits for."""


def make(M: int, H: int, O: int) -> list[torch.Tensor]:
    """x, gamma, beta, W, b and the gradient of the output, in bfloat16."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    tensors = (normal(M, H), 1 + 0.3 * normal(H), normal(H), normal(O, H) / math.sqrt(H), normal(O))
    return [tensor.bfloat16() for tensor in (*tensors, normal(M, O))]


def aligned(H: int, O: int) -> bool:
    """Whether all rows of 16-bit elements begin at multiples of 16 bytes."""
    return H % 8 == 0 == O % 8


def chosen(leaves: list[torch.Tensor], captured: bool) -> int:
    """The choice of products in bits."""
    host.load(LAYER)
    return torch.ops.mojo_workbook.layernorm_linear_plan(*leaves, 0, captured)


def given(leaves: list[torch.Tensor], way: tuple[str, ...], forked: bool = False) -> int:
    """The operator's option for some products."""
    bits = sum(MATMUL_BACKENDS.index(who) << 2 * k for k, who in enumerate(way)) | forked << 6
    return GIVEN | (chosen(leaves, True) & ~OF_CHOICE | bits) << ABOVE


def passes(leaves: list[torch.Tensor], dy: torch.Tensor, options: int) -> tuple[Callable, Callable]:
    """Both passes with these options: () -> output and statistics, (statistics) -> the gradients."""
    x, gamma, beta, W, b = leaves
    operators = torch.ops.mojo_workbook

    def forward():
        return operators.layernorm_linear_forward(x, gamma, beta, W, b, EPS, options)

    def backward(kept):
        return operators.layernorm_linear_backward(dy, x, kept, gamma, beta, W, ALL_GRADIENTS, options)

    return forward, backward


def measure(M: int, H: int, O: int) -> list[dict]:
    """A row for each way."""
    *leaves, dy = make(M, H, O)
    graphs, host_us, clock = {}, {}, LaunchClock(CudaClock())
    small = M * H * O < HOST_WORK
    for way in ALIGNED if aligned(H, O) else UNALIGNED:
        options = given(leaves, way)
        forward, backward = passes(leaves, dy, options)
        wanted = [leaf.detach().requires_grad_() for leaf in leaves]

        def both(options=options, wanted=wanted):
            y = torch.ops.mojo_workbook.layernorm_linear(*wanted, EPS, options)
            return torch.autograd.grad(y, wanted, dy)

        both()
        kept = forward()[1]
        host_us[way] = min(clock.measure(both, 20) for _ in range(4)) if small else math.nan
        graphs[way, "forward"], graphs[way, "backward"] = (
            capture(forward),
            capture(lambda b=backward, k=kept: b(k)),
        )
    taken = medians(graphs, ROUNDS, BURST, PAUSE)
    captured, plain = (decode_plan(chosen(leaves, captured)) for captured in (True, False))
    loop = "own" if {*plain.values()} == {OWN} else "as a graph" if plain == captured else "library"
    return [
        {"M": M, "H": H, "O": O, **dict(zip(NAMES, way, strict=True)), "host_us": f"{host_us[way]:.1f}"}
        | {f"{part}_us": f"{taken[way, part]:.1f}" for part in ("forward", "backward")}
        | {f"chosen_{name}": who for name, who in captured.items()}
        | {"loop": loop}
        for way in host_us
    ]


if __name__ == "__main__":
    write(row for size in sizes("products") for row in measure(*size))
