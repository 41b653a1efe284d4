"""Threads and blocks that work together, as a GPU course shows it: atomics, locks, clusters, mbarriers, collectives.

Each program checks its own results and prints its name.
"""

from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from max.gpu import barrier, block_dim, block_idx, block_rank_in_cluster, cluster_sync, global_idx, grid_dim
from max.gpu import lane_id, named_barrier, thread_idx, warp_id
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives import block, warp
from max.gpu.primitives.cluster import load_cluster_smem
from max.gpu.sync import mbarrier_arrive, mbarrier_init, mbarrier_test_wait
from std.atomic import Atomic, Ordering, fence
from std.memory import AddressSpace
from std.testing import assert_equal

comptime Ints = MutPointer[Int32, MutAnyOrigin]
comptime Counter = Atomic[Int32, scope="device"]


def counted(o: Ints, x: Ints):
    """Block sums, and the block that counts last adds them up."""
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
        ctx.enqueue_function[counted](o, x, grid_dim=5, block_dim=64)
        with o.map_to_host() as host:
            assert_equal(host[0], 320 * 319 // 2)
    print("last_block")


def guarded(o: Ints):
    """One thread of every block takes a lock in global memory, counts without an atomic, and gives it back.
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
        ctx.enqueue_function[guarded](o, grid_dim=20, block_dim=32)
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
    """Each block leaves its number in global memory; behind the barrier of the cluster its first block adds them.
    """
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


def pass_the_token(o: Ints):
    """A phase of an mbarrier: all threads arrive with what they have written, all wait, all read a neighbour's.
    """
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
        ctx.enqueue_function[pass_the_token](o, grid_dim=1, block_dim=64)
        with o.map_to_host() as host:
            for i in range(64):
                assert_equal(host[i], Int32(((i + 1) % 64) * ((i + 1) % 64)))
    print("mbarriers")


def library_sums(o: Ints, x: Ints):
    var t = thread_idx.x
    var v = x[unsafe_offset=t]
    o[unsafe_offset=t] = block.prefix_sum[block_size=128](v)
    o[unsafe_offset=128 + t] = warp.prefix_sum(v)
    o[unsafe_offset=256 + t] = block.max[block_size=128](v)
    o[unsafe_offset=384 + t] = warp.shuffle_xor(v, 1)


def collectives() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](128)
        var o = ctx.enqueue_create_buffer[DType.int32](512)
        x.enqueue_fill(3)
        ctx.enqueue_function[library_sums](o, x, grid_dim=1, block_dim=128)
        with o.map_to_host() as host:
            for i in range(128):
                assert_equal(host[i], Int32(3 * (i + 1)))
                assert_equal(host[128 + i], Int32(3 * (i % 32 + 1)))
                assert_equal(host[384 + i], 3)
            assert_equal(host[256], 3)
    print("collectives")


def two_teams(o: Ints):
    """Each half of the block has a barrier of its own."""
    var s = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[128]())
    var t = thread_idx.x
    s[t] = Int32(t)
    if t < 64:
        named_barrier[64](1)
        o[unsafe_offset=t] = rebind[Int32](s[63 - t])
    else:
        named_barrier[64](2)
        o[unsafe_offset=t] = rebind[Int32](s[191 - t])


def named_barriers() raises:
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.int32](128)
        ctx.enqueue_function[two_teams](o, grid_dim=1, block_dim=128)
        with o.map_to_host() as host:
            for i in range(128):
                assert_equal(host[i], Int32(63 - i if i < 64 else 191 - i))
    print("named_barriers")


def said(n: Int32):
    debug_assert[assert_mode="safe"](block_dim.x == Int(n), "the block has another size")
    if thread_idx.x == 0:
        print("block", block_idx.x, "of", grid_dim.x, "half:", 0.5, "yes:", True, "byte:", Int8(-3))


def print_and_assert() raises:
    with DeviceContext() as ctx:
        ctx.enqueue_function[said](Int32(32), grid_dim=2, block_dim=32)
        ctx.synchronize()
    print("print_and_assert")


def main() raises:
    last_block()
    spin_lock()
    atomics()
    clusters()
    mbarriers()
    collectives()
    named_barriers()
    print_and_assert()
