"""Puzzle 21, provided: the ops for MAX."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .shared.common import MutPtr, accum_type
from .hunt import (
    launch_bias_gradient,
    launch_scale_gradient,
    launch_softmax_gradient,
    launch_standardise_gradient,
)
from .shared.launcher import DeviceLauncher


@extensibility.register("bias_gradient_train")
struct BiasGradient:
    """Compute the gradient of a bias."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_bias.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var batch = grad_output.dim_size(0)
        var sequence = grad_output.dim_size(1)
        var width = grad_output.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_bias_gradient[dtype](launcher, to, dy, batch, sequence, width)


@extensibility.register("scale_gradient_train")
struct ScaleGradient:
    """Compute the gradient of a scale, in the accumulation type."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        grad_scale: MutableInputTensor[dtype=accum, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "sums are kept in accum_type[dtype]"
        var to = rebind[MutPtr[accum_type[dtype]]](grad_scale.unsafe_ptr())
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_scale_gradient[dtype](launcher, to, dy, x, rows, width)


@extensibility.register("softmax_gradient_train")
struct SoftmaxGradient:
    """Compute the gradient of softmax's logits."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_logits: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_logits.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_softmax_gradient[dtype](launcher, to, dy, x, rows, width)


@extensibility.register("standardise_gradient_train")
struct StandardiseGradient:
    """Compute the gradient of the standardised input."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        var launcher = DeviceLauncher(ctx)
        launch_standardise_gradient[dtype](launcher, to, dy, x, rows, width)
