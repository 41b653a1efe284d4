"""Puzzle 20, provided: the launch of each kernel, and the ops for MAX and PyTorch.

Every op takes matrices [rows, columns] with run-time sizes: outputs first, then incoming gradients, then inputs.
An op NAME allocates its outputs, as `CustomOpLibrary` expects; its twin NAME_train writes into the caller's
buffers, so that the checks can fill them beforehand. LayerNorm has only the twin: puzzle 22 makes its layer.
"""

from std.math import ceildiv
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .first_backward import (
    ROW_THREADS,
    THREADS,
    WORD,
    layernorm_backward_kernel,
    layernorm_kernel,
    layernorm_parameters_kernel,
    relu_mask_backward_kernel,
    relu_mask_kernel,
    softmax_backward_kernel,
    softmax_kernel,
)
from .shared.launcher import DeviceLauncher, Launcher


# ---- Launches -----------------------------------------------------------------------------------------------


def launch_relu_mask[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], mask: MutPtr[DType.int32], input: ImmPtr[dtype], count: Int) raises:
    """Launch one kernel: a thread for each element."""
    if count > 0:
        launcher.launch[relu_mask_kernel[dtype]](
            "relu_mask",
            output,
            mask,
            input,
            Int32(count),
            grid_dim=ceildiv(count, THREADS),
            block_dim=THREADS,
        )


def launch_relu_mask_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    mask: ImmPtr[DType.int32],
    count: Int,
) raises:
    """Launch one kernel: a thread for each element."""
    if count > 0:
        launcher.launch[relu_mask_backward_kernel[dtype]](
            "relu_mask_backward", grad_input, grad_output, mask, Int32(count),
            grid_dim=ceildiv(count, THREADS), block_dim=THREADS,
        )  # fmt: skip


def launch_softmax[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int, columns: Int) raises:
    """Launch one kernel: a block for each row."""
    if rows > 0 and columns > 0:
        launcher.launch[softmax_kernel[dtype]](
            "softmax", output, input, Int32(columns), grid_dim=rows, block_dim=ROW_THREADS
        )


def launch_softmax_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    rows: Int,
    columns: Int,
) raises:
    """Launch one kernel: a block for each row."""
    if rows > 0 and columns > 0:
        launcher.launch[softmax_backward_kernel[dtype]](
            "softmax_backward", grad_input, grad_output, output, Int32(columns),
            grid_dim=rows, block_dim=ROW_THREADS,
        )  # fmt: skip


def launch_layernorm[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    weight: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    rows: Int,
    columns: Int,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Launch one kernel: a block for each row."""
    if rows > 0 and columns > 0:
        launcher.launch[layernorm_kernel[dtype]](
            "layernorm", output, mean, rstd, input, weight, bias, Int32(columns), eps,
            grid_dim=rows, block_dim=ROW_THREADS,
        )  # fmt: skip


def launch_layernorm_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    weight: ImmPtr[dtype],
    rows: Int,
    columns: Int,
) raises:
    """Launch two kernels: a block for each row, then a thread for each column."""
    if rows > 0 and columns > 0:
        launcher.launch[layernorm_backward_kernel[dtype]](
            "layernorm_backward", grad_input, grad_output, input, mean, rstd, weight, Int32(columns),
            grid_dim=rows, block_dim=ROW_THREADS,
        )  # fmt: skip
    if columns > 0:
        launcher.launch[layernorm_parameters_kernel[dtype]](
            "layernorm_parameters", grad_weight, grad_bias, grad_output, input, mean, rstd, Int32(rows),
            Int32(columns), grid_dim=ceildiv(columns, ROW_THREADS), block_dim=ROW_THREADS,
        )  # fmt: skip


# ---- Ops for MAX and PyTorch -------------------------------------------------------------------------------


@extensibility.register("relu_mask")
struct ReluMask:
    """Compute ReLU and the mask for its backward pass, one bit per element."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mask: OutputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [ceil(rows * columns / 32)]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, input.dim_size(0), input.dim_size(1))
        expect_shape("mask", mask, ceildiv(input.size(), WORD))
        var launcher = DeviceLauncher(ctx)
        launch_relu_mask[dtype](
            launcher, output.unsafe_ptr(), mask.unsafe_ptr(), input.unsafe_ptr().as_imm(), input.size()
        )


@extensibility.register("relu_mask_train")
struct ReluMaskTrain:
    """Compute ReLU and the mask for its backward pass, one bit per element, in the caller's buffers."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mask: MutableInputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [ceil(rows * columns / 32)]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, input.dim_size(0), input.dim_size(1))
        expect_shape("mask", mask, ceildiv(input.size(), WORD))
        var launcher = DeviceLauncher(ctx)
        launch_relu_mask[dtype](
            launcher, output.unsafe_ptr(), mask.unsafe_ptr(), input.unsafe_ptr().as_imm(), input.size()
        )


@extensibility.register("relu_mask_backward")
struct ReluMaskBackward:
    """Compute the gradient of ReLU's input from the mask."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mask: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [ceil(rows * columns / 32)]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, grad_output.dim_size(0), grad_output.dim_size(1))
        expect_shape("mask", mask, ceildiv(grad_output.size(), WORD))
        var launcher = DeviceLauncher(ctx)
        launch_relu_mask_backward[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            mask.unsafe_ptr().as_imm(),
            grad_output.size(),
        )


@extensibility.register("relu_mask_backward_train")
struct ReluMaskBackwardTrain:
    """Compute the gradient of ReLU's input from the mask, in the caller's buffer."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mask: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [ceil(rows * columns / 32)]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, grad_output.dim_size(0), grad_output.dim_size(1))
        expect_shape("mask", mask, ceildiv(grad_output.size(), WORD))
        var launcher = DeviceLauncher(ctx)
        launch_relu_mask_backward[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            mask.unsafe_ptr().as_imm(),
            grad_output.size(),
        )


@extensibility.register("softmax")
struct Softmax:
    """Compute softmax of every row."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, input.dim_size(0), input.dim_size(1))
        var launcher = DeviceLauncher(ctx)
        launch_softmax[dtype](
            launcher, output.unsafe_ptr(), input.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1)
        )


