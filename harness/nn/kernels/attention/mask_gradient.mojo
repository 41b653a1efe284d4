"""The gradient of an additive 16-bit mask with `mma.sync`: kernel and launch.

The mask is added to the scores, so its gradient is dS = P * (dP - delta), summed over the axes along which
the mask has size 1: batch, heads or queries. This recomputes the scores a third time, which takes two more
products, but stores nothing except the gradient. A block owns a tile of the mask and loops over the heads
that share it and, for a one-row mask, over the queries. A warp keeps its sums in registers, and no other warp
adds to them.
"""

from std.math import ceildiv, exp2
from std.memory import AddressSpace
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.host import Dim
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group, external_memory
from max.gpu.primitives import warp

from .layout import Layout, has_tensor_cores
from .scores import LOG2_E, Strides, all_visible, mask_hidden_keys, score_shift, row_offset
from .masks import MaskTile
from .tiles import HIDDEN, Lane, LeftOperand, SharedPtr, Sums, load_tile
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, accum_type
from shared.launcher import Launcher

comptime KEYS = 64
"""Keys in a block's tile."""
comptime PART = 32
"""Keys whose scores a warp holds at a time."""
comptime WARPS = 4
comptime BANDS = 1
"""Groups of 16 queries that a warp owns; with more, registers would spill."""
comptime ROWS = 16 * BANDS * WARPS


