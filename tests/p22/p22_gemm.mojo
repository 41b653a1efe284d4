"""Records the fast variant's matrix products: `mojo run -D DTYPE=float32 -D TF32 -I HARNESS/devices/recording p22_gemm.mojo ...`.

The arguments are m, n, k and a shift, again and again. One case for each of them, each form of the operands and each
size of tile: "nt64 m n k shift". `shift` elements move every operand from the boundary that tensors usually have.
"""

from std.sys import argv, get_defined_dtype, is_defined

from op.shared.gemm import SMALL_TILE, TILE, launch_portable
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime TF32 = is_defined["TF32"]()


def main() raises:
    var arguments = argv()
    var recorder = Recorder()
    for first in range(1, len(arguments) - 3, 4):
        var sizes: List[Int] = []
        for i in range(4):
            sizes.append(Int(String(arguments[first + i])))
        comptime for tile in [SMALL_TILE, TILE]:
            comptime for operands in ["nt", "nn", "tn"]:
                record[operands, tile](recorder, sizes[0], sizes[1], sizes[2], sizes[3])


def record[
    operands: StaticString, tile: Int
](mut recorder: Recorder, m: Int, n: Int, k: Int, shift: Int) raises:
    """One product, with a bias where the operands are "nt"."""
    recorder.case(String(t"{operands}{tile} {m} {n} {k} {shift}"))
    var a = recorder.tensor[dtype]("a", m * k + shift).unsafe_offset(shift).as_imm()
    var b = recorder.tensor[dtype]("b", k * n + shift).unsafe_offset(shift).as_imm()
    var bias = recorder.tensor[dtype]("bias", n + shift).unsafe_offset(shift).as_imm()
    var c = recorder.tensor[dtype]("c", m * n + shift).unsafe_offset(shift)
    launch_portable[dtype, operands, operands == "nt", TF32, tile](
        recorder, "gemm", c, a, b, bias, Int32(m), Int32(n), Int32(k)
    )
