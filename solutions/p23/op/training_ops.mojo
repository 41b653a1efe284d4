"""The internal ops of puzzle 23: each step of attention, forward and backward, by itself, written in place.

Between them scores, probabilities and their gradients are visible, so that each is checked alone, from right ones before it.
"""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
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
from .sizes import checked_sizes


@extensibility.register("attention_scores")
struct AttentionScores:
    """S = query key^T / sqrt(dim)."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        scores: MutableInputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "scores must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var T = key.dim_size(2)
        var d = query.dim_size(3)
        expect_shape("scores", scores, B, N, S, T)
        expect_shape("key", key, B, N, T, d)
        var launcher = DeviceLauncher(ctx)
        launch_scores[dtype](
            launcher,
            rebind[MutPtr[accum_type[dtype]]](scores.unsafe_ptr()),
            query.unsafe_ptr().as_imm(),
            key.unsafe_ptr().as_imm(),
            checked_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_softmax")
struct AttentionSoftmax:
    """P = softmax(scores + mask)."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        probabilities: MutableInputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        scores: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        mask: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [S, T]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "scores must have the accumulation dtype"
        var B = scores.dim_size(0)
        var N = scores.dim_size(1)
        var S = scores.dim_size(2)
        var T = scores.dim_size(3)
        expect_shape("probabilities", probabilities, B, N, S, T)
        expect_shape("mask", mask, S, T)
        var launcher = DeviceLauncher(ctx)
        launch_softmax[dtype](
            launcher,
            rebind[MutPtr[accum_type[dtype]]](probabilities.unsafe_ptr()),
            rebind[ImmPtr[accum_type[dtype]]](scores.unsafe_ptr().as_imm()),
            mask.unsafe_ptr().as_imm(),
            checked_sizes(B, N, S, T, 1),
            Int32(S),
        )


@extensibility.register("attention_output")
struct AttentionOutput:
    """O = probabilities value."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        probabilities: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "probabilities must have the accumulation dtype"
        var B = probabilities.dim_size(0)
        var N = probabilities.dim_size(1)
        var S = probabilities.dim_size(2)
        var T = probabilities.dim_size(3)
        var d = value.dim_size(3)
        expect_shape("output", output, B, N, S, d)
        expect_shape("value", value, B, N, T, d)
        var launcher = DeviceLauncher(ctx)
        launch_output[dtype](
            launcher,
            output.unsafe_ptr(),
            rebind[ImmPtr[accum_type[dtype]]](probabilities.unsafe_ptr().as_imm()),
            value.unsafe_ptr().as_imm(),
            checked_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_output_backward")
struct AttentionOutputBackward:
    """The gradients of value and probabilities, from that of the output."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        grad_value: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        grad_probabilities: MutableInputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        probabilities: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "probabilities must have the accumulation dtype"
        var B = probabilities.dim_size(0)
        var N = probabilities.dim_size(1)
        var S = probabilities.dim_size(2)
        var T = probabilities.dim_size(3)
        var d = value.dim_size(3)
        expect_shape("grad_value", grad_value, B, N, T, d)
        expect_shape("grad_probabilities", grad_probabilities, B, N, S, T)
        expect_shape("grad_output", grad_output, B, N, S, d)
        expect_shape("value", value, B, N, T, d)
        var launcher = DeviceLauncher(ctx)
        launch_output_backward[dtype](
            launcher,
            grad_value.unsafe_ptr(),
            rebind[MutPtr[accum_type[dtype]]](grad_probabilities.unsafe_ptr()),
            grad_output.unsafe_ptr().as_imm(),
            rebind[ImmPtr[accum_type[dtype]]](probabilities.unsafe_ptr().as_imm()),
            value.unsafe_ptr().as_imm(),
            checked_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_softmax_backward")
struct AttentionSoftmaxBackward:
    """The gradient of the scores, from that of the probabilities."""

    @staticmethod
    def execute[
        accum: DType
    ](
        grad_scores: MutableInputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        grad_probabilities: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        probabilities: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[accum], "probabilities must have an accumulation dtype"
        var B = probabilities.dim_size(0)
        var N = probabilities.dim_size(1)
        var S = probabilities.dim_size(2)
        var T = probabilities.dim_size(3)
        expect_shape("grad_scores", grad_scores, B, N, S, T)
        expect_shape("grad_probabilities", grad_probabilities, B, N, S, T)
        var launcher = DeviceLauncher(ctx)
        launch_softmax_backward[accum](
            launcher,
            rebind[MutPtr[accum_type[accum]]](grad_scores.unsafe_ptr()),
            rebind[ImmPtr[accum_type[accum]]](grad_probabilities.unsafe_ptr().as_imm()),
            rebind[ImmPtr[accum_type[accum]]](probabilities.unsafe_ptr().as_imm()),
            checked_sizes(B, N, S, T, 1),
        )


@extensibility.register("attention_scores_backward")
struct AttentionScoresBackward:
    """The gradients of query and key, from that of the scores."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        grad_query: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        grad_key: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        grad_scores: InputTensor[dtype=accum, rank=4, static_spec=_],  # [B, N, S, T]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, T, d]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "grad_scores must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var T = key.dim_size(2)
        var d = query.dim_size(3)
        expect_shape("grad_query", grad_query, B, N, S, d)
        expect_shape("grad_key", grad_key, B, N, T, d)
        expect_shape("grad_scores", grad_scores, B, N, S, T)
        expect_shape("key", key, B, N, T, d)
        var launcher = DeviceLauncher(ctx)
        launch_scores_backward[dtype](
            launcher,
            grad_query.unsafe_ptr(),
            grad_key.unsafe_ptr(),
            rebind[ImmPtr[accum_type[dtype]]](grad_scores.unsafe_ptr().as_imm()),
            query.unsafe_ptr().as_imm(),
            key.unsafe_ptr().as_imm(),
            checked_sizes(B, N, S, T, d),
        )
