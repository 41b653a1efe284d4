"""Helpers for tests of Linear with cross-entropy: tensors, a PyTorch reference, and a comparison."""

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


def make_tensors(
    dtype=torch.float64, rows=ROWS, *, bias=True, classes=V, features=H, requires_grad=True, ignored=-100, device="cpu"
) -> Any:  # fmt: skip
    """Return input, weight, target with one ignored row, and bias."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_(requires_grad)

    target = torch.randint(0, classes, rows, generator=generator).to(device)
    if target.numel():
        target.view(-1)[-1] = ignored
    return randn(*rows, features), randn(classes, features), target, randn(classes) if bias else None


def compute_loss(
    input, weight, target, bias=None, *, softcap=None, z_loss=0.0, reduction="mean", ignore_index=-100, **options
):  # fmt: skip
    """Return the reference loss, computed by PyTorch."""
    logits = F.linear(input, weight, bias)
    logits = logits.reshape(-1, logits.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = target.flatten()
    losses = F.cross_entropy(logits, rows, ignore_index=ignore_index, reduction="none", **options)
    valid = rows != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * valid
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def to_float64(tensors):
    """Return the tensors in float64, as leaves."""
    is_float = [tensor is not None and tensor.is_floating_point() for tensor in tensors]
    return [
        tensor.detach().double().requires_grad_(tensor.requires_grad) if floating else tensor
        for tensor, floating in zip(tensors, is_float, strict=True)
    ]


def differentiate(function, tensors, grad=None, **options):
    """Return the loss and the gradients of input, weight and bias, by default for output gradients other than 1."""
    input, weight, target, bias = tensors
    leaves = [t.detach().clone().requires_grad_() for t in (input, weight, bias) if t is not None]
    loss = function(*leaves[:2], target, *leaves[2:], **options)
    grad = torch.linspace(0.5, 2, loss.numel(), device=loss.device).view(loss.shape) if grad is None else grad
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss.dtype))]


def assert_matches_reference(tensors, tolerance=1e-12, **options):
    """Compare the loss and its gradients with the reference."""
    actual_results = differentiate(linear_cross_entropy, tensors, **options)
    options.pop("chunk_rows", None)
    for actual, expected in zip(actual_results, differentiate(compute_loss, tensors, **options), strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
