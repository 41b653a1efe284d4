"""Inclusive prefix sum in three launches: scan each block, scan the block totals, add them. Prints 700 sums."""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime N = 700
comptime BLOCK = 64


def scan_blocks(
    sums: MutPointer[Int32, MutAnyOrigin],
    totals: MutPointer[Int32, MutAnyOrigin],
    x: Pointer[Int32, ImmutAnyOrigin],
    n: Int32,
):
    """Scans one block's elements in shared memory; the last thread also writes the block's total."""
    var tile = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[BLOCK]())
    var t = thread_idx.x
    var i = global_idx.x
    tile[t] = x[unsafe_offset=i] if i < Int(n) else 0
    barrier()
    var distance = 1
    while distance < BLOCK:
        var left = tile[t - distance] if t >= distance else 0
        barrier()
        tile[t] += left
        barrier()
        distance *= 2
    if i < Int(n):
        sums[unsafe_offset=i] = rebind[Int32](tile[t])
    if t == BLOCK - 1:
        totals[unsafe_offset=block_idx.x] = rebind[Int32](tile[t])


def add_totals(sums: MutPointer[Int32, MutAnyOrigin], totals: Pointer[Int32, ImmutAnyOrigin], n: Int32):
    """Adds the sum of all blocks before this one."""
    var i = global_idx.x
    if block_idx.x > 0 and i < Int(n):
        sums[unsafe_offset=i] += totals[unsafe_offset=block_idx.x - 1]


def main() raises:
    comptime blocks = ceildiv(N, BLOCK)
    comptime assert blocks <= BLOCK, "the block totals are scanned by one block"
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        var sums = ctx.enqueue_create_buffer[DType.int32](N)
        var totals = ctx.enqueue_create_buffer[DType.int32](blocks)
        var before = ctx.enqueue_create_buffer[DType.int32](blocks)
        var unused = ctx.enqueue_create_buffer[DType.int32](1)
        with x.map_to_host() as host:
            for i in range(N):
                host[i] = Int32((i * 7919) % 1009 - 500)
        ctx.enqueue_function[scan_blocks](sums, totals, x, Int32(N), grid_dim=blocks, block_dim=BLOCK)
        ctx.enqueue_function[scan_blocks](before, unused, totals, Int32(blocks), grid_dim=1, block_dim=BLOCK)
        ctx.enqueue_function[add_totals](sums, before, Int32(N), grid_dim=blocks, block_dim=BLOCK)
        with sums.map_to_host() as host:
            for i in range(N):
                print(host[i])
