"""Masks for the `wgmma` kernels: TMA loads, and the steps that a one-row mask skips.

TMA boxes of 64 x 64 elements of a mask are stored like those of other tiles, with queries as rows and keys as
columns; `ldmatrix` reads 16 x 16 elements in the layout of a lane's accumulators, transposed if the scores
are. A mask that is one row for all queries has boxes of one row, and steps whose keys it hides are skipped.
Every warp that has read a box arrives at its barrier, because a lane only knows how far its own warp is.
"""

from max.gpu import block_dim, lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TMADescriptor
from std.utils.index import IndexList

from .hopper_tiles import BOX_BYTES, GROUP_THREADS, ROW_BYTES, BOX_SIZE, Shared, tma_load_box
from .masks import VisibleTiles, is_one_row, are_keys_hidden, to_float32
from .tiles import CHUNK
from .tensors import FlashSizes
from shared.common import ImmPtr, MutPtr
from common.tensor_maps import get_tensor_map

comptime STEP_BYTES = 8
"""Bytes per stage that hold the first key of its step and of the next one."""
comptime ROW_BOX_BYTES = 1024
"""Bytes from one single-row box to the next: the period of the swizzle."""


def tma_supports_mask[dtype: DType](mask: ImmPtr[dtype], sizes: FlashSizes) -> Bool:
    """Return whether TMA can load a mask: it has one element per key and rows that start at multiples of 16
    bytes.
    """
    var stride_bits = sizes.mask_b | sizes.mask_n | sizes.mask_s
    var positive = min(sizes.mask_b, sizes.mask_n, sizes.mask_s) >= 0
    var whole = positive and stride_bits % CHUNK == 0 and Int(mask) % 16 == 0
    return whole and sizes.mask_block == 1 and sizes.mask_t == 1


def create_mask_map[
    dtype: DType
](ctx: DeviceContext, mask: ImmPtr[dtype], sizes: FlashSizes) raises -> TMADescriptor:
    """Return the tensor map of a mask; a broadcast axis has size 1."""
    var one = is_one_row(sizes)
    var shape = IndexList[4](
        Int(sizes.batch) if sizes.mask_b else 1,
        Int(sizes.query_heads) if sizes.mask_n else 1,
        1 if one else Int(sizes.query_len),
        Int(sizes.key_len),
    )
    # The stride of an axis of size 1 is never used, but must not be 0.
    var steps = IndexList[4](
        max(Int(sizes.mask_b), CHUNK), max(Int(sizes.mask_n), CHUNK), max(Int(sizes.mask_s), CHUNK), 1
    )
    return get_tensor_map(ctx, mask, shape, steps, IndexList[4](1, 1, 1 if one else BOX_SIZE, BOX_SIZE))


@always_inline
def count_arrivals[has_mask: Bool](groups: Int) -> Int32:
    """Return the number of arrivals that release a stage: one per warpgroup, or one per warp if mask boxes
    are read.
    """
    return Int32(groups * 4 if has_mask else groups)


@always_inline
def is_arriving_lane[has_mask: Bool]() -> Bool:
    """Return whether this lane arrives at the barriers of its group."""
    comptime if has_mask:
        return lane_id() == 0
    return thread_idx.x % GROUP_THREADS == 0


@always_inline
def box_bytes(sizes: FlashSizes) -> Int:
    """Return the bytes from one box of a mask to the next."""
    return ROW_BOX_BYTES if is_one_row(sizes) else BOX_BYTES


@always_inline
def count_mask_bytes[down: Int, right: Int](sizes: FlashSizes) -> Int:
    """Return the bytes that `tma_load_mask` loads."""
    return right * ROW_BYTES if is_one_row(sizes) else down * right * BOX_BYTES


@always_inline
def tma_load_mask[
    down: Int, right: Int
](
    target: Shared[UInt8],
    map: TMADescriptor,
    full: Shared[Int64],
    s0: Int,
    t0: Int,
    head: Int,
    batch: Int,
    sizes: FlashSizes,
):
    """Load the mask's boxes for 64 * down queries from s0 on and 64 * right keys from t0 on, boxes of the
    same queries next to each other; for a one-row mask, load only its row.
    """
    var one = is_one_row(sizes)
    var batch_index = batch if sizes.mask_b else 0
    var head_index = head if sizes.mask_n else 0
    comptime for below in range(down):
        comptime for along in range(right):
            if below == 0 or not one:
                tma_load_box(
                    target.unsafe_offset((below * right + along) * box_bytes(sizes)),
                    map,
                    full,
                    t0 + along * BOX_SIZE,
                    0 if one else s0 + below * BOX_SIZE,
                    head_index,
                    batch_index,
                )


