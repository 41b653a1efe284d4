"""Programs with deliberate errors, and one that does not use the GPU."""

from max.gpu import block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext, DeviceGraph, DeviceGraphBuilder, FuncAttribute
from max.gpu.memory import external_memory


def add_ten_unguarded(y: MutPointer[Float32, MutAnyOrigin], x: Pointer[Float32, ImmutAnyOrigin]):
    var i = global_idx.x
    y[unsafe_offset=i] = x[unsafe_offset=i] + 10


def same_element(y: MutPointer[Int32, MutAnyOrigin]):
    y[unsafe_offset=0] = Int32(block_idx.x)


def spin(flag: MutPointer[Int32, MutAnyOrigin]):
    """Waits for a value that is never written."""
    while flag.unsafe_load[volatile=True](0) == 0:
        pass


def spin_and_count(flag: MutPointer[Int32, MutAnyOrigin]):
    """The same, but each iteration changes memory."""
    while flag.unsafe_load[volatile=True](0) == 0:
        flag.unsafe_store[volatile=True](1, flag.unsafe_load[volatile=True](1) + 1)


def fill(y: MutPointer[Float32, MutAnyOrigin]):
    y[unsafe_offset=thread_idx.x] = 1


def dynamic_shared(y: MutPointer[Float32, MutAnyOrigin]):
    var tile = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var t = thread_idx.x
    tile[unsafe_offset=t] = Float32(t)
    y[unsafe_offset=t] = tile[unsafe_offset=t] * 2


def assert_sixteen_threads():
    debug_assert[assert_mode="safe"](thread_idx.x < 16, "thread ", thread_idx.x, " is too many")


def out_of_bounds() raises:
    """Sixteen threads access ten elements without a guard."""
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[DType.float32](10)
        var y = ctx.enqueue_create_buffer[DType.float32](10)
        x.enqueue_fill(1)
        ctx.enqueue_function[add_ten_unguarded](y, x, grid_dim=1, block_dim=16)
        ctx.synchronize()


def race() raises:
    """Four blocks store different values to one element."""
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.int32](1)
        ctx.enqueue_function[same_element](y, grid_dim=4, block_dim=1)
        ctx.synchronize()


def wait_forever() raises:
    with DeviceContext() as ctx:
        var flag = ctx.enqueue_create_buffer[DType.int32](1)
        flag.enqueue_fill(0)
        ctx.enqueue_function[spin](flag, grid_dim=1, block_dim=1)
        ctx.synchronize()


def endless() raises:
    with DeviceContext() as ctx:
        var flag = ctx.enqueue_create_buffer[DType.int32](2)
        flag.enqueue_fill(0)
        ctx.enqueue_function[spin_and_count](flag, grid_dim=1, block_dim=1)
        ctx.synchronize()


def launch_fill(grid: Int, block: Int) raises:
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.float32](2048)
        ctx.enqueue_function[fill](y, grid_dim=(1, grid), block_dim=block)
        ctx.synchronize()


def too_many_threads() raises:
    launch_fill(1, 1025)


def too_many_blocks() raises:
    """The y dimension of a grid is at most 65535."""
    launch_fill(65536, 1)


def opt_in_shared_memory() raises:
    """Uses more than 48 KiB of dynamic shared memory by setting the function attribute. Prints 32 numbers."""
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.float32](32)
        ctx.enqueue_function[dynamic_shared](
            y,
            grid_dim=1,
            block_dim=32,
            shared_mem_bytes=50000,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(50000)),
        )
        with y.map_to_host() as host:
            for i in range(32):
                print(host[i])


def too_much_shared() raises:
    """Requests more shared memory than a block can have."""
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.float32](32)
        ctx.enqueue_function[dynamic_shared](
            y,
            grid_dim=1,
            block_dim=32,
            shared_mem_bytes=300000,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(300000)),
        )
        ctx.synchronize()


def out_of_memory() raises:
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.uint8](1 << 40)
        y.enqueue_fill(1)
        ctx.synchronize()


def out_of_memory_handled() raises:
    """The program handles the error of an allocation that is too large."""
    with DeviceContext() as ctx:
        try:
            _ = ctx.enqueue_create_buffer[DType.uint8](1 << 40)
            ctx.synchronize()
        except:
            print("too much")


def graph() raises:
    """Uses a graph of launches, which is not simulated."""
    with DeviceContext() as ctx:
        var y = ctx.enqueue_create_buffer[DType.float32](32)
        var compiled = ctx.compile_function[fill]()

        def build(mut builder: DeviceGraphBuilder) raises {imm}:
            _ = builder.add_function(compiled, y, grid_dim=1, block_dim=32, dependencies=[])

        DeviceGraph.create(ctx, build).replay()
        ctx.synchronize()


def failed_assert() raises:
    with DeviceContext() as ctx:
        ctx.enqueue_function[assert_sixteen_threads](grid_dim=1, block_dim=32)
        ctx.synchronize()


def no_gpu() raises:
    print("no kernel here")
