"""Tensor-core products of one warp: bf16 D[16, 8] = A[16, 16] @ B[16, 8], and tf32 with A[16, 8], B[8, 8].

The layout of the fragments follows the PTX manual's tables for mma.m16n8k16 and mma.m16n8k8, with group = lane / 4
and part = lane % 4. Prints the bf16 product's 128 elements, then the tf32 product's.
"""

from max.gpu import lane_id
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext

comptime M = 16
comptime N = 8


def product_bf16(
    d: MutPointer[Float32, MutAnyOrigin],
    a: Pointer[BFloat16, ImmutAnyOrigin],
    b: Pointer[BFloat16, ImmutAnyOrigin],
):
    comptime K = 16
    var group = Int(lane_id()) // 4
    var part = Int(lane_id()) % 4
    var a_part = SIMD[DType.bfloat16, 8]()
    comptime for i in range(8):
        comptime lower = ((i // 2) % 2) * 8  # elements 2, 3, 6, 7 are eight rows below
        comptime right = (i // 4) * 8  # elements 4 to 7 are eight columns to the right
        a_part[i] = a[unsafe_offset=(group + lower) * K + 2 * part + i % 2 + right]
    var b_part = SIMD[DType.bfloat16, 4]()
    comptime for i in range(4):
        b_part[i] = b[unsafe_offset=(2 * part + i % 2 + (i // 2) * 8) * N + group]
    var sum = SIMD[DType.float32, 4](0)
    mma(sum, a_part, b_part, sum)
    comptime for i in range(4):
        d[unsafe_offset=(group + (i // 2) * 8) * N + 2 * part + i % 2] = sum[i]


def product_tf32(
    d: MutPointer[Float32, MutAnyOrigin],
    a: Pointer[Float32, ImmutAnyOrigin],
    b: Pointer[Float32, ImmutAnyOrigin],
):
    comptime K = 8
    var group = Int(lane_id()) // 4
    var part = Int(lane_id()) % 4
    var a_part = SIMD[DType.float32, 4]()
    comptime for i in range(4):
        a_part[i] = a[unsafe_offset=(group + (i % 2) * 8) * K + part + (i // 2) * 4]
    var b_part = SIMD[DType.float32, 2]()
    comptime for i in range(2):
        b_part[i] = b[unsafe_offset=(part + i * 4) * N + group]
    var sum = SIMD[DType.float32, 4](0)
    mma(sum, a_part, b_part, sum)
    comptime for i in range(4):
        d[unsafe_offset=(group + (i // 2) * 8) * N + 2 * part + i % 2] = sum[i]


def main() raises:
    with DeviceContext() as ctx:
        var a16 = ctx.enqueue_create_buffer[DType.bfloat16](M * 16)
        var b16 = ctx.enqueue_create_buffer[DType.bfloat16](16 * N)
        var a32 = ctx.enqueue_create_buffer[DType.float32](M * 8)
        var b32 = ctx.enqueue_create_buffer[DType.float32](8 * N)
        var d16 = ctx.enqueue_create_buffer[DType.float32](M * N)
        var d32 = ctx.enqueue_create_buffer[DType.float32](M * N)
        # Multiples of 1/8 below 13: exact in bf16 and tf32, and so are their products' sums in float32.
        with a16.map_to_host() as host:
            for i in range(M * 16):
                host[i] = (Float32((i * 37) % 101 - 50) / 8).cast[DType.bfloat16]()
        with b16.map_to_host() as host:
            for i in range(16 * N):
                host[i] = (Float32((i * 53) % 97 - 48) / 8).cast[DType.bfloat16]()
        with a32.map_to_host() as host:
            for i in range(M * 8):
                host[i] = Float32((i * 37) % 101 - 50) / 8
        with b32.map_to_host() as host:
            for i in range(8 * N):
                host[i] = Float32((i * 53) % 97 - 48) / 8
        ctx.enqueue_function[product_bf16](d16, a16, b16, grid_dim=1, block_dim=32)
        ctx.enqueue_function[product_tf32](d32, a32, b32, grid_dim=1, block_dim=32)
        with d16.map_to_host() as host:
            for i in range(M * N):
                print(host[i])
        with d32.map_to_host() as host:
            for i in range(M * N):
                print(host[i])
