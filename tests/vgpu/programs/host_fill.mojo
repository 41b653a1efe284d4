"""Fills on both sides: host buffers of three element sizes are filled by the device's stream, then used.

Prints x + y for 70 elements, and one element each of the 16-bit and the 8-bit buffer.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceContext

comptime N = 70


def add(
    total: MutPointer[Float32, MutAnyOrigin],
    x: Pointer[Float32, ImmutAnyOrigin],
    y: Pointer[Float32, ImmutAnyOrigin],
):
    var i = global_idx.x
    if i < N:
        total[unsafe_offset=i] = x[unsafe_offset=i] + y[unsafe_offset=i]


def main() raises:
    with DeviceContext() as ctx:
        var x_host = ctx.enqueue_create_host_buffer[DType.float32](N)
        var y_host = ctx.enqueue_create_host_buffer[DType.float32](N)
        var shorts = ctx.enqueue_create_host_buffer[DType.int16](N)
        var bytes = ctx.enqueue_create_host_buffer[DType.uint8](N)
        x_host.enqueue_fill(0.5)
        y_host.enqueue_fill(0)
        shorts.enqueue_fill(-3)
        bytes.enqueue_fill(200)
        ctx.synchronize()
        for i in range(N):
            y_host[i] += Float32(i)
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        var y = ctx.enqueue_create_buffer[DType.float32](N)
        var total = ctx.enqueue_create_buffer[DType.float32](N)
        total.enqueue_fill(0)
        ctx.enqueue_copy(dst_buf=x, src_buf=x_host)
        ctx.enqueue_copy(dst_buf=y, src_buf=y_host)
        ctx.enqueue_function[add](total, x, y, grid_dim=3, block_dim=32)
        var back = ctx.enqueue_create_host_buffer[DType.float32](N)
        back.enqueue_fill(-1)
        ctx.enqueue_copy(dst_buf=back, src_buf=total)
        ctx.synchronize()
        for i in range(N):
            print(back[i])
        print(shorts[N - 1])
        print(bytes[N - 1])
