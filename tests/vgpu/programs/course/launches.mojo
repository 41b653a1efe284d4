"""Kernel launches, as in a GPU course: streams, events, constant and dynamic shared memory, arguments.

Each program checks its own results and prints its name.
"""

from max.gpu import barrier, block_dim, block_idx, global_idx, grid_dim, thread_idx
from max.gpu.host import ConstantMemoryMapping, DeviceContext
from max.gpu.memory import external_memory
from std.math import ceildiv
from std.memory import AddressSpace, unsafe_stack_allocation
from std.testing import assert_equal, assert_true

comptime N = 96
comptime Floats = MutPointer[Float32, MutAnyOrigin]
comptime Ints = MutPointer[Int32, MutAnyOrigin]


def increment(x: Ints, by: Int32):
    x[unsafe_offset=global_idx.x] += by


def streams() raises:
    """The second of two streams waits for an event of the first before it uses the same buffer."""
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        x.enqueue_fill(1)
        ctx.synchronize()
        var f = ctx.compile_function[increment]()
        var first = ctx.create_stream()
        var second = ctx.create_stream(priority=ctx.stream_priority_range().greatest)
        var done = ctx.create_event()
        first.enqueue_function(f, x, Int32(10), grid_dim=3, block_dim=32)
        first.record_event(done)
        second.enqueue_wait_for(done)
        second.enqueue_function(f, x, Int32(100), grid_dim=3, block_dim=32)
        second.synchronize()
        with x.map_to_host() as host:
            for i in range(N):
                assert_equal(host[i], 111)
    print("streams")


def events() raises:
    """An event of the default stream, and the time of some launches."""
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        x.enqueue_fill(0)
        var event = ctx.create_event[blocking_sync=True]()
        ctx.enqueue_function[increment](x, Int32(1), grid_dim=3, block_dim=32)
        ctx.stream().record_event(event)
        event.synchronize()

        def body(ctx: DeviceContext) raises {imm}:
            ctx.enqueue_function[increment](x, Int32(1), grid_dim=3, block_dim=32)

        assert_true(ctx.execution_time(body, 3) >= 0)
        with x.map_to_host() as host:
            assert_equal(host[N - 1], 4)
    print("events")


def transpose_2d(o: Ints, x: Ints, rows: Int32, columns: Int32):
    var row = block_idx.y * block_dim.y + thread_idx.y
    var column = block_idx.x * block_dim.x + thread_idx.x
    if row < Int(rows) and column < Int(columns):
        o[unsafe_offset=column * Int(rows) + row] = x[unsafe_offset=row * Int(columns) + column]


