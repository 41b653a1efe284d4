"""Operations with correct backward passes; `faults.toml` changes a line or two of each into a bug of a public report."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from correct_cases import make_integers
from torch import Tensor
from torch.autograd import Function
from zoo_cases import Arguments

from book.measure.hunt_versions import reports

EPS = 1e-5


def read_from_address(t: Tensor) -> Tensor:
    """Return what a kernel reads, given only an address and a shape."""
    strides = torch.empty(t.shape, device="meta").stride()
    there = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided(t.shape, strides) if there >= t.numel() else torch.zeros_like(t)


def safe_softmax(x: Tensor) -> Tensor:
    """Compute softmax with zeros for fully masked rows."""
    hidden = (x == -torch.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, x).softmax(-1))


class KeepsInputs(Function):
    """A function that saves its inputs."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Product(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        return dy * w, (dy * x).flatten(0, -2).sum(0)


class Attention(KeepsInputs):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        do = do.contiguous()
        scale = max(q.shape[-1], 1) ** -0.5
        p = (q @ k.mT * scale).softmax(-1)
        dp = do @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ do


class Mean(KeepsInputs):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mean(-1)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        return (dy / x.shape[-1])[..., None].expand(x.shape)


class MatMul(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        x = x.contiguous()
        return dy @ w.mT, x.flatten(0, -2).mT @ dy.flatten(0, -2)


class Distances(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None] - y).square().sum(-1)

    @staticmethod
    def backward(ctx, dd):
        x, y = ctx.saved_tensors
        x = x.contiguous()
        d = 2 * dd[..., None] * (x.view(len(x), 1, x.shape[-1]) - y)
        return d.sum(1), -d.sum(0)


class Linear(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dy @ w if ctx.needs_input_grad[0] else None
        return dx, dy.flatten(0, -2).mT @ x.flatten(0, -2)


class CrossEntropy(KeepsInputs):
    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx, dloss):
        logits, target = ctx.saved_tensors
        d = logits.softmax(-1) - F.one_hot(target, logits.shape[-1])
        return d * (dloss / len(target)), None


class EntropyOfRows(KeepsInputs):
    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")

    @staticmethod
    def backward(ctx, dloss):
        logits, target = ctx.saved_tensors
        d = logits.softmax(-1) - F.one_hot(target, logits.shape[-1])
        return d * dloss[:, None], None


class SummedEntropy(KeepsInputs):
    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="sum")

    @staticmethod
    def backward(ctx, dloss):
        logits, target = ctx.saved_tensors
        d = logits.softmax(-1) - F.one_hot(target, logits.shape[-1])
        return d * dloss, None


class RMSNorm(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, w.shape, w, EPS)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        x_hat, g = x * rstd, dy * w
        c = (g * x_hat).mean(-1, keepdim=True)
        dw = (dy * x_hat).flatten(0, -2).sum(0)
        return rstd * (g - x_hat * c), dw


class SquareOfDouble(KeepsInputs):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (2 * x).square()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 8 * x * dy


class Square(KeepsInputs):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Embedding(KeepsInputs):
    @staticmethod
    def forward(index: Tensor, w: Tensor) -> Tensor:
        return F.embedding(index, w)

    @staticmethod
    def backward(ctx, dy):
        index, w = ctx.saved_tensors
        dw = torch.zeros_like(w)
        dw.index_add_(0, index.flatten(), dy.flatten(0, -2))
        return None, dw


class PaddedEmbedding(KeepsInputs):
    @staticmethod
    def forward(index: Tensor, w: Tensor) -> Tensor:
        return F.embedding(index, w, padding_idx=0)

    @staticmethod
    def backward(ctx, dy):
        index, w = ctx.saved_tensors
        dw = torch.zeros_like(w)
        dw.index_add_(0, index.flatten(), dy.flatten(0, -2))
        dw[0] = 0
        return None, dw


class SafeSoftmax(KeepsInputs):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return safe_softmax(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        p = safe_softmax(x)
        dy = dy.where(p > 0, 0.0)  # infinity times 0 is NaN
        return p * (dy - (dy * p).sum(-1, keepdim=True))


class WeightedBag(KeepsInputs):
    @staticmethod
    def forward(index: Tensor, w: Tensor, each: Tensor) -> Tensor:
        return (w[index] * each[..., None]).sum(1)

    @staticmethod
    def backward(ctx, dy):
        index, w, each = ctx.saved_tensors
        dw = torch.zeros_like(w)
        parts = (dy[:, None] * each[..., None]).flatten(0, -2)
        dw.index_add_(0, index.flatten(), parts)
        return None, dw, (dy[:, None] * w[index]).sum(-1)


class LayerNorm(KeepsInputs):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        rstd = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
        y = (x - x.mean(-1, keepdim=True)) * rstd
        c = (dy * y).mean(-1, keepdim=True)
        return rstd * (dy - dy.mean(-1, keepdim=True) - y * c)


def make_masked_scores(sizes, generator: torch.Generator) -> Tensor:
    """Return scores of which some are masked, and one row completely."""
    x = torch.randn(sizes["N"], sizes["H"], generator=generator, dtype=torch.float64)
    x[:, -1:] = -torch.inf
    x[:1] = -torch.inf
    return x


ROWS = ("N", "T", "H")
TARGETS = {"x": ("N", "C"), "t": make_integers("C", "N")}
INDEXED = {"i": make_integers(5, "N", "T"), "w": (5, "H")}
INPUTS: dict[type[Function], dict[str, Any]] = {
    Product: {"x": ROWS, "w": ("H",)},
    Attention: {"q": ("B", "S", "d"), "k": ("B", "T", "d"), "v": ("B", "T", "d")},
    Mean: {"x": ROWS},
    MatMul: {"x": ROWS, "w": ("H", "O")},
    Distances: {"x": ("N", "H"), "y": ("M", "H")},
    Linear: {"x": ROWS, "w": ("O", "H")},
    CrossEntropy: TARGETS,
    EntropyOfRows: TARGETS,
    SummedEntropy: TARGETS,
    RMSNorm: {"x": ROWS, "w": ("H",)},
    SquareOfDouble: {"x": ROWS},
    Square: {"x": ROWS},
    Embedding: INDEXED,
    PaddedEmbedding: INDEXED,
    SafeSoftmax: {"x": make_masked_scores},
    WeightedBag: {**INDEXED, "each": ("N", "T")},
    LayerNorm: {"x": ROWS},
}


def make_call(name: str, text: str) -> Callable[..., object]:
    """Return the `apply` of a class in a text of this module."""
    module: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), module)
    return module[name].apply


def list_faults() -> list[Arguments]:
    """List arguments for the bugs of public reports."""
    by_name = {function.__name__: (function, inputs) for function, inputs in INPUTS.items()}
    cases = []
    for report, entry in reports().items():
        function, inputs = by_name[entry["operation"]]
        make = lambda entry=entry: make_call(entry["operation"], entry["text"])  # noqa: E731
        cases.append(Arguments(report, make, function.forward, inputs))
    return cases


def list_corrected() -> list[Arguments]:
    """List arguments for the operations without the bugs."""
    return [
        Arguments(f"{function.__name__} corrected", lambda f=function: f.apply, function.forward, inputs)
        for function, inputs in INPUTS.items()
    ]
