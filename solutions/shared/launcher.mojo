"""Kernel launches: the trait that all launch code uses.

`DeviceLauncher` enqueues on a MAX `DeviceContext`. Another implementation may handle the same calls
differently, for example record the PTX, the geometry and the argument bytes without a driver.
"""

from std.sys import size_of
from max.gpu.host import DeviceBuffer, DeviceContext, Dim, FuncAttribute
from max.gpu.host.device_context import DevicePassable

from .common import MutPtr, shared_memory


trait Launcher:
    """Launches kernels in order on one device, and allocates workspace for them."""

    comptime wgmma: Bool
    """Whether every device of this launcher supports Hopper's wgmma and TMA instructions; selects kernels."""

    def launch[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin -> None,
        *Ts: DevicePassable,
    ](
        mut self,
        name: StaticString,
        *args: *Ts,
        grid_dim: Dim,
        block_dim: Dim,
        shared_bytes: Int = 0,
        early: Bool = False,
    ) raises:
        """Enqueue `kernel` after everything launched before it.

        Args:
            name: The name of the launch in reports.
            args: The kernel's arguments, in order.
            grid_dim: Blocks of the grid along x, y, z.
            block_dim: Threads per block along x, y, z.
            shared_bytes: Dynamic shared memory per block.
            early: Whether the kernel may start before the previous launch is done, for which it then waits
                itself ("programmatic dependent launch"). A launcher may ignore this.
        """
        ...

    def context(self) -> Optional[DeviceContext]:
        """Return the context of this launcher's device, for tensor map descriptors, or None."""
        return None

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        """Allocate `count` uninitialised elements, which stay valid until all of this launcher's launches are
        done.

        Args:
            name: The name of the memory in reports.
            count: Number of elements.

        Returns:
            The device address.
        """
        ...


struct DeviceLauncher(Launcher):
    """Enqueues launches on the stream of a `DeviceContext`."""

    comptime wgmma = False

    var ctx: DeviceContext
    var _workspaces: List[DeviceBuffer[DType.uint8]]

    def __init__(out self, ctx: DeviceContext):
        self.ctx = ctx
        self._workspaces = []

    def launch[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin -> None,
        *Ts: DevicePassable,
    ](
        mut self,
        name: StaticString,
        *args: *Ts,
        grid_dim: Dim,
        block_dim: Dim,
        shared_bytes: Int = 0,
        early: Bool = False,
    ) raises:
        if shared_bytes == 0:
            self.ctx.enqueue_function[kernel](*args, grid_dim=grid_dim, block_dim=block_dim)
            return
        self.ctx.enqueue_function[kernel](
            *args,
            grid_dim=grid_dim,
            block_dim=block_dim,
            shared_mem_bytes=shared_bytes,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared_memory())),
        )

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        # The list holds the buffer until this launcher is destroyed; it is then freed in stream order, after
        # the launches.
        var bytes = self.ctx.enqueue_create_buffer[DType.uint8](max(1, count) * size_of[Scalar[dtype]]())
        var address = bytes.unsafe_ptr().unsafe_bitcast[Scalar[dtype]]().as_unsafe_any_origin()
        self._workspaces.append(bytes^)
        return address
