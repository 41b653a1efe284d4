"""Launching of kernels: the trait that all launch code uses.

`DeviceLauncher` enqueues on a MAX `DeviceContext`. Another implementation may do anything else with the same
calls, for example write down the PTX, the geometry and the argument bytes without a driver.
"""

from std.sys import size_of
from max.gpu.host import DeviceBuffer, DeviceContext, Dim, FuncAttribute
from max.gpu.host.device_context import DevicePassable

from .common import MutPtr, shared_memory


trait Launcher:
    """Launch kernels in order on one device, and lends them scratch memory."""

    comptime wgmma: Bool
    """Whether every device that this launcher serves runs Hopper's wgmma and TMA instructions: a choice of kernels."""

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
            name: The launch's name in reports.
            args: The kernel's arguments, in the kernel's order.
            grid_dim: Blocks along x, y, z.
            block_dim: Threads of a block along x, y, z.
            shared_bytes: Shared memory of a block beyond what the kernel itself declares.
            early: Whether the kernel may start before the launch in front of it is done, because it waits for that
                itself ("programmatic dependent launch"). A launcher may let it start no earlier.
        """
        ...

    def context(self) -> Optional[DeviceContext]:
        """The context of this launcher's device, for descriptors; without one it launches nothing."""
        return None

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        """Allocate `count` uninitialised elements that stay valid until every launch of this launcher is done.

        Args:
            name: The memory's name in reports.
            count: How many elements.

        Returns:
            The address on the device.
        """
        ...


struct DeviceLauncher(Launcher):
    """Enqueue on the stream of a `DeviceContext`."""

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
        # The list keeps the buffer until this launcher goes; its release is ordered after the launches.
        var bytes = self.ctx.enqueue_create_buffer[DType.uint8](max(1, count) * size_of[Scalar[dtype]]())
        var address = bytes.unsafe_ptr().unsafe_bitcast[Scalar[dtype]]().as_unsafe_any_origin()
        self._workspaces.append(bytes^)
        return address
