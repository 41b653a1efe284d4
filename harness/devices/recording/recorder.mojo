"""The recording launcher: prints what a puzzle launches, without a GPU, a driver or MAX.

A puzzle's recording program imports its `op` package and hands a `Recorder` to the launch functions there. Lines, fields
separated by a space:

    //@ package                             what follows belongs to the next package; written by the program that runs all of them
    //@ case NAME                           what the launches below belong to
    //@ tensor NAME ADDRESS BYTES           a tensor at a made-up address
    //@ workspace NAME ADDRESS BYTES        likewise scratch memory, as it is lent
    //@ launch NAME KERNEL gx gy gz bx by bz SHARED ARGUMENT...     (dynamic shared memory and argument bytes, the latter in hexadecimal)
    //@ ptx KERNEL                          followed by the PTX, once for each kernel; none with `-D PLAN`
"""

from std.compile import compile_info
from std.reflection import get_linkage_name
from std.sys import is_defined, size_of
from max.gpu.host import Dim
from max.gpu.host.compile import get_gpu_target
from max.gpu.host.device_context import DefaultDeviceTypeEncoder, DevicePassable

from op.shared.common import MutPtr
from op.shared.launcher import Launcher

comptime TARGET = get_gpu_target["sm_90a"]()
comptime FIRST_ADDRESS = 0x5A5A00000000
comptime PLAN = is_defined["PLAN"]()
"""Launches alone are printed, no PTX: the kernels are not compiled, which is most of the work."""


struct Recorder(Launcher):
    """Prints every launch and lends made-up memory."""

    comptime wgmma = False

    var next_address: Int
    var printed: List[String]  # kernels whose PTX is out

    def __init__(out self):
        self.next_address = FIRST_ADDRESS
        self.printed = []

    def case(mut self, name: String):
        """Says what the launches that follow belong to. Its addresses are the same whatever comes before."""
        self.next_address = FIRST_ADDRESS
        print("//@ case", name)

    def case(mut self, variant: String, dims: List[Int]):
        """The case of a variant at some sizes."""
        var name = variant
        for i in range(len(dims)):
            name += String(t" {dims[i]}")
        self.case(name)

    def tensor[dtype: DType](mut self, name: StaticString, count: Int) -> MutPtr[dtype]:
        """A made-up address for a tensor of `count` elements."""
        return self.memory[dtype]("tensor", name, count)

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        return self.memory[dtype]("workspace", name, count)

    def memory[dtype: DType](mut self, what: StaticString, name: StaticString, count: Int) -> MutPtr[dtype]:
        """A made-up address for `count` elements, a page away from every other."""
        var address = self.next_address
        var bytes = count * size_of[Scalar[dtype]]()
        self.next_address += (bytes + 0xFFF) // 0x1000 * 0x1000 + 0x1000
        print("//@", what, name, address, bytes)
        return MutPtr[dtype](unsafe_from_address=address)

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
        var bytes: List[UInt8] = []
        var sizes: List[Int] = []
        comptime for i in range(Ts.length):
            comptime count = size_of[Ts[i].device_type, target=TARGET]()
            var start = len(bytes)
            bytes.resize(start + max(count, 64), 0)
            var encoder = DefaultDeviceTypeEncoder()
            args[i]._to_device_type(
                encoder, bytes.unsafe_ptr().unsafe_offset(start).unsafe_bitcast[NoneType]()
            )
            bytes.shrink(start + count)
            sizes.append(count)
        comptime symbol = get_linkage_name[kernel, target=TARGET]()
        comptime if not PLAN:
            self.compiled(symbol, compile_info[kernel, emission_kind="asm", target=TARGET]().asm)
        self.write(name, symbol, grid_dim, block_dim, shared_bytes, bytes, sizes)

    @no_inline
    def compiled(mut self, symbol: StringSlice, ptx: StringSlice):
        """Prints the PTX of a kernel, once."""
        for i in range(len(self.printed)):
            if self.printed[i] == symbol:
                return
        self.printed.append(String(symbol))
        print("//@ ptx", symbol)
        print(ptx)

    @no_inline
    def write(
        mut self,
        name: StaticString,
        symbol: StringSlice,
        grid: Dim,
        block: Dim,
        shared_bytes: Int,
        bytes: List[UInt8],
        sizes: List[Int],
    ):
        """Prints one launch.

        Not in `launch`, which is compiled anew for every kernel: all this in every one of them costs seconds.
        """
        print("//@ launch", name, symbol, end="")
        var numbers: List[Int] = [grid.x(), grid.y(), grid.z(), block.x(), block.y(), block.z(), shared_bytes]
        for i in range(len(numbers)):
            print("", numbers[i], end="")
        var first = 0
        comptime DIGITS = "0123456789abcdef"
        for i in range(len(sizes)):
            print(" ", end="")
            for k in range(first, first + sizes[i]):
                print(DIGITS[byte=Int(bytes[k]) // 16], DIGITS[byte=Int(bytes[k]) % 16], sep="", end="")
            first += sizes[i]
        print()
