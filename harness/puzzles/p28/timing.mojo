"""Launch single steps of puzzle 28 on the caller's stream, through the C ABI, for timing.

Built with -D DTYPE=bfloat16 or float32 next to an op package; steps 9 to 12 are bfloat16 only.
"""

from std.memory.alloc import unsafe_alloc
from std.reflection import get_linkage_name
from std.sys import size_of
from std.sys.defines import get_defined_dtype
from max.gpu.host import DeviceContext, DeviceStream, Dim, FuncAttribute
from max.gpu.host.device_context import DevicePassable

from std.math import ceildiv

from op.launches import (
    launch_bias_and_sums, launch_dgamma, launch_dx, launch_epilogue, launch_grad_input, launch_layernorm,
    launch_layouts, launch_product,
)  # fmt: skip
from op.parts import BF16, BLOCK_ROWS, TILE, transpose_kernel
from op.shared.common import ImmPtr, MutPtr, accum_type
from op.shared.launcher import Launcher

comptime dtype = get_defined_dtype["DTYPE", DType.bfloat16]()
comptime accum = accum_type[dtype]
comptime ALIGNMENT = 256


struct Device(Movable):
    """A GPU, and its loaded kernels: the addresses of their names and functions."""

    var ctx: DeviceContext
    var kernels: List[Tuple[Int, Int]]

    def __init__(out self) raises:
        self.ctx = DeviceContext()
        self.kernels = []


struct ExternalStreamLauncher(Launcher):
    """Enqueues launches on the caller's stream, with the caller's workspace."""

    comptime wgmma = False
    var device: Pointer[Device, MutUntrackedOrigin]
    var stream: DeviceStream
    var scratch: Int

    def __init__(out self, device: Int, stream: Int, scratch: Int) raises:
        self.device = Pointer[Device, MutUntrackedOrigin](unsafe_from_address=device)
        self.stream = self.device[].ctx.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=stream)
        )
        self.scratch = scratch

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
        comptime Function = type_of(self.device[].ctx.compile_function[kernel]())
        comptime symbol = get_linkage_name[kernel]()
        var key = Int(symbol.unsafe_ptr())
        var address = 0
        for loaded in self.device[].kernels:
            if loaded[0] == key:
                address = loaded[1]
        if not address:  # loading takes milliseconds, and fails during graph capture
            var function = unsafe_alloc[Function](1)
            var attribute = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(max(shared_bytes, 48 * 1024)))
            function.unsafe_write(self.device[].ctx.compile_function[kernel](func_attribute=attribute))
            address = Int(function)
            self.device[].kernels.append((key, address))
        ref function = Pointer[Function, MutAnyOrigin](unsafe_from_address=address)[]
        self.stream.enqueue_function(
            function, *args, grid_dim=grid_dim, block_dim=block_dim, shared_mem_bytes=shared_bytes
        )

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        var start = self.scratch
        self.scratch += ceildiv(count * size_of[Scalar[dtype]](), ALIGNMENT) * ALIGNMENT
        return MutPtr[dtype](unsafe_from_address=start)


struct Pointers:
    """The tensors of a call, by index."""

    var addresses: Pointer[Int, MutUntrackedOrigin]

    def __init__(out self, address: Int):
        self.addresses = Pointer[Int, MutUntrackedOrigin](unsafe_from_address=address)

    def mut[t: DType](self, index: Int) -> MutPtr[t]:
        return MutPtr[t](unsafe_from_address=self.addresses[unsafe_offset=index])

    def imm[t: DType](self, index: Int) -> ImmPtr[t]:
        return ImmPtr[t](unsafe_from_address=self.addresses[unsafe_offset=index])


def enqueue(
    step: Int, mut launcher: ExternalStreamLauncher, p: Pointers, rows: Int, hidden: Int, outputs: Int
) raises:
    """Enqueue a step's launches, with tensors in its op's order; step 13 is a transpose, 14 the bias and
    column sums, 15 dln.
    """
    comptime for index in range(1, 5):
        if step == index:
            launch_layernorm[dtype, index](
                launcher, p.mut[dtype](0), p.imm[dtype](1), p.imm[dtype](2), p.imm[dtype](3), rows, hidden
            )
    if step == 5:
        launch_dx[dtype](
            launcher, p.mut[dtype](0), p.imm[dtype](1), p.imm[dtype](2), p.imm[accum](3), p.imm[accum](4),
            p.imm[dtype](5), rows, hidden,
        )  # fmt: skip
    if step == 6:
        launch_dgamma[dtype](
            launcher, p.mut[dtype](0), p.mut[dtype](1), p.imm[dtype](2), p.imm[dtype](3), p.imm[accum](4),
            p.imm[accum](5), rows, hidden,
        )  # fmt: skip
    comptime for index in range(7, 11):
        comptime if index <= 8 or dtype == DType.bfloat16:
            if step == index:
                launch_product[dtype, index](
                    launcher, p.mut[dtype](0), p.imm[dtype](1), p.imm[dtype](2), rows, hidden, outputs
                )
    comptime if dtype == DType.bfloat16:
        if step == 11:
            launch_layouts(
                launcher, p.mut[BF16](0), p.mut[BF16](1), p.imm[BF16](2), p.imm[BF16](3), p.imm[BF16](4), rows, hidden,
                outputs,
            )  # fmt: skip
        if step == 12:
            launch_epilogue(
                launcher, p.mut[BF16](0), p.mut[BF16](1), p.mut[BF16](2), p.imm[BF16](3), p.imm[BF16](4),
                p.imm[BF16](5), p.imm[BF16](6), rows, hidden, outputs,
            )  # fmt: skip
        if step == 13:
            var transposed = p.mut[BF16](0)
            launcher.launch[transpose_kernel](
                "transpose", transposed, p.imm[BF16](1), Int32(rows), Int32(hidden),
                grid_dim=Dim(ceildiv(hidden, TILE), ceildiv(rows, TILE)), block_dim=Dim(TILE, BLOCK_ROWS),
            )  # fmt: skip
        if step == 14:
            launch_bias_and_sums(
                launcher, p.mut[BF16](0), p.mut[BF16](1), p.imm[BF16](2), p.imm[BF16](3), rows, outputs
            )
        if step == 15:
            launch_grad_input(launcher, p.mut[BF16](0), p.imm[BF16](1), p.imm[BF16](2), rows, hidden, outputs)


@export
def workbook_open() abi("C") -> Int:
    """Return the address of a new Device, or 0 on failure."""
    try:
        var device = unsafe_alloc[Device](1)
        device.unsafe_write(Device())
        return Int(device)
    except error:
        print(error)
        return 0


@export
def workbook_step(
    device: Int, stream: Int, step: Int, addresses: Int, rows: Int, hidden: Int, outputs: Int, scratch: Int
) abi("C") -> Int:
    """Enqueue a step's launches; return 0 on failure."""
    try:
        var launcher = ExternalStreamLauncher(device, stream, scratch)
        enqueue(step, launcher, Pointers(addresses), rows, hidden, outputs)
        return 1
    except error:
        print(error)
        return 0
