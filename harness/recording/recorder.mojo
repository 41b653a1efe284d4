"""The recording launcher: prints what a puzzle launches, without a GPU, a driver or MAX.

A program that records imports a puzzle's `op` package and hands a `Recorder` to its launch functions. Lines, fields
separated by a space:

    //@ case NAME                           what the launches below belong to
    //@ tensor NAME ADDRESS BYTES           a tensor at a made-up address
    //@ workspace NAME ADDRESS BYTES        likewise scratch memory, as it is lent
    //@ launch NAME KERNEL gx gy gz bx by bz SHARED ARGUMENT...     (dynamic shared memory and argument bytes, the latter in hexadecimal)
    //@ ptx KERNEL                          followed by the PTX, once for each kernel
"""

from std.compile import compile_info
from std.sys import size_of
from max.gpu.host import Dim
from max.gpu.host.compile import get_gpu_target
from max.gpu.host.device_context import DefaultDeviceTypeEncoder, DevicePassable

from op.common import MutPtr
from op.launcher import Launcher

comptime TARGET = get_gpu_target["sm_90a"]()
comptime FIRST_ADDRESS = 0x5A5A00000000


struct Recorder(Launcher):
    """Prints every launch and lends made-up memory."""

    comptime wgmma = False

    var next_address: Int
    var seen: List[String]

    def __init__(out self):
        self.next_address = FIRST_ADDRESS
        self.seen = []

    def case(mut self, name: String):
        """Says what the launches that follow belong to."""
        print("//@ case", name)

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
        print(t"//@ {what}", name, address, bytes)
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
        var info = compile_info[kernel, emission_kind="asm", target=TARGET]()
        var symbol = String(info.function_name)
        if symbol not in self.seen:
            self.seen.append(symbol)
            print("//@ ptx", symbol)
            print(info.asm)
        var line = String(t"//@ launch {name} {symbol}")
        line += String(t" {grid_dim.x()} {grid_dim.y()} {grid_dim.z()}")
        line += String(t" {block_dim.x()} {block_dim.y()} {block_dim.z()} {shared_bytes}")
        comptime for i in range(Ts.length):
            comptime count = size_of[Ts[i].device_type, target=TARGET]()
            var raw = List[UInt8](length=max(count, 64), fill=0)
            var encoder = DefaultDeviceTypeEncoder()
            args[i]._to_device_type(encoder, raw.unsafe_ptr().unsafe_bitcast[NoneType]())
            line += " "
            for k in range(count):
                line += hex_digit(Int(raw[k]) // 16) + hex_digit(Int(raw[k]) % 16)
        print(line)


def hex_digit(value: Int) -> String:
    """One hexadecimal digit."""
    return String("0123456789abcdef"[byte=value])
