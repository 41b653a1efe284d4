"""The gradient of an additive mask, given: kernel, launch, CPU path and op.

The mask is added to the scores, so its gradient is dS, summed over all that an element of it was broadcast to: the batch,
the heads, the queries or the keys, wherever the mask has the size 1. The scores are computed a third time for it, two
products more; beside the gradient itself, in the mask's own shape, nothing is stored.

Over all keys of a row P * dP and P * delta cancel. So they do here, to the rounding of sums: a mask that is broadcast along the keys
gets a delta made of this pass's own P and dP. Delta as it comes is made of the output, and has its rounding, of 16 bits perhaps.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext, Dim
from layout.tile_tensor import stack_allocation

from .cpu_reference import exponential
from .flash_cpu import dot_cpu, score_cpu
from .flash_ops import flash_sizes, scale_or_default
from .flash_tensors import FlashSizes, PackedSizes
from .shared.checks import expect_shape
from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher, Launcher
from .tiles import MAX_GRID_Z, TILE, TILE_LAYOUT, probability, row_total, seen_score, tile_product


@fieldwise_init
struct MaskGradient[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """What the pass writes, and what it reads."""

    var grad_mask: Pointer[Scalar[Self.dtype], Self.written]  # [B or 1, N or 1, S or 1, T or 1]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var output: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var delta: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var mask: Pointer[Scalar[Self.dtype], Self.read]  # as grad_mask
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]


@always_inline
def own_size(size: Int32, stride: Int32) -> Int:
    """The mask's size along an axis: that of the scores, or 1 where it was broadcast."""
    return Int(size) if stride else 1


