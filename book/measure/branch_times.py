"""Times backward passes of one branch and of two: `python -m book.measure branches`, on an NVIDIA H100 or H200.

bfloat16; both passes as a CUDA graph, shuffled turns with a pause before each, the median. A row for each size and way: who
multiplies dln and dW, and whether dW is made beside all the rest. "chosen" is what `harness/nn/layernorm_plan.py` says, whose estimates
come from such a file. Every way is compared with float64 before it is timed.
"""

import torch

from book.measure.product_times import in_turns, make
from book.measure.shared import capture, write
from harness.nn import extension_kernels, layernorm_direct, layernorm_plan
from harness.nn.layernorm_plan import ALL_LIBRARY, ALL_OWN, LIBRARY, OWN, Choice, Products, choose

ONE = ((OWN, OWN), (OWN, LIBRARY), (LIBRARY, LIBRARY))
TWO = ((OWN, OWN), (OWN, LIBRARY), (LIBRARY, OWN), (LIBRARY, LIBRARY))
SIZES = (
    *((4096, 768, 3072), (8192, 1024, 4096), (512, 768, 2304), (512, 256, 1024), (128, 64, 256)),
    *((2048, 1280, 5120), (6282, 1344, 3648), (2048, 768, 3072), (8192, 768, 3072), (1024, 1024, 1024)),
    *((2843, 192, 256), (4909, 1664, 256), (19, 3328, 512), (523, 8256, 3200), (32, 8960, 1408)),
    *((333, 1152, 6912), (799, 5568, 1536), (1142, 2624, 384), (7403, 576, 192), (25, 1472, 12224)),
    *((157, 5248, 3072), (399, 13248, 128), (214, 448, 1024), (27, 128, 256), (140, 512, 2624)),
    *((64, 768, 3072), (16, 4096, 4096), (256, 1024, 4096), (1024, 768, 3072), (1024, 4096, 1024)),
    *((4096, 1024, 4096), (4096, 2048, 2048), (12288, 1024, 1024), (5000, 1600, 4800), (4164, 320, 14656)),
    *((37, 5931, 775), (3968, 105, 1265), (3796, 692, 141), (31, 650, 243), (10412, 126, 3116)),
    *((260, 88, 1067), (30, 338, 997), (1115, 134, 654), (793, 160, 427), (1349, 2212, 505)),
    *((22020, 576, 64), (5995, 832, 10688), (8192, 4096, 4096), (7416, 16384, 1088)),
)
ROUNDS = 9
LARGEST_ERROR = 6e-3
"""Of a gradient, by the norm of its own: bfloat16 rounds each element by up to 4e-3 of itself."""


def ways(M: int, H: int, O: int) -> dict[tuple[str, str, int], Choice]:
    """Who multiplies dln and dW, and on how many branches."""
    chosen = choose(M, H, O, torch.bfloat16, hopper=True).captured
    unaligned = any(extension_kernels.padded(width, torch.bfloat16) != width for width in (H, O))
    one = (ALL_OWN[1:], ALL_LIBRARY[1:]) if unaligned else ONE
    two = (ALL_OWN[1:], ALL_LIBRARY[1:]) if unaligned else TWO
    if unaligned and M * H * O > 2**27:
        one = two = (ALL_OWN[1:],)  # the library's products take several times as long
    choices = {}
    for branches, pairs in ((1, one), (2, two)):
        for dln, dW in pairs:
            way = Products(chosen.output, dln, dW)
            choices[dln, dW, branches] = Choice(way, way, branches == 2)
    return choices


def exact(dy, x, gamma, beta, W) -> tuple[torch.Tensor, ...]:
    """The gradients in float64."""
    dy, x, gamma, beta, W = (tensor.double() for tensor in (dy, x, gamma, beta, W))
    rstd = (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    x_hat = (x - x.mean(1, keepdim=True)) * rstd
    dln = dy @ W
    g = dln * gamma
    dx = rstd * (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True))
    return dx, (dln * x_hat).sum(0), dln.sum(0), dy.t() @ (x_hat * gamma + beta), dy.sum(0)


def measure(M: int, H: int, O: int) -> list[dict]:
    """A row for each way. Raises RuntimeError where a gradient is wrong."""
    x, gamma, beta, W, b, dy = make(M, H, O)
    kernels = layernorm_direct.kernels(x.device)
    assert kernels is not None
    truth = exact(dy, x, gamma, beta, W)
    graphs = {}
    for way, choice in ways(M, H, O).items():
        layernorm_plan.choose = lambda *sizes, choice=choice, **facts: choice
        layernorm_plan.make_plan.cache_clear()
        plan = layernorm_plan.make_plan(x.shape, O, x.dtype, False, kernels.hopper)
        got = []

        def both(plan=plan, got=got):
            _, kept = kernels.forward(plan, 1e-5, True, x, gamma, beta, W, b)
            assert kept is not None
            got[:] = kernels.backward(plan, layernorm_direct.ALL_GRADIENTS, dy, x, kept, gamma, beta, W)

        graphs[way] = capture(both)
        graphs[way]()
        for mine, right in zip(got, truth, strict=True):
            error = (mine.double() - right).norm() / right.norm()
            if not error < LARGEST_ERROR:
                raise RuntimeError(f"{(M, H, O)}, {way}: an error of {error:.1e}")
    layernorm_plan.choose = choose
    choice = choose(M, H, O, x.dtype, hopper=kernels.hopper)
    chosen = (choice.captured.dln, choice.captured.dW, 1 + choice.forked)
    return [
        {"M": M, "H": H, "O": O, "dln": way[0], "dW": way[1], "branches": way[2]}
        | {"us": f"{time:.1f}", "chosen": "yes" if way == chosen else ""}
        for way, time in in_turns(graphs, ROUNDS, M * H * O).items()
    ]


if __name__ == "__main__":
    write(row for size in SIZES for row in measure(*size))
