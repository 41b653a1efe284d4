"""Records the launches of puzzle 22, without a GPU and without MAX: `mojo run -g1 -I solutions/p22 FILE`.

Every launch of every variant goes through the puzzle's own launch functions, into a `Launcher` that prints instead of
launching. Tensors have made-up addresses; the reader puts real ones in their place. Lines, fields separated by a space:

    //@ case VARIANT DTYPE B S H O
    //@ tensor NAME ADDRESS BYTES            (also scratch memory, in the order in which it is lent)
    //@ launch NAME KERNEL gx gy gz bx by bz ARGUMENT...       (arguments in hexadecimal)
    //@ ptx KERNEL                           (followed by the PTX, once for each kernel)
"""

from std.compile import compile_info
from std.memory import Pointer
from std.sys import size_of
from max.gpu.host import Dim
from max.gpu.host.compile import get_gpu_target
from max.gpu.host.device_context import DefaultDeviceTypeEncoder, DevicePassable

from op.common import ImmPtr, MutPtr, accum_type
from op.launcher import Launcher
from op.layernorm_linear import (
    EPS,
    Sizes,
    launch_backward_fused,
    launch_backward_unfused,
    launch_forward_fused,
    launch_forward_unfused,
)

comptime TARGET = get_gpu_target["sm_90a"]()
comptime FIRST_ADDRESS = 0x5A5A00000000


struct Recorder(Launcher):
    """Prints what it is asked to launch."""

    var next_address: Int
    var seen: List[String]

    def __init__(out self):
        self.next_address = FIRST_ADDRESS
        self.seen = []

    def tensor[dtype: DType](mut self, name: StaticString, count: Int) -> MutPtr[dtype]:
        """A made-up address for `count` elements."""
        var address = self.next_address
        var bytes = count * size_of[Scalar[dtype]]()
        self.next_address += (bytes + 0xFFF) // 0x1000 * 0x1000 + 0x1000
        print("//@ tensor", name, address, bytes)
        return MutPtr[dtype](unsafe_from_address=address)

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        return self.tensor[dtype](name, count)

    def launch[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin -> None,
        *Ts: DevicePassable,
    ](mut self, name: StaticString, *args: *Ts, grid_dim: Dim, block_dim: Dim) raises:
        var info = compile_info[kernel, emission_kind="asm", target=TARGET]()
        var symbol = String(info.function_name)
        if symbol not in self.seen:
            self.seen.append(symbol)
            print("//@ ptx", symbol)
            print(info.asm)
        var line = String(t"//@ launch {name} {symbol}")
        line += String(t" {grid_dim.x()} {grid_dim.y()} {grid_dim.z()}")
        line += String(t" {block_dim.x()} {block_dim.y()} {block_dim.z()}")
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


def record[dtype: DType](mut recorder: Recorder, B: Int, S: Int, H: Int, O: Int) raises:
    """Forward and backward of both variants at one size."""
    comptime accum = accum_type[dtype]
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    for fused in range(2):
        print("//@ case", "fused" if fused else "unfused", dtype, B, S, H, O)
        var rows = B * S
        var x = recorder.tensor[dtype]("x", rows * H)
        var gamma = recorder.tensor[dtype]("gamma", H)
        var beta = recorder.tensor[dtype]("beta", H)
        var W = recorder.tensor[dtype]("W", O * H)
        var bias = recorder.tensor[dtype]("bias", O)
        var dy = recorder.tensor[dtype]("dy", rows * O)
        var output = recorder.tensor[dtype]("output", rows * O)
        var mean = recorder.tensor[accum]("mean", rows)
        var rstd = recorder.tensor[accum]("rstd", rows)
        var dx = recorder.tensor[dtype]("dx", rows * H)
        var dgamma = recorder.tensor[dtype]("dgamma", H)
        var dbeta = recorder.tensor[dtype]("dbeta", H)
        var dW = recorder.tensor[dtype]("dW", O * H)
        var db = recorder.tensor[dtype]("db", O)
        if fused:
            launch_forward_fused[dtype](
                recorder, output, mean, rstd, x.as_imm(), gamma.as_imm(), beta.as_imm(), W.as_imm(), bias.as_imm(),
                sizes, Scalar[accum](EPS),
            )
            launch_backward_fused[dtype](
                recorder, dx, dgamma, dbeta, dW, db, dy.as_imm(), x.as_imm(), mean.as_imm(), rstd.as_imm(),
                gamma.as_imm(), beta.as_imm(), W.as_imm(), sizes,
            )
        else:
            launch_forward_unfused[dtype](
                recorder, output, mean, rstd, x.as_imm(), gamma.as_imm(), beta.as_imm(), W.as_imm(), bias.as_imm(),
                sizes, Scalar[accum](EPS),
            )
            launch_backward_unfused[dtype](
                recorder, dx, dgamma, dbeta, dW, db, dy.as_imm(), x.as_imm(), mean.as_imm(), rstd.as_imm(),
                gamma.as_imm(), beta.as_imm(), W.as_imm(), sizes,
            )


def main() raises:
    var recorder = Recorder()
    record[DType.float32](recorder, 4, 4, 8, 16)
    record[DType.bfloat16](recorder, 4, 4, 8, 16)
    record[DType.float32](recorder, 3, 5, 33, 17)
    record[DType.float32](recorder, 1, 1, 1, 1)
    record[DType.float32](recorder, 2, 16, 32, 48)
