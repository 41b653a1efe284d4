"""The brightest pixel of a blurred picture in one launch: each block blurs its part, the last one to finish looks for it.

Without `-D MENDED` the barrier is missing that brings the stores of a whole block before the fence of its first thread.
"""

from max.gpu import barrier, block_idx, global_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from std.atomic import Atomic, Ordering, fence
from std.memory import AddressSpace
from std.sys.defines import is_defined

comptime WIDTH = 48
comptime HEIGHT = 32
comptime BLOCK = 128
comptime Floats = MutPointer[Float32, MutAnyOrigin]
comptime Ints = MutPointer[Int32, MutAnyOrigin]


# ANCHOR: kernel
def brightest(place: Ints, finished: Ints, blurred: Floats, picture: Floats):
    """`place` [1] becomes the index of the brightest pixel; `finished` [1] counts blocks and starts at 0."""
    var last = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[1]())
    var i = global_idx.x
    var left = picture[unsafe_offset=i - 1] if i % WIDTH > 0 else 0
    var right = picture[unsafe_offset=i + 1] if i % WIDTH < WIDTH - 1 else 0
    blurred[unsafe_offset=i] = (left + 2 * picture[unsafe_offset=i] + right) / 4
    comptime if is_defined["MENDED"]():
        barrier()
    if thread_idx.x == 0:
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
        last[0] = Atomic[Int32, scope="device"].fetch_add[ordering=Ordering.RELAXED](finished, 1)
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
    barrier()
    if last[0] == Int32(grid_dim.x - 1) and thread_idx.x == 0:
        var best = 0
        for k in range(1, WIDTH * HEIGHT):
            if blurred[unsafe_offset=k] > blurred[unsafe_offset=best]:
                best = k
        place[unsafe_offset=0] = Int32(best)


# ANCHOR_END: kernel


def main() raises:
    with DeviceContext() as ctx:
        var picture = ctx.enqueue_create_buffer[DType.float32](WIDTH * HEIGHT)
        var blurred = ctx.enqueue_create_buffer[DType.float32](WIDTH * HEIGHT)
        var place = ctx.enqueue_create_buffer[DType.int32](1)
        var finished = ctx.enqueue_create_buffer[DType.int32](1)
        finished.enqueue_fill(0)
        with picture.map_to_host() as host:
            for i in range(WIDTH * HEIGHT):
                host[i] = Float32(i * 37 % 251)
        ctx.enqueue_function[brightest](
            place, finished, blurred, picture, grid_dim=WIDTH * HEIGHT // BLOCK, block_dim=BLOCK
        )
        with place.map_to_host() as host:
            print("brightest at row", Int(host[0]) // WIDTH, "column", Int(host[0]) % WIDTH)
