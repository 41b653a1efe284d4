"""Cooperation of threads and blocks, as in a GPU course: atomics, locks, clusters, mbarriers, output.

Each program checks its own results and prints its name.
"""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, block_dim, block_idx, block_rank_in_cluster, cluster_sync, global_idx, grid_dim
from max.gpu import thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives import block
from max.gpu.sync import mbarrier_arrive, mbarrier_init, mbarrier_test_wait
from std.atomic import Atomic, Ordering, fence
from std.memory import AddressSpace
from std.testing import assert_equal

comptime Ints = MutPointer[Int32, MutAnyOrigin]
comptime Counter = Atomic[Int32, scope="device"]


def sum_in_last_block(o: Ints, x: Ints):
    """Stores block sums; the last block to finish, determined by a counter, adds them."""
    var flag = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[1]())
    var total = block.sum[block_size=64](x[unsafe_offset=global_idx.x])
    if thread_idx.x == 0:
        o[unsafe_offset=2 + block_idx.x] = total
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
        flag[0] = Counter.fetch_add[ordering=Ordering.RELAXED](o.unsafe_offset(1), 1)
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
    barrier()
    if flag[0] == Int32(grid_dim.x - 1) and thread_idx.x == 0:
        var sum = Int32(0)
        for k in range(grid_dim.x):
            sum += o[unsafe_offset=2 + k]
        o[unsafe_offset=0] = sum


def last_block() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](5 * 64)
        var o = ctx.enqueue_create_buffer[DType.int32](7)
        o.enqueue_fill(0)
        with x.map_to_host() as host:
            for i in range(5 * 64):
                host[i] = Int32(i)
        ctx.enqueue_function[sum_in_last_block](o, x, grid_dim=5, block_dim=64)
        with o.map_to_host() as host:
            assert_equal(host[0], 320 * 319 // 2)
    print("last_block")


def count_under_lock(o: Ints):
    """One thread of every block acquires a lock in global memory, counts without an atomic, and releases it.
    """
    if thread_idx.x == 0:
        var expected = Int32(0)
        while not Counter.compare_exchange(o, expected, 1):
            expected = 0
        o[unsafe_offset=1] += 1
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
        Counter.store(o, 0)


def spin_lock() raises:
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.int32](2)
        o.enqueue_fill(0)
        ctx.enqueue_function[count_under_lock](o, grid_dim=20, block_dim=32)
        with o.map_to_host() as host:
            assert_equal(host[0], 0)
            assert_equal(host[1], 20)
    print("spin_lock")


def extremes(o: Ints, x: Ints, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        Counter.min(o, x[unsafe_offset=i])
        Counter.max(o.unsafe_offset(1), x[unsafe_offset=i])
        _ = Counter.fetch_add[ordering=Ordering.RELAXED](o.unsafe_offset(2 + i % 3), 1)


def atomics() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](200)
        var o = ctx.enqueue_create_buffer[DType.int32](5)
        o.enqueue_fill(0)
        with x.map_to_host() as host:
            for i in range(200):
                host[i] = Int32(i * 37 % 199 - 99)
        ctx.enqueue_function[extremes](o, x, Int32(200), grid_dim=4, block_dim=64)
        with o.map_to_host() as host:
            assert_equal(host[0], -99)
            assert_equal(host[1], 99)
            assert_equal(host[2] + host[3] + host[4], 200)
    print("atomics")


def gather_in_cluster(o: Ints, partials: Ints):
    """Each block stores its number in global memory; after the cluster barrier the first block adds them."""
    var rank = Int(block_rank_in_cluster())
    if thread_idx.x == 0:
        partials[unsafe_offset=block_idx.x] = Int32(block_idx.x + 1)
    cluster_sync()
    if rank == 0 and thread_idx.x == 0:
        var sum = Int32(0)
        for k in range(4):
            sum += partials[unsafe_offset=block_idx.x + k]
        o[unsafe_offset=block_idx.x // 4] = sum


def clusters() raises:
    with DeviceContext() as ctx:
        var partials = ctx.enqueue_create_buffer[DType.int32](8)
        var o = ctx.enqueue_create_buffer[DType.int32](2)
        ctx.enqueue_function[gather_in_cluster](o, partials, grid_dim=8, block_dim=32, cluster_dim=Dim(4))
        with o.map_to_host() as host:
            assert_equal(host[0], 10)
            assert_equal(host[1], 26)
    print("clusters")


def read_neighbour(o: Ints):
    """A phase of an mbarrier: all threads write and arrive, wait, and read their neighbour's value."""
    var values = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[64]())
    var bar = stack_allocation[dtype=DType.int64, address_space=AddressSpace.SHARED](row_major[1]())
    var t = thread_idx.x
    if t == 0:
        mbarrier_init(bar.ptr, 64)
    barrier()
    values[t] = Int32(t * t)
    var state = mbarrier_arrive(bar.ptr)
    while not mbarrier_test_wait(bar.ptr, state):
        pass
    o[unsafe_offset=t] = rebind[Int32](values[(t + 1) % 64])


def mbarriers() raises:
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.int32](64)
        ctx.enqueue_function[read_neighbour](o, grid_dim=1, block_dim=64)
        with o.map_to_host() as host:
            for i in range(64):
                assert_equal(host[i], Int32(((i + 1) % 64) * ((i + 1) % 64)))
    print("mbarriers")


def print_block(n: Int32):
    debug_assert[assert_mode="safe"](block_dim.x == Int(n), "the block has another size")
    if thread_idx.x == 0:
        print("block", block_idx.x, "of", grid_dim.x, "half:", 0.5, "yes:", True, "byte:", Int8(-3))


def print_and_assert() raises:
    with DeviceContext() as ctx:
        ctx.enqueue_function[print_block](Int32(32), grid_dim=2, block_dim=32)
        ctx.synchronize()
    print("print_and_assert")


def main() raises:
    last_block()
    spin_lock()
    atomics()
    clusters()
    mbarriers()
    print_and_assert()
