"""Row accesses of the row kernels: loads, shared-memory buffers, stores.

Each kernel reads its operands from DRAM once, 16 bytes per thread at a time, and keeps a row in registers
while the sums over it are computed and used; `common/row_reductions.mojo` adds over the threads of a row.
Rows that are not a whole number of 16-byte vectors are loaded element by element. On Hopper, if their
elements are 16-bit, the aligned vectors that cover the row pass through shared memory instead.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from std.sys import size_of
from max.gpu import WARP_SIZE, barrier, block_dim, syncwarp, thread_idx

from shared.common import ImmPtr, MutPtr, lanes_per_warp
from common.row_reductions import (
    VECTOR_BYTES,
    load_shifted,
    copy_vector,
    load_global,
    store_vector,
    vector_width,
)
from .tensors import Sizes

comptime EARLY_ELEMENTS = 4 * 1024 * 1024
"""Maximum elements of the input for a row kernel to start before the previous launch is done."""
comptime ANY_THREADS = 256
"""Threads that share a row in the kernels for any row."""
comptime WIDE_VECTORS = 4
"""Maximum vectors of a row per thread in `ln_backward_wide`."""
comptime NARROW_LANES = [4, 8, 16]
"""Threads that share a narrow row, in ascending order."""
comptime NARROW_VECTORS = 2
"""Maximum vectors of a narrow row per thread."""
comptime DX = 1
"""Bit of `parts`, the results of a backward row kernel: dx. The memory of other results is not touched."""
comptime LN_OUT = 2
"""Bit of `parts`: ln_out."""
comptime SUMS = 4
"""Bit of `parts`: partial sums of dgamma and dbeta."""


@always_inline
def normalize[
    dtype: DType, accum: DType, width: SIMDLength
](x: SIMD[accum, width], mean: Scalar[accum], rstd: Scalar[accum]) -> SIMD[accum, width]:
    """Return x_hat = (x - mean) * rstd of elements converted from `dtype`.

    For 16-bit elements this is one multiply-add: the rounding error of mean * rstd is far below that of the
    elements.
    """
    comptime if dtype.is_half_float():
        return x.fma(rstd, -mean * rstd)
    else:
        return (x - mean) * rstd


@always_inline
def load_elements[
    dtype: DType, //, width: Int, accum: DType
](source: ImmPtr[dtype], offset: Int) -> SIMD[accum, width]:
    """Load `width` elements, aligned to `width` elements, from global memory and convert them to the
    accumulation type.
    """
    comptime alignment = min(VECTOR_BYTES, width * size_of[Scalar[dtype]]())
    return source.unsafe_load[width=width, alignment=alignment](offset).cast[accum]()


@always_inline
def store_elements[
    dtype: DType, width: SIMDLength, //
](target: MutPtr[dtype], offset: Int, values: SIMD[dtype, width]):
    """Store `width` elements, aligned to `width` elements, in global memory."""
    target.unsafe_store[alignment=min(VECTOR_BYTES, Int(width) * size_of[Scalar[dtype]]())](offset, values)


@always_inline
def copy_elements[
    dtype: DType, //, width: Int
](target: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED], source: ImmPtr[dtype]):
    """Copy `width` elements, one or more vectors, to shared memory, asynchronously on NVIDIA."""
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
    """Copy this thread's vectors of gamma or beta, `width` elements each, to shared memory, converted once
    for all rows.
    """
    comptime for v in range(vectors):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            store_vector(target, v * block_dim.x * width, load_global[width, accum](source, h))


def lanes_per_row[dtype: DType](H: Int) -> Int:
    """Return the number of lanes that share a row of H aligned elements; narrow rows share a warp.

    Only 16-bit rows share warps: for wider types a warp's vectors hold half as many elements, and each kernel
    costs compile time.
    """
    comptime if dtype.is_half_float():
        comptime for lanes in NARROW_LANES:
            if H <= NARROW_VECTORS * lanes * vector_width[dtype]:
                return lanes
    return lanes_per_warp()


def whole_warps(groups: Int, lanes: Int) -> Int:
    """Round a number of groups of `lanes` threads up to whole warps."""
    var per_warp = max(1, lanes_per_warp() // lanes)
    return ceildiv(groups, per_warp) * per_warp


def starts_early(sizes: Sizes) -> Bool:
    """Return whether a row kernel is short enough to be worth starting before the previous launch is done."""
    return Int(sizes.rows()) * Int(sizes.hidden_dim) <= EARLY_ELEMENTS


# ---- Rows in shared memory -----------------------------------------------------------------------------------


def wide_row_elements[dtype: DType](group: Int) -> Int:
    """Return the elements in a row's buffer in `ln_backward_wide`: the vectors that its threads own, plus one
    vector.
    """
    return (WIDE_VECTORS * group + 1) * vector_width[dtype]


def wide_slots(shifted: Bool) -> Int:
    """Return the number of row buffers per group of threads: two each for the input and dln, and one for dx
    if shifted.
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
    """Copy the aligned vectors that cover a row at any address, plus one vector. This thread copies
    WIDE_VECTORS vectors, `step` elements apart. Past the end of the tensor, zeros are written.

    Args:
        slot: The destination in shared memory.
        source: The tensor, [rows, H].
        row: The index of the row.
        H: Elements of a row.
        rows: Rows of the tensor.
    """
    comptime width = vector_width[dtype]
    var column = thread_idx.x * width
    var x_row = source.unsafe_offset(row * H // width * width)
    var available = rows * H - row * H // width * width
    var last = ceildiv(H, width) * width
    if last + width <= available:
        var remaining = Int32(H - column)
        comptime for v in range(WIDE_VECTORS):
            if Int32(v * step) < remaining:
                copy_vector(slot.unsafe_offset(column + v * step), x_row.unsafe_offset(column + v * step))
        if thread_idx.x == 0:
            copy_vector(slot.unsafe_offset(last), x_row.unsafe_offset(last))
        return
    for h in range(column, last + width, step):
        for i in range(h, h + width):
            slot[unsafe_offset=i] = x_row[unsafe_offset=i] if i < available else Scalar[dtype](0)


@always_inline
def store_row[
    dtype: DType, //, step: Int
](
    target: MutPtr[dtype],
    slot: Pointer[Scalar[dtype], _, address_space=AddressSpace.SHARED],
    row: Int,
    H: Int,
):
    """Store a row from shared memory at any address of `target`, [rows, H]. This thread stores WIDE_VECTORS
    of its aligned vectors, `step` elements apart; the elements at both ends are stored one by one.
    """
    comptime width = vector_width[dtype]
    var y_row = target.unsafe_offset(row * H)
    # The index of the row's first aligned element.
    var first = Int32(-row * H) & Int32(width - 1)
    var column = thread_idx.x * width
    var y = y_row.unsafe_offset(column + Int(first))
    var remaining = Int32(H - column) - first
    comptime for v in range(WIDE_VECTORS):
        if Int32(v * step + width) <= remaining:
            y.unsafe_store[alignment=VECTOR_BYTES](v * step, load_shifted(slot, column + v * step, first))
    var thread = Int32(thread_idx.x)
    if thread < first and thread < Int32(H):
        y_row[unsafe_offset=thread_idx.x] = slot[unsafe_offset=thread_idx.x]
    var tail = Int(first + (Int32(H) - first) // Int32(width) * Int32(width)) + thread_idx.x
    if thread < Int32(width) and tail >= Int(first) and tail < H:
        y_row[unsafe_offset=tail] = slot[unsafe_offset=tail]


@always_inline
def fill_row[dtype: DType, //, step: Int](target: MutPtr[dtype], row: Int, H: Int, pitch: Int):
    """Write zeros to the padding of a row of `target`, [rows, pitch]; each thread owns vectors `step`
    elements apart.
    """
    comptime width = vector_width[dtype]
    for h in range(ceildiv(H, width) * width + thread_idx.x * width, pitch, step):
        target.unsafe_store[alignment=VECTOR_BYTES](row * pitch + h, SIMD[dtype, width](0))


@always_inline
def wait_for_row[group: Int]():
    """Wait for all `group` threads of a row; every thread of the block must call it."""
    comptime if group == WARP_SIZE:
        syncwarp()
    else:
        barrier()


@always_inline
def zero_tail[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width], count: Int32) -> SIMD[dtype, width]:
    """Return `values` with zeros after the first `count` elements."""
    var result = values
    if count < Int32(width):
        comptime for i in range(Int(width)):
            result[i] = values[i] if Int32(i) < count else 0
    return result


@always_inline
def load_columns[
    dtype: DType, //, accum: DType
](source: ImmPtr[dtype], offset: Int, remaining: Int32) -> SIMD[accum, vector_width[dtype]]:
    """Load the vector of gamma or beta at `offset`, with zeros after the `remaining` remaining columns."""
    comptime width = vector_width[dtype]
    if remaining >= Int32(width):
        return load_global[width, accum](source, offset)
    var tail = SIMD[accum, width](0)
    comptime for i in range(width):
        if Int32(i) < remaining:
            tail[i] = source[unsafe_offset=offset + i].cast[accum]()
    return tail
