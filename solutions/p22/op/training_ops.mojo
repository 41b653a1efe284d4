"""The internal ops of puzzle 22, for training and for checks: sizes at run time, results written in place.

The PyTorch layer and all hard cases use them; the statistics go from the forward op to the backward op.
"""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .launches import checked_sizes
from .passes import run_backward, run_forward, run_row_sums
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .tensors import BackwardTensors, ForwardTensors


@extensibility.register("layernorm_linear_train")
struct LayerNormLinearTrain:
    """The forward op for training: sizes at run time, written in place, and the statistics are outputs."""

    @staticmethod
    def execute[
        target: StaticString, algorithm: StaticString, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        mean: MutableInputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        rstd: MutableInputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        linear_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        var O = linear_weight.dim_size(0)
        expect_shape("output", output, B, S, O)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        expect_shape("ln_bias", ln_bias, H)
        expect_shape("linear_weight", linear_weight, O, H)
        expect_shape("linear_bias", linear_bias, O)
        var launcher = DeviceLauncher(ctx)
        var tensors = ForwardTensors[dtype](
            output=output.unsafe_ptr(),
            mean=mean.unsafe_ptr(),
            rstd=rstd.unsafe_ptr(),
            input=input.unsafe_ptr().as_imm(),
            ln_weight=ln_weight.unsafe_ptr().as_imm(),
            ln_bias=ln_bias.unsafe_ptr().as_imm(),
            linear_weight=linear_weight.unsafe_ptr().as_imm(),
            linear_bias=linear_bias.unsafe_ptr().as_imm(),
            sizes=checked_sizes(B, S, H, O),
            eps=eps.cast[accum_type[dtype]](),
        )
        run_forward[target, algorithm](tensors, launcher)


@extensibility.register("layernorm_linear_train_backward")
struct LayerNormLinearTrainBackward:
    """The backward op for training: sizes at run time, written in place, from saved statistics."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, algorithm: StaticString = "fused"
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        grad_ln_weight: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_ln_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_weight: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        grad_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        mean: InputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        rstd: InputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        var O = linear_weight.dim_size(0)
        expect_shape("grad_input", grad_input, B, S, H)
        expect_shape("grad_ln_weight", grad_ln_weight, H)
        expect_shape("grad_ln_bias", grad_ln_bias, H)
        expect_shape("grad_weight", grad_weight, O, H)
        expect_shape("grad_bias", grad_bias, O)
        expect_shape("grad_output", grad_output, B, S, O)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        expect_shape("ln_bias", ln_bias, H)
        expect_shape("linear_weight", linear_weight, O, H)
        var launcher = DeviceLauncher(ctx)
        var tensors = BackwardTensors[dtype](
            grad_input=grad_input.unsafe_ptr(),
            grad_ln_weight=grad_ln_weight.unsafe_ptr(),
            grad_ln_bias=grad_ln_bias.unsafe_ptr(),
            grad_weight=grad_weight.unsafe_ptr(),
            grad_bias=grad_bias.unsafe_ptr(),
            grad_output=grad_output.unsafe_ptr().as_imm(),
            input=input.unsafe_ptr().as_imm(),
            mean=mean.unsafe_ptr().as_imm(),
            rstd=rstd.unsafe_ptr().as_imm(),
            ln_weight=ln_weight.unsafe_ptr().as_imm(),
            ln_bias=ln_bias.unsafe_ptr().as_imm(),
            linear_weight=linear_weight.unsafe_ptr().as_imm(),
            sizes=checked_sizes(B, S, H, O),
        )
        run_backward[target, algorithm](tensors, launcher)


@extensibility.register("layernorm_linear_row_sums")
struct LayerNormLinearRowSums:
    """The row sums c1 and c2 alone, written in place, so that one kernel can be run and checked alone."""

    @staticmethod
    def execute[
        target: StaticString, accum: DType, dtype: DType
    ](
        row_sums: MutableInputTensor[dtype=accum, rank=2, static_spec=_],  # [B * S, 2]
        dln: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        mean: InputTensor[dtype=accum, rank=2, static_spec=_],  # [B, S]
        rstd: InputTensor[dtype=accum, rank=2, static_spec=_],  # [B, S]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "row_sums, mean and rstd must have the accumulation dtype"
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        expect_shape("row_sums", row_sums, B * S, 2)
        expect_shape("dln", dln, B, S, H)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        var launcher = DeviceLauncher(ctx)
        run_row_sums[dtype, target](
            rebind[MutPtr[accum_type[dtype]]](row_sums.unsafe_ptr()),
            dln.unsafe_ptr().as_imm(),
            input.unsafe_ptr().as_imm(),
            rebind[ImmPtr[accum_type[dtype]]](mean.unsafe_ptr().as_imm()),
            rebind[ImmPtr[accum_type[dtype]]](rstd.unsafe_ptr().as_imm()),
            ln_weight.unsafe_ptr().as_imm(),
            checked_sizes(B, S, H, 1),
            launcher,
        )
