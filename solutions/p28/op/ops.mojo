"""The ops of puzzle 28 for MAX and PyTorch. Outputs first, then inputs; sizes come from the tensors."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .launches import (
    launch_dgamma, launch_dx, launch_epilogue, launch_layernorm, launch_layouts, launch_product,
)  # fmt: skip
from .parts import BF16
from .shared.common import accum_type
from .shared.launcher import DeviceLauncher


@extensibility.register("fast_layernorm")
struct FastLayerNorm:
    """Compute LayerNorm (steps 1 to 4)."""

    @staticmethod
    def execute[
        dtype: DType, step: Int
    ](
        ln_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype, step](
            launcher, ln_out.unsafe_ptr(),
            input.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(), ln_bias.unsafe_ptr().as_imm(),
            input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_dx")
struct FastDx:
    """Compute the gradient of LayerNorm's input."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        dln: InputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        mean: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],
        rstd: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_dx[dtype](
            launcher, grad_input.unsafe_ptr(),
            dln.unsafe_ptr().as_imm(), input.unsafe_ptr().as_imm(), mean.unsafe_ptr().as_imm(), rstd.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(),
            input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_dgamma")
struct FastDgamma:
    """Compute the gradients of LayerNorm's parameters."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_ln_weight: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        grad_ln_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        dln: InputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        mean: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],
        rstd: InputTensor[dtype=accum_type[dtype], rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_dgamma[dtype](
            launcher, grad_ln_weight.unsafe_ptr(), grad_ln_bias.unsafe_ptr(),
            dln.unsafe_ptr().as_imm(), input.unsafe_ptr().as_imm(), mean.unsafe_ptr().as_imm(), rstd.unsafe_ptr().as_imm(),
            input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_product")
struct FastProduct:
    """Compute the product ln_out @ linear_weight.T (steps 7 to 10)."""

    @staticmethod
    def execute[
        dtype: DType, step: Int
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_out: InputTensor[dtype=dtype, rank=2, static_spec=_],
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_product[dtype, step](
            launcher, output.unsafe_ptr(),
            ln_out.unsafe_ptr().as_imm(), linear_weight.unsafe_ptr().as_imm(),
            ln_out.dim_size(0), ln_out.dim_size(1), linear_weight.dim_size(0),
        )  # fmt: skip


@extensibility.register("fast_layouts")
struct FastLayouts:
    """Compute the products of the backward pass."""

    @staticmethod
    def execute(
        grad_ln_out: MutableInputTensor[dtype=BF16, rank=2, static_spec=_],
        grad_linear_weight: MutableInputTensor[dtype=BF16, rank=2, static_spec=_],
        dy: InputTensor[dtype=BF16, rank=2, static_spec=_],
        ln_out: InputTensor[dtype=BF16, rank=2, static_spec=_],
        linear_weight: InputTensor[dtype=BF16, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layouts(
            launcher, grad_ln_out.unsafe_ptr(), grad_linear_weight.unsafe_ptr(),
            dy.unsafe_ptr().as_imm(), ln_out.unsafe_ptr().as_imm(), linear_weight.unsafe_ptr().as_imm(),
            ln_out.dim_size(0), ln_out.dim_size(1), linear_weight.dim_size(0),
        )  # fmt: skip


@extensibility.register("fast_epilogue")
struct FastEpilogue:
    """Compute the forward product with the bias, and the gradients of weight and bias."""

    @staticmethod
    def execute(
        output: MutableInputTensor[dtype=BF16, rank=2, static_spec=_],
        grad_linear_weight: MutableInputTensor[dtype=BF16, rank=2, static_spec=_],
        grad_linear_bias: MutableInputTensor[dtype=BF16, rank=1, static_spec=_],
        dy: InputTensor[dtype=BF16, rank=2, static_spec=_],
        ln_out: InputTensor[dtype=BF16, rank=2, static_spec=_],
        linear_weight: InputTensor[dtype=BF16, rank=2, static_spec=_],
        linear_bias: InputTensor[dtype=BF16, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_epilogue(
            launcher, output.unsafe_ptr(), grad_linear_weight.unsafe_ptr(), grad_linear_bias.unsafe_ptr(),
            dy.unsafe_ptr().as_imm(), ln_out.unsafe_ptr().as_imm(), linear_weight.unsafe_ptr().as_imm(), linear_bias.unsafe_ptr().as_imm(),
            ln_out.dim_size(0), ln_out.dim_size(1), linear_weight.dim_size(0),
        )  # fmt: skip
