"""The public ops of puzzle 23: attention and its backward without a mask, as other harnesses call them.

Shapes: query, output and grad_output [batch, heads, length, dim]; key and value [batch, heads, key length, dim]. The scale
is 1 / sqrt(dim). The backward op computes the probabilities again.
"""

from extensibility import InputTensor, OutputTensor
import extensibility
from max.gpu.host import DeviceContext

from .shared.checks import expect_shape
from .shared.common import accum_type
from .shared.launcher import DeviceLauncher
from .sizes import checked_sizes
from .steps import (
    run_output,
    run_output_backward,
    run_probabilities,
    run_scores_backward,
    run_softmax_backward,
)


@extensibility.register("attention")
struct Attention:
    """The public forward op: output = softmax(query key^T / sqrt(dim)) value."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
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
        var probabilities = run_probabilities[dtype, target](
            launcher, query.unsafe_ptr().as_imm(), key.unsafe_ptr().as_imm(), sizes
        )
        run_output[dtype, target](
            launcher, output.unsafe_ptr(), probabilities.as_imm(), value.unsafe_ptr().as_imm(), sizes
        )


@extensibility.register("attention_backward")
struct AttentionBackward:
    """The public backward op: the gradients of query, key and value, from that of the output."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
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
        var probabilities = run_probabilities[dtype, target](launcher, q, k, sizes).as_imm()
        var dP = launcher.workspace[accum]("grad_probabilities", sizes.scores())
        var dS = launcher.workspace[accum]("grad_scores", sizes.scores())
        run_output_backward[dtype, target](
            launcher,
            grad_value.unsafe_ptr(),
            dP,
            grad_output.unsafe_ptr().as_imm(),
            probabilities,
            value.unsafe_ptr().as_imm(),
            sizes,
        )
        run_softmax_backward[dtype, target](launcher, dS, dP.as_imm(), probabilities, sizes)
        run_scores_backward[dtype, target](
            launcher, grad_query.unsafe_ptr(), grad_key.unsafe_ptr(), dS.as_imm(), q, k, sizes
        )
