"""Rows in the row kernels: loads, buffers in shared memory, stores.

Each kernel reads its operands from DRAM once, 16 bytes per thread at a time, and keeps a row in registers
between the sums over it and what is computed from them; `common/row_reductions.mojo` adds over the threads of
a row. For rows that are not a whole number of 16-byte vectors, a thread loads as many single elements. On
Hopper the aligned vectors that cover such rows of 16-bit elements pass through shared memory instead.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from std.sys import size_of
from max.gpu import WARP_SIZE, barrier, block_dim, syncwarp, thread_idx

from shared.common import ImmPtr, MutPtr, lanes_of_a_warp
from common.row_reductions import (
    VECTOR_BYTES,
    load_across,
    copy_vector,
    load_global,
    store_vector,
    vector_width,
)
from .tensors import Sizes

comptime EARLY_ELEMENTS = 4 * 1024 * 1024
"""The most elements of the input with which a row kernel starts early."""
comptime ANY_THREADS = 256
"""Threads that share a row in the kernels for any row."""
comptime WIDE_VECTORS = 4
"""The most vectors of a row per thread in `ln_backward_wide`."""
comptime NARROW_LANES = [4, 8, 16]
"""Threads that share a narrow row, fewest first."""
comptime NARROW_VECTORS = 2
"""The most vectors of a narrow row per thread."""
comptime DX = 1
"""Results of a backward row kernel, added: dx. The memory of omitted results is not touched."""
comptime LN_OUT = 2
"""Result of a backward row kernel: ln_out."""
comptime SUMS = 4
"""Result of a backward row kernel: partial sums of dgamma and dbeta."""


@always_inline
def normalised[
    dtype: DType, accum: DType, width: SIMDLength
](x: SIMD[accum, width], mean: Scalar[accum], rstd: Scalar[accum]) -> SIMD[accum, width]:
    """Return x_hat = (x - mean) * rstd of elements that were `dtype`.

    For 16-bit elements one operation: the rounding of mean * rstd is far below that of the elements.
    """
    comptime if dtype.is_half_float():
        return x.fma(rstd, -mean * rstd)
    else:
        return (x - mean) * rstd


@always_inline
def load_elements[
    dtype: DType, //, width: Int, wide: DType
](source: ImmPtr[dtype], offset: Int) -> SIMD[wide, width]:
    """Load `width` elements, aligned to as many, from global memory, in the type of sums."""
    comptime alignment = min(VECTOR_BYTES, width * size_of[Scalar[dtype]]())
    return source.unsafe_load[width=width, alignment=alignment](offset).cast[wide]()


@always_inline
def store_elements[
    dtype: DType, width: SIMDLength, //
](target: MutPtr[dtype], offset: Int, values: SIMD[dtype, width]):
    """Store elements, aligned to as many, in global memory."""
    target.unsafe_store[alignment=min(VECTOR_BYTES, Int(width) * size_of[Scalar[dtype]]())](offset, values)


@always_inline
def copy_elements[
    dtype: DType, //, width: Int
](target: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED], source: ImmPtr[dtype]):
    """Copy `width` elements, one vector or more, to shared memory, asynchronously on NVIDIA."""
    comptime for v in range(width // vector_width[dtype]):
        copy_vector(
            target.unsafe_offset(v * vector_width[dtype]), source.unsafe_offset(v * vector_width[dtype])
        )


@always_inline
def copy_constants[
    dtype: DType, accum: DType, //, vectors: Int, width: Int
](
    target: Pointer[mut=True, Scalar[accum], _, address_space=AddressSpace.SHARED],
    source: ImmPtr[dtype],
    columns: Int,
):
    """Copy this thread's vectors of gamma or beta, `width` elements each, converted once for all rows."""
    comptime for v in range(vectors):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            store_vector(target, v * block_dim.x * width, load_global[width, accum](source, h))


def lanes_of_a_row[dtype: DType](H: Int) -> Int:
    """Return the lanes of a warp that share a row of H aligned elements, few enough that narrow rows leave
    none idle.

    Only for 16-bit rows: for others a warp's vectors hold a row half as long, and each kernel costs compile
    time.
    """
    comptime if dtype.is_half_float():
        comptime for lanes in NARROW_LANES:
            if H <= NARROW_VECTORS * lanes * vector_width[dtype]:
                return lanes
    return lanes_of_a_warp()


