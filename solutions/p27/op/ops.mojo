"""Puzzle 27, provided: the launch of each kernel, and the ops for MAX.

Tensors are [batch, sequence, ...]; `places` is batch * sequence, the number of positions. An op's outputs come first,
then incoming gradients, then inputs, then numbers. The ops for AdamW and clipping do not overwrite their inputs; their
kernels may run in place.
"""

from std.math import ceildiv
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .parts import (
    CHUNK,
    THREADS,
    adamw_kernel,
    clip_kernel,
    correction,
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    embedding_backward_kernel,
    gelu_backward_kernel,
    gelu_kernel,
    mean_loss_kernel,
    norm_kernel,
    square_sums_kernel,
)
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher, Launcher


# ---- Launches -----------------------------------------------------------------------------------------------


def launch_cross_entropy[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    row_loss: MutPtr[accum_type[dtype]],
    lse: MutPtr[accum_type[dtype]],
    logits: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    places: Int,
    vocabulary: Int,
) raises:
    """Launch one kernel: a block for each position."""
    launcher.launch[cross_entropy_kernel[dtype]](
        "cross_entropy", row_loss, lse, logits, targets, Int32(vocabulary),
        grid_dim=places, block_dim=THREADS,
    )  # fmt: skip


def launch_mean_loss[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    mean_loss: MutPtr[dtype],
    counted: MutPtr[dtype],
    row_loss: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    places: Int,
) raises:
    """Launch one kernel of one block."""
    launcher.launch[mean_loss_kernel[dtype]](
        "mean_loss", mean_loss, counted, row_loss, targets, Int32(places), grid_dim=1, block_dim=THREADS
    )


def launch_cross_entropy_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_rows: MutPtr[dtype],
    logits: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    lse: ImmPtr[accum_type[dtype]],
    counted: ImmPtr[accum_type[dtype]],
    places: Int,
    vocabulary: Int,
) raises:
    """Launch one kernel: a block for each position."""
    launcher.launch[cross_entropy_backward_kernel[dtype]](
        "cross_entropy_backward", grad_rows, logits, targets, lse, counted, Int32(vocabulary),
        grid_dim=places, block_dim=THREADS,
    )  # fmt: skip


def launch_gelu[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], count: Int) raises:
    """Launch one kernel: a thread for each element."""
    launcher.launch[gelu_kernel[dtype]](
        "gelu", output, input, Int32(count), grid_dim=ceildiv(count, THREADS), block_dim=THREADS
    )


def launch_gelu_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L, grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], count: Int
) raises:
    """Launch one kernel: a thread for each element."""
    launcher.launch[gelu_backward_kernel[dtype]](
        "gelu_backward", grad_input, grad_output, input, Int32(count),
        grid_dim=ceildiv(count, THREADS), block_dim=THREADS,
    )  # fmt: skip


def launch_embedding_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_token: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    starts: ImmPtr[DType.int32],
    vocabulary: Int,
    channels: Int,
) raises:
    """Launch one kernel: a block for each row of the table."""
    launcher.launch[embedding_backward_kernel[dtype]](
        "embedding_backward", grad_token, grad_output, order, starts, Int32(channels),
        grid_dim=vocabulary, block_dim=THREADS,
    )  # fmt: skip


def launch_adamw[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    corrections: MutPtr[accum_type[dtype]],
    new_parameter: MutPtr[dtype],
    new_mean: MutPtr[accum_type[dtype]],
    new_square: MutPtr[accum_type[dtype]],
    parameter: ImmPtr[dtype],
    gradient: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    square: ImmPtr[accum_type[dtype]],
    rate: Float64,
    beta1: Float64,
    beta2: Float64,
    eps: Float64,
    decay: Float64,
    step: Int32,
    count: Int,
) raises:
    """Launch one kernel: a thread for each element. The first `step` is 1."""
    comptime accum = accum_type[dtype]
    launcher.launch[adamw_kernel[dtype]](
        "adamw", corrections, new_parameter, new_mean, new_square, parameter, gradient, mean, square,
        rate.cast[accum](), beta1.cast[accum](), beta2.cast[accum](), eps.cast[accum](), decay.cast[accum](),
        correction(beta1, step).cast[accum](), correction(beta2, step).cast[accum](), Int32(count),
        grid_dim=ceildiv(count, THREADS), block_dim=THREADS,
    )  # fmt: skip


