"""Mojo as far as puzzle 22 needs it: a kernel that sums the squares of every row, and a program that launches it."""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major

comptime THREADS = 32


# ANCHOR: kernel
def row_squares[
    dtype: DType
](
    squares: Pointer[Scalar[DType.float32], MutAnyOrigin],  # [rows], written
    input: Pointer[Scalar[dtype], ImmutAnyOrigin],  # [rows, H], only read
    rows: Int32,
    hidden_dim: Int32,
):
    """The sum of squares of every row. One block of THREADS threads owns one row."""
    comptime accum = DType.float32
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))

    var mine = Scalar[accum](0)
    for h in range(thread_idx.x, H, THREADS):
        var value = x[row, h].cast[accum]()
        mine += value * value
    var total = block.sum[block_size=THREADS](mine)
    if thread_idx.x == 0:
        squares[unsafe_offset=row] = total


# ANCHOR_END: kernel


# ANCHOR: launch
def main() raises:
    with DeviceContext() as ctx:
        var squares = ctx.enqueue_create_buffer[DType.float32](2)
        var input = ctx.enqueue_create_buffer[DType.bfloat16](2 * 5)
        with input.map_to_host() as host:
            for i in range(2 * 5):
                host[i] = Scalar[DType.bfloat16](i)
        ctx.enqueue_function[row_squares[DType.bfloat16]](
            squares, input, Int32(2), Int32(5), grid_dim=2, block_dim=THREADS
        )
        with squares.map_to_host() as host:
            print("sums of squares:", host[0], host[1])


# ANCHOR_END: launch
