"""A linear layer with cross-entropy, chunk of rows by chunk of rows: the products, and what lies between them.

The logits of one chunk lie in a buffer, in which their gradient takes their place; no others are ever stored. On an NVIDIA or
AMD GPU the extension module of cross-entropy makes losses and gradient of a chunk in one launch, on torch's current stream;
anywhere else, and where the module cannot be built, torch's own operations do. All products are torch's.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.nn import extension_kernels
from harness.nn.arguments import wide
from harness.nn.extension_kernels import KINDS, VECTOR, OnDevice, Opened, padded

Tensor = torch.Tensor
INPUT, WEIGHT, BIAS = 1, 2, 4
"""Gradients that are wanted, added."""
GPU_ROWS = 2048
"""Rows of a chunk on a GPU: fewer would add to dW's wide sum so often that it takes as long as products."""
CPU_LOGITS = 2**25
"""Bytes that the logits of a chunk take at most elsewhere, if that is more than STEP rows."""
STEP = 128
"""A chunk has a multiple of so many rows: a product's tiles are as high."""
PIECE_STEP = 128
"""The first piece of the sum of dW has a multiple of so many rows, for the same reason."""
NARROWED_FIRST = 2**18
"""Elements of a sum that are narrowed by way of a copy; after them as many at a time as are done already."""


