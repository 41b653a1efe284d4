"""Linear with cross-entropy: the formula by PyTorch's functions, tensors, and a comparison, for the operator and for what runs without."""

from typing import Any

import torch
import torch.nn.functional as F

from harness.nn import linear_cross_entropy

H, V, ROWS = 7, 11, (2, 5)
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 2.0},
    {"label_smoothing": 0.3, "z_loss": 0.02, "softcap": 1.5, "ignore_index": 3},
]


def tensors(
    dtype=torch.float64,
    rows=ROWS,
    bias=True,
    classes=V,
    requires_grad=True,
    ignored=-100,
    features=H,
    device="cpu",
) -> Any:
    """input, weight, target, of which one row is ignored, and bias."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_(requires_grad)

    target = torch.randint(0, classes, rows, generator=generator).to(device)
    if target.numel():
        target.view(-1)[-1] = ignored
    return randn(*rows, features), randn(classes, features), target, randn(classes) if bias else None


def by_formula(
    input,
    weight,
    target,
    bias=None,
    *,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    ignore_index=-100,
    **options,
):
    """The loss, from PyTorch's own functions."""
    logits = F.linear(input, weight, bias)
    logits = logits.reshape(-1, logits.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = target.flatten()
    losses = F.cross_entropy(logits, rows, ignore_index=ignore_index, reduction="none", **options)
    counted = rows != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def wide(given):
    """The same tensors in float64, leaves of their own."""
    return [
        each.detach().double().requires_grad_(each.requires_grad)
        if each is not None and each.is_floating_point()
        else each
        for each in given
    ]


def loss_and_gradients(function, given, grad=None, **options):
    """The loss, and the gradients of input, weight and bias, from a gradient of the loss that is no 1."""
    input, weight, target, bias = given
    leaves = [each.detach().clone().requires_grad_() for each in (input, weight, bias) if each is not None]
    loss = function(*leaves[:2], target, *leaves[2:], **options)
    grad = torch.linspace(0.5, 2, loss.numel(), device=loss.device).view(loss.shape) if grad is None else grad
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss.dtype))]


def assert_is_formula(given, tolerance=1e-12, **options):
    """Compare the loss and its gradients with the formula's."""
    ours = loss_and_gradients(linear_cross_entropy, given, **options)
    options.pop("chunk_rows", None)
    for got, expected in zip(ours, loss_and_gradients(by_formula, given, **options), strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
