"""The public ops of puzzle 23: attention and its backward without a mask, as other harnesses call them.

Shapes: query, output and grad_output [batch, heads, length, dim]; key and value [batch, heads, key length, dim]. The scale
is 1 / sqrt(dim). The backward op computes the probabilities again.
"""

from extensibility import InputTensor, OutputTensor
import extensibility
from max.gpu.host import DeviceContext

from .attention import (
    launch_output,
    launch_output_backward,
    launch_scores,
    launch_scores_backward,
    launch_softmax,
    launch_softmax_backward,
)
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .sizes import Sizes, checked_sizes


def launch_probabilities[
    dtype: DType
](mut launcher: DeviceLauncher, query: ImmPtr[dtype], key: ImmPtr[dtype], sizes: Sizes) raises -> MutPtr[
    accum_type[dtype]
]:
    """The probabilities without a mask, [B, N, S, T], in scratch memory of the launcher."""
    comptime accum = accum_type[dtype]
    var scores = launcher.workspace[accum]("scores", sizes.scores())
    var probabilities = launcher.workspace[accum]("probabilities", sizes.scores())
    launch_scores[dtype](launcher, scores, query, key, sizes)
    # Without a mask its address is not read: any will do.
    launch_softmax[dtype](launcher, probabilities, scores.as_imm(), query, sizes, 0)
    return probabilities


@extensibility.register("attention")
struct Attention:
    """The public forward op: output = softmax(query key^T / sqrt(dim)) value."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var T = key.dim_size(2)
        var d = query.dim_size(3)
        expect_shape("output", output, B, N, S, d)
        expect_shape("key", key, B, N, T, d)
        expect_shape("value", value, B, N, T, d)
        var sizes = checked_sizes(B, N, S, T, d)
        var launcher = DeviceLauncher(ctx)
        var probabilities = launch_probabilities[dtype](
            launcher, query.unsafe_ptr().as_imm(), key.unsafe_ptr().as_imm(), sizes
        )
        launch_output[dtype](
            launcher, output.unsafe_ptr(), probabilities.as_imm(), value.unsafe_ptr().as_imm(), sizes
        )


@extensibility.register("attention_backward")
struct AttentionBackward:
    """The public backward op: the gradients of query, key and value, from that of the output."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_query: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        grad_key: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        grad_value: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        comptime accum = accum_type[dtype]
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var T = key.dim_size(2)
        var d = query.dim_size(3)
        expect_shape("grad_query", grad_query, B, N, S, d)
        expect_shape("grad_key", grad_key, B, N, T, d)
        expect_shape("grad_value", grad_value, B, N, T, d)
        expect_shape("grad_output", grad_output, B, N, S, d)
        expect_shape("key", key, B, N, T, d)
        expect_shape("value", value, B, N, T, d)
        var sizes = checked_sizes(B, N, S, T, d)
        var launcher = DeviceLauncher(ctx)
        var q = query.unsafe_ptr().as_imm()
        var k = key.unsafe_ptr().as_imm()
        var probabilities = launch_probabilities[dtype](launcher, q, k, sizes).as_imm()
        var dP = launcher.workspace[accum]("grad_probabilities", sizes.scores())
        var dS = launcher.workspace[accum]("grad_scores", sizes.scores())
        launch_output_backward[dtype](
            launcher,
            grad_value.unsafe_ptr(),
            dP,
            grad_output.unsafe_ptr().as_imm(),
            probabilities,
            value.unsafe_ptr().as_imm(),
            sizes,
        )
        launch_softmax_backward[dtype](launcher, dS, dP.as_imm(), probabilities, sizes)
        launch_scores_backward[dtype](
            launcher, grad_query.unsafe_ptr(), grad_key.unsafe_ptr(), dS.as_imm(), q, k, sizes
        )