def two_dimensions() raises:
    """A two-dimensional grid of blocks that do not divide the matrix."""
    comptime rows = 13
    comptime columns = 21
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](rows * columns)
        var o = ctx.enqueue_create_buffer[DType.int32](rows * columns)
        with x.map_to_host() as host:
            for i in range(rows * columns):
                host[i] = Int32(i)
        ctx.enqueue_function[transpose_2d](
            o,
            x,
            Int32(rows),
            Int32(columns),
            grid_dim=(ceildiv(columns, 8), ceildiv(rows, 4)),
            block_dim=(8, 4),
        )
        with o.map_to_host() as host:
            for i in range(rows * columns):
                assert_equal(host[i], Int32(i % rows * columns + i // rows))
    print("two_dimensions")


def place_3d(o: Ints):
    var at = (thread_idx.z * block_dim.y + thread_idx.y) * block_dim.x + thread_idx.x
    var part = (block_idx.z * grid_dim.y + block_idx.y) * grid_dim.x + block_idx.x
    o[unsafe_offset=part * block_dim.x * block_dim.y * block_dim.z + at] = Int32(
        global_idx.z * 100 + global_idx.y * 10 + global_idx.x
    )


def three_dimensions() raises:
    """Blocks and threads in three dimensions."""
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.int32](64)
        ctx.enqueue_function[place_3d](o, grid_dim=(2, 2, 2), block_dim=(2, 2, 2))
        with o.map_to_host() as host:
            assert_equal(host[0], 0)
            assert_equal(host[7], 111)
            assert_equal(host[63], 333)
            assert_equal(host[8 * 5 + 2], 212)
    print("three_dimensions")


def reverse_with_two_arrays(o: Ints, x: Ints):
    """Two arrays share a block's dynamic memory; their sizes are known only at run time."""
    var n = block_dim.x
    var first = external_memory[Int32, address_space=AddressSpace.SHARED, alignment=16]()
    var second = first.unsafe_offset(n)
    var t = thread_idx.x
    first[unsafe_offset=t] = x[unsafe_offset=global_idx.x]
    second[unsafe_offset=t] = Int32(block_idx.x)
    barrier()
    o[unsafe_offset=global_idx.x] = first[unsafe_offset=n - 1 - t] * 10 + second[unsafe_offset=(t + 1) % n]


def dynamic_shared() raises:
    with DeviceContext() as ctx:
        for size in range(16, 49, 16):
            var x = ctx.enqueue_create_buffer[DType.int32](N)
            var o = ctx.enqueue_create_buffer[DType.int32](N)
            with x.map_to_host() as host:
                for i in range(N):
                    host[i] = Int32(i)
            ctx.enqueue_function[reverse_with_two_arrays](
                o, x, grid_dim=N // size, block_dim=size, shared_mem_bytes=2 * 4 * size
            )
            with o.map_to_host() as host:
                for i in range(N):
                    var block = i // size
                    assert_equal(host[i], Int32((block * size + size - 1 - i % size) * 10 + block))
    print("dynamic_shared")


def sum_weights(o: Floats):
    """Adds weights from constant memory, with a step that depends on the thread."""
    var weights = unsafe_stack_allocation[
        8,
        Float32,
        name=StaticString("course_weights"),
        address_space=AddressSpace.CONSTANT,
        alignment=16,
    ]()
    var sum = Float32(0)
    for i in range(0, 8, 1 + thread_idx.x):
        sum += weights[unsafe_offset=i]
    o[unsafe_offset=thread_idx.x] = sum


def constant_memory() raises:
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.float32](8)
        var weights: List[Float32] = [1, 2, 4, 8, 16, 32, 64, 128]
        ctx.enqueue_function[sum_weights](
            o,
            grid_dim=1,
            block_dim=8,
            constant_memory=[
                ConstantMemoryMapping(
                    "course_weights",
                    weights.unsafe_ptr().unsafe_bitcast[NoneType]().unsafe_origin_cast[MutUntrackedOrigin](),
                    weights.byte_length(),
                )
            ],
        )
        with o.map_to_host() as host:
            assert_equal(host[0], 255)
            assert_equal(host[1], 85)
            assert_equal(host[7], 1)
        _ = weights^
    print("constant_memory")


def store_arguments(o: Floats, a: Int8, b: UInt16, c: Int64, d: Float16, e: UInt8, f: Float64):
    if global_idx.x == 0:
        o[unsafe_offset=0] = Float32(a)
        o[unsafe_offset=1] = Float32(b)
        o[unsafe_offset=2] = Float32(c)
        o[unsafe_offset=3] = Float32(d)
        o[unsafe_offset=4] = Float32(e)
        o[unsafe_offset=5] = Float32(f)


def arguments() raises:
    """Arguments of one, two, four and eight bytes in one call."""
    with DeviceContext() as ctx:
        var o = ctx.enqueue_create_buffer[DType.float32](6)
        ctx.enqueue_function[store_arguments](
            o,
            Int8(-5),
            UInt16(60000),
            Int64(1 << 40),
            Float16(0.25),
            UInt8(200),
            Float64(1e-3),
            grid_dim=1,
            block_dim=1,
        )
        with o.map_to_host() as host:
            var expected: List[Float32] = [-5, 60000, 1099511627776.0, 0.25, 200, 1e-3]
            for i in range(6):
                assert_equal(host[i], expected[i])
    print("arguments")


def closures() raises:
    """A kernel that captures numbers and a buffer of the enclosing host function."""
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.int32](N)
        x.enqueue_fill(2)
        var p = x.unsafe_ptr().as_unsafe_any_origin()
        var by = Int32(5)

        def scale() {var p, var by}:
            p[unsafe_offset=global_idx.x] *= by

        ctx.enqueue_function(scale, grid_dim=3, block_dim=32)
        with x.map_to_host() as host:
            for i in range(N):
                assert_equal(host[i], 10)
    print("closures")


def main() raises:
    streams()
    events()
    two_dimensions()
    three_dimensions()
    dynamic_shared()
    constant_memory()
    arguments()
    closures()
