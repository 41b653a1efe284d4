"""Gradient formulas of common ops in PyTorch, each with known mistakes, for `harness/testing/mistakes.py`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check.gradients import compute_gradients
from harness.puzzles.formulas import EPS

Formula = Callable[..., Tensor]
"""(inputs, dy, mistake) -> the gradient of an input, correct or with a known mistake."""


def layer_norm(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    """Return the gradient of x; t is [x, gamma, beta], or only its beginning."""
    x, H = t[0], t[0].shape[-1]
    rstd = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    x_hat, g = (x - x.mean(-1, keepdim=True)) * rstd, dy * t[1] if len(t) > 1 else dy
    if mistake == "diagonal":
        return rstd * g * (1 - 1 / H - x_hat.square() / H)
    factor = rstd if mistake == "power" else torch.tensor(float(mistake not in ("c1", "both")))
    term = factor * x_hat * (g * x_hat).mean(-1, keepdim=True)
    g = dy if mistake == "gamma" else g
    return rstd * (g - (mistake not in ("c2", "both")) * g.mean(-1, keepdim=True) - term)


def rms_norm(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    """Return the gradient of x; t is [x] or [x, gamma]."""
    rstd = (t[0].square().mean(-1, keepdim=True) + EPS).rsqrt()
    g = dy * t[1] if len(t) > 1 and mistake != "gamma" else dy
    x_hat = t[0] * rstd
    c1 = (g * x_hat).mean() if mistake == "all" else (g * x_hat).mean(-1, keepdim=True)
    return rstd * (g - (mistake != "c1") * x_hat * c1)


def norm_weight(t: list[Tensor], dy: Tensor, mistake: str = "", *, subtract_mean: bool) -> Tensor:
    """Return the gradient of gamma: LayerNorm's if `subtract_mean`, else RMSNorm's."""
    centred = t[0] - t[0].mean(-1, keepdim=True) if subtract_mean else t[0]
    x_hat = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    factor = {"x": t[0], "centred": centred, "gamma": x_hat * t[1]}.get(mistake, x_hat)
    return (dy * factor).flatten(0, -2).sum(0)


def linear(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    return dy @ (t[1].mT if mistake else t[1])


def softmax(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    p = t[0].softmax(-1)
    product = dy * p
    sums = {
        "diagonal": product,
        "axis": product.sum(0, keepdim=True),
        "none": torch.zeros_like(p),
        "mean": dy.mean(-1, keepdim=True),
    }
    if mistake == "twice":
        return p * (product - product.sum(-1, keepdim=True))
    return p * (dy - sums.get(mistake, product.sum(-1, keepdim=True)))


def log_softmax(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    total = dy.sum(0 if mistake == "axis" else -1, keepdim=True)
    return dy - (mistake != "none") * t[0].softmax(-1) * total


def attention(t: list[Tensor], dy: Tensor, mistake: str = "", input_index: int = 0) -> Tensor:
    q, k, v = t[:3]
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale + (t[3] if len(t) > 3 else 0.0)
    p, dp = scores.softmax(-1), dy @ v.mT
    ds = p * (dp - (mistake != "sum") * (dp * p).sum(-1, keepdim=True))
    scale = 1.0 if mistake == "scale" else scale
    return (scale * ds @ k, scale * ds.mT @ q, p.mT @ dy)[input_index]


def cross_entropy(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    x, target = t
    valid = target != -100
    one_hot = F.one_hot(target.clamp(min=0), x.shape[-1]) * (mistake != "target")
    grad = (x.softmax(-1) - one_hot) * (1.0 if mistake == "dy" else dy)
    grad = grad / (target.numel() if mistake == "all" else valid.sum())
    return grad if mistake == "pushed" else torch.where(valid[..., None], grad, 0.0)


def make_activation_formula(
    slope: Callable[[Tensor], Tensor], wrong_slopes: dict[str, Callable[[Tensor], Tensor]]
) -> Formula:
    return lambda t, dy, mistake="": dy * wrong_slopes.get(mistake, slope)(t[0])


def make_derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: compute_gradients(
        function, [x.detach().clone().requires_grad_()], lambda out: [torch.ones_like(out[0])]
    )[0]


def embedding(t: list[Tensor], dy: Tensor, mistake: str = "") -> Tensor:
    table = torch.zeros_like(t[1])
    if mistake:
        table[t[0].flatten()] = dy.flatten(0, -2)
        return table
    return table.index_add_(0, t[0].flatten(), dy.flatten(0, -2))


SUM, X_HAT = "without the sum over a row", "with x in the place of x_hat"
LAST = "with the last of equal indices in the place of their sum"
KNOWN_FORMULAS: tuple[tuple[int, Formula, dict[str, str]], ...] = (
    (0, layer_norm, {
        "c2": "without the mean term c2", "c1": "without the variance term c1", "both": "without the terms c1 and c2",
        "diagonal": "on the diagonal of the Jacobian alone", "gamma": "without gamma in g and c2",
        "power": "with one rstd too many in the variance term"}),
    (0, rms_norm, {"c1": "without the term c1", "gamma": "without gamma", "all": "with one mean c1 for all rows"}),
    (1, partial(norm_weight, subtract_mean=True), {"x": X_HAT, "centred": "without rstd", "gamma": "with gamma multiplied in"}),
    (1, partial(norm_weight, subtract_mean=False), {"x": X_HAT, "gamma": "with gamma multiplied in"}),
    (0, linear, {"weight": "with the weight transposed"}),
    (0, softmax, {"diagonal": "on the diagonal of the Jacobian alone", "axis": "with the sum along the first axis", "none": SUM,
        "mean": "with the mean of dy in the place of the sum", "twice": "with the probabilities multiplied in twice"}),
    (0, log_softmax, {"axis": "with the sum along the first axis", "none": SUM}),
    (0, partial(attention, input_index=0), {"scale": "without the scale 1 / sqrt(d)", "sum": SUM}),
    (1, partial(attention, input_index=1), {"scale": "without the scale 1 / sqrt(d)", "sum": SUM}),
    (0, cross_entropy, {"dy": "without the gradient that comes in", "all": "divided by all rows, those that do not count too",
        "target": "without the 1 of the target", "pushed": "with rows that do not count as if they had class 0"}),
    (0, make_activation_formula(make_derivative(F.gelu), {"tanh": make_derivative(partial(F.gelu, approximate="tanh"))}), {"tanh": "of its tanh approximation"}),
    (0, make_activation_formula(make_derivative(F.silu), {"sigmoid": torch.sigmoid}), {"sigmoid": "without the slope of the sigmoid"}),
    (0, make_activation_formula(make_derivative(F.relu), {"one": torch.ones_like}), {"one": "without the mask"}),
    (1, embedding, {"last": LAST}),
    (0, lambda t, dy, mistake="": embedding(t[::-1], dy, mistake), {"last": LAST}),
)  # fmt: skip
"""Index of an input, the formula of its gradient, and descriptions of the known mistakes."""
