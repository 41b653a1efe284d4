"""Memory operations of the host, as in a GPU course: fills, maps, sub-buffers, copies, pinned and wrapped memory.

Each program checks its own results and prints its name.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.memory.alloc import unsafe_alloc
from std.testing import assert_equal, assert_true

comptime N = 100
comptime Floats = MutPointer[Float32, MutAnyOrigin]
comptime Ints = MutPointer[Int32, MutAnyOrigin]


def double(x: Floats, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        x[unsafe_offset=i] *= 2


def add_index(x: Ints, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        x[unsafe_offset=i] += Int32(i)


def host_fills() raises:
    """The device's stream fills a pinned host buffer, the host changes it, and it is copied to the device and back.
    """
    with DeviceContext() as ctx:
        var host = ctx.enqueue_create_host_buffer[DType.float32](N)
        host.enqueue_fill(3)
        ctx.synchronize()
        for i in range(0, N, 2):
            host[i] += 1
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        host.enqueue_copy_to(x)
        ctx.enqueue_function[double](x, Int32(N), grid_dim=4, block_dim=32)
        x.enqueue_copy_to(host)
        ctx.synchronize()
        for i in range(N):
            assert_equal(host[i], Float32(8 if i % 2 == 0 else 6))
    print("host_fills")


def maps() raises:
    """Two buffers are mapped at once; the host's changes are on the device after the map ends."""
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        var y = ctx.enqueue_create_buffer[DType.float32](N)
        with x.map_to_host() as a, y.map_to_host() as b:
            for i in range(N):
                a[i] = Float32(i)
                b[i] = -a[i]
        ctx.enqueue_function[double](x, Int32(N), grid_dim=4, block_dim=32)
        with x.map_to_host() as a, y.map_to_host() as b:
            for i in range(N):
                assert_equal(a[i] + 2 * b[i], 0)
                a[i] = 0
        ctx.enqueue_function[double](x, Int32(N), grid_dim=4, block_dim=32)
        with x.map_to_host() as a:
            for i in range(N):
                assert_equal(a[i], 0)
    print("maps")


def sub_buffers() raises:
    """Fills both halves of a buffer through sub-buffers of different dtypes and runs a kernel on each."""
    with DeviceContext() as ctx:
        var whole = ctx.enqueue_create_buffer[DType.float32](N)
        var low = whole.create_sub_buffer[DType.float32](0, N // 2)
        var high = whole.create_sub_buffer[DType.int32](N // 2, N // 2)
        low.enqueue_fill(1.5)
        high.enqueue_fill(7)
        ctx.enqueue_function[double](low, Int32(N // 2), grid_dim=2, block_dim=32)
        ctx.enqueue_function[add_index](high, Int32(N // 2), grid_dim=2, block_dim=32)
        with low.map_to_host() as a, high.map_to_host() as b:
            for i in range(N // 2):
                assert_equal(a[i], 3)
                assert_equal(b[i], Int32(7 + i))
    print("sub_buffers")


def copies() raises:
    """Copies between pageable host memory, a list, two device buffers and host buffers."""
    with DeviceContext() as ctx:
        var pageable = unsafe_alloc[Float32](N)
        for i in range(N):
            pageable[unsafe_offset=i] = Float32(i)
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        var y = ctx.enqueue_create_buffer[DType.float32](N)
        ctx.enqueue_copy(x, pageable)
        ctx.enqueue_copy(y, x)
        ctx.enqueue_function[double](y, Int32(N), grid_dim=4, block_dim=32)
        var first = ctx.enqueue_create_host_buffer[DType.float32](N)
        var second = ctx.enqueue_create_host_buffer[DType.float32](N)
        ctx.enqueue_copy(first, y)
        ctx.enqueue_copy(second, first)
        ctx.enqueue_copy(pageable, second)
        ctx.synchronize()
        var list = List[Float32](length=N, fill=0)
        ctx.enqueue_copy(Span(list), y)
        ctx.synchronize()
        for i in range(N):
            assert_equal(pageable[unsafe_offset=i], Float32(2 * i))
            assert_equal(list[i], Float32(2 * i))
        pageable.unsafe_free()
    print("copies")


def kernel_accesses_pinned_memory() raises:
    """With unified addressing a kernel reads and writes a pinned host buffer at its host address."""
    with DeviceContext() as ctx:
        var host = ctx.enqueue_create_host_buffer[DType.float32](N)
        for i in range(N):
            host[i] = Float32(i)
        var address = host.unsafe_ptr().as_unsafe_any_origin()
        ctx.enqueue_function[double](address, Int32(N), grid_dim=4, block_dim=32)
        ctx.enqueue_function[double](address.unsafe_offset(50), Int32(10), grid_dim=1, block_dim=32)
        ctx.synchronize()
        for i in range(N):
            assert_equal(host[i], Float32(4 * i if 50 <= i < 60 else 2 * i))
    print("kernel_accesses_pinned_memory")


def wrapped_host_memory() raises:
    """Host memory of the default allocator is registered with the device."""
    with DeviceContext() as ctx:
        var pageable = unsafe_alloc[Int32](N)
        for i in range(N):
            pageable[unsafe_offset=i] = 1
        var wrapped = ctx.wrap_host_memory[DType.int32](pageable, N)
        ctx.enqueue_function[add_index](wrapped, Int32(N), grid_dim=4, block_dim=32)
        ctx.synchronize()
        for i in range(N):
            assert_equal(pageable[unsafe_offset=i], Int32(1 + i))
        _ = wrapped^
        ctx.synchronize()
        pageable.unsafe_free()
    print("wrapped_host_memory")


def device_facts() raises:
    """Queries of the device."""
    with DeviceContext() as ctx:
        var memory = ctx.get_memory_info()
        assert_true(memory[0] <= memory[1] and memory[1] > 1 << 20)
        assert_equal(ctx.api(), "cuda")
        assert_true(DeviceContext.number_of_devices() >= 1)
    print("device_facts")


def main() raises:
    host_fills()
    maps()
    sub_buffers()
    copies()
    kernel_accesses_pinned_memory()
    wrapped_host_memory()
    device_facts()
