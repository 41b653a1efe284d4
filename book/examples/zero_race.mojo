"""The race of the races chapter: blocks add to one gradient, and one of them clears it, in the same launch.

Every block adds 1, so the right answer is the number of blocks. The gradient is computed twice, first by the wrong
kernel, then by the right pair of launches.
"""

from std.atomic import Atomic, Ordering
from max.gpu import block_idx
from max.gpu.host import DeviceContext

comptime BLOCKS = 16
comptime Gradient = Pointer[Scalar[DType.float32], MutAnyOrigin]


# ANCHOR: race
def clear_inside(grad: Gradient):
    """WRONG: block 0 clears what the other blocks may already have added to."""
    if block_idx.x == 0:
        grad[unsafe_offset=0] = 0
    _ = Atomic[Scalar[DType.float32], scope="device"].fetch_add[ordering=Ordering.RELAXED](grad, 1)


# ANCHOR_END: race


# ANCHOR: fixed
def clear(grad: Gradient):
    """A launch of its own: all of it happens before the next launch starts."""
    grad[unsafe_offset=0] = 0


def add(grad: Gradient):
    """Every block adds; no block clears."""
    _ = Atomic[Scalar[DType.float32], scope="device"].fetch_add[ordering=Ordering.RELAXED](grad, 1)


# ANCHOR_END: fixed


def main() raises:
    with DeviceContext() as ctx:
        var grad = ctx.enqueue_create_buffer[DType.float32](1)
        ctx.enqueue_function[clear_inside](grad, grid_dim=BLOCKS, block_dim=1)
        with grad.map_to_host() as host:
            print("cleared inside the kernel:", host[0], "of", BLOCKS)
        ctx.enqueue_function[clear](grad, grid_dim=1, block_dim=1)
        ctx.enqueue_function[add](grad, grid_dim=BLOCKS, block_dim=1)
        with grad.map_to_host() as host:
            print("cleared by its own launch:", host[0], "of", BLOCKS)
