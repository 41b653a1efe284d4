"""Linear + cross-entropy as one differentiable function and one module: the end of a language model.

On an NVIDIA GPU the operator `torch.ops.mojo_workbook.linear_cross_entropy`
(`harness/nn/host/cross_entropy.cpp`) works on chunks of rows and never stores all logits. Other devices run
PyTorch's own operations.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.nn import host
from harness.nn.arguments import in_autocast_dtype, plain, wide

Tensor = torch.Tensor
REDUCTIONS = ("none", "mean", "sum")
"""Reductions in the order of PyTorch's own numbers."""
IGNORED = -100
OPTIONS = ("ignore_index", "label_smoothing", "reduction", "z_loss", "softcap", "chunk_rows")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute `cross_entropy(linear(input, weight, bias).float(), target)`, on a GPU without storing all logits.

    With s = softcap * tanh(logits / softcap), or the logits themselves, and lse = log(sum(exp(s))), the loss
    of a row is

        lse - (1 - label_smoothing) * s[target] - label_smoothing * mean(s) + z_loss * lse^2

    On an NVIDIA GPU one launch of a Mojo kernel replaces a chunk's logits, in input's dtype, by their
    gradient and writes the losses; the matmuls are PyTorch's. For "mean" and "sum" the forward pass computes
    the gradients too: three matmuls in all. For "none" the backward pass computes the logits again: four. The
    gradient of weight is summed over chunks in float32 (float64 for float64). Every run gives the same bits.
    The first call builds what it needs.

    Other devices, second derivatives, forward mode and torch.func run PyTorch's own operations, which store
    the logits. Under `torch.autocast` input, weight and bias are cast to its dtype.

    Args:
        input: Shape [..., H]; float32, bfloat16, float16 or float64.
        weight: [V, H], V >= 1.
        target: [...], int64: a class from 0 to V - 1, or ignore_index, per row. The kernels return NaN for
            others.
        bias: [V], or None.
        ignore_index: The target of rows without loss and gradient, which "mean" does not count.
        label_smoothing: From 0 to 1: the share of the target that all classes have in common.
        reduction: "mean" over the rows that count (NaN if none does), "sum", or "none".
        z_loss: Not negative: the weight of lse^2, which keeps logits from drifting.
        softcap: Above 0: no capped logit is larger; None for no cap.
        chunk_rows: Rows of a chunk, at least 1; None for at most 2,048. More rows need more memory and less
            time.

    Returns:
        The loss, a scalar, or [...] for "none"; float64 for float64, else float32.

    Raises:
        TypeError: The target is not int64; an option has a wrong type.
        ValueError: The target's shape does not fit, or an option is out of range.
        RuntimeError, IndexError: PyTorch's own, for other arguments that do not fit.
    """
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected int64 classes, got {plain(target.dtype)}")
    if target.shape != input.shape[:-1]:
        shapes = f"shape {list(input.shape[:-1])}, that of input without its last dimension, got {list(target.shape)}"
        raise ValueError(f"target: expected {shapes}")
    check_options(ignore_index, label_smoothing, reduction, z_loss, softcap, chunk_rows)
    if not host.load("cross_entropy", input.device.type):
        return by_torch(
            input, weight, target, bias, ignore_index, label_smoothing, reduction, z_loss, softcap
        )
    return torch.ops.mojo_workbook.linear_cross_entropy(
        *(input, weight, bias, target, ignore_index, label_smoothing, REDUCTIONS.index(reduction)),
        *(z_loss, softcap or 0.0, chunk_rows or 0),
    )


class LinearCrossEntropy(nn.Linear):
    """A linear layer that takes a target and returns the loss: `linear_cross_entropy` with its own weight.

    It is an `nn.Linear(H, V)`, by default without a bias: state dicts and tied weights fit. `logits(input)`
    returns all logits, for generation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk_rows: int | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        check_options(ignore_index, label_smoothing, reduction, z_loss, softcap, chunk_rows)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.z_loss, self.softcap, self.chunk_rows = z_loss, softcap, chunk_rows

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss of input [..., H] and target [...]."""
        options: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        return linear_cross_entropy(input, self.weight, target, self.bias, **options)

    def logits(self, input: Tensor) -> Tensor:
        """Return the logits [..., V] of input [..., H], with the soft cap."""
        values = super().forward(input)
        return values if self.softcap is None else self.softcap * torch.tanh(values / self.softcap)

    def explain(self, input: Tensor) -> dict[str, str]:
        """Return how the loss of an input [..., H] is computed; it may build the kernels, and launches none.

        "rows": what computes losses and gradients of a chunk's rows; "chunks": how many of how many rows;
        "products": what multiplies; "gradients": in which pass they are computed.
        """
        (narrow,) = in_autocast_dtype((input.new_empty(0),))
        part = plain(narrow.dtype)
        if why := host.missing("cross_entropy", part, input.device):
            return {"rows": f"PyTorch's operations: {why}", "chunks": "none", "products": "library"}
        rows = input.shape[:-1].numel()
        chunk = self.chunk_rows or torch.ops.mojo_workbook.linear_cross_entropy_chunk_rows(rows)
        again = self.reduction == "none"
        return {
            "rows": f"kernels ({part})",
            "chunks": f"{math.ceil(rows / chunk)} of {chunk:,} rows",
            "products": "library",
            "gradients": "backward pass, from logits computed again" if again else "forward pass",
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}"


def by_torch(
    input, weight, target, bias, ignore_index, label_smoothing, reduction, z_loss, softcap
) -> Tensor:
    """Compute the loss with PyTorch's own operations, without the operator."""
    logits = F.linear(input, weight, bias)
    # Under autocast the product has autocast's dtype, not the input's.
    logits = logits.to(wide(logits.dtype)).reshape(target.numel(), logits.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = target.reshape(-1)
    loss = F.cross_entropy(
        logits, rows, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if z_loss:
        counted = rows != ignore_index
        squares = z_loss * logits.logsumexp(1).square().where(counted, 0)
        total = squares if reduction == "none" else squares.sum()
        loss = loss + (total / counted.sum() if reduction == "mean" else total)
    return loss.view(target.shape) if reduction == "none" else loss


def check_options(
    ignore_index: Any, label_smoothing: Any, reduction: Any, z_loss: Any, softcap: Any, chunk_rows: Any
) -> None:
    """Raise TypeError for a wrong type, ValueError for a value out of range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    for name, value in {"ignore_index": ignore_index, "chunk_rows": chunk_rows or 1}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    cap = math.inf if softcap is None else softcap
    for name, value in {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": cap}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: expected a number that is not negative, got {z_loss}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a number above 0, or None, got {softcap}")
