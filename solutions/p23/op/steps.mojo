"""Each step of puzzle 23 on the device of the op, plain loops on the CPU and launches on a GPU, and whole passes of them."""

from .attention import (
    launch_output,
    launch_output_backward,
    launch_scores,
    launch_scores_backward,
    launch_softmax,
    launch_softmax_backward,
)
from .cpu_reference import (
    output_backward_cpu,
    output_cpu,
    scores_backward_cpu,
    scores_cpu,
    softmax_backward_cpu,
    softmax_cpu,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .sizes import Sizes


def run_scores[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    scores: MutPtr[accum_type[dtype]],
    query: ImmPtr[dtype],
    key: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """S = scale * Q K^T."""
    comptime if target == "cpu":
        scores_cpu[dtype](scores, query, key, sizes)
    else:
        launch_scores[dtype](launcher, scores, query, key, sizes)


def run_softmax[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    probabilities: MutPtr[accum_type[dtype]],
    scores: ImmPtr[accum_type[dtype]],
    mask: ImmPtr[dtype],
    sizes: Sizes,
    mask_rows: Int32,
) raises:
    """P = softmax(S + mask); without a mask, mask_rows is 0."""
    comptime if target == "cpu":
        softmax_cpu[dtype](probabilities, scores, mask, sizes, Int(mask_rows))
    else:
        launch_softmax[dtype](launcher, probabilities, scores, mask, sizes, mask_rows)


def run_output[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    output: MutPtr[dtype],
    probabilities: ImmPtr[accum_type[dtype]],
    value: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """O = P V."""
    comptime if target == "cpu":
        output_cpu[dtype](output, probabilities, value, sizes)
    else:
        launch_output[dtype](launcher, output, probabilities, value, sizes)


def run_output_backward[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    grad_value: MutPtr[dtype],
    grad_probabilities: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    probabilities: ImmPtr[accum_type[dtype]],
    value: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """The gradients dV and dP, from dO."""
    comptime if target == "cpu":
        output_backward_cpu[dtype](grad_value, grad_probabilities, grad_output, probabilities, value, sizes)
    else:
        launch_output_backward[dtype](
            launcher, grad_value, grad_probabilities, grad_output, probabilities, value, sizes
        )


def run_softmax_backward[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    grad_scores: MutPtr[accum_type[dtype]],
    grad_probabilities: ImmPtr[accum_type[dtype]],
    probabilities: ImmPtr[accum_type[dtype]],
    sizes: Sizes,
) raises:
    """The gradient dS, from dP and P."""
    comptime if target == "cpu":
        softmax_backward_cpu[dtype](grad_scores, grad_probabilities, probabilities, sizes)
    else:
        launch_softmax_backward[dtype](launcher, grad_scores, grad_probabilities, probabilities, sizes)


def run_scores_backward[
    dtype: DType, target: StaticString
](
    mut launcher: DeviceLauncher,
    grad_query: MutPtr[dtype],
    grad_key: MutPtr[dtype],
    grad_scores: ImmPtr[accum_type[dtype]],
    query: ImmPtr[dtype],
    key: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """The gradients dQ and dK, from dS."""
    comptime if target == "cpu":
        scores_backward_cpu[dtype](grad_query, grad_key, grad_scores, query, key, sizes)
    else:
        launch_scores_backward[dtype](launcher, grad_query, grad_key, grad_scores, query, key, sizes)


def run_probabilities[
    dtype: DType, target: StaticString
](mut launcher: DeviceLauncher, query: ImmPtr[dtype], key: ImmPtr[dtype], sizes: Sizes) raises -> MutPtr[
    accum_type[dtype]
]:
    """The probabilities without a mask, [B, N, S, T], in scratch memory of the launcher."""
    comptime accum = accum_type[dtype]
    var scores = launcher.workspace[accum]("scores", sizes.scores())
    var probabilities = launcher.workspace[accum]("probabilities", sizes.scores())
    run_scores[dtype, target](launcher, scores, query, key, sizes)
    # Without a mask its address is not read: any will do.
    run_softmax[dtype, target](launcher, probabilities, scores.as_imm(), query, sizes, 0)
    return probabilities
