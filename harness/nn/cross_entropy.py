"""A linear layer with cross-entropy as one differentiable function and one module: what ends a language model.

Its logits, rows x vocabulary, are by far the largest tensor of most models. Here they are never all stored
(`harness.nn.cross_entropy_chunks`). Where the loss is one number, the gradient is a multiple of one that is known in the forward
pass already; so all three products of a chunk are made there, and the backward pass only multiplies. Where every row has a
loss of its own, the backward pass computes the logits again.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.nn import extension_kernels
from harness.nn.arguments import check_device, check_dtype, check_has_kernels, in_autocast_dtype, plain, wide
from harness.nn.cross_entropy_chunks import (
    BIAS,
    INPUT,
    WEIGHT,
    Loss,
    Results,
    compute,
    kernels,
    rows_of_a_chunk,
)
from harness.nn.derivatives import FirstOnly
from harness.nn.extension_kernels import PLAIN
from harness.nn.layers import check_dense_tensors, parameter
from harness.nn.operators import registered
from harness.nn.private import any_autocast, dispatch_modes

Tensor = torch.Tensor
REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100
FIRST_ONLY = FirstOnly("linear_cross_entropy", "torch.nn.functional.linear and cross_entropy")


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
    """`cross_entropy(linear(input, weight, bias).float(), target)` that never stores all logits.

    The logits of some rows at a time are computed, in input's dtype, and their loss and gradient take their place. With
    s = softcap * tanh(logits / softcap), or the logits themselves, and lse = log(sum(exp(s))), the loss of a row is

        lse - (1 - label_smoothing) * s[target] - label_smoothing * mean(s) + z_loss * lse^2

    For "mean" and "sum" the forward pass makes the gradients too, if any is needed: three products in all. For "none" the
    backward pass computes the logits again: four. The gradient of weight is added up over the chunks in float32 (float64 for float64),
    so with the 16-bit types it takes twice its size for a while. Every run gives the same bits. Under
    `torch.autocast` input, weight and bias are taken in the autocast dtype.

    On NVIDIA and AMD GPUs the loss and the gradient of a chunk's rows are one launch of a Mojo kernel, on torch's stream, and the products
    are torch's. The kernel is in an extension module, which the first call builds (a minute) and the cache keeps. On a CPU,
    where a chunk's products take nearly all of the time, torch's own operations do the same chunk by chunk.

    Args:
        input: Shape [..., H]; float32, bfloat16, float16 or float64.
        weight: [V, H], V >= 1.
        target: [...], int64: for each row a class from 0 to V - 1, or ignore_index.
        bias: [V], or None.
        ignore_index: The target of rows that do not count: no loss, no gradient, not counted by "mean".
        label_smoothing: From 0 to 1: the share of the target that all classes have in common.
        reduction: "mean" over the rows that count (NaN where none does), "sum", or "none".
        z_loss: Not negative: the weight of lse^2, which keeps logits from drifting.
        softcap: Above 0: no capped logit is larger; None for no cap.
        chunk_rows: Rows of a chunk, at least 1; None for 2,048 on a GPU, and elsewhere for as many as have 32 MiB of logits. More rows take more memory and less time.

    Returns:
        The loss, a scalar, or [...] for "none"; float64 for float64, else float32.

    Raises:
        TypeError: A tensor is none, is not dense, or has a dtype that does not fit; an option has a wrong type.
        ValueError: A rank or size does not fit, tensors lie on different devices, an option is out of range; or, on a CPU, a
            target is no class. On a GPU, where nobody waits to look, such a target makes the loss NaN.
        NotImplementedError: A second derivative, forward mode, or a transform of torch.func is asked for.
    """
    tensors = (input, weight, bias)
    FIRST_ONLY.refuse(batches=False, input=input, weight=weight, bias=bias)
    named = {"input": input, "weight": weight, "target": target, "bias": bias}
    check_dense_tensors(named, optional=("bias",))
    if any_autocast() or torch.compiler.is_compiling():
        tensors = in_autocast_dtype(tensors)
    needs = [tensor is not None and tensor.requires_grad for tensor in tensors]
    wanted = wanted_of(needs) if torch.is_grad_enabled() else 0
    loss = checked_loss(ignore_index, label_smoothing, z_loss, softcap, reduction, wanted, chunk_rows)
    check(*tensors, target)
    input, weight, bias = tensors
    if as_operator(input, weight, bias, target):
        return operator(input, weight, bias, target, *loss)[0]
    if not wanted:
        return forward(input, weight, bias, target, loss)[0]
    return DirectCrossEntropy.apply(input, weight, bias, target, loss)


class LinearCrossEntropy(nn.Linear):
    """A linear layer whose call takes a target and returns the loss: `linear_cross_entropy` with its own weight.

    It is an `nn.Linear(H, V)`, so that a state dict, and a weight tied to an embedding, fit. `logits(input)` are the logits, for
    generation; all of them.

    Args:
        in_features: H.
        out_features: V.
        bias: Whether there is one; most heads of language models have none.
        ignore_index, label_smoothing, reduction, z_loss, softcap, chunk_rows: As in `linear_cross_entropy`.
        device: Where the parameters are made.
        dtype: Of the parameters.
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
        checked_loss(ignore_index, label_smoothing, z_loss, softcap, reduction, 0, chunk_rows)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.z_loss, self.softcap, self.chunk_rows = z_loss, softcap, chunk_rows

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The loss of input [..., H] and target [...]; see `linear_cross_entropy` for dtypes, devices and errors."""
        return linear_cross_entropy(
            input,
            parameter(self, "weight"),
            target,
            parameter(self, "bias"),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            z_loss=self.z_loss,
            softcap=self.softcap,
            chunk_rows=self.chunk_rows,
        )

    def logits(self, input: Tensor) -> Tensor:
        """The logits [..., V] of input [..., H], under the soft cap."""
        values = super().forward(input)
        return values if self.softcap is None else self.softcap * torch.tanh(values / self.softcap)

    def explain(self, input: Tensor) -> dict[str, str]:
        """Who computes the loss of an input [..., H] like this one, as calls ask too: it may build the extension module, and launches
        nothing else.

        "rows" is who makes losses and gradient of a chunk's rows, "chunks" how many there are of how many rows, "products" who
        multiplies, and "gradients" in which pass they are made.
        """
        dtype = in_autocast_dtype((input.new_empty(0),))[0].dtype
        rows = input.shape[:-1].numel()
        V = len(self.weight)
        chunk = self.chunk_rows or rows_of_a_chunk(rows, V, dtype, input.device)
        again = self.reduction == "none"
        return {
            "rows": "PyTorch's operations" if kernels(input.device) is None else "extension module",
            "chunks": f"{math.ceil(rows / chunk)} of {chunk:,} rows",
            "products": "library",
            "gradients": "backward pass, from logits computed again" if again else "forward pass",
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}"


# ---- Both passes ----------------------------------------------------------------------------------------------


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: Loss,
    empty: Callable[..., Tensor] | None = None,
    stays_wide: bool = False,
) -> tuple[Tensor, Results, Tensor | None]:
    """The reduced loss; the losses and gradients it was made from; and what the gradients are still to be multiplied by.

    For "none" there are no gradients yet. In float16 the mean's 1 / count comes last, and the gradient of weight waits in
    float32: a scaler's factor keeps them from being 0. `empty` and `stays_wide` are as in `compute`.
    """
    check_targets(target, len(weight), loss.ignore_index)
    sums = wide(input.dtype)
    rows = target.reshape(-1).contiguous()
    late = None
    scales = input.new_ones(1, dtype=sums)
    count = scales
    if loss.reduction == "mean":
        count = (rows != loss.ignore_index).sum().to(sums)
        late = 1 / count
        if input.dtype != torch.float16:
            scales, late = late.reshape(1), None
    made = 0 if loss.reduction == "none" else loss.wanted
    flat = input.reshape(-1, input.shape[-1])
    stays_wide |= late is not None
    results = compute(flat, weight, bias, rows, scales, loss, made, empty, stays_wide)
    if loss.reduction == "none":
        return results.losses.view(target.shape), results, None
    total = results.losses.sum()
    return total / count if loss.reduction == "mean" else total, results, late


def gradients_of(
    results: Results, input: Tensor, factor: Tensor, *, in_place: bool = False
) -> list[Tensor | None]:
    """dx, dW and db in input's dtype, multiplied by one number in the dtype of sums; `in_place` lets a kernel do that in the
    memory of the results."""
    opened = kernels(input.device) if in_place else None
    scaled: list[Tensor | None] = []
    for gradient in (results.dx, results.dW, results.db):
        if gradient is not None and opened:
            opened.scale(gradient, factor.contiguous())
        elif gradient is not None:
            gradient = gradient.to(factor.dtype) * factor
        scaled.append(None if gradient is None else gradient.to(input.dtype))
    if scaled[0] is not None:
        scaled[0] = scaled[0].view(input.shape)
    return scaled


def recompute(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: Loss
) -> list[Tensor | None]:
    """dx, dW and db from the gradient of the loss, from logits that are computed again."""
    if loss.reduction != "none":
        _, results, late = forward(input, weight, bias, target, loss)
        factor = grad if late is None else grad * late
        return gradients_of(rounded(results, input.dtype, late), input, factor)
    rows = target.reshape(-1).contiguous()
    scales = grad.reshape(-1).contiguous()
    flat = input.reshape(-1, input.shape[-1])
    results = compute(flat, weight, bias, rows, scales, loss, loss.wanted)
    return gradients_of(results, input, grad.new_ones(()))


class DirectCrossEntropy(torch.autograd.Function):
    """Both passes of a plain call."""

    @staticmethod
    def forward(ctx, input, weight, bias, target, loss):
        ctx.save_for_backward(input, weight, bias, target)
        ctx.loss = loss
        value, results, ctx.late = forward(input, weight, bias, target, loss)
        ctx.results = None if loss.reduction == "none" else rounded(results, input.dtype, ctx.late)
        return value

    @staticmethod
    @FIRST_ONLY.once
    def backward(ctx, grad):
        """The gradients of the forward pass are given away once; a graph that is retained computes them again."""
        input, weight, bias, target = ctx.saved_tensors
        grad = grad.resolve_neg()  # the kernels read memory as it lies
        if ctx.results is None:
            gradients = recompute(grad, input, weight, bias, target, ctx.loss)
        else:
            results, ctx.results = ctx.results, None
            factor = grad if ctx.late is None else grad * ctx.late
            gradients = gradients_of(results, input, factor, in_place=True)
        return (*gradients, None, None)


def rounded(results: Results, dtype: torch.dtype, late: Tensor | None) -> Results:
    """The results as they wait for the backward pass: in input's dtype, unless they are still to be divided."""
    if late is not None:
        return results
    dW = None if results.dW is None else results.dW.to(dtype)
    db = None if results.db is None else results.db.to(dtype)
    return Results(results.losses, results.dx, dW, db)


