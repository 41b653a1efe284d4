"""Mojo as far as the puzzles need it: a kernel that finds the largest magnitude of every row, and a program that launches it."""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from layout import TileTensor
from layout.tile_layout import row_major

comptime THREADS = 32


# ANCHOR: kernel
def row_largest[
    dtype: DType
](
    largest: Pointer[Scalar[DType.float32], MutAnyOrigin],  # [rows], written
    input: Pointer[Scalar[dtype], ImmutAnyOrigin],  # [rows, H], only read
    rows: Int32,
    hidden_dim: Int32,
):
    """The largest magnitude of every second element of a row. One thread owns one row."""
    comptime accum = DType.float32
    var H = Int(hidden_dim)
    var x = TileTensor(input, row_major(Int(rows), H))
    var r = global_idx.x
    if r >= Int(rows):
        return

    var seen = Scalar[accum](0)
    for h in range(0, H, 2):
        var magnitude = abs(x[r, h].cast[accum]())
        if magnitude > seen:
            seen = magnitude
    largest[unsafe_offset=r] = seen


# ANCHOR_END: kernel


# ANCHOR: launch
def main() raises:
    with DeviceContext() as ctx:
        var largest = ctx.enqueue_create_buffer[DType.float32](2)
        var input = ctx.enqueue_create_buffer[DType.bfloat16](2 * 5)
        with input.map_to_host() as host:
            for i in range(2 * 5):
                host[i] = Scalar[DType.bfloat16](-i)
        ctx.enqueue_function[row_largest[DType.bfloat16]](
            largest, input, Int32(2), Int32(5), grid_dim=1, block_dim=THREADS
        )
        with largest.map_to_host() as host:
            print("largest magnitudes:", host[0], host[1])


# ANCHOR_END: launch
