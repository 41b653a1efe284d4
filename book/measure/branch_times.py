"""Times backward passes of one branch and of two: `python -m book.measure branches`, on an NVIDIA H100 or H200.

bfloat16; both passes as a CUDA graph, shuffled turns with a pause before each, the median. A row for each size and way: who
multiplies dln and dW, and whether dW is made beside all the rest. "chosen" is what the table `harness/nn/kernels/layernorm_linear/plan.mojo`
says, whose estimates come from such a file. Every way is compared with float64 before it is timed.
"""

import torch
import torch.nn.functional as F

from book.measure.product_times import BURST, LIBRARY, OWN, PAUSE, aligned, chosen, given, make, passes
from book.measure.record import sizes
from book.measure.shared import capture, medians, write
from harness.nn.layers import TWO_STREAMS, decode_plan

ONE = ((OWN, OWN), (OWN, LIBRARY), (LIBRARY, LIBRARY))
TWO = ((OWN, OWN), (OWN, LIBRARY), (LIBRARY, OWN), (LIBRARY, LIBRARY))
ROUNDS = 9
LARGEST_ERROR = 6e-3
"""Of a gradient, by the norm of its own: bfloat16 rounds each element by up to 4e-3 of itself."""


def ways(M: int, H: int, O: int) -> list[tuple[str, str, int]]:
    """Who multiplies dln and dW, and on how many branches."""
    one, two = ONE, TWO
    if not aligned(H, O):
        one = two = ((OWN, OWN), (LIBRARY, LIBRARY))
        if M * H * O > 2**27:
            one = two = ((OWN, OWN),)  # the library's products take several times as long
    return [(*way, branches) for branches, pairs in ((1, one), (2, two)) for way in pairs]


def exact(leaves: list[torch.Tensor], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients in float64, by autograd."""
    x, gamma, beta, W, b = inputs = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(F.linear(F.layer_norm(x, x.shape[1:], gamma, beta), W, b), inputs, dy.double())


def measure(M: int, H: int, O: int) -> list[dict]:
    """A row for each way. Raises RuntimeError where a gradient is wrong."""
    *leaves, dy = make(M, H, O)
    truth = exact(leaves, dy)
    captured = chosen(leaves, captured=True)
    output = decode_plan(captured)["output"]
    graphs = {}
    for dln, dW, branches in ways(M, H, O):
        got = []
        forward, backward = passes(leaves, dy, given(leaves, (output, dln, dW), forked=branches == 2))

        def both(forward=forward, backward=backward, got=got):
            got[:] = backward(forward()[1])

        graphs[dln, dW, branches] = capture(both)
        graphs[dln, dW, branches]()
        for mine, right in zip(got, truth, strict=True):
            error = (mine.double() - right).norm() / right.norm()
            if not error < LARGEST_ERROR:
                raise RuntimeError(f"{(M, H, O)}, {dln}, {dW}, {branches}: an error of {error:.1e}")
    said = decode_plan(captured)
    best = (said["dln"], said["dW"], 2 if captured & TWO_STREAMS else 1)
    return [
        {"M": M, "H": H, "O": O, "dln": way[0], "dW": way[1], "branches": way[2]}
        | {"us": f"{time:.1f}", "chosen": "yes" if way == best else ""}
        for way, time in medians(graphs, ROUNDS, BURST, PAUSE).items()
    ]


if __name__ == "__main__":
    write(row for size in sizes("branches") for row in measure(*size))
