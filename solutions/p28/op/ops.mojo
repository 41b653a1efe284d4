"""The ops of puzzle 28, one for each step: what MAX and PyTorch see. Outputs first, then inputs; sizes come from the tensors.
"""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .launches import launch_dgamma, launch_dx, launch_layernorm, launch_product
from .shared.common import accum_type
from .shared.launcher import DeviceLauncher


@extensibility.register("fast_rows")
struct FastRows:
    """LayerNorm, step 1."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        rows_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype, 1](
            launcher, rows_out.unsafe_ptr(), input.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_once")
struct FastOnce:
    """LayerNorm, step 2."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        once_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype, 2](
            launcher, once_out.unsafe_ptr(), input.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_vectors")
struct FastVectors:
    """LayerNorm, step 3."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        vectors_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype, 3](
            launcher, vectors_out.unsafe_ptr(), input.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_shuffles")
struct FastShuffles:
    """LayerNorm, step 4."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        shuffles_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_layernorm[dtype, 4](
            launcher, shuffles_out.unsafe_ptr(), input.unsafe_ptr().as_imm(), ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(), input.dim_size(0), input.dim_size(1),
        )  # fmt: skip


@extensibility.register("fast_dx")
struct FastDx:
    """The gradient of LayerNorm's input."""

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
    """The gradients of LayerNorm's parameters."""

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


@extensibility.register("fast_tiled")
struct FastTiled:
    """The product ln_out @ linear_weight.T, step 7."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        tiled_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_out: InputTensor[dtype=dtype, rank=2, static_spec=_],
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_product[dtype, 7](
            launcher, tiled_out.unsafe_ptr(), ln_out.unsafe_ptr().as_imm(), linear_weight.unsafe_ptr().as_imm(),
            ln_out.dim_size(0), ln_out.dim_size(1), linear_weight.dim_size(0),
        )  # fmt: skip


@extensibility.register("fast_registers")
struct FastRegisters:
    """The product ln_out @ linear_weight.T, step 8."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        registers_out: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        ln_out: InputTensor[dtype=dtype, rank=2, static_spec=_],
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var launcher = DeviceLauncher(ctx)
        launch_product[dtype, 8](
            launcher, registers_out.unsafe_ptr(), ln_out.unsafe_ptr().as_imm(), linear_weight.unsafe_ptr().as_imm(),
            ln_out.dim_size(0), ln_out.dim_size(1), linear_weight.dim_size(0),
        )  # fmt: skip
