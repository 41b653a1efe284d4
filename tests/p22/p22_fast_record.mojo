"""Records the fast variant in one dtype, and its matrix products alone:
`mojo run -D DTYPE=float32 -D VARIANT_fast -I HARNESS/devices/recording -I SOLUTION -I RECORD tests/p22/p22_fast_record.mojo WHAT 1 2 3 4 ...`.

After "fast" come B, S, H and O, and "fast B S H O" is the case. After "gemm" come m, n, k and a shift, and there is a case for
each form of the operands and each size of tile, "nt64 m n k shift"; in float32 also "tf32_nt64 m n k shift", whose factors may
be rounded. `shift` elements move every operand from the boundary that tensors usually have.
"""

from std.sys import argv, get_defined_dtype

from op.shared.gemm import SMALL_TILE, TILE, launch_portable
from record import record_launches
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()


def main() raises:
    var arguments = argv()
    var recorder = Recorder()
    for first in range(1, len(arguments) - 4, 5):
        var sizes: List[Int] = []
        for i in range(1, 5):
            sizes.append(Int(String(arguments[first + i])))
        if arguments[first] == "fast":
            record_launches(recorder, sizes)
            continue
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