@fieldwise_init
struct MaskGradient[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The tensors of the pass."""

    var grad_mask: Pointer[Scalar[Self.dtype], Self.written]  # [B or 1, N or 1, S or 1, T]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var delta: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var mask: Pointer[Scalar[Self.dtype], Self.read]  # like grad_mask
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]


@always_inline
def mask_size(size: Int32, stride: Int32) -> Int:
    """Return the mask's size along an axis: the size of the scores, or 1 if the mask is broadcast."""
    return Int(size) if stride else 1


struct MaskGradientTile(Copyable, Movable):
    """A block's tile of a mask, and the loop over the batch entries, heads and tiles of queries that share
    the tile.
    """

    var t0: Int
    """The first key of the tile."""
    var steps: Int
    """Iterations of the loop."""
    var _s0: Int
    var _entry: Int
    var _head: Int
    var _heads: Int
    var _tiles: Int

    @always_inline
    def __init__(out self, sizes: FlashSizes):
        """Compute the tile of this block."""
        var mask_heads = mask_size(sizes.query_heads, sizes.mask_n)
        var tiles_t = ceildiv(Int(sizes.key_len), KEYS)
        var tiles_s = ceildiv(mask_size(sizes.query_len, sizes.mask_s), ROWS)
        var mask_index = block_idx.x // tiles_t // tiles_s
        self.t0 = block_idx.x % tiles_t * KEYS
        self._s0 = block_idx.x // tiles_t % tiles_s * ROWS
        self._entry = mask_index // mask_heads
        self._head = mask_index % mask_heads
        self._heads = 1 if sizes.mask_n else Int(sizes.query_heads)
        self._tiles = 1 if sizes.mask_s else ceildiv(Int(sizes.query_len), ROWS)
        self.steps = (1 if sizes.mask_b else Int(sizes.batch)) * self._heads * self._tiles

    @staticmethod
    def blocks(sizes: FlashSizes) -> Int:
        """Return the number of blocks for the whole mask."""
        var tiles = ceildiv(mask_size(sizes.query_len, sizes.mask_s), ROWS) * ceildiv(
            Int(sizes.key_len), KEYS
        )
        return tiles * mask_size(sizes.batch, sizes.mask_b) * mask_size(sizes.query_heads, sizes.mask_n)

    @always_inline
    def query(self, step: Int) -> Int:
        """Return the first query of a step."""
        return self._s0 + step % self._tiles * ROWS

    @always_inline
    def head(self, step: Int, sizes: FlashSizes) -> Int:
        """Return the index of a step's head across the batch."""
        var heads = step // self._tiles
        var entry = self._entry + heads // self._heads
        return entry * Int(sizes.query_heads) + self._head + heads % self._heads

    @always_inline
    def visible(self, step: Int, sizes: FlashSizes) -> Bool:
        """Return whether any query of a step sees a key of the tile."""
        return self.t0 < sizes.visible_keys(min(self.query(step) + ROWS, Int(sizes.query_len)) - 1)

    @always_inline
    def store[
        dtype: DType, //, bands: Int
    ](
        self,
        grad_mask: MutPtr[dtype],
        totals: Array[Sums, bands * (KEYS // 8)],
        warp_sums: SharedPtr[DType.float32],
        sizes: FlashSizes,
    ):
        """Write the sums of a block's warps. For a one-row mask, first add them over all queries, in the
        memory `warp_sums`.
        """
        comptime columns_per_tile = KEYS // 8
        var warp_rows = thread_idx.x // 32 * (16 * bands)
        var target = grad_mask.unsafe_offset(self._entry * Int(sizes.mask_b) + self._head * Int(sizes.mask_n))
        if sizes.mask_s:
            store_tile[bands, columns_per_tile](target, totals, self._s0 + warp_rows, self.t0, sizes)
            return
        # For a one-row mask, add over the queries of a warp, then over the warps.
        barrier()
        comptime for j in range(columns_per_tile):
            comptime for side in range(2):
                var sum = Float32(0)
                comptime for band in range(bands):
                    sum += (
                        totals[band * columns_per_tile + j][side]
                        + totals[band * columns_per_tile + j][side + 2]
                    )
                comptime for distance in range(3):
                    sum += warp.shuffle_xor(sum, UInt32(4 << distance))
                if lane_id() < 4:
                    warp_sums[unsafe_offset=thread_idx.x // 32 * KEYS + j * 8 + lane_id() * 2 + side] = sum
        barrier()
        if thread_idx.x < KEYS and self.t0 + thread_idx.x < Int(sizes.key_len):
            var sum = Float32(0)
            comptime for warp_index in range(WARPS):
                sum += warp_sums[unsafe_offset=warp_index * KEYS + thread_idx.x]
            target[unsafe_offset=(self.t0 + thread_idx.x) * Int(sizes.mask_t)] = sum.cast[dtype]()


@__name("attention_mask_gradient")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(32 * WARPS)),
    `nvvm.minctasm`=SIMDLength(2),
)
def fast_mask_gradient_kernel[
    dtype: DType, width: Int
](
    grad_mask: MutPtr[dtype],  # [B or 1, N or 1, S or 1, T]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S]
    mask: ImmPtr[dtype],  # like grad_mask
    grad_strides: Strides,
    query_strides: Strides,
    key_strides: Strides,
    value_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
):
    """Compute the gradient of the mask. A block owns 64 keys and ROWS queries of it, or 64 keys of its only
    row.
    """
    comptime bands = BANDS
    comptime rows = ROWS
    comptime threads = 32 * WARPS
    comptime columns = PART // 8
    comptime columns_per_tile = KEYS // 8
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var mask_tile = MaskGradientTile(sizes)
    var t0 = mask_tile.t0
    var queries = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var grads = queries.unsafe_offset(rows * width)
    var keys = grads.unsafe_offset(rows * width)
    var values = keys.unsafe_offset(KEYS * width)
    var masks = values.unsafe_offset(KEYS * width)
    var lane = Lane[width]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var query_operand = LeftOperand[dtype, bands, width, False](
        queries.unsafe_offset(warp_rows * width), lane
    )
    var grad_operand = LeftOperand[dtype, bands, width, False](grads.unsafe_offset(warp_rows * width), lane)
    var totals = Array[Sums, bands * columns_per_tile](fill=0)
    for step in range(mask_tile.steps):
        if not mask_tile.visible(step, sizes):
            continue
        var s0 = mask_tile.query(step)
        var head = mask_tile.head(step, sizes)
        var shared_head = sizes.shared_head(head)
        var head_mask = MaskTile[dtype, KEYS](mask.unsafe_offset(sizes.head_mask_offset(head)), sizes)
        # Wait until all threads are done with the previous step's tiles.
        barrier()
        load_tile[rows, width, threads](
            queries,
            query.unsafe_offset(row_offset(head, sizes.query_heads, query_strides)),
            s0,
            S,
            Int(query_strides[2]),
            d,
        )
        load_tile[rows, width, threads](
            grads,
            grad_output.unsafe_offset(row_offset(head, sizes.query_heads, grad_strides)),
            s0,
            S,
            Int(grad_strides[2]),
            d,
        )
        load_tile[KEYS, width, threads](
            keys,
            key.unsafe_offset(row_offset(shared_head, sizes.key_heads, key_strides)),
            t0,
            T,
            Int(key_strides[2]),
            d,
        )
        load_tile[KEYS, width, threads](
            values,
            value.unsafe_offset(row_offset(shared_head, sizes.key_heads, value_strides)),
            t0,
            T,
            Int(value_strides[2]),
            d,
        )
        head_mask.load[rows, threads](masks, s0, t0, sizes)
        async_copy_commit_group()
        var first = s0 + warp_rows
        var shifts = Array[Float32, 2 * bands](fill=0)
        var deltas = Array[Float32, 2 * bands](fill=0)
        comptime for half in range(2 * bands):
            var s = first + half * 8 + lane_id() // 4
            var row = head * S + min(s, S - 1)
            # A query past the end has P = 0 and dP = 0.
            shifts[half] = score_shift[True](lse[unsafe_offset=row]) if s < S else -HIDDEN
            deltas[half] = delta[unsafe_offset=row] if s < S else 0
        async_copy_wait_group(0)
        barrier()
        comptime for part in range(KEYS // PART):
            comptime t1 = part * PART
            var score_grads = query_operand.multiply_transposed[columns](
                keys.unsafe_offset(t1 * width), Array[Sums, bands * columns](fill=0)
            )
            head_mask.add[bands, columns](score_grads, scale, masks, warp_rows, t1)
            if not all_visible(first, first + 1, t0 + t1, t0 + t1 + PART, sizes):
                mask_hidden_keys[bands, columns](score_grads, HIDDEN, first, t0 + t1, sizes)
            var minus_delta = Array[Sums, bands * columns](fill=0)
            comptime for frag in range(bands * columns):
                comptime half = frag // columns * 2
                minus_delta[frag] = Sums(-deltas[half], -deltas[half], -deltas[half + 1], -deltas[half + 1])
                comptime for e in range(4):
                    score_grads[frag][e] = exp2(score_grads[frag][e] * LOG2_E - shifts[half + e // 2])
            var minus_delta_dp = grad_operand.multiply_transposed[columns](
                values.unsafe_offset(t1 * width), minus_delta
            )
            comptime for frag in range(bands * columns):
                comptime total = frag // columns * columns_per_tile + part * columns + frag % columns
                totals[total] += score_grads[frag] * minus_delta_dp[frag]

    mask_tile.store[bands](grad_mask, totals, queries.unsafe_bitcast[Float32](), sizes)


@always_inline
def store_tile[
    dtype: DType, //, bands: Int, columns_per_tile: Int
](
    target: MutPtr[dtype],
    totals: Array[Sums, bands * columns_per_tile],
    first: Int,
    t0: Int,
    sizes: FlashSizes,
):
    """Write a warp's sums to the rows from `first` on of a head's gradient."""
    comptime both = 2 * size_of[Scalar[dtype]]()
    var pairs = sizes.mask_t == 1 and sizes.mask_s % 2 == 0 and Int(target) % both == 0
    comptime for half in range(2 * bands):
        var s = first + half * 8 + lane_id() // 4
        if s < Int(sizes.query_len):
            comptime for j in range(columns_per_tile):
                var t = t0 + j * 8 + lane_id() % 4 * 2
                var from_totals = totals[half // 2 * columns_per_tile + j]
                var pair = SIMD[DType.float32, 2](from_totals[half % 2 * 2], from_totals[half % 2 * 2 + 1])
                var rounded = pair.cast[dtype]()
                var at = target.unsafe_offset(s * Int(sizes.mask_s) + t * Int(sizes.mask_t))
                if pairs and t + 1 < Int(sizes.key_len):
                    at.unsafe_store[alignment=both](0, rounded)
                else:
                    comptime for e in range(2):
                        if t + e < Int(sizes.key_len):
                            at[unsafe_offset=e * Int(sizes.mask_t)] = rounded[e]


def launch_mask_gradient[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: MaskGradient[dtype], layout: Layout) raises:
    """Launch the kernel, with the tiles for the head dimension; the gradient has the mask's strides."""
    comptime if has_tensor_cores[dtype]():
        if t.sizes.head_dim <= 64:
            launch_mask_gradient_tiles[64](launcher, t, layout)
        else:
            launch_mask_gradient_tiles[128](launcher, t, layout)
    else:
        raise Error("the gradient of a mask needs a 16-bit dtype and NVIDIA's tensor cores")


def launch_mask_gradient_tiles[
    L: Launcher, dtype: DType, //, width: Int
](mut launcher: L, t: MaskGradient[dtype], layout: Layout) raises:
    """Launch the kernel with one tile size."""
    ref sizes = t.sizes
    launcher.launch[fast_mask_gradient_kernel[dtype, width]](
        "attention_mask_gradient",
        t.grad_mask,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.mask,
        layout.grad_output,
        layout.query,
        layout.key,
        layout.value,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        grid_dim=Dim(MaskGradientTile.blocks(sizes)),
        block_dim=Dim(32 * WARPS),
        shared_bytes=((2 * ROWS + 2 * KEYS) * width + ROWS * KEYS) * size_of[Scalar[dtype]](),
    )
