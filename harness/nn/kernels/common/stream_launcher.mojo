"""Launch kernels on the caller's stream, in order with its other work, so that a CUDA graph can capture them.

Nothing is allocated on the GPU: the caller queries the size of the workspace and provides it (`calls.mojo`).
"""

from std.memory.alloc import unsafe_alloc
from std.reflection import get_linkage_name
from std.sys import default_accelerator, size_of
from max.gpu.host import DeviceContext, DeviceStream, Dim, FuncAttribute
from max.gpu.host.device_context import DevicePassable
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes

from shared.common import MutPtr, shared_memory
from shared.launcher import Launcher

comptime ALIGNMENT = 256
"""Alignment of workspace allocations, in bytes."""


# ---- One GPU ------------------------------------------------------------------------------------------------


struct Gpu(Movable):
    """A GPU and the kernels loaded on it."""

    var ctx: DeviceContext
    var kernels: List[Tuple[Int, Int]]
    """Pairs of addresses: a kernel's unique name and its `DeviceFunction`, which is never freed."""

    def __init__(out self, index: Int) raises:
        self.ctx = DeviceContext(index)
        self.kernels = []

    def find(self, name: Int) -> Int:
        """Return the address of a loaded function, or 0."""
        for kernel in self.kernels:
            if kernel[0] == name:
                return kernel[1]
        return 0


# ---- Launching on the caller's stream ----------------------------------------------------------------------


struct StreamLauncher(Launcher):
    """A launcher on the caller's stream, with the caller's workspace.

    Without a GPU it only computes the workspace size.
    """

    comptime wgmma = default_accelerator()._is_arch["sm_90a"]()

    var gpu: Optional[Pointer[Gpu, MutUntrackedOrigin]]
    var stream: Optional[DeviceStream]
    var workspace_address: Int
    var available: Int
    var used: Int

    def __init__(out self):
        """Compute the workspace size without launching."""
        self.gpu = None
        self.stream = None
        self.workspace_address = 0
        self.available = Int.MAX
        self.used = 0

    def __init__(out self, gpu: Int, stream: Int, workspace_address: Int, available: Int) raises:
        """Launch on `stream` of a GPU opened by `open_gpu`, with `available` bytes at `workspace_address`."""
        var opened = Pointer[Gpu, MutUntrackedOrigin](unsafe_from_address=gpu)
        self.gpu = opened
        self.stream = opened[].ctx.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=stream)
        )
        self.workspace_address = workspace_address
        self.available = available
        self.used = 0

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
        if not self.gpu:
            return
        comptime Function = type_of(self.gpu.value()[].ctx.compile_function[kernel]())
        ref gpu = self.gpu.value()[]
        comptime symbol = get_linkage_name[kernel]()
        var key = Int(symbol.unsafe_ptr())
        var address = gpu.find(key)
        if not address:
            # Loading takes milliseconds or more; keep the function for the next call.
            var loaded = unsafe_alloc[Function](1)
            if shared_bytes:
                var max_shared = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(max(shared_bytes, shared_memory()))
                )
                loaded.unsafe_write(gpu.ctx.compile_function[kernel](func_attribute=max_shared))
            else:
                loaded.unsafe_write(gpu.ctx.compile_function[kernel]())
            address = Int(loaded)
            gpu.kernels.append((key, address))
        ref function = Pointer[Function, MutAnyOrigin](unsafe_from_address=address)[]
        if early and Self.wgmma:
            self.stream.value().enqueue_function(
                function,
                *args,
                grid_dim=grid_dim,
                block_dim=block_dim,
                shared_mem_bytes=shared_bytes,
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )
        else:
            self.stream.value().enqueue_function(
                function, *args, grid_dim=grid_dim, block_dim=block_dim, shared_mem_bytes=shared_bytes
            )

    def context(self) -> Optional[DeviceContext]:
        if self.gpu:
            return self.gpu.value()[].ctx
        return None

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        var start = self.used
        var bytes = count * size_of[Scalar[dtype]]()
        self.used += (bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.used > self.available:
            raise Error(t"{name} needs {self.used} bytes of workspace, got {self.available}")
        return MutPtr[dtype](unsafe_from_address=self.workspace_address + start)