def launch_clip[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    square_sums: MutPtr[accum_type[dtype]],
    norm: MutPtr[accum_type[dtype]],
    clipped: MutPtr[dtype],
    gradient: ImmPtr[dtype],
    limit: Float64,
    count: Int,
) raises:
    """Launch three kernels: a block for each chunk, one block for the norm, a thread for each element."""
    comptime accum = accum_type[dtype]
    var chunks = ceildiv(count, CHUNK)
    launcher.launch[square_sums_kernel[dtype]](
        "square_sums", square_sums, gradient, Int32(count), grid_dim=chunks, block_dim=THREADS
    )
    launcher.launch[norm_kernel[accum]](
        "norm", norm, square_sums.as_imm(), Int32(chunks), grid_dim=1, block_dim=THREADS
    )
    launcher.launch[clip_kernel[dtype]](
        "clip", clipped, gradient, norm.as_imm(), limit.cast[accum](), Int32(count),
        grid_dim=ceildiv(count, THREADS), block_dim=THREADS,
    )  # fmt: skip


# ---- Ops for MAX --------------------------------------------------------------------------------------------


@extensibility.register("cross_entropy_train")
struct CrossEntropy:
    """Compute the loss and lse of every position."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        row_loss: MutableInputTensor[dtype=accum, rank=2, static_spec=_],  # [B, T]
        lse: MutableInputTensor[dtype=accum, rank=2, static_spec=_],  # [B, T]
        logits: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, V]
        targets: InputTensor[dtype=DType.int64, rank=2, static_spec=_],  # [B, T]
        ctx: DeviceContext,
    ) raises:
        expect_shape("targets", targets, logits.dim_size(0), logits.dim_size(1))
        comptime assert accum == accum_type[dtype], "sums are kept in accum_type[dtype]"
        var losses = rebind[MutPtr[accum_type[dtype]]](row_loss.unsafe_ptr())
        var l = rebind[MutPtr[accum_type[dtype]]](lse.unsafe_ptr())
        var z = logits.unsafe_ptr().as_imm()
        var target_ids = targets.unsafe_ptr().as_imm()
        var V = logits.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_cross_entropy[dtype](launcher, losses, l, z, target_ids, targets.size(), V)


@extensibility.register("mean_loss_train")
struct MeanLoss:
    """Compute the mean loss, and the number of positions that are not ignored."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        mean_loss: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [1]
        counted: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [1]
        row_loss: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [B, T]
        targets: InputTensor[dtype=DType.int64, rank=2, static_spec=_],  # [B, T]
        ctx: DeviceContext,
    ) raises:
        expect_shape("targets", targets, row_loss.dim_size(0), row_loss.dim_size(1))
        var mean = mean_loss.unsafe_ptr()
        var count = counted.unsafe_ptr()
        var losses = row_loss.unsafe_ptr().as_imm()
        var target_ids = targets.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_mean_loss[dtype](launcher, mean, count, losses, target_ids, targets.size())


