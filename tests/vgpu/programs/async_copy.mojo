"""Asynchronous copies (cp.async) into two alternating shared buffers; writes each tile reversed. Prints 512 numbers."""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group

comptime TILE = 128  # elements; each of 32 threads copies 16 bytes
comptime TILES = 4
comptime BLOCK = 32


def reverse_tiles(y: MutPointer[Float32, MutAnyOrigin], x: Pointer[Float32, ImmutAnyOrigin]):
    var buffers = stack_allocation[dtype=DType.float32, address_space=AddressSpace.SHARED](
        row_major[2 * TILE]()
    )
    var source = x.unsafe_address_space_cast[AddressSpace.GLOBAL]()
    var t = thread_idx.x
    async_copy[16](source.unsafe_offset(4 * t), buffers.ptr.unsafe_offset(4 * t))
    async_copy_commit_group()
    for tile in range(TILES):
        if tile + 1 < TILES:  # the next tile is copied while this one is used
            var target = ((tile + 1) % 2) * TILE + 4 * t
            async_copy[16](source.unsafe_offset((tile + 1) * TILE + 4 * t), buffers.ptr.unsafe_offset(target))
            async_copy_commit_group()
            async_copy_wait_group(1)
        else:
            async_copy_wait_group(0)
        barrier()
        for i in range(t, TILE, BLOCK):
            y[unsafe_offset=tile * TILE + i] = rebind[Float32](buffers[(tile % 2) * TILE + TILE - 1 - i])
        barrier()


def main() raises:
    comptime n = TILE * TILES
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.float32](n)
        var y = ctx.enqueue_create_buffer[DType.float32](n)
        with x.map_to_host() as host:
            for i in range(n):
                host[i] = Float32((i * 37) % 101) / 8
        ctx.enqueue_function[reverse_tiles](y, x, grid_dim=1, block_dim=BLOCK)
        with y.map_to_host() as host:
            for i in range(n):
                print(host[i])
