"""The passes of each variant on the CPU (loops) or a GPU (launches), and the internal ops with run-time sizes."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .cpu_reference import (
    backward_fused_cpu,
    backward_unfused_cpu,
    forward_fused_cpu,
    forward_unfused_cpu,
    row_statistics_cpu,
    row_sums_cpu,
)
from .launches import (
    validate_sizes,
    launch_backward_fused,
    launch_backward_unfused,
    launch_forward_fused,
    launch_forward_unfused,
    launch_row_statistics,
    launch_row_sums,
)
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .tensors import BackwardTensors, ForwardTensors, Sizes


def is_algorithm(name: StaticString) -> Bool:
    """Return whether `name` is an implemented variant."""
    return name == "unfused" or name == "fused"


def run_forward[
    dtype: DType, //, target: StaticString, algorithm: StaticString
](tensors: ForwardTensors[dtype], mut launcher: DeviceLauncher) raises:
    """Run the forward pass. No-op if there are no rows."""
    comptime assert is_algorithm(algorithm), "algorithm must be 'unfused' or 'fused'"
    var rows = Int(tensors.sizes.rows())
    if rows == 0:
        return
    comptime if target == "cpu":
        comptime if algorithm == "fused":
            forward_fused_cpu(tensors)
        else:
            var H = Int(tensors.sizes.hidden_dim)
            forward_unfused_cpu(tensors, launcher.workspace[dtype]("ln_out", rows * H))
    elif algorithm == "fused":
        launch_forward_fused(launcher, tensors)
    else:
        launch_forward_unfused(launcher, tensors)


def run_backward[
    dtype: DType, //, target: StaticString, algorithm: StaticString
](tensors: BackwardTensors[dtype], mut launcher: DeviceLauncher) raises:
    """Run the backward pass."""
    comptime assert is_algorithm(algorithm), "algorithm must be 'unfused' or 'fused'"
    comptime if target == "cpu":
        var rows = Int(tensors.sizes.rows())
        var H = Int(tensors.sizes.hidden_dim)
        var O = Int(tensors.sizes.output_dim)
        comptime if algorithm == "fused":
            backward_fused_cpu(tensors, launcher.workspace[DType.float64]("sums", 3 * H + O * H + O))
        else:
            backward_unfused_cpu(
                tensors,
                launcher.workspace[dtype]("ln_out", rows * H),
                launcher.workspace[dtype]("dln", rows * H),
                launcher.workspace[accum_type[dtype]]("row_sums", 2 * rows),
            )
    elif algorithm == "fused":
        launch_backward_fused(launcher, tensors)
    else:
        launch_backward_unfused(launcher, tensors)


def run_row_statistics[
    dtype: DType, target: StaticString
](
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    sizes: Sizes,
    eps: Float64,
    mut launcher: DeviceLauncher,
) raises:
    """Compute mean and rstd of every row."""
    var eps_accum = eps.cast[accum_type[dtype]]()
    if sizes.rows() == 0:
        return
    comptime if target == "cpu":
        row_statistics_cpu[dtype](mean, rstd, input, Int(sizes.rows()), Int(sizes.hidden_dim), eps_accum)
    else:
        launch_row_statistics[dtype](launcher, mean, rstd, input, sizes, eps_accum)


def run_row_sums[
    dtype: DType, target: StaticString
](
    row_sums: MutPtr[accum_type[dtype]],  # [rows, 2]
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H]
    sizes: Sizes,
    mut launcher: DeviceLauncher,
) raises:
    """Compute the row sums c1 and c2 of every row."""
    comptime if target == "cpu":
        row_sums_cpu[dtype](
            row_sums, dln, input, mean, rstd, ln_weight, Int(sizes.rows()), Int(sizes.hidden_dim)
        )
    else:
        launch_row_sums[dtype](launcher, row_sums, dln, input, mean, rstd, ln_weight, sizes)


# ---- The internal ops ---------------------------------------------------------------------------------------


@extensibility.register("layernorm_linear_train")
struct LayerNormLinearTrain:
    """The forward op for training, with the statistics; run-time sizes, in the caller's buffers."""

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
            sizes=validate_sizes(B, S, H, O),
            eps=eps.cast[accum_type[dtype]](),
        )
        run_forward[target, algorithm](tensors, launcher)


@extensibility.register("layernorm_linear_train_backward")
struct LayerNormLinearTrainBackward:
    """The backward op for training, from saved statistics; run-time sizes, in the caller's buffers."""

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
            sizes=validate_sizes(B, S, H, O),
        )
        run_backward[target, algorithm](tensors, launcher)


@extensibility.register("layernorm_linear_row_sums")
struct LayerNormLinearRowSums:
    """Compute only the row sums c1 and c2, in the caller's buffer, to check their kernel alone."""

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
            validate_sizes(B, S, H, 1),
            launcher,
        )
