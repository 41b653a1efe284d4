"""The ops of puzzle 23: public ops, as other harnesses call them, and internal ops for each step and for the fused variant.

Shapes: query, output and grad_output [batch, heads, length, dim]; key and value [batch, heads, key length, dim]. The scale
is 1 / sqrt(dim). The public backward op recomputes the probabilities. The internal ops output scores, probabilities and
their gradients, so that each step is checked alone, from correct inputs.
"""

from extensibility import InputTensor, OutputTensor
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
from .launches import launch_delta, launch_flash_backward, launch_flash_forward
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .sizes import FlashBackward, FlashForward, Sizes, validate_flash_sizes, validate_sizes

# ---- Public: no mask, sizes by the tensors -------------------------------------------------------------------


def launch_probabilities[
    dtype: DType
](mut launcher: DeviceLauncher, query: ImmPtr[dtype], key: ImmPtr[dtype], sizes: Sizes) raises -> MutPtr[
    accum_type[dtype]
]:
    """Launch the probabilities without a mask, [B, N, S, T], in the launcher's workspace, and return them."""
    comptime accum = accum_type[dtype]
    var scores = launcher.workspace[accum]("scores", sizes.scores())
    var probabilities = launcher.workspace[accum]("probabilities", sizes.scores())
    launch_scores[dtype](launcher, scores, query, key, sizes)
    # Without a mask, its address is not read: pass any address.
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
        var sizes = validate_sizes(B, N, S, T, d)
        var launcher = DeviceLauncher(ctx)
        var probabilities = launch_probabilities[dtype](
            launcher, query.unsafe_ptr().as_imm(), key.unsafe_ptr().as_imm(), sizes
        )
        launch_output[dtype](
            launcher, output.unsafe_ptr(), probabilities.as_imm(), value.unsafe_ptr().as_imm(), sizes
        )


@extensibility.register("attention_backward")
struct AttentionBackward:
    """The public backward op: the gradients of query, key and value from the gradient of the output."""

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
        var sizes = validate_sizes(B, N, S, T, d)
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


# ---- Each step -----------------------------------------------------------------------------------------------


@extensibility.register("attention_scores")
struct AttentionScores:
    """Compute S = query key^T / sqrt(dim)."""

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
            validate_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_softmax")
struct AttentionSoftmax:
    """Compute P = softmax(scores + mask)."""

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
            validate_sizes(B, N, S, T, 1),
            Int32(S),
        )


@extensibility.register("attention_output")
struct AttentionOutput:
    """Compute O = probabilities value."""

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
            validate_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_output_backward")
struct AttentionOutputBackward:
    """Compute the gradients of value and probabilities from the gradient of the output."""

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
            validate_sizes(B, N, S, T, d),
        )


@extensibility.register("attention_softmax_backward")
struct AttentionSoftmaxBackward:
    """Compute the gradient of the scores from the gradient of the probabilities."""

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
            validate_sizes(B, N, S, T, 1),
        )


@extensibility.register("attention_scores_backward")
struct AttentionScoresBackward:
    """Compute the gradients of query and key from the gradient of the scores."""

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
            validate_sizes(B, N, S, T, d),
        )


# ---- The fused variant ---------------------------------------------------------------------------------------


@extensibility.register("attention_train")
struct AttentionTrain:
    """The forward op for training: output and the log-sum-exp of every row, in the caller's buffers."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        lse: MutableInputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        mask: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [S, T]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "lse must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var d = query.dim_size(3)
        var G = key.dim_size(1)
        var T = key.dim_size(2)
        expect_shape("output", output, B, N, S, d)
        expect_shape("lse", lse, B, N, S)
        expect_shape("key", key, B, G, T, d)
        expect_shape("value", value, B, G, T, d)
        expect_shape("mask", mask, S, T)
        var tensors = FlashForward[dtype](
            output=output.unsafe_ptr(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](lse.unsafe_ptr()),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            mask=mask.unsafe_ptr().as_imm(),
            sizes=validate_flash_sizes(B, N, G, S, T, d),
            scale=Sizes(0, 0, 0, Int32(d)).scale().cast[accum_type[dtype]](),
        )
        var launcher = DeviceLauncher(ctx)
        launch_flash_forward(launcher, tensors)


@extensibility.register("attention_delta")
struct AttentionDelta:
    """Compute delta = rowsum(dO * O), an input of the backward op, in the caller's buffer."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        delta: MutableInputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "delta must have the accumulation dtype"
        var B = output.dim_size(0)
        var N = output.dim_size(1)
        var S = output.dim_size(2)
        var d = output.dim_size(3)
        expect_shape("delta", delta, B, N, S)
        expect_shape("grad_output", grad_output, B, N, S, d)
        var sizes = validate_sizes(B, N, S, 1, d)
        var delta_out = rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](delta.unsafe_ptr())
        var dO = grad_output.unsafe_ptr().as_imm()
        var O = output.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_delta[dtype](launcher, delta_out, dO, O, sizes.rows(), Int32(d))


@extensibility.register("attention_train_backward")
struct AttentionTrainBackward:
    """The backward op for training: the gradients of query, key and value from lse and delta, in the caller's buffers.
    """

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        grad_query: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        grad_key: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        grad_value: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        lse: InputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        delta: InputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        mask: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [S, T]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "lse and delta must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var d = query.dim_size(3)
        var G = key.dim_size(1)
        var T = key.dim_size(2)
        expect_shape("grad_query", grad_query, B, N, S, d)
        expect_shape("grad_key", grad_key, B, G, T, d)
        expect_shape("grad_value", grad_value, B, G, T, d)
        expect_shape("grad_output", grad_output, B, N, S, d)
        expect_shape("key", key, B, G, T, d)
        expect_shape("value", value, B, G, T, d)
        expect_shape("lse", lse, B, N, S)
        expect_shape("delta", delta, B, N, S)
        expect_shape("mask", mask, S, T)
        var tensors = FlashBackward[dtype](
            grad_query=grad_query.unsafe_ptr(),
            grad_key=grad_key.unsafe_ptr(),
            grad_value=grad_value.unsafe_ptr(),
            grad_output=grad_output.unsafe_ptr().as_imm(),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], ImmutAnyOrigin]](lse.unsafe_ptr().as_imm()),
            delta=rebind[Pointer[Scalar[accum_type[dtype]], ImmutAnyOrigin]](delta.unsafe_ptr().as_imm()),
            mask=mask.unsafe_ptr().as_imm(),
            sizes=validate_flash_sizes(B, N, G, S, T, d),
            scale=Sizes(0, 0, 0, Int32(d)).scale().cast[accum_type[dtype]](),
        )
        var launcher = DeviceLauncher(ctx)
        launch_flash_backward(launcher, tensors)
