"""Shared-memory reduction: each block halves its tile until one sum is left. Prints one sum per block."""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime N = 1000
comptime BLOCK = 128


def block_sum(sums: MutPointer[Float32, MutAnyOrigin], x: Pointer[Float32, ImmutAnyOrigin], n: Int32):
    var tile = stack_allocation[dtype=DType.float32, address_space=AddressSpace.SHARED](row_major[BLOCK]())
    var t = thread_idx.x
    var i = global_idx.x
    tile[t] = x[unsafe_offset=i] if i < Int(n) else 0
    barrier()
    var active = BLOCK // 2
    while active > 0:
        if t < active:
            tile[t] += tile[t + active]
        barrier()
        active //= 2
    if t == 0:
        sums[unsafe_offset=block_idx.x] = tile[0]


def main() raises:
    comptime blocks = ceildiv(N, BLOCK)
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        var sums = ctx.enqueue_create_buffer[DType.float32](blocks)
        with x.map_to_host() as host:
            for i in range(N):
                host[i] = Float32((i * 37) % 101 - 50) / 8
        ctx.enqueue_function[block_sum](sums, x, Int32(N), grid_dim=blocks, block_dim=BLOCK)
        with sums.map_to_host() as host:
            for i in range(blocks):
                print(host[i])
