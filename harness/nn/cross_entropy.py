"""Fuse Linear and cross-entropy, the head of a language model, as a differentiable function and a module.

On an NVIDIA GPU the operator `torch.ops.mojo_workbook.linear_cross_entropy`
(`harness/nn/host/cross_entropy.cpp`) processes rows in chunks and never stores all logits. Other devices run
PyTorch's own operations.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.nn import host
from harness.nn.arguments import cast_for_autocast, get_accumulation_dtype, get_dtype_name

Tensor = torch.Tensor
REDUCTIONS = ("none", "mean", "sum")
"""Reductions, in the order of PyTorch's enumeration."""
IGNORE_INDEX = -100
OPTIONS = ("ignore_index", "label_smoothing", "reduction", "z_loss", "softcap", "chunk_rows")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
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

    On an NVIDIA GPU one Mojo kernel writes a chunk's losses and overwrites its logits, in input's dtype, with
    their gradient; the matmuls are PyTorch's. For "mean" and "sum" the forward pass also computes the
    gradients, with three matmuls in total. For "none" the backward pass recomputes the logits with a fourth
    matmul. The gradient of weight is summed over chunks in float32 (float64 for float64). Results are
    deterministic. The first call builds the operator and its kernels.

    Other devices, second derivatives, forward mode and torch.func run PyTorch's own operations, which store
    the logits. Under `torch.autocast` input, weight and bias are cast to its dtype.

    Args:
        input: Shape [..., H]; float32, bfloat16, float16 or float64.
        weight: Shape [V, H], V >= 1.
        target: Shape [...], int64: a class from 0 to V - 1, or ignore_index, for each row. The kernels return
            NaN for other values.
        bias: Shape [V], or None.
        ignore_index: The target of rows that have no loss and no gradient, and do not count for "mean".
        label_smoothing: From 0 to 1: the fraction of the target distribution that is uniform.
        reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none".
        z_loss: The weight of lse^2, which limits the drift of logits; at least 0.
        softcap: The upper bound of capped logits, above 0; None means no cap.
        chunk_rows: Rows in a chunk, at least 1; None means at most 2,048. Larger chunks need more memory and
            less time.

    Returns:
        The loss, a scalar, or [...] for "none"; float64 for float64, else float32.

    Raises:
        TypeError: The target is not int64; an option has a wrong type.
        ValueError: The target's shape does not match input's, or an option is out of range.
        RuntimeError, IndexError: PyTorch's own errors for other mismatched arguments.
    """
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected int64 classes, got {get_dtype_name(target.dtype)}")
    if target.shape != input.shape[:-1]:
        shapes = f"shape {list(input.shape[:-1])}, that of input without its last dimension, got {list(target.shape)}"
        raise ValueError(f"target: expected {shapes}")
    check_options(ignore_index, label_smoothing, reduction, z_loss, softcap, chunk_rows)
    loaded = host.load("cross_entropy", input.device.type)
    compute = torch.ops.mojo_workbook.linear_cross_entropy if loaded else compute_with_torch
    options = ignore_index, label_smoothing, REDUCTIONS.index(reduction), z_loss
    return compute(input, weight, bias, target, *options, softcap or 0.0, chunk_rows or 0)


class LinearCrossEntropy(nn.Linear):
    """A linear layer that takes a target and returns the loss of `linear_cross_entropy`.

    It is a subclass of `nn.Linear`, by default without a bias, so state dicts and tied weights are
    compatible. `logits(input)` returns all logits, for generation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = IGNORE_INDEX,
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
        """Describe how the loss of an input [..., H] is computed; may build the kernels, but launches none.

        "rows" is the backend for losses and gradients of a chunk's rows, "chunks" the number and size of
        chunks, "products" the backend of the matmuls, "gradients" the pass that computes the gradients.
        """
        (sample,) = cast_for_autocast((input.new_empty(0),))
        part = get_dtype_name(sample.dtype)
        if reason := host.explain_missing_kernels("cross_entropy", part, input.device):
            return {"rows": f"PyTorch's operations: {reason}", "chunks": "none", "products": "library"}
        rows = input.shape[:-1].numel()
        chunk = self.chunk_rows or torch.ops.mojo_workbook.linear_cross_entropy_chunk_rows(rows)
        recomputes = self.reduction == "none"
        return {
            "rows": f"kernels ({part})",
            "chunks": f"{math.ceil(rows / chunk)} of {chunk:,} rows",
            "products": "library",
            "gradients": "backward pass, from recomputed logits" if recomputes else "forward pass",
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}"


def compute_with_torch(
    input, weight, bias, target, ignore_index, label_smoothing, reduction, z_loss, softcap, chunk_rows
) -> Tensor:
    """Compute the loss with PyTorch's own operations; the operator calls this as its fallback."""
    logits = F.linear(input, weight, bias)
    # Under autocast the logits have autocast's dtype, not the input's.
    logits = logits.to(get_accumulation_dtype(logits.dtype)).reshape(target.numel(), logits.shape[-1])
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat_target, reduction_name = target.reshape(-1), REDUCTIONS[reduction]
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, flat_target, reduction=reduction_name, **options)
    if z_loss:
        is_valid = flat_target != ignore_index
        z_losses = z_loss * logits.logsumexp(1).square().where(is_valid, 0)
        total = z_losses if reduction_name == "none" else z_losses.sum()
        loss = loss + (total / is_valid.sum() if reduction_name == "mean" else total)
    return loss.view(target.shape) if reduction_name == "none" else loss


OPERATORS = {"linear_cross_entropy_by_torch": compute_with_torch}


def check_options(
    ignore_index: Any, label_smoothing: Any, reduction: Any, z_loss: Any, softcap: Any, chunk_rows: Any
) -> None:
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
