"""Tiled matrix product with shared tiles and ragged edges: C[40, 28] = A[40, 36] @ B[36, 28]. Prints C by rows."""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime M = 40
comptime K = 36
comptime N = 28
comptime TILE = 16


def tiled_matmul(
    c: MutPointer[Float32, MutAnyOrigin],
    a: Pointer[Float32, ImmutAnyOrigin],
    b: Pointer[Float32, ImmutAnyOrigin],
    m: Int32,
    k: Int32,
    n: Int32,
):
    var a_tile = stack_allocation[dtype=DType.float32, address_space=AddressSpace.SHARED](
        row_major[TILE, TILE]()
    )
    var b_tile = stack_allocation[dtype=DType.float32, address_space=AddressSpace.SHARED](
        row_major[TILE, TILE]()
    )
    var ty = thread_idx.y
    var tx = thread_idx.x
    var row = block_idx.y * TILE + ty
    var col = block_idx.x * TILE + tx
    var sum = Float32(0)
    for start in range(0, Int(k), TILE):
        var inside_a = row < Int(m) and start + tx < Int(k)
        a_tile[ty, tx] = a[unsafe_offset=row * Int(k) + start + tx] if inside_a else 0
        var inside_b = start + ty < Int(k) and col < Int(n)
        b_tile[ty, tx] = b[unsafe_offset=(start + ty) * Int(n) + col] if inside_b else 0
        barrier()
        for i in range(TILE):
            sum += a_tile[ty, i] * b_tile[i, tx]
        barrier()
    if row < Int(m) and col < Int(n):
        c[unsafe_offset=row * Int(n) + col] = sum


def main() raises:
    with DeviceContext() as ctx:
        var a = ctx.enqueue_create_buffer[DType.float32](M * K)
        var b = ctx.enqueue_create_buffer[DType.float32](K * N)
        var c = ctx.enqueue_create_buffer[DType.float32](M * N)
        with a.map_to_host() as host:
            for i in range(M * K):
                host[i] = Float32((i * 37) % 101 - 50) / 8
        with b.map_to_host() as host:
            for i in range(K * N):
                host[i] = Float32((i * 53) % 97 - 48) / 16
        ctx.enqueue_function[tiled_matmul](
            c,
            a,
            b,
            Int32(M),
            Int32(K),
            Int32(N),
            grid_dim=(ceildiv(N, TILE), ceildiv(M, TILE)),
            block_dim=(TILE, TILE),
        )
        with c.map_to_host() as host:
            for i in range(M * N):
                print(host[i])
