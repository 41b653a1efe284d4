"""Gradient formulas of common ops in PyTorch, each with known mistakes, for `harness/testing/mistakes.py`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check.gradients import compute_gradients
from harness.puzzles.formulas import EPS

Formula = Callable[..., Tensor]
"""(inputs, dy, wrong) -> the gradient of an input, correct or with the mistake `wrong`."""


def layer_norm(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    """Return the gradient of x; t is [x, gamma, beta], or only its beginning."""
    x, H = t[0], t[0].shape[-1]
    rstd = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    x_hat, g = (x - x.mean(-1, keepdim=True)) * rstd, dy * t[1] if len(t) > 1 else dy
    if wrong == "diagonal":
        return rstd * g * (1 - 1 / H - x_hat.square() / H)
    factor = rstd if wrong == "power" else torch.tensor(float(wrong not in ("c1", "both")))
    term = factor * x_hat * (g * x_hat).mean(-1, keepdim=True)
    g = dy if wrong == "gamma" else g
    return rstd * (g - (wrong not in ("c2", "both")) * g.mean(-1, keepdim=True) - term)


def rms_norm(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    """Return the gradient of x; t is [x] or [x, gamma]."""
    rstd = (t[0].square().mean(-1, keepdim=True) + EPS).rsqrt()
    g = dy * t[1] if len(t) > 1 and wrong != "gamma" else dy
    x_hat = t[0] * rstd
    c1 = (g * x_hat).mean() if wrong == "all" else (g * x_hat).mean(-1, keepdim=True)
    return rstd * (g - (wrong != "c1") * x_hat * c1)


def norm_weight(t: list[Tensor], dy: Tensor, wrong: str = "", *, centre: bool) -> Tensor:
    """Return the gradient of gamma: LayerNorm's if `centre`, else RMSNorm's."""
    centred = t[0] - t[0].mean(-1, keepdim=True) if centre else t[0]
    x_hat = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    factor = {"x": t[0], "centred": centred, "gamma": x_hat * t[1]}.get(wrong, x_hat)
    return (dy * factor).flatten(0, -2).sum(0)


def linear(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    return dy @ (t[1].mT if wrong else t[1])


def softmax(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    p = t[0].softmax(-1)
    product = dy * p
    sums = {
        "diagonal": product,
        "axis": product.sum(0, keepdim=True),
        "none": torch.zeros_like(p),
        "mean": dy.mean(-1, keepdim=True),
    }
    if wrong == "twice":
        return p * (product - product.sum(-1, keepdim=True))
    return p * (dy - sums.get(wrong, product.sum(-1, keepdim=True)))


def log_softmax(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    total = dy.sum(0 if wrong == "axis" else -1, keepdim=True)
    return dy - (wrong != "none") * t[0].softmax(-1) * total


def attention(t: list[Tensor], dy: Tensor, wrong: str = "", of: int = 0) -> Tensor:
    q, k, v = t[:3]
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale + (t[3] if len(t) > 3 else 0.0)
    p, dp = scores.softmax(-1), dy @ v.mT
    ds = p * (dp - (wrong != "sum") * (dp * p).sum(-1, keepdim=True))
    scale = 1.0 if wrong == "scale" else scale
    return (scale * ds @ k, scale * ds.mT @ q, p.mT @ dy)[of]


def cross_entropy(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    x, target = t
    valid = target != -100
    one_hot = F.one_hot(target.clamp(min=0), x.shape[-1]) * (wrong != "target")
    grad = (x.softmax(-1) - one_hot) * (1.0 if wrong == "dy" else dy)
    grad = grad / (target.numel() if wrong == "all" else valid.sum())
    return grad if wrong == "pushed" else torch.where(valid[..., None], grad, 0.0)


def activation(
    slope: Callable[[Tensor], Tensor], wrong_slopes: dict[str, Callable[[Tensor], Tensor]]
) -> Formula:
    return lambda t, dy, wrong="": dy * wrong_slopes.get(wrong, slope)(t[0])


def derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: compute_gradients(
        function, [x.detach().clone().requires_grad_()], lambda out: [torch.ones_like(out[0])]
    )[0]


def embedding(t: list[Tensor], dy: Tensor, wrong: str = "") -> Tensor:
    table = torch.zeros_like(t[1])
    if wrong:
        table[t[0].flatten()] = dy.flatten(0, -2)
        return table
    return table.index_add_(0, t[0].flatten(), dy.flatten(0, -2))


SUM, X_HAT = "without the sum over a row", "with x in the place of x_hat"
LAST = "with the last of equal indices in the place of their sum"
KNOWN: tuple[tuple[int, Formula, dict[str, str]], ...] = (
    (0, layer_norm, {
        "c2": "without the mean term c2", "c1": "without the variance term c1", "both": "without the terms c1 and c2",
        "diagonal": "on the diagonal of the Jacobian alone", "gamma": "without gamma in g and c2",
        "power": "with one rstd too many in the variance term"}),
    (0, rms_norm, {"c1": "without the term c1", "gamma": "without gamma", "all": "with one mean c1 for all rows"}),
    (1, partial(norm_weight, centre=True), {"x": X_HAT, "centred": "without rstd", "gamma": "with gamma multiplied in"}),
    (1, partial(norm_weight, centre=False), {"x": X_HAT, "gamma": "with gamma multiplied in"}),
    (0, linear, {"weight": "with the weight transposed"}),
    (0, softmax, {"diagonal": "on the diagonal of the Jacobian alone", "axis": "with the sum along the first axis", "none": SUM,
        "mean": "with the mean of dy in the place of the sum", "twice": "with the probabilities multiplied in twice"}),
    (0, log_softmax, {"axis": "with the sum along the first axis", "none": SUM}),
    (0, partial(attention, of=0), {"scale": "without the scale 1 / sqrt(d)", "sum": SUM}),
    (1, partial(attention, of=1), {"scale": "without the scale 1 / sqrt(d)", "sum": SUM}),
    (0, cross_entropy, {"dy": "without the gradient that comes in", "all": "divided by all rows, those that do not count too",
        "target": "without the 1 of the target", "pushed": "with rows that do not count as if they had class 0"}),
    (0, activation(derivative(F.gelu), {"tanh": derivative(partial(F.gelu, approximate="tanh"))}), {"tanh": "of its tanh approximation"}),
    (0, activation(derivative(F.silu), {"sigmoid": torch.sigmoid}), {"sigmoid": "without the slope of the sigmoid"}),
    (0, activation(derivative(F.relu), {"one": torch.ones_like}), {"one": "without the mask"}),
    (1, embedding, {"last": LAST}),
    (0, lambda t, dy, wrong="": embedding(t[::-1], dy, wrong), {"last": LAST}),
)  # fmt: skip
"""Index of an input, the formula of its gradient, and descriptions of the known mistakes."""
