"""The host's side of memory, as a GPU course uses it: fills, maps, sub-buffers, copies, pinned and wrapped host memory.

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
    """A pinned host buffer is filled by the device's stream, changed by the host, and copied over and back.
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
    """Two buffers are mapped at once; what the host changes in a map is on the device when the map ends."""
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
    """Views of parts of one buffer: each half is filled and computed with by itself, one under another type.
    """
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
    """Plain host memory, a list, a second device buffer and a host buffer, one after the other."""
    with DeviceContext() as ctx:
        var plain = unsafe_alloc[Float32](N)
        for i in range(N):
            plain[unsafe_offset=i] = Float32(i)
        var x = ctx.enqueue_create_buffer[DType.float32](N)
        var y = ctx.enqueue_create_buffer[DType.float32](N)
        ctx.enqueue_copy(x, plain)
        ctx.enqueue_copy(y, x)
        ctx.enqueue_function[double](y, Int32(N), grid_dim=4, block_dim=32)
        var first = ctx.enqueue_create_host_buffer[DType.float32](N)
        var second = ctx.enqueue_create_host_buffer[DType.float32](N)
        ctx.enqueue_copy(first, y)
        ctx.enqueue_copy(second, first)
        ctx.enqueue_copy(plain, second)
        ctx.synchronize()
        var list = List[Float32](length=N, fill=0)
        ctx.enqueue_copy(Span(list), y)
        ctx.synchronize()
        for i in range(N):
            assert_equal(plain[unsafe_offset=i], Float32(2 * i))
            assert_equal(list[i], Float32(2 * i))
        plain.unsafe_free()
    print("copies")


def pinned_in_a_kernel() raises:
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
    print("pinned_in_a_kernel")


def wrapped_host_memory() raises:
    """Memory of the host's own allocator, made known to the device."""
    with DeviceContext() as ctx:
        var plain = unsafe_alloc[Int32](N)
        for i in range(N):
            plain[unsafe_offset=i] = 1
        var wrapped = ctx.wrap_host_memory[DType.int32](plain, N)
        ctx.enqueue_function[add_index](wrapped, Int32(N), grid_dim=4, block_dim=32)
        ctx.synchronize()
        for i in range(N):
            assert_equal(plain[unsafe_offset=i], Int32(1 + i))
        _ = wrapped^
        ctx.synchronize()
        plain.unsafe_free()
    print("wrapped_host_memory")


def device_facts() raises:
    """What a program asks its device before it starts."""
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
    pinned_in_a_kernel()
    wrapped_host_memory()
    device_facts()