def whole_warps(groups: Int, lanes: Int) -> Int:
    """Round the number of groups of `lanes` threads up to whole warps."""
    var of_a_warp = max(1, lanes_of_a_warp() // lanes)
    return ceildiv(groups, of_a_warp) * of_a_warp


def starts_early(sizes: Sizes) -> Bool:
    """Return whether a row kernel is short enough to be worth starting before the previous launch is done."""
    return Int(sizes.rows()) * Int(sizes.hidden_dim) <= EARLY_ELEMENTS


# ---- Rows in shared memory -----------------------------------------------------------------------------------


def wide_room[dtype: DType](group: Int) -> Int:
    """Return the elements of a row's buffer in `ln_backward_wide`: the vectors that its threads own, and one
    more.
    """
    return (WIDE_VECTORS * group + 1) * vector_width[dtype]


def wide_slots(shifted: Bool) -> Int:
    """Return the row buffers per group of threads: two for the input and dln each, and one for dx if it is
    shifted.
    """
    return 5 if shifted else 4


@always_inline
def fetch_row[
    dtype: DType, //, step: Int
](
    slot: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED],
    source: ImmPtr[dtype],
    row: Int,
    H: Int,
    rows: Int,
):
    """Copy the aligned vectors that cover a row at any address, and one vector more; this thread WIDE_VECTORS
    vectors, `step` elements apart. Past the tensor there are zeros.

    Args:
        slot: The target.
        source: The tensor, [rows, H].
        row: The index of the row.
        H: Elements of a row.
        rows: Rows of the tensor.
    """
    comptime width = vector_width[dtype]
    var column = thread_idx.x * width
    var x_row = source.unsafe_offset(row * H // width * width)
    var inside = rows * H - row * H // width * width
    var last = ceildiv(H, width) * width
    if last + width <= inside:
        var left = Int32(H - column)
        comptime for v in range(WIDE_VECTORS):
            if Int32(v * step) < left:
                copy_vector(slot.unsafe_offset(column + v * step), x_row.unsafe_offset(column + v * step))
        if thread_idx.x == 0:
            copy_vector(slot.unsafe_offset(last), x_row.unsafe_offset(last))
        return
    for h in range(column, last + width, step):
        for i in range(h, h + width):
            slot[unsafe_offset=i] = x_row[unsafe_offset=i] if i < inside else Scalar[dtype](0)


@always_inline
def store_row[
    dtype: DType, //, step: Int
](
    target: MutPtr[dtype],
    slot: Pointer[Scalar[dtype], _, address_space=AddressSpace.SHARED],
    row: Int,
    H: Int,
):
    """Store a row from shared memory at any address of `target`, [rows, H]: its aligned vectors, of which
    this thread stores WIDE_VECTORS, `step` elements apart; and the elements at both ends one by one.
    """
    comptime width = vector_width[dtype]
    var y_row = target.unsafe_offset(row * H)
    # The first element of a row at an aligned address.
    var first = Int32(-row * H) & Int32(width - 1)
    var column = thread_idx.x * width
    var y = y_row.unsafe_offset(column + Int(first))
    var left = Int32(H - column) - first
    comptime for v in range(WIDE_VECTORS):
        if Int32(v * step + width) <= left:
            y.unsafe_store[alignment=VECTOR_BYTES](v * step, load_across(slot, column + v * step, first))
    var thread = Int32(thread_idx.x)
    if thread < first and thread < Int32(H):
        y_row[unsafe_offset=thread_idx.x] = slot[unsafe_offset=thread_idx.x]
    var rest = Int(first + (Int32(H) - first) // Int32(width) * Int32(width)) + thread_idx.x
    if thread < Int32(width) and rest >= Int(first) and rest < H:
        y_row[unsafe_offset=rest] = slot[unsafe_offset=rest]


@always_inline
def fill_row[dtype: DType, //, step: Int](target: MutPtr[dtype], row: Int, H: Int, pitch: Int):
    """Write zeros to the padding of a row of `target`, [rows, pitch], by threads that own vectors `step`
    elements apart.
    """
    comptime width = vector_width[dtype]
    for h in range(ceildiv(H, width) * width + thread_idx.x * width, pitch, step):
        target.unsafe_store[alignment=VECTOR_BYTES](row * pitch + h, SIMD[dtype, width](0))


@always_inline
def wait_for_row[group: Int]():
    """Wait for all of the `group` threads of a row; every thread of the block must call it."""
    comptime if group == WARP_SIZE:
        syncwarp()
    else:
        barrier()


@always_inline
def first_of[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width], count: Int32) -> SIMD[dtype, width]:
    """Return the first `count` elements, and zeros for the others."""
    var kept = values
    if count < Int32(width):
        comptime for i in range(Int(width)):
            kept[i] = values[i] if Int32(i) < count else 0
    return kept


@always_inline
def load_columns[
    dtype: DType, //, wide: DType
](source: ImmPtr[dtype], offset: Int, left: Int32) -> SIMD[wide, vector_width[dtype]]:
    """Load the vector of gamma or beta at `offset`, with zeros after the `left` remaining columns."""
    comptime width = vector_width[dtype]
    if left >= Int32(width):
        return load_global[width, wide](source, offset)
    var rest = SIMD[wide, width](0)
    comptime for i in range(width):
        if Int32(i) < left:
            rest[i] = source[unsafe_offset=offset + i].cast[wide]()
    return rest
