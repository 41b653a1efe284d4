"""One thread per element; the last block is only partly used. Prints a + b for 1000 elements."""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime N = 1000
comptime BLOCK = 256


def vector_add(
    total: MutPointer[Float32, MutAnyOrigin],
    a: Pointer[Float32, ImmutAnyOrigin],
    b: Pointer[Float32, ImmutAnyOrigin],
    n: Int32,
):
    var i = global_idx.x
    if i < Int(n):
        total[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]


def main() raises:
    with DeviceContext() as ctx:
        var a = ctx.enqueue_create_buffer[DType.float32](N)
        var b = ctx.enqueue_create_buffer[DType.float32](N)
        var total = ctx.enqueue_create_buffer[DType.float32](N)
        with a.map_to_host() as host:
            for i in range(N):
                host[i] = Float32((i * 37) % 101) / 8
        with b.map_to_host() as host:
            for i in range(N):
                host[i] = Float32((i * 53) % 97) / 16
        ctx.enqueue_function[vector_add](total, a, b, Int32(N), grid_dim=ceildiv(N, BLOCK), block_dim=BLOCK)
        with total.map_to_host() as host:
            for i in range(N):
                print(host[i])
