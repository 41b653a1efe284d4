"""Row softmax, one block per row of 100 elements, with the library's block reductions. Prints 5 rows."""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import block
from std.math import exp

comptime ROWS = 5
comptime COLS = 100
comptime BLOCK = 128


def softmax(y: MutPointer[Float32, MutAnyOrigin], x: Pointer[Float32, ImmutAnyOrigin], cols: Int32):
    var t = thread_idx.x
    var i = block_idx.x * Int(cols) + t
    var value = x[unsafe_offset=i] if t < Int(cols) else Float32.MIN
    var largest = block.max[block_size=BLOCK](value)
    var e = exp(value - largest) if t < Int(cols) else 0
    var sum = block.sum[block_size=BLOCK](e)
    if t < Int(cols):
        y[unsafe_offset=i] = e / sum


def main() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.float32](ROWS * COLS)
        var y = ctx.enqueue_create_buffer[DType.float32](ROWS * COLS)
        with x.map_to_host() as host:
            for i in range(ROWS * COLS):
                host[i] = Float32((i * 37) % 101 - 50) / 8
        ctx.enqueue_function[softmax](y, x, Int32(COLS), grid_dim=ROWS, block_dim=BLOCK)
        with y.map_to_host() as host:
            for i in range(ROWS * COLS):
                print(host[i])
