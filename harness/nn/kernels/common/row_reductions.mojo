"""Row operations: 16-byte vector accesses, and sums over the threads that share a row.

A group of block_dim.x threads (whole warps, or part of a warp for narrow rows) shares a row; a block has
block_dim.y groups. The order of every sum is fixed, so every run gives the same bits.
"""

from std.bit import count_trailing_zeros
from std.memory import AddressSpace, bitcast
from std.sys import is_nvidia_gpu, llvm_intrinsic, size_of
from max.gpu import WARP_SIZE, barrier, block_dim, thread_idx
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group
from max.gpu.primitives import warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from shared.common import ImmPtr

comptime VECTOR_BYTES = 16
"""Bytes of a thread's widest memory access."""
comptime MAX_WARPS = 32
"""Maximum warps per block, the size of the array of partial sums; half as many on AMD."""

comptime vector_width[dtype: DType] = VECTOR_BYTES // size_of[Scalar[dtype]]()
"""Elements per 16-byte vector."""


def is_aligned[dtype: DType](*tensors: ImmPtr[dtype]) -> Bool:
    """Return whether all of the tensors start at multiples of 16 bytes."""
    for tensor in tensors:
        if Int(tensor) % VECTOR_BYTES != 0:
            return False
    return True


# ---- Sums over the threads of a row -------------------------------------------------------------------------


@always_inline
def warp_sum[
    dtype: DType, width: SIMDLength, //, lanes: Int = 0
](values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Add the values of `lanes` consecutive lanes (a power of two; 0 for the whole warp), always in the same
    order. Each lane gets the sum.
    """
    var totals = values
    comptime for distance in range(count_trailing_zeros(lanes if lanes > 0 else WARP_SIZE)):
        comptime for i in range(Int(width)):
            totals[i] += warp.shuffle_xor(totals[i], UInt32(1 << distance))
    return totals


@always_inline
def row_sum[
    dtype: DType, width: SIMDLength, //, lanes: Int = 0
](values: SIMD[dtype, width], slot: Int) -> SIMD[dtype, width]:
    """Add the values of the block_dim.x threads that share a row; each of them gets the sum.

    The order of additions is fixed. Every thread of the block must call it, alternating slots 0 and 1, so
    that no value is overwritten before it is read.

    Parameters:
        dtype: The dtype of the values.
        width: Values per thread; each is summed separately.
        lanes: block_dim.x if less than the warp size, else 0.
    """
    var totals = warp_sum[lanes](values)
    comptime if lanes > 0:
        return totals
    var warps = block_dim.x // WARP_SIZE
    if warps == 1:
        return totals
    comptime size = Int(width) * size_of[Scalar[dtype]]()
    var partials = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED, alignment=size](
        row_major[2 * MAX_WARPS * Int(width)]()
    )
    var first = partials.ptr.unsafe_offset((slot * MAX_WARPS + thread_idx.y * warps) * Int(width))
    if thread_idx.x % WARP_SIZE == 0:
        first.unsafe_store[alignment=size](thread_idx.x // WARP_SIZE * Int(width), totals)
    barrier()
    # Every warp adds the partial sums of all warps, one in each lane.
    var lane = thread_idx.x % WARP_SIZE
    totals = 0
    if lane < warps:
        totals = first.unsafe_load[width=width, alignment=size](lane * Int(width))
    return warp_sum(totals)


# ---- Between global and shared memory ----------------------------------------------------------------------


@always_inline
def load_vector[
    dtype: DType, //, width: Int, accum: DType
](source: Pointer[Scalar[dtype], _, address_space=AddressSpace.SHARED], offset: Int) -> SIMD[accum, width]:
    """Load a vector from shared memory and convert it to the accumulation type."""
    return source.unsafe_load[width=width, alignment=VECTOR_BYTES](offset).cast[accum]()


@always_inline
def store_vector[
    dtype: DType, width: SIMDLength, //
](
    target: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED],
    offset: Int,
    values: SIMD[dtype, width],
):
    """Convert a vector and store it in shared memory."""
    target.unsafe_store[alignment=VECTOR_BYTES](offset, values)


@always_inline
def load_global[
    dtype: DType, //, width: Int, accum: DType
](source: ImmPtr[dtype], offset: Int) -> SIMD[accum, width]:
    """Load a vector from global memory and convert it to the accumulation type."""
    return source.unsafe_load[width=width, alignment=VECTOR_BYTES](offset).cast[accum]()


@always_inline
def copy_vector[
    dtype: DType
](target: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED], source: ImmPtr[dtype]):
    """Copy 16 bytes to shared memory, asynchronously on NVIDIA."""
    comptime width = vector_width[dtype]
    comptime if is_nvidia_gpu():
        async_copy[VECTOR_BYTES](source.unsafe_address_space_cast[AddressSpace.GLOBAL](), target)
    else:
        target.unsafe_store[alignment=VECTOR_BYTES](
            0, source.unsafe_load[width=width, alignment=VECTOR_BYTES](0)
        )


@always_inline
def load_shifted[
    dtype: DType, //
](source: Pointer[Scalar[dtype], _, address_space=AddressSpace.SHARED], offset: Int, shift: Int32) -> SIMD[
    dtype, vector_width[dtype]
]:
    """Load the vector that begins `shift` elements after an aligned one in shared memory."""
    comptime width = vector_width[dtype]
    var low = source.unsafe_load[width=width, alignment=VECTOR_BYTES](offset)
    return shift_vectors(low, source.unsafe_load[width=width, alignment=VECTOR_BYTES](offset + width), shift)


@always_inline
def shift_vectors[
    dtype: DType, width: SIMDLength, //
](low: SIMD[dtype, width], high: SIMD[dtype, width], shift: Int32) -> SIMD[dtype, width]:
    """Return the vector that begins at element `shift` of `low` and continues in `high`.

    It selects by halves of a vector first, then by 32-bit words, then by 16-bit elements within words.
    """
    comptime size = size_of[Scalar[dtype]]()
    comptime count = VECTOR_BYTES // 4
    var words = bitcast[DType.uint32, count](low).join(bitcast[DType.uint32, count](high))
    var bytes = UInt32(shift) * UInt32(size)
    comptime for step in [2, 1]:
        var step_bit = bytes & UInt32(4 * step) != 0
        comptime for i in range(count + step):
            comptime if i + step < 2 * count:
                words[i] = words[i + step] if step_bit else words[i]
    var result = SIMD[DType.uint32, count](0)
    comptime for i in range(count):
        comptime if size == 2:
            result[i] = llvm_intrinsic["llvm.fshr.i32", UInt32](words[i + 1], words[i], (bytes & 2) * 8)
        else:
            result[i] = words[i]
    return bitcast[dtype, Int(width)](result)


@always_inline
def commit_copies():
    """Commit a group of asynchronous copies."""
    comptime if is_nvidia_gpu():
        async_copy_commit_group()


@always_inline
def wait_for_copies[pending: Int]():
    """Wait for all groups of asynchronous copies but the last `pending`."""
    comptime if is_nvidia_gpu():
        async_copy_wait_group(Int32(pending))
