"""Correct and wrong calls of library collectives, for the tests of a finding's location.

All run in blocks of 128 threads on ones.
"""

from max.gpu import block_idx, lane_id, thread_idx, warp_id
from max.gpu.primitives import block, warp

comptime In = Pointer[Float32, ImmutAnyOrigin]
comptime Out = MutPointer[Float32, MutAnyOrigin]
comptime BLOCK = 128


# -- wrong: some threads do not take part ------------------------------------------------------------------------
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
    """A user function between the branch and the library."""
    return warp.sum(value) / 32


def helper_in_branch(o: Out, a: In, h: Int32):
    var t = thread_idx.x
    var value = a[unsafe_offset=t]
    if t < Int(h):
        value = helper_sum(value)
    o[unsafe_offset=t] = value


# -- correct: all threads that are needed take part --------------------------------------------------------------
def block_collectives(o: Out, a: In, h: Int32):
    """All collectives, also in a branch and a loop that are uniform in a block."""
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


def partial_block_warp_sum(o: Out, a: In, h: Int32):
    """Only the first warps use a warp collective; the others have returned or take another branch."""
    var t = thread_idx.x
    if t >= 96:
        return
    var value = a[unsafe_offset=t]
    if t < Int(h):
        value = warp.sum(value)
    o[unsafe_offset=t] = value


def rows_by_warps(o: Out, a: In, rows: Int32):
    """Each warp has a different number of rows; prefix sums of a warp."""
    for row in range(warp_id(), Int(rows), BLOCK // 32):
        var i = row * 32 + lane_id()
        o[unsafe_offset=i] = warp.sum(a[unsafe_offset=i]) + warp.prefix_sum(a[unsafe_offset=i])


def sum_then_return(o: Out, a: In, h: Int32):
    """Threads return only after the last collective."""
    var t = thread_idx.x
    var total = block.sum[block_size=BLOCK](a[unsafe_offset=t] if t < Int(h) else Float32(0))
    if t >= Int(h):
        return
    o[unsafe_offset=t] = total