@always_inline
def add_mask[
    dtype: DType, columns: SIMDLength, //, transposed: Bool = False
](mut scores: SIMD[DType.float32, columns], scale: Float32, boxes: Shared[UInt8], sizes: FlashSizes):
    """Scale products and add the mask. A warpgroup's 64 rows are the queries of `boxes`, which are next to
    each other; if `transposed`, the rows are the keys of one box, and the columns its queries.
    """
    var lane = Int(lane_id())
    var row = thread_idx.x % GROUP_THREADS // 32 * 16
    # This lane provides the address of this row and chunk of the four matrices.
    var below = lane % 8 + lane // 16 * 8 if transposed else lane % 16
    var right = lane // 8 % 2 if transposed else lane // 16
    var one = is_one_row(sizes)
    var pitch = 0 if one else ROW_BYTES
    var key = 0 if one else below % 8
    comptime for pair in range(Int(columns) // 8):
        var at = boxes
        comptime if transposed:
            at = boxes.unsafe_offset((16 * pair + below) * pitch + ((row // CHUNK + right) ^ key) * 16)
        else:
            at = boxes.unsafe_offset(
                pair // 4 * box_bytes(sizes) + (row + below) * pitch + ((2 * (pair % 4) + right) ^ key) * 16
            )
        var elements = to_float32(ld_matrix[8, transpose=transposed](at.unsafe_bitcast[Scalar[dtype]]()))
        comptime for i in range(8):
            scores[8 * pair + i] = scores[8 * pair + i].fma(scale, elements[i])


struct Steps[dtype: DType, keys: Int, has_mask: Bool](Copyable, Movable):
    """The steps of a loop over a head's keys, `keys` at a time; a step is identified by its first key. The
    producer warp selects the steps, and stores for the consumers which step follows each one.
    """

    var visible: VisibleTiles[Self.dtype, Self.keys]
    var skips: Bool
    var end: Int

    @__allow_legacy_any_origin_fields
    var step_info: Shared[Int32]

    @always_inline
    def __init__(
        out self, mask: ImmPtr[Self.dtype], head: Int, end: Int, step_info: Shared[Int32], sizes: FlashSizes
    ):
        """Set up the steps up to key `end`, without those that a one-row mask hides; `step_info` has two
        numbers per stage.
        """
        self.visible = VisibleTiles[Self.dtype, Self.keys](mask)
        self.skips = False
        comptime if Self.has_mask:
            self.visible = VisibleTiles[Self.dtype, Self.keys](
                mask.unsafe_offset(sizes.head_mask_offset(head))
            )
            self.skips = is_one_row(sizes)
        self.end = end
        self.step_info = step_info

    @always_inline
    def first(mut self, sizes: FlashSizes) -> Int:
        """Return the first step. There is always one: if every key is hidden, the step at key 0."""
        var t = self.after(-Self.keys, sizes)
        return t if t < self.end else 0

    @always_inline
    def after(mut self, t: Int, sizes: FlashSizes) -> Int:
        """Return the step after t; `end` or more if t was the last."""
        comptime if Self.has_mask:
            if self.skips:
                return self.visible.following(t + Self.keys, self.end, sizes)
        return t + Self.keys

    @always_inline
    def write_step(self, stage: Int, t: Int, following: Int):
        """Write a stage's step and the one after it. Call this before setting the number of bytes that
        the stage's barrier expects.
        """
        comptime if Self.has_mask:
            self.step_info[unsafe_offset=2 * stage] = Int32(t)
            self.step_info[unsafe_offset=2 * stage + 1] = Int32(following)


@always_inline
def read_first_step[has_mask: Bool](step_info: Shared[Int32]) -> Int:
    """Return the first step. The first stage must have arrived."""
    comptime if has_mask:
        return Int(step_info[unsafe_offset=0])
    return 0


@always_inline
def read_next_step[keys: Int, has_mask: Bool](step_info: Shared[Int32], stage: Int, t: Int) -> Int:
    """Return the step after t. The stage must have arrived."""
    comptime if has_mask:
        return Int(step_info[unsafe_offset=2 * stage + 1])
    return t + keys


@always_inline
def are_shared_keys_hidden[
    dtype: DType, //, count: Int
](mask: ImmPtr[dtype], head: Int, group_heads: Int, t0: Int, sizes: FlashSizes) -> Bool:
    """Return whether a one-row mask hides `count` keys from t0 on in all of `group_heads` heads, starting at
    `head`.
    """
    if not is_one_row(sizes):
        return False
    var causal = True
    for member in range(group_heads if sizes.mask_n else 1):
        causal = causal and are_keys_hidden[count](mask, head + member, t0, sizes)
    return causal


def clear_rows[dtype: DType](target: MutPtr[dtype], first: Int, rows: Int, count: Int, pitch: Int, d: Int):
    """Write zeros to `rows` rows from `first` on of a matrix [count, d], chunk by chunk, with all threads of
    a block.
    """
    var chunks = d // CHUNK
    for i in range(thread_idx.x, min(rows, count - first) * chunks, block_dim.x):
        var place = (first + i // chunks) * pitch + i % chunks * CHUNK
        target.unsafe_store[alignment=16](place, SIMD[dtype, CHUNK](0))
