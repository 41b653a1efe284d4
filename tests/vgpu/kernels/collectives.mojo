"""Library collectives called rightly and wrongly, for the tests of whose fault a finding is.

All run in blocks of 128 threads and sum, spread or shift ones.
"""

from max.gpu import block_idx, lane_id, thread_idx, warp_id
from max.gpu.primitives import block, warp

comptime In = Pointer[Float32, ImmutAnyOrigin]
comptime Out = MutPointer[Float32, MutAnyOrigin]
comptime BLOCK = 128


# -- wrong: not all threads that must take part do ---------------------------------------------------------------
def return_before_block_sum(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    if t >= Int(h):
        return
    var total = block.sum[block_size=BLOCK](a[unsafe_offset=t])
    o[unsafe_offset=t] = total


def return_before_block_broadcast(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    if t < Int(h):
        return
    var first = block.broadcast[block_size=BLOCK](a[unsafe_offset=t])
    o[unsafe_offset=t] = first


def block_sum_in_branch(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    if t < Int(h):
        var total = block.sum[block_size=BLOCK](a[unsafe_offset=t])
        o[unsafe_offset=t] = total
    else:
        o[unsafe_offset=t] = 0


def block_sum_in_uneven_loop(o: Out, a: In, n: Int32):
    var t = thread_idx.x
    var total = Float32(0)
    for i in range(t, Int(n), BLOCK):
        total += block.sum[block_size=BLOCK](a[unsafe_offset=i])
    o[unsafe_offset=t] = total


def warp_sum_in_branch(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    var value = a[unsafe_offset=t]
    if t < Int(h):
        value = warp.sum(value)
    o[unsafe_offset=t] = value


def warp_sum_after_return(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    if t >= Int(h):
        return
    var total = warp.sum(a[unsafe_offset=t])
    o[unsafe_offset=t] = total


def shuffle_in_half_a_warp(o: Out, a: In):
    var t = thread_idx.x
    var value = a[unsafe_offset=t]
    if lane_id() < 16:
        value = warp.shuffle_down(value, 1)
    o[unsafe_offset=t] = value


def helper_sum(value: Float32) -> Float32:
    """The reader's own function between the branch and the library."""
    return warp.sum(value) / 32


def helper_in_branch(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    var value = a[unsafe_offset=t]
    if t < Int(h):
        value = helper_sum(value)
    o[unsafe_offset=t] = value


# -- right: everybody whom the library needs is there ------------------------------------------------------------
def block_collectives(o: Out, a: In, h: Int32):
    """All of them, also in a branch and in a loop that all threads of a block take alike."""
    var t = thread_idx.x
    var value = a[unsafe_offset=t]
    o[unsafe_offset=t] = block.prefix_sum[block_size=BLOCK](value)
    o[unsafe_offset=BLOCK + t] = block.prefix_sum[block_size=BLOCK, exclusive=True](value)
    o[unsafe_offset=2 * BLOCK + t] = block.max[block_size=BLOCK](value) - block.min[block_size=BLOCK](value)
    o[unsafe_offset=3 * BLOCK + t] = block.broadcast[block_size=BLOCK](value)
    var total = Float32(0)
    if block_idx.x < Int(h):
        for _ in range(Int(h)):
            total += block.sum[block_size=BLOCK](value)
    o[unsafe_offset=4 * BLOCK + t] = total


def one_warp_sums(o: Out, a: In, h: Int32):
    """The first warps alone use a collective of the warp; the others have returned or go another way."""
    var t = thread_idx.x
    if t >= 96:
        return
    var value = a[unsafe_offset=t]
    if t < Int(h):
        value = warp.sum(value)
    o[unsafe_offset=t] = value


def rows_by_warps(o: Out, a: In, rows: Int32):
    """Each warp its own number of rows; prefix sums of a warp."""
    for row in range(warp_id(), Int(rows), BLOCK // 32):
        var i = row * 32 + lane_id()
        o[unsafe_offset=i] = warp.sum(a[unsafe_offset=i]) + warp.prefix_sum(a[unsafe_offset=i])


def sum_then_return(o: Out, a: In, h: Int32):
    """Threads leave only after the last collective."""
    var t = thread_idx.x
    var total = block.sum[block_size=BLOCK](a[unsafe_offset=t] if t < Int(h) else Float32(0))
    if t >= Int(h):
        return
    o[unsafe_offset=t] = total
