"""Histogram with atomics: counts in shared memory, then one addition per bin and block. Prints 20 counts."""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, global_idx, thread_idx
from max.gpu.host import DeviceContext
from std.atomic import Atomic, Ordering
from std.math import ceildiv

comptime N = 3000
comptime BINS = 20
comptime BLOCK = 128


def histogram(counts: MutPointer[Int32, MutAnyOrigin], x: Pointer[Int32, ImmutAnyOrigin], n: Int32):
    var local = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[BINS]())
    var t = thread_idx.x
    if t < BINS:
        local[t] = 0
    barrier()
    var i = global_idx.x
    if i < Int(n):
        var bin = Int(x[unsafe_offset=i]) % BINS
        _ = Atomic[Int32, scope="block"].fetch_add[ordering=Ordering.RELAXED](local.ptr.unsafe_offset(bin), 1)
    barrier()
    if t < BINS:
        var count = rebind[Int32](local[t])
        _ = Atomic[Int32, scope="device"].fetch_add[ordering=Ordering.RELAXED](counts.unsafe_offset(t), count)


def main() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        var counts = ctx.enqueue_create_buffer[DType.int32](BINS)
        counts.enqueue_fill(0)
        with x.map_to_host() as host:
            for i in range(N):
                host[i] = Int32((i * i) % 1009)
        ctx.enqueue_function[histogram](counts, x, Int32(N), grid_dim=ceildiv(N, BLOCK), block_dim=BLOCK)
        with counts.map_to_host() as host:
            for i in range(BINS):
                print(host[i])
