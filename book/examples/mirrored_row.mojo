"""Four warps reverse a row through shared memory, with a barrier between storing and loading (`-D MENDED`) or without."""

from std.memory import AddressSpace
from std.sys import is_defined
from max.gpu import barrier, thread_idx
from max.gpu.host import DeviceContext
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

comptime THREADS = 128


# ANCHOR: kernel
def reverse(reversed: Pointer[Int32, MutAnyOrigin], row: Pointer[Int32, ImmutAnyOrigin]):
    """Each thread stores one number in the tile, and takes the one at the opposite end."""
    var tile = stack_allocation[DType.int32, address_space=AddressSpace.SHARED](row_major[THREADS]())
    var t = thread_idx.x
    tile[t] = row[unsafe_offset=t]
    comptime if is_defined["MENDED"]():
        barrier()
    reversed[unsafe_offset=t] = tile[THREADS - 1 - t][0]


# ANCHOR_END: kernel


def main() raises:
    with DeviceContext() as ctx:
        var reversed = ctx.enqueue_create_buffer[DType.int32](THREADS)
        var row = ctx.enqueue_create_buffer[DType.int32](THREADS)
        with row.map_to_host() as host:
            for i in range(THREADS):
                host[i] = Int32(i)
        ctx.enqueue_function[reverse](reversed, row, grid_dim=1, block_dim=THREADS)
        with reversed.map_to_host() as host:
            for warp in range(THREADS // 32):
                var right = 0
                for t in range(32 * warp, 32 * warp + 32):
                    right += Int(host[t] == Int32(THREADS - 1 - t))
                print("warp", warp, "took the numbers of warp", host[32 * warp] // 32, "and", right, "of 32 are right")
