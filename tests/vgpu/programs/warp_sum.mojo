"""Warp reduction by shuffles, then one atomic addition per warp. Prints every warp's sum and the total."""

from max.gpu import WARP_SIZE, global_idx, lane_id
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from std.atomic import Atomic, Ordering
from std.math import ceildiv

comptime N = 500
comptime BLOCK = 64
comptime WARPS = 16  # every warp of the launch, the last one without data included


def warp_sum(
    sums: MutPointer[Int32, MutAnyOrigin],
    total: MutPointer[Int32, MutAnyOrigin],
    x: Pointer[Int32, ImmutAnyOrigin],
    n: Int32,
):
    var i = global_idx.x
    var value = x[unsafe_offset=i] if i < Int(n) else 0
    var sum = warp.sum(value)
    if lane_id() == 0:
        sums[unsafe_offset=i // WARP_SIZE] = sum
        _ = Atomic[Int32, scope="device"].fetch_add[ordering=Ordering.RELAXED](total, sum)


def main() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        var sums = ctx.enqueue_create_buffer[DType.int32](WARPS)
        var total = ctx.enqueue_create_buffer[DType.int32](1)
        total.enqueue_fill(0)
        with x.map_to_host() as host:
            for i in range(N):
                host[i] = Int32((i * 7919) % 1009 - 500)
        ctx.enqueue_function[warp_sum](sums, total, x, Int32(N), grid_dim=ceildiv(N, BLOCK), block_dim=BLOCK)
        with sums.map_to_host() as host:
            for i in range(WARPS):
                print(host[i])
        with total.map_to_host() as host:
            print(host[0])
