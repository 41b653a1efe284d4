"""Records the matrix products in one dtype:
`mojo run -D DTYPE=float32 -I RECORDER -I harness/nn/kernels products_record.mojo M N K SHIFT ...`.

There is a case for each form of the operands and each size of tile, "nt64 m n k shift"; in float32 also "tf32_nt64 m n k shift",
whose factors may be rounded. `shift` elements move every operand from the boundary that tensors usually have.
"""

from std.sys import argv, get_defined_dtype

from common.gemm import SMALL_TILE, TILE, launch_portable
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()


def main() raises:
    var arguments = argv()
    var recorder = Recorder()
    for first in range(1, len(arguments) - 3, 4):
        var sizes: List[Int] = []
        for i in range(4):
            sizes.append(Int(String(arguments[first + i])))
        comptime for tile in [SMALL_TILE, TILE]:
            comptime for operands in ["nt", "nn", "tn"]:
                record_product[operands, tile, False](recorder, sizes)
                comptime if dtype == DType.float32:
                    record_product[operands, tile, True](recorder, sizes)


def record_product[
    operands: StaticString, tile: Int, tf32: Bool
](mut recorder: Recorder, sizes: List[Int]) raises:
    """One product, with a bias where the operands are "nt"."""
    var m = sizes[0]
    var n = sizes[1]
    var k = sizes[2]
    var shift = sizes[3]
    recorder.case(String(t"{"tf32_" if tf32 else ""}{operands}{tile} {m} {n} {k} {shift}"))
    var a = recorder.tensor[dtype]("a", m * k + shift).unsafe_offset(shift).as_imm()
    var b = recorder.tensor[dtype]("b", k * n + shift).unsafe_offset(shift).as_imm()
    var bias = recorder.tensor[dtype]("bias", n + shift).unsafe_offset(shift).as_imm()
    var c = recorder.tensor[dtype]("c", m * n + shift).unsafe_offset(shift)
    launch_portable[dtype, operands, operands == "nt", tf32, tile](
        recorder, "gemm", c, a, b, bias, Int32(m), Int32(n), Int32(k)
    )