class Loss(NamedTuple):
    """What `harness.nn.linear_cross_entropy` says of the loss of a row, then how all rows are computed: as its operator takes it."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    """0: none."""
    reduction: str = "mean"
    wanted: int = 0
    """Gradients: INPUT, WEIGHT and BIAS, added."""
    chunk_rows: int = 0
    """Rows of a chunk, of which the last one may have fewer; 0: as `rows_of_a_chunk` says."""


@dataclass(frozen=True)
class Results:
    """The losses [rows], and the gradients that were wanted: dx [rows, H] in input's dtype, dW [V, H] and db [V].

    dW is in the dtype of sums or, if it was not added up over chunks or narrowed already, in input's; db is in that of sums.
    """

    losses: Tensor
    dx: Tensor | None
    dW: Tensor | None
    db: Tensor | None


def rows_of_a_chunk(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows a chunk has, where the caller does not say: chunks are as equal as STEP lets them be."""
    on_cpu = max(STEP, CPU_LOGITS // (classes * dtype.itemsize) // STEP * STEP)
    limit = GPU_ROWS if device.type == extension_kernels.DEVICE else on_cpu
    chunks = max(1, math.ceil(rows / limit))
    return max(1, math.ceil(rows / chunks / STEP)) * STEP


# ---- Losses and gradient of the rows of a chunk -----------------------------------------------------------


class RowKernels(OnDevice):
    """The module of cross-entropy on one GPU."""

    def smallest_pass(self) -> None:
        logits = torch.zeros(1, 8, device=extension_kernels.DEVICE)
        target = torch.zeros(1, dtype=torch.int64, device=extension_kernels.DEVICE)
        self.rows(logits, logits.new_empty(1), target, logits.new_ones(1), Loss(-100, 0.0, 0.0, 0.0), True)

    def rows(
        self,
        logits: Tensor,
        losses: Tensor,
        target: Tensor,
        scales: Tensor,
        loss: Loss,
        gradient_wanted: bool,
    ) -> None:
        """As `rows_by_torch`; each row of the logits begins at a multiple of 16 bytes, and there is room up to the next.

        A target that is no class makes its row NaN.
        """
        self.launch(
            self.module.cross_entropy_rows,
            KINDS[logits.dtype],
            *logits.shape,
            logits.stride(0),
            0 if len(scales) == 1 else 1,
            int(gradient_wanted),
            loss.ignore_index,
            loss.label_smoothing,
            loss.z_loss,
            loss.softcap,
            *(logits, losses, target, scales),
            scratch=0,
        )

    def scale(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiplies a contiguous tensor in place by one number on the GPU; where that is 1, nothing is read or written."""
        kind = KINDS[tensor.dtype]
        self.launch(self.module.scale_unless_one, kind, tensor.numel(), tensor, factor, scratch=0)


kernels = Opened(
    "cross_entropy", RowKernels, lambda device: "linear_cross_entropy goes through PyTorch's own operations"
)
"""The kernels of a device."""


def rows_by_torch(
    logits: Tensor, losses: Tensor, target: Tensor, scales: Tensor, loss: Loss, gradient_wanted: bool
) -> None:
    """Writes the losses [n] of logits [n, V], and where it is wanted the gradient over the logits.

    A row's gradient is multiplied by its scale: `scales` has one element a row, or one for all, in the dtype of sums.
    """
    values = logits.to(wide(logits.dtype))
    if loss.softcap:
        values.div_(loss.softcap).tanh_().mul_(loss.softcap)
    lse = values.logsumexp(1, keepdim=True)
    counted = (target != loss.ignore_index).unsqueeze(1)
    place = target.unsqueeze(1).where(counted, 0)
    kept = 1 - loss.label_smoothing
    row_losses = lse - kept * values.gather(1, place) + loss.z_loss * lse.square()
    if loss.label_smoothing:
        row_losses -= loss.label_smoothing * values.mean(1, keepdim=True)
    losses.copy_(row_losses.where(counted, 0).squeeze(1))
    if not gradient_wanted:
        return
    slope = 1 - (values / loss.softcap).square_() if loss.softcap else None
    values.sub_(lse).exp_().mul_(1 + 2 * loss.z_loss * lse)
    values.sub_(loss.label_smoothing / logits.shape[1])
    values.scatter_add_(1, place, torch.full_like(lse, -kept))
    if slope is not None:
        values.mul_(slope)
    values.mul_(scales.unsqueeze(1)).masked_fill_(~counted, 0)
    if values is not logits:
        logits.copy_(values)


# ---- The gradient of weight ---------------------------------------------------------------------------------


class WeightSum:
    """dW [V, H] while the products of chunks are added up, in the dtype of sums.

    A narrow gradient needs no room beside its wide sum: the sum's first rows lie in the gradient's own memory, and are narrowed
    there in the end.

    Args:
        weight: [V, H].
        chunked: Whether there are several products; one alone is written in weight's dtype.
        narrow: Whether dW is to be in weight's dtype whatever the sum is.
    """

    def __init__(self, weight: Tensor, *, chunked: bool, narrow: bool):
        classes, H = weight.shape
        sums = wide(weight.dtype) if chunked else weight.dtype
        self.dW = weight.new_empty(classes, H, dtype=weight.dtype if narrow else sums)
        self.pieces = [self.dW]
        if self.dW.dtype != sums:
            rows = classes * self.dW.itemsize // sums.itemsize // PIECE_STEP * PIECE_STEP
            own = self.dW.view(-1).view(torch.uint8)[: rows * H * sums.itemsize].view(sums).view(rows, H)
            self.pieces = [own, weight.new_empty(classes - rows, H, dtype=sums)]

    def add(self, dlogits: Tensor, x: Tensor, *, first: bool) -> None:
        """Adds dlogits^T [V, rows] x [rows, H]; the `first` is written."""
        begin = 0
        for piece in self.pieces:
            for some in whole_vectors(len(piece), x):
                classes = slice(begin + some.start, begin + some.stop)
                add_product(piece[some], dlogits[:, classes].t(), x, first=first)
            begin += len(piece)

    def gradient(self) -> Tensor:
        """dW; to be asked for once."""
        if len(self.pieces) == 1:
            return self.dW
        own, rest = self.pieces
        values, narrowed = own.view(-1), self.dW.view(-1)
        done = min(len(values), NARROWED_FIRST)
        narrowed[:done] = values[:done].clone()
        while done < len(values):
            # These are written where no value lies that is still to be read: they take half the bytes.
            part = slice(done, min(2 * done, len(values)))
            narrowed[part] = values[part]
            done = part.stop
        self.dW[len(own) :] = rest
        return self.dW


# ---- All rows -----------------------------------------------------------------------------------------------


def compute(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scales: Tensor,
    loss: Loss,
    wanted: int,
    empty: Callable[..., Tensor] | None = None,
    stays_wide: bool = False,
) -> Results:
    """Losses and gradients of input [rows, H], weight [V, H], bias [V] and target [rows], all on one device.

    Args:
        input: Of any strides, as weight.
        weight: In input's dtype.
        bias: Likewise, or None.
        target: Classes, contiguous.
        scales: What the gradients of the rows are multiplied by, [rows] or [1], in the dtype of sums.
        loss: Of a row, and in what chunks.
        wanted: INPUT, WEIGHT and BIAS, added: what the loss says, or nothing yet.
        empty: What makes uninitialised matrices of input's dtype, for dx and the logits of a chunk, from their sizes; torch unless given.
        stays_wide: Whether dW stays in the dtype of sums, if it was added up over chunks.
    """
    empty = empty or input.new_empty
    rows, classes = len(input), len(weight)
    chunk_rows = loss.chunk_rows or rows_of_a_chunk(rows, classes, input.dtype, input.device)
    sums = wide(input.dtype)
    opened = kernels(input.device)
    make_rows = rows_by_torch if opened is None else opened.rows
    chunked = rows > chunk_rows
    losses = input.new_empty(rows, dtype=sums)
    dx = empty(*input.shape) if wanted & INPUT else None
    weight_sum = None
    if wanted & WEIGHT:
        # With fewer features than rows in a chunk, dW has room where the logits were.
        narrow = not stays_wide and input.shape[1] > chunk_rows
        weight_sum = WeightSum(weight, chunked=chunked, narrow=narrow)
    db = input.new_zeros(classes, dtype=sums) if wanted & BIAS else None
    buffer = empty(min(rows, chunk_rows), padded(classes, input.dtype))
    for part in parts(rows, chunk_rows):
        x, own_target = input[part], target[part]
        logits = buffer[: len(x), :classes]
        own_scales = scales if len(scales) == 1 else scales[part]
        for some in whole_vectors(classes, input):
            if bias is None:
                torch.mm(x, weight[some].t(), out=logits[:, some])
            else:
                torch.addmm(bias[some], x, weight[some].t(), out=logits[:, some])
        make_rows(logits, losses[part], own_target, own_scales, loss, wanted != 0)
        if dx is not None:
            for some in whole_vectors(classes, input):
                add_product(dx[part], logits[:, some], weight[some], first=some.start == 0)
        if weight_sum is not None:
            weight_sum.add(logits, x, first=part.start == 0)
        if db is not None:
            db += logits.sum(0, dtype=sums)
    dW = None if weight_sum is None else weight_sum.gradient() if rows else torch.zeros_like(weight)
    return Results(losses, dx, dW, db)


def whole_vectors(classes: int, like: Tensor) -> list[slice]:
    """The classes in one piece, or on a GPU those that are whole vectors of 16 bytes apart from the few that are left.

    The library falls to a fifth of its speed where a matrix has rows that are no whole vectors, as GPT-2's 50,257 classes.
    """
    whole = classes // (VECTOR // like.dtype.itemsize) * (VECTOR // like.dtype.itemsize)
    if like.device.type != extension_kernels.DEVICE or like.dtype.itemsize != 2 or whole in (0, classes):
        return [slice(0, classes)]
    return [slice(0, whole), slice(whole, classes)]


def parts(rows: int, chunk_rows: int) -> Iterator[slice]:
    """The rows of each chunk."""
    for first in range(0, rows, chunk_rows):
        yield slice(first, min(first + chunk_rows, rows))


def add_product(sums: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """sums += a b, where the sums may be wider than the factors; the `first` is written."""
    beta = 0 if first else 1
    if a.dtype == sums.dtype:
        sums.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        # The library adds to the wide sums itself.
        torch.ops.aten.addmm.dtype_out(sums, a, b, sums.dtype, beta=beta, out=sums)
    else:
        sums.addmm_(a.to(sums.dtype), b.to(sums.dtype), beta=beta)
