"""Prints what LayerNorm + Linear launches, without a GPU and without compiling a kernel.

`mojo run --target-accelerator sm_80 -I harness/nn/kernels launches.mojo` prints one line for each launch and each workspace: what
the tests compare.
"""

from std.sys import size_of
from max.gpu.host import Dim
from max.gpu.host.device_context import DevicePassable

from layernorm_linear.launches import launch_backward_fast, launch_forward_fast
from shared.common import MutPtr, accum_type
from shared.launcher import Launcher
from layernorm_linear.tensors import BackwardTensors, ForwardTensors, Sizes

comptime ALIGNMENT = 4096


struct PrintingLauncher(Launcher):
    """Prints what it is asked to launch; its memory is addresses that nobody reads."""

    comptime wgmma = False

    var title: String
    var next_address: Int

    def __init__(out self, var title: String):
        self.title = title^
        self.next_address = ALIGNMENT

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
        """Prints: launch, title, name, grid x y, block x y, dynamic shared memory."""
        var geometry = String(t"{grid_dim.x()} {grid_dim.y()} {block_dim.x()} {block_dim.y()} {shared_bytes}")
        print(t"launch {self.title} {name} {geometry}")

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        print(t"workspace {self.title} {name} {count * size_of[Scalar[dtype]]()}")
        return self.tensor[dtype]()

    def tensor[dtype: DType](mut self) -> MutPtr[dtype]:
        """The address of some tensor."""
        self.next_address += ALIGNMENT
        return MutPtr[dtype](unsafe_from_address=self.next_address)


def print_both[dtype: DType, tf32: Bool](rows: Int, H: Int, O: Int, offset: Int) raises:
    """The launches of both passes; `offset` elements move the input from its boundary."""
    comptime accum = accum_type[dtype]
    var sizes = Sizes(1, Int32(rows), Int32(H), Int32(O))
    var kind = "tf32" if tf32 else String(dtype)
    var l = PrintingLauncher(String(t"{kind} {rows} {H} {O} {offset}"))
    var dy = l.tensor[dtype]().as_imm()
    var x = l.tensor[dtype]().unsafe_offset(offset).as_imm()
    var gamma = l.tensor[dtype]().as_imm()
    var beta = l.tensor[dtype]().as_imm()
    var W = l.tensor[dtype]().as_imm()
    var b = l.tensor[dtype]().as_imm()
    var mean = l.tensor[accum]()
    var rstd = l.tensor[accum]()
    var output = l.tensor[dtype]()
    var dx = l.tensor[dtype]()
    var dgamma = l.tensor[dtype]()
    var dbeta = l.tensor[dtype]()
    var dW = l.tensor[dtype]()
    var db = l.tensor[dtype]()
    var forward = ForwardTensors[dtype](
        output, mean, rstd, x, gamma, beta, W, b, sizes.copy(), Scalar[accum](1e-5)
    )
    launch_forward_fast[tf32=tf32](l, forward)
    var backward = BackwardTensors[dtype](
        dx, dgamma, dbeta, dW, db, dy, x, mean.as_imm(), rstd.as_imm(), gamma, beta, W, sizes^
    )
    launch_backward_fast[tf32=tf32](l, backward)


def main() raises:
    comptime for kind in range(5):
        comptime dtype = [DType.float32, DType.float32, DType.bfloat16, DType.float16, DType.float64][kind]
        # Odd; whole vectors; not aligned; ever longer rows; none.
        print_both[dtype, kind == 1](210000, 37, 53, 0)
        print_both[dtype, kind == 1](210000, 768, 3072, 0)
        print_both[dtype, kind == 1](210000, 768, 3072, 1)
        print_both[dtype, kind == 1](10, 6144, 8, 0)
        print_both[dtype, kind == 1](1, 100000, 8, 0)
        print_both[dtype, kind == 1](0, 768, 3072, 0)