# ANCHOR: mask_gradient_kernel
def mask_gradient_kernel[
    dtype: DType
](
    grad_mask: MutPtr[dtype],  # [B or 1, N or 1, S or 1, T or 1]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    output: ImmPtr[dtype],  # [B, N, S, d]
    lse: ImmPtr[accum_type[dtype]],  # [B, N, S]
    delta: ImmPtr[accum_type[dtype]],  # [B, N, S]
    mask: ImmPtr[dtype],  # as grad_mask
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """The gradient of the mask. A block owns a tile of it, and walks over the heads, queries and keys that share it.

    Thread (x, y) holds query s0 + y and key t0 + x. Along an axis of size 1 the block walks over all tiles, and the threads
    add up what they have at the end.
    """
    comptime accum = accum_type[dtype]
    var sizes = FlashSizes(packed)
    var B = Int(sizes.batch)
    var N = Int(sizes.query_heads)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var totals = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var mask_heads = own_size(sizes.query_heads, sizes.mask_n)
    var first_s = block_idx.y * TILE
    var first_t = block_idx.x * TILE
    var end_s = first_s + 1 if sizes.mask_s else S
    var end_t = first_t + 1 if sizes.mask_t else T

    for own in range(block_idx.z, own_size(sizes.batch, sizes.mask_b) * mask_heads, grid_dim.z):
        var first_b = own // mask_heads
        var first_n = own % mask_heads
        var total = CompensatedSum[accum]()
        for b in range(first_b, first_b + 1 if sizes.mask_b else B):
            for n in range(first_n, first_n + 1 if sizes.mask_n else N):
                var head = b * N + n
                var Q = query.unsafe_offset(head * S * d)
                var dO = grad_output.unsafe_offset(head * S * d)
                var K = key.unsafe_offset(sizes.shared_head(head) * T * d)
                var V = value.unsafe_offset(sizes.shared_head(head) * T * d)
                var M = mask.unsafe_offset(sizes.mask_of(head))
                for s0 in range(first_s, end_s, TILE):
                    var s = s0 + y
                    var row_lse = lse[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                    var row_delta = delta[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                    var weights = Scalar[accum](0)
                    var slopes = Scalar[accum](0)
                    for t0 in range(first_t, min(end_t, sizes.keys_seen(s0 + TILE - 1)), TILE):
                        var product = tile_product[dtype](Q, K, s0, t0, S, T, d)
                        var score = seen_score(scale * product, M, s, t0 + x, sizes)
                        var weight = probability(score, row_lse)
                        weights += weight
                        slopes += weight * tile_product[dtype](dO, V, s0, t0, S, T, d)
                    if not sizes.mask_t:
                        # The threads of a row have all of its keys.
                        var rounded = Scalar[accum](0)
                        for i in range(x, d if s < S else 0, TILE):
                            var at = (head * S + s) * d + i
                            rounded += (
                                grad_output[unsafe_offset=at].cast[accum]()
                                * output[unsafe_offset=at].cast[accum]()
                            )
                        var weight = row_total(weights)
                        var exact = row_total(slopes)
                        rounded = row_total(rounded)
                        # Lse has a rounding too: P need not add up to 1.
                        if weight != 0:
                            exact /= weight
                        row_delta += exact - rounded
                    total += slopes - row_delta * weights
        totals[y, x] = total.total
        barrier()
        # Where an axis has one element, one thread of it adds up for all.
        var s = first_s + y
        var t = first_t + x
        if s < own_size(sizes.query_len, sizes.mask_s) and t < own_size(sizes.key_len, sizes.mask_t):
            var sum = CompensatedSum[accum]()
            for i in range(y, y + 1 if sizes.mask_s else TILE):
                for j in range(x, x + 1 if sizes.mask_t else TILE):
                    sum += totals[i, j]
            var at = sizes.mask_of(first_b * N + first_n) + s * Int(sizes.mask_s) + t * Int(sizes.mask_t)
            grad_mask[unsafe_offset=at] = sum.total.cast[dtype]()
        barrier()


# ANCHOR_END: mask_gradient_kernel


def mask_gradient_grid(sizes: FlashSizes) -> Dim:
    """The blocks of `mask_gradient_kernel`, which strides over the masks."""
    var rows = own_size(sizes.query_len, sizes.mask_s)
    var columns = own_size(sizes.key_len, sizes.mask_t)
    var masks = own_size(sizes.batch, sizes.mask_b) * own_size(sizes.query_heads, sizes.mask_n)
    return Dim(ceildiv(columns, TILE), ceildiv(rows, TILE), min(masks, MAX_GRID_Z))


def launch_mask_gradient[L: Launcher, dtype: DType, //](mut launcher: L, t: MaskGradient[dtype]) raises:
    """One launch: grad_mask."""
    var grid = mask_gradient_grid(t.sizes)
    if grid.x() * grid.y() * grid.z() == 0:
        return
    launcher.launch[mask_gradient_kernel[dtype]](
        "mask_gradient",
        t.grad_mask,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.output,
        t.lse,
        t.delta,
        t.mask,
        t.sizes.packed(),
        t.scale,
        grid_dim=grid,
        block_dim=Dim(TILE, TILE),
    )


def mask_gradient_cpu[
    dtype: DType, //
](p: MaskGradient[dtype], sums: MutPtr[DType.float64], count: Int):  # sums: [count], as grad_mask
    """DS of every score, added to the element of the mask that it had."""
    comptime accum = DType.float64
    var S = Int(p.sizes.query_len)
    var T = Int(p.sizes.key_len)
    var d = Int(p.sizes.head_dim)
    var scale = p.scale.cast[accum]()
    for i in range(count):
        sums[unsafe_offset=i] = 0
    for head in range(p.sizes.heads()):
        var K = p.key.unsafe_offset(p.sizes.shared_head(head) * T * d)
        var V = p.value.unsafe_offset(p.sizes.shared_head(head) * T * d)
        var mask_at = p.sizes.mask_of(head)
        for s in range(S):
            var row = head * S + s
            var q = p.query.unsafe_offset(row * d)
            var dO = p.grad_output.unsafe_offset(row * d)
            var row_lse = p.lse[unsafe_offset=row].cast[accum]()
            var shift = Scalar[accum](0) if row_lse == Scalar[accum].MIN else row_lse
            var row_delta = p.delta[unsafe_offset=row].cast[accum]()
            var weights = Scalar[accum](0)
            var slopes = Scalar[accum](0)
            for t in range(p.sizes.keys_seen(s)):
                var score = score_cpu(q, K, p.mask, mask_at, s, t, p.sizes, scale)
                var dP = dot_cpu(dO, V.unsafe_offset(t * d), d)
                var weight = exponential(score - shift)
                weights += weight
                slopes += weight * dP
                if p.sizes.mask_t:
                    sums[unsafe_offset=mask_at + p.sizes.mask_at(s, t)] += weight * (dP - row_delta)
            if not p.sizes.mask_t:
                # Lse has a rounding too: P need not add up to 1.
                var exact = slopes / weights if weights != 0 else Scalar[accum](0)
                row_delta += exact - dot_cpu(dO, p.output.unsafe_offset(row * d), d)
                sums[unsafe_offset=mask_at + p.sizes.mask_at(s, 0)] += slopes - row_delta * weights
    for i in range(count):
        p.grad_mask[unsafe_offset=i] = sums[unsafe_offset=i].cast[dtype]()


@extensibility.register("attention_train_mask_backward")
struct AttentionTrainMaskBackward:
    """The gradient of an additive mask, from lse and delta, written in place."""

    @staticmethod
    def execute[
        target: StaticString, accum: DType, dtype: DType
    ](
        grad_attn_mask: MutableInputTensor[
            dtype=dtype, rank=4, static_spec=_
        ],  # [B or 1, N or 1, S or 1, T or 1]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, G, T, d]
        lse: InputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        delta: InputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, S]
        attn_mask: InputTensor[dtype=dtype, rank=4, static_spec=_],  # as grad_mask
        output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, S, d]
        scale: Float64,  # NaN for 1 / sqrt(d)
        diagonal: Int32,  # how many keys further than its own place a query sees
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "lse and delta must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var S = query.dim_size(2)
        var d = query.dim_size(3)
        var G = key.dim_size(1)
        var T = key.dim_size(2)
        expect_shape("grad_output", grad_output, B, N, S, d)
        expect_shape("key", key, B, G, T, d)
        expect_shape("value", value, B, G, T, d)
        expect_shape("output", output, B, N, S, d)
        expect_shape("lse", lse, B, N, S)
        expect_shape("delta", delta, B, N, S)
        var mask: List[Int] = [
            attn_mask.dim_size(0),
            attn_mask.dim_size(1),
            attn_mask.dim_size(2),
            attn_mask.dim_size(3),
        ]
        expect_shape("grad_attn_mask", grad_attn_mask, mask[0], mask[1], mask[2], mask[3])
        var tensors = MaskGradient[dtype](
            grad_mask=grad_attn_mask.unsafe_ptr(),
            grad_output=grad_output.unsafe_ptr().as_imm(),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            output=output.unsafe_ptr().as_imm(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], ImmutAnyOrigin]](lse.unsafe_ptr().as_imm()),
            delta=rebind[Pointer[Scalar[accum_type[dtype]], ImmutAnyOrigin]](delta.unsafe_ptr().as_imm()),
            mask=attn_mask.unsafe_ptr().as_imm(),
            sizes=flash_sizes(B, N, G, S, T, d, diagonal, mask, 1),
            scale=scale_or_default(scale, d).cast[accum_type[dtype]](),
        )
        var launcher = DeviceLauncher(ctx)
        comptime if target == "cpu":
            var count = mask[0] * mask[1] * mask[2] * mask[3]
            mask_gradient_cpu(tensors, launcher.workspace[DType.float64]("sums", count), count)
        else:
            launch_mask_gradient(launcher, tensors)
