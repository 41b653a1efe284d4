"""The internal ops of the fused variant: sizes, mask and scale at run time."""

from std.math import ceildiv

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .flash_launches import launch_delta, launch_flash_backward, launch_flash_forward
from .flash_tensors import FlashBackward, FlashForward, FlashSizes
from .shared.checks import expect_shape
from .shared.common import accum_type
from .shared.launcher import DeviceLauncher
from .sizes import Sizes, checked_sizes
from .tiles import MAX_HEAD


def flash_sizes(
    batch: Int,
    query_heads: Int,
    key_heads: Int,
    query_len: Int,
    key_len: Int,
    head_dim: Int,
    diagonal: Int32,
    mask: List[Int],
    mask_block: Int32,
) raises -> FlashSizes:
    """The sizes in the kernels' type; `mask` is the mask's shape, each axis of its own size, in blocks, or 1.
    """
    _ = checked_sizes(batch, query_heads, query_len, key_len, head_dim)
    if head_dim > MAX_HEAD:
        raise Error(t"the head dimension must be at most {MAX_HEAD}, got {head_dim}")
    if key_heads < 1 or query_heads % key_heads != 0:
        raise Error(
            t"the heads of query must be a multiple of those of key and value, got {query_heads} and"
            t" {key_heads}"
        )
    var strides: List[Int] = [0, 0, 0, 0]
    if mask_block < 1:
        raise Error(t"a block of the mask must be at least 1, got {mask_block}")
    var block = Int(mask_block)
    var wanted: List[Int] = [batch, query_heads, ceildiv(query_len, block), ceildiv(key_len, block)]
    var stride = 1
    for i in range(4):
        var axis = 3 - i
        if mask[axis] != 1:
            if mask[axis] != wanted[axis]:
                raise Error(t"mask has size {mask[axis]} along axis {axis}, expected {wanted[axis]} or 1")
            strides[axis] = stride
        stride *= mask[axis]
    return FlashSizes(
        Int32(batch),
        Int32(query_heads),
        Int32(key_heads),
        Int32(query_len),
        Int32(key_len),
        Int32(head_dim),
        diagonal,
        Int32(strides[0]),
        Int32(strides[1]),
        Int32(strides[2]),
        Int32(strides[3]),
        mask_block,
    )


def scale_or_default(scale: Float64, head_dim: Int) -> Float64:
    """The scale of the scores: 1 / sqrt(head_dim) where `scale` is NaN."""
    return scale if scale == scale else Sizes(0, 0, 0, Int32(head_dim)).scale()


@extensibility.register("attention_train")
struct AttentionTrain:
    """The forward op for training: output, and the log-sum-exp of every row, written in place."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        lse: MutableInputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        attn_mask: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B or 1, N or 1, S or 1, T or 1]
        scale: Float64,  # NaN for 1 / sqrt(d)
        diagonal: Int32,  # how many keys further than its own place a query sees
        mask_block: Int32,  # how many queries, and keys, an element of the mask stands for
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
        var mask: List[Int] = [
            attn_mask.dim_size(0),
            attn_mask.dim_size(1),
            attn_mask.dim_size(2),
            attn_mask.dim_size(3),
        ]
        var tensors = FlashForward[dtype](
            output=output.unsafe_ptr(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](lse.unsafe_ptr()),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            mask=attn_mask.unsafe_ptr().as_imm(),
            sizes=flash_sizes(B, N, G, S, T, d, diagonal, mask, mask_block),
            scale=scale_or_default(scale, d).cast[accum_type[dtype]](),
        )
        var launcher = DeviceLauncher(ctx)
        launch_flash_forward(launcher, tensors)


@extensibility.register("attention_delta")
struct AttentionDelta:
    """Delta = rowsum(dO * O), which the backward op starts from, written in place."""

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
        var sizes = checked_sizes(B, N, S, 1, d)
        var written = rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](delta.unsafe_ptr())
        var dO = grad_output.unsafe_ptr().as_imm()
        var O = output.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_delta[dtype](launcher, written, dO, O, sizes.rows(), Int32(d))


@extensibility.register("attention_train_backward")
struct AttentionTrainBackward:
    """The backward op for training: the gradients of query, key and value, from lse and delta, written in place.
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
        attn_mask: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B or 1, N or 1, S or 1, T or 1]
        scale: Float64,  # NaN for 1 / sqrt(d)
        diagonal: Int32,  # how many keys further than its own place a query sees
        mask_block: Int32,  # how many queries, and keys, an element of the mask stands for
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
        var mask: List[Int] = [
            attn_mask.dim_size(0),
            attn_mask.dim_size(1),
            attn_mask.dim_size(2),
            attn_mask.dim_size(3),
        ]
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
            mask=attn_mask.unsafe_ptr().as_imm(),
            sizes=flash_sizes(B, N, G, S, T, d, diagonal, mask, mask_block),
            scale=scale_or_default(scale, d).cast[accum_type[dtype]](),
        )
        var launcher = DeviceLauncher(ctx)
        launch_flash_backward(launcher, tensors)