@extensibility.register("softmax_train")
struct SoftmaxTrain:
    """Compute softmax of every row, in the caller's buffer."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, input.dim_size(0), input.dim_size(1))
        var launcher = DeviceLauncher(ctx)
        launch_softmax[dtype](
            launcher, output.unsafe_ptr(), input.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1)
        )


@extensibility.register("softmax_backward")
struct SoftmaxBackward:
    """Compute the gradient of softmax's input from its output."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, output.dim_size(0), output.dim_size(1))
        expect_shape("grad_output", grad_output, output.dim_size(0), output.dim_size(1))
        var launcher = DeviceLauncher(ctx)
        launch_softmax_backward[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            output.unsafe_ptr().as_imm(),
            output.dim_size(0),
            output.dim_size(1),
        )


@extensibility.register("softmax_backward_train")
struct SoftmaxBackwardTrain:
    """Compute the gradient of softmax's input from its output, in the caller's buffer."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, output.dim_size(0), output.dim_size(1))
        expect_shape("grad_output", grad_output, output.dim_size(0), output.dim_size(1))
        var launcher = DeviceLauncher(ctx)
        launch_softmax_backward[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            output.unsafe_ptr().as_imm(),
            output.dim_size(0),
            output.dim_size(1),
        )


@extensibility.register("layernorm_train")
struct LayerNormTrain:
    """Compute LayerNorm, and the mean and rstd for its backward pass, in the caller's buffers."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mean: MutableInputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [rows]
        rstd: MutableInputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [rows]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        var R = input.dim_size(0)
        var C = input.dim_size(1)
        expect_shape("output", output, R, C)
        expect_shape("mean", mean, R)
        expect_shape("rstd", rstd, R)
        expect_shape("weight", weight, C)
        expect_shape("bias", bias, C)
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        var gamma = weight.unsafe_ptr().as_imm()
        var beta = bias.unsafe_ptr().as_imm()
        var m = mean.unsafe_ptr()
        var r = rstd.unsafe_ptr()
        var e = eps.cast[accum_type[dtype]]()
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype](launcher, y, m, r, x, gamma, beta, R, C, e)


@extensibility.register("layernorm_backward_train")
struct LayerNormBackwardTrain:
    """Compute all three gradients of LayerNorm from saved statistics, in the caller's buffers."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        grad_weight: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        grad_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        mean: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [rows]
        rstd: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],  # [rows]
        weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        ctx: DeviceContext,
    ) raises:
        var R = input.dim_size(0)
        var C = input.dim_size(1)
        expect_shape("grad_input", grad_input, R, C)
        expect_shape("grad_weight", grad_weight, C)
        expect_shape("grad_bias", grad_bias, C)
        expect_shape("grad_output", grad_output, R, C)
        expect_shape("mean", mean, R)
        expect_shape("rstd", rstd, R)
        expect_shape("weight", weight, C)
        var dx = grad_input.unsafe_ptr()
        var dweight = grad_weight.unsafe_ptr()
        var dbias = grad_bias.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var m = mean.unsafe_ptr().as_imm()
        var r = rstd.unsafe_ptr().as_imm()
        var gamma = weight.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_layernorm_backward[dtype](launcher, dx, dweight, dbias, dy, x, m, r, gamma, R, C)
