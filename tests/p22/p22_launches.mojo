"""Compiles every kernel of puzzle 22 for one GPU target, without a GPU, through the code that launches them.

`mojo run -D TARGET=apple-m4 -I PARENT_OF_OP tests/p22/p22_launches.mojo` prints one line for each launch, each workspace
and each refused size: what the tests compare. An error of the target's compiler goes to standard error, and may leave
the exit code at 0.
"""

from std.compile import compile_info
from std.sys import size_of
from std.sys.defines import get_defined_string
from max.gpu.host import Dim
from max.gpu.host.compile import get_gpu_target
from max.gpu.host.device_context import DevicePassable

from op.launches import (
    validate_sizes,
    launch_backward_fused,
    launch_backward_unfused,
    launch_forward_fused,
    launch_forward_unfused,
)
from op.shared.common import MutPtr, accum_type
from op.shared.launcher import Launcher
from op.tensors import BackwardTensors, ForwardTensors, Sizes

comptime TARGET: StaticString = get_defined_string["TARGET"]()


struct CompilingLauncher(Launcher):
    """Compiles what it is asked to launch and says so; its memory is addresses that nobody reads."""

    comptime wgmma = False

    var title: String
    var next_address: Int

    def __init__(out self, var title: String):
        self.title = title^
        self.next_address = 0x1000

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
        var info = compile_info[kernel, emission_kind="asm", target=get_gpu_target[TARGET]()]()
        var size = info.asm.byte_length()
        print(
            t"launch {self.title} {name} {grid_dim.x()} {grid_dim.y()} {block_dim.x()} {block_dim.y()} {size}"
        )

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        print(t"workspace {self.title} {name} {count * size_of[Scalar[dtype]]()}")
        return self.tensor[dtype]()

    def tensor[dtype: DType](mut self) -> MutPtr[dtype]:
        """The address of some tensor."""
        self.next_address += 0x1000
        return MutPtr[dtype](unsafe_from_address=self.next_address)


def compile_forward[dtype: DType](sizes: Sizes) raises:
    """The launches of both forward passes."""
    comptime accum = accum_type[dtype]
    for fused in range(2):
        var l = CompilingLauncher(String(t"{dtype} {"fused" if fused else "unfused"}"))
        var output = l.tensor[dtype]()
        var mean = l.tensor[accum]()
        var rstd = l.tensor[accum]()
        var input = l.tensor[dtype]().as_imm()
        var gamma = l.tensor[dtype]().as_imm()
        var beta = l.tensor[dtype]().as_imm()
        var weight = l.tensor[dtype]().as_imm()
        var bias = l.tensor[dtype]().as_imm()
        var tensors = ForwardTensors[dtype](
            output, mean, rstd, input, gamma, beta, weight, bias, sizes.copy(), Scalar[accum](1e-5)
        )
        if fused:
            launch_forward_fused(l, tensors)
        else:
            launch_forward_unfused(l, tensors)


def compile_backward[dtype: DType](sizes: Sizes) raises:
    """The launches of both backward passes."""
    comptime accum = accum_type[dtype]
    for fused in range(2):
        var l = CompilingLauncher(String(t"{dtype} {"fused" if fused else "unfused"}"))
        var dx = l.tensor[dtype]()
        var dgamma = l.tensor[dtype]()
        var dbeta = l.tensor[dtype]()
        var dW = l.tensor[dtype]()
        var db = l.tensor[dtype]()
        var dy = l.tensor[dtype]().as_imm()
        var x = l.tensor[dtype]().as_imm()
        var mean = l.tensor[accum]().as_imm()
        var rstd = l.tensor[accum]().as_imm()
        var gamma = l.tensor[dtype]().as_imm()
        var beta = l.tensor[dtype]().as_imm()
        var W = l.tensor[dtype]().as_imm()
        var tensors = BackwardTensors[dtype](
            dx, dgamma, dbeta, dW, db, dy, x, mean, rstd, gamma, beta, W, sizes.copy()
        )
        if fused:
            launch_backward_fused(l, tensors)
        else:
            launch_backward_unfused(l, tensors)


def show_refusal(batch_size: Int, seq_len: Int, hidden_dim: Int, output_dim: Int):
    """Prints what the ops say to sizes that no test has the memory for."""
    try:
        _ = validate_sizes(batch_size, seq_len, hidden_dim, output_dim)
        print(t"accepted {batch_size} {seq_len} {hidden_dim} {output_dim}")
    except error:
        print(t"refused {error}")


def main() raises:
    # Odd sizes, and more sequence positions than a grid has along y.
    var sizes = Sizes(3, 70000, 37, 53)
    comptime for dtype in [DType.float32, DType.bfloat16, DType.float16]:
        compile_forward[dtype](sizes)
        compile_backward[dtype](sizes)
    show_refusal(65536, 32768, 1, 1)
    show_refusal(65536, 32767, 1, 1)