# ---- The operators, for compiled graphs ------------------------------------------------------------------------


def as_operator(*tensors: Tensor | None) -> bool:
    """Whether a call is to be one operator: for a compiler, for subclasses of Tensor, and for modes that watch operators on a GPU,
    where the kernels launch past them."""
    if torch.compiler.is_compiling():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    if any(type(tensor) not in PLAIN for tensor in given):
        return True
    return given[0].device.type == extension_kernels.DEVICE and dispatch_modes() > 0


TENSORS = "Tensor input, Tensor weight, Tensor? bias, Tensor target"
OPTIONS = (
    "SymInt ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, SymInt wanted, "
    "SymInt chunk_rows"
)
"""A `Loss`, as the operators take it."""


@registered("linear_cross_entropy", f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def operator(input, weight, bias, target, *options):
    """Returns the loss, dx, dW and db for a loss gradient of 1, and what they are still to be multiplied by.

    Gradients that are not wanted, or that the backward pass makes, are empty.
    """
    loss = Loss(*options)
    value, results, late = forward(input, weight, bias, target, loss)
    results = rounded(results, input.dtype, late)
    late = value.new_ones(()) if late is None else late
    dx, dW, db = filled((results.dx, results.dW, results.db), input)
    return value, dx, dW, db, late


def filled(gradients, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients, with an empty tensor in the place of each that there is not."""
    dx, dW, db = (like.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dx, dW, db


@operator.register_fake
def operator_buffers(input, weight, bias, target, *options):
    """What the operator returns, uninitialised."""
    loss = Loss(*options)
    made = 0 if loss.reduction == "none" else loss.wanted
    sums = wide(input.dtype)
    value = input.new_empty(target.shape if loss.reduction == "none" else (), dtype=sums)
    waiting = sums if loss.reduction == "mean" and input.dtype == torch.float16 else input.dtype
    rows = target.numel()
    gradients = (
        input.new_empty(rows, input.shape[-1]) if made & INPUT else None,
        input.new_empty(weight.shape, dtype=waiting) if made & WEIGHT else None,
        input.new_empty(len(weight), dtype=waiting) if made & BIAS else None,
    )
    return (value, *filled(gradients, input), value.new_empty(()))


@registered(
    "linear_cross_entropy_backward", f"(Tensor grad, {TENSORS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
def operator_backward(grad, input, weight, bias, target, *options):
    """dx, dW and db from the gradients of the rows' losses; those that are not wanted are empty."""
    return filled(recompute(grad, input, weight, bias, target, Loss(*options)), input)


@operator_backward.register_fake
def backward_buffers(grad, input, weight, bias, target, *options):
    """What the backward operator returns, uninitialised."""
    wanted = Loss(*options).wanted
    gradients = (
        input.new_empty(input.shape) if wanted & INPUT else None,
        weight.new_empty(weight.shape) if wanted & WEIGHT else None,
        weight.new_empty(len(weight)) if wanted & BIAS else None,
    )
    return filled(gradients, input)


def keep_for_backward(ctx, inputs, output):
    """Keeps the gradients where the forward pass has made them, else what it was given."""
    input, weight, bias, target, *loss = inputs
    _, *made = output
    ctx.mark_non_differentiable(*made)
    ctx.loss, ctx.shape, ctx.dtype = Loss(*loss), input.shape, input.dtype
    ctx.save_for_backward(*((input, weight, bias, target) if ctx.loss.reduction == "none" else made))


def backward(ctx, grad, *_):
    """The gradients of input, weight and bias."""
    if ctx.loss.reduction == "none":
        gradients = operator_backward(grad, *ctx.saved_tensors, *ctx.loss)
    else:
        *made, late = ctx.saved_tensors
        gradients = [(each.to(grad.dtype) * (grad * late)).to(ctx.dtype) for each in made]
    bits = (INPUT, WEIGHT, BIAS)
    dx, dW, db = (each if ctx.loss.wanted & bit else None for each, bit in zip(gradients, bits, strict=True))
    return (None if dx is None else dx.view(ctx.shape), dW, db, *[None] * 8)


operator.register_autograd(backward, setup_context=keep_for_backward)
operator_backward.register_autograd(FIRST_ONLY.refuse_double_backward)


def wanted_of(needed) -> int:
    """Which gradients are wanted, from whether input, weight and bias need one."""
    return sum(bit for bit, need in zip((INPUT, WEIGHT, BIAS), needed, strict=True) if need)


# ---- Checks ------------------------------------------------------------------------------------------------------


def check(input, weight, bias, target) -> None:
    """Raises TypeError or ValueError where the tensors do not fit each other, naming the first one at fault."""
    check_has_kernels("input", input)
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected int64 classes, got {plain(target.dtype)}")
    if input.dim() < 1:
        raise ValueError("input: expected at least one dimension, [..., H], got a scalar")
    H = input.shape[-1]
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None:
            check_dtype(name, tensor, "input", input)
    for name, tensor in {"weight": weight, "bias": bias, "target": target}.items():
        if tensor is not None:
            check_device(name, tensor, "input", input)
    if weight.dim() != 2 or weight.shape[1] != H or not len(weight):
        raise ValueError(
            f"weight: expected shape [V, {H}], {H} being the last dimension of input, V >= 1, got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape [{len(weight)}], the rows of weight, got {list(bias.shape)}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: expected shape {list(input.shape[:-1])}, that of input without its last dimension, "
            f"got {list(target.shape)}"
        )


def check_integer(name: str, value: Any) -> None:
    """Raises TypeError for what is no integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")


def checked_loss(
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
    wanted: int,
    chunk_rows: Any,
) -> Loss:
    """The options of the loss. Raises TypeError for what is no number, ValueError for what is out of range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if chunk_rows is not None:
        check_integer("chunk_rows", chunk_rows)
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    check_integer("ignore_index", ignore_index)
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
    numbers = float(label_smoothing), float(z_loss), float(softcap or 0)
    # None is decided where rows are counted: a compiled graph must not depend on their number.
    return Loss(ignore_index, *numbers, reduction, wanted, chunk_rows or 0)


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises ValueError where a target is no class, on a CPU: a GPU would have to be waited for."""
    if target.device.type != "cpu":
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"target: expected classes from 0 to {classes - 1}, or ignore_index {ignore_index}, "
            f"got {target[tuple(place)].item()} at {place}"
        )
