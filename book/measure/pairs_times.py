"""Errors and times of float32 by pairs of float16: `python -m book.measure pairs`.

A row for each size, kind of input and result: its relative error against float64, in the Frobenius norm and at the largest
element, beside that of PyTorch in float32 (IEEE, no TF32). Then a row for each size and way with the time of both passes as
one CUDA graph, the median of shuffled turns after a pause.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from book.measure.shared import capture, medians, write
from harness.nn.layers import fused_layernorm_linear

RESULTS = ("output", "dx", "dgamma", "dbeta", "dW", "db")
ERROR_SIZES = ((512, 256, 264), (4096, 768, 3072), (1000, 1600, 4800), (8192, 1024, 4096))
TIME_SIZES = ((4096, 768, 3072), (8192, 1024, 4096))
ROUNDS = 5


def plain(x, gamma, beta, W, b):
    """PyTorch's own."""
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta), W, b)


pairs = partial(fused_layernorm_linear, algorithm="pairs")
fast = partial(fused_layernorm_linear, algorithm="fast")


def make(M: int, H: int, O: int, kind: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Leaves and a gradient of the output; every kind but "ordinary" is hard in its own way."""

    def normal(*shape):
        return torch.randn(*shape, device="cuda")

    x = 1.5 * normal(M, H) + 0.5 * normal(M, 1)
    gamma, beta, W, b = 1 + 0.3 * normal(H), 0.3 * normal(H), normal(O, H) / math.sqrt(H), normal(O)
    dy = normal(M, O)
    if kind == "mean 100":
        x += 100
    if kind == "outliers":
        x[::7, ::13] *= 1000
        dy[::5, 3] *= 1e4
        W[5] *= 100
    if kind == "tiny":
        dy *= 1e-30
        W *= 1e-6
    if kind == "huge":
        dy *= 1e25
        W *= 1e6
    if kind == "rows of 1e-6 to 1e3":
        dy *= torch.logspace(-6, 3, M, device="cuda")[:, None]
    return [tensor.requires_grad_() for tensor in (x, gamma, beta, W, b)], dy


KINDS = ("ordinary", "mean 100", "outliers", "tiny", "huge", "rows of 1e-6 to 1e3")


def run(function, leaves, dy) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    output = function(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, dy))


def errors(got, truth) -> list[tuple[float, float]]:
    """Of each result, in the norm and at the largest element."""
    pairs_of = [(one.double() - exact, exact) for one, exact in zip(got, truth, strict=True)]
    return [
        ((d.norm() / exact.norm()).item(), (d.abs().max() / exact.abs().max()).item())
        for d, exact in pairs_of
    ]


def error_rows(M: int, H: int, O: int, kind: str) -> list[dict]:
    """A row for each result."""
    leaves, dy = make(M, H, O, kind)
    truth = run(plain, [leaf.detach().double().requires_grad_() for leaf in leaves], dy.double())
    ours, theirs = errors(run(pairs, leaves, dy), truth), errors(run(plain, leaves, dy), truth)
    return [
        {"M": M, "H": H, "O": O, "inputs": kind, "result": result}
        | {"norm_error": f"{own[0]:.3e}", "norm_of_torch": f"{other[0]:.3e}"}
        | {"largest_error": f"{own[1]:.3e}", "largest_of_torch": f"{other[1]:.3e}"}
        for result, own, other in zip(RESULTS, ours, theirs, strict=True)
    ]


def strange_rows() -> list[dict]:
    """Whether infinities and NaN stand where PyTorch's stand, by what is strange."""
    leaves, dy = make(512, 256, 264, "ordinary")
    rows = []
    places = {"x": (0, (3, 5)), "W": (3, (7, 9)), "gamma": (1, (4,)), "grad_output": (5, (11, 13))}
    for name, (which, place) in places.items():
        for value in (math.inf, math.nan):
            tensors = [tensor.detach().clone() for tensor in (*leaves, dy)]
            tensors[which][place] = value
            *own_leaves, gradient = tensors
            own_leaves = [leaf.requires_grad_() for leaf in own_leaves]
            ours, theirs = run(pairs, own_leaves, gradient), run(plain, own_leaves, gradient)
            for result, one, other in zip(RESULTS, ours, theirs, strict=True):
                same = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.isinf(), other.isinf())
                rows.append(
                    {"M": 512, "H": 256, "O": 264, "inputs": f"{value} in {name}", "result": result}
                    | {"note": "as PyTorch" if same else "elsewhere than PyTorch"}
                )
    return rows


def time_rows(M: int, H: int, O: int) -> list[dict]:
    """A row for each way."""
    leaves, dy = make(M, H, O, "ordinary")
    ways = {
        "pairs": pairs,
        "fast": fast,
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False, fullgraph=True),
    }
    graphs = {name: capture(partial(run, way, leaves, dy)) for name, way in ways.items()}
    first = run(pairs, leaves, dy)
    same = all(all(map(torch.equal, first, run(pairs, leaves, dy))) for _ in range(5))
    return [
        {"M": M, "H": H, "O": O, "inputs": "ordinary", "way": name, "graph_us": f"{us:.1f}"}
        | {"note": ("the same bits in 6 runs" if same else "other bits") if name == "pairs" else ""}
        for name, us in medians(graphs, ROUNDS, burst=4_000, pause=0.05).items()
    ]


def rows() -> Iterator[dict]:
    """The times first, then errors and strange places."""
    for sizes in TIME_SIZES:
        yield from time_rows(*sizes)
    for sizes in ERROR_SIZES:
        for kind in KINDS:
            yield from error_rows(*sizes, kind)
    yield from strange_rows()


if __name__ == "__main__":
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.manual_seed(0)
    columns = (
        "M", "H", "O", "inputs", "result", "norm_error", "norm_of_torch", "largest_error",
        "largest_of_torch",
    )  # fmt: skip
    write(rows(), (*columns, "way", "graph_us", "note"))
