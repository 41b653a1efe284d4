"""A pass of any variant on the device of the op: plain loops on the CPU, launches on a GPU."""

from .cpu_reference import (
    backward_fused_cpu,
    backward_unfused_cpu,
    forward_fused_cpu,
    forward_unfused_cpu,
    row_statistics_cpu,
    row_sums_cpu,
)
from .launches import (
    launch_backward_fused,
    launch_backward_unfused,
    launch_forward_fused,
    launch_forward_unfused,
    launch_row_statistics,
    launch_row_sums,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .tensors import BackwardTensors, ForwardTensors, Sizes


def is_algorithm(name: StaticString) -> Bool:
    """Whether there is a variant of this name."""
    return name == "unfused" or name == "fused"


def run_forward[
    dtype: DType, //, target: StaticString, algorithm: StaticString
](tensors: ForwardTensors[dtype], mut launcher: DeviceLauncher) raises:
    """The forward pass. Without rows it writes nothing."""
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
    """The backward pass."""
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
    """Mean and rstd of every row."""
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
    """The row sums c1 and c2 of every row."""
    comptime if target == "cpu":
        row_sums_cpu[dtype](
            row_sums, dln, input, mean, rstd, ln_weight, Int(sizes.rows()), Int(sizes.hidden_dim)
        )
    else:
        launch_row_sums[dtype](launcher, row_sums, dln, input, mean, rstd, ln_weight, sizes)