@extensibility.register("cross_entropy_backward_train")
struct CrossEntropyBackward:
    """Compute the gradient of the logits for the mean loss."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_rows: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, V]
        logits: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, V]
        targets: InputTensor[dtype=DType.int64, rank=2, static_spec=_],  # [B, T]
        lse: InputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, T]
        counted: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [1]
        ctx: DeviceContext,
    ) raises:
        expect_shape("targets", targets, logits.dim_size(0), logits.dim_size(1))
        var dz = grad_rows.unsafe_ptr()
        var z = logits.unsafe_ptr().as_imm()
        var target_ids = targets.unsafe_ptr().as_imm()
        var l = lse.unsafe_ptr().as_imm()
        var count = counted.unsafe_ptr().as_imm()
        var V = logits.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_cross_entropy_backward[dtype](launcher, dz, z, target_ids, l, count, targets.size(), V)


@extensibility.register("gelu_train")
struct Gelu:
    """Compute GELU in its tanh form."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        ctx: DeviceContext,
    ) raises:
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_gelu[dtype](launcher, y, x, input.size())


@extensibility.register("gelu_backward_train")
struct GeluBackward:
    """Compute the gradient of GELU's input."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        ctx: DeviceContext,
    ) raises:
        var dx = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_gelu_backward[dtype](launcher, dx, dy, x, input.size())


@extensibility.register("embedding_backward_train")
struct EmbeddingBackward:
    """Compute the gradient of an embedding table."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_token: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [V, C]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [B * T]
        starts: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [V + 1]
        ctx: DeviceContext,
    ) raises:
        var V = grad_token.dim_size(0)
        var C = grad_token.dim_size(1)
        expect_shape("order", order, grad_output.dim_size(0) * grad_output.dim_size(1))
        expect_shape("starts", starts, V + 1)
        var table = grad_token.unsafe_ptr()
        var dx = grad_output.unsafe_ptr().as_imm()
        var positions = order.unsafe_ptr().as_imm()
        var token_starts = starts.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_embedding_backward[dtype](launcher, table, dx, positions, token_starts, V, C)


@extensibility.register("adamw_train")
struct AdamW:
    """Compute one step of AdamW; also write the corrections of the two running means."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        new_parameter: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        corrections: MutableInputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [2]
        new_mean: MutableInputTensor[dtype=accum_type[dtype], rank=3, static_spec=_],  # [B, T, C]
        new_square: MutableInputTensor[dtype=accum_type[dtype], rank=3, static_spec=_],  # [B, T, C]
        parameter: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        gradient: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        mean: InputTensor[dtype=accum_type[dtype], rank=3, static_spec=_],  # [B, T, C]
        square: InputTensor[dtype=accum_type[dtype], rank=3, static_spec=_],  # [B, T, C]
        rate: Float64,
        beta1: Float64,
        beta2: Float64,
        eps: Float64,
        decay: Float64,
        step: Int32,
        ctx: DeviceContext,
    ) raises:
        var c = corrections.unsafe_ptr()
        var new_x = new_parameter.unsafe_ptr()
        var new_m = new_mean.unsafe_ptr()
        var new_v = new_square.unsafe_ptr()
        var x = parameter.unsafe_ptr().as_imm()
        var g = gradient.unsafe_ptr().as_imm()
        var m = mean.unsafe_ptr().as_imm()
        var v = square.unsafe_ptr().as_imm()
        comptime accum = accum_type[dtype]
        var launcher = DeviceLauncher(ctx)
        launch_adamw[dtype](
            launcher, c, new_x, new_m, new_v, x, g, m, v, rate, beta1, beta2, eps, decay, step,
            parameter.size(),
        )  # fmt: skip


@extensibility.register("clip_train")
struct Clip:
    """Compute each chunk's sum of squares, the norm, and the gradients scaled down to the limit."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        clipped: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        square_sums: MutableInputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [chunks]
        norm: MutableInputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [1]
        gradient: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, T, C]
        limit: Float64,
        ctx: DeviceContext,
    ) raises:
        expect_shape("square_sums", square_sums, ceildiv(gradient.size(), CHUNK))
        var sums = square_sums.unsafe_ptr()
        var n = norm.unsafe_ptr()
        var scaled = clipped.unsafe_ptr()
        var g = gradient.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_clip[dtype](launcher, sums, n, scaled, g, limit, gradient.size())
