"""Records the launches of puzzle NN in one case, whose sizes are rows, columns.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_plain`; without a VARIANT_ name, the default variants are recorded.
"""

from std.sys import get_defined_dtype, is_defined

from op.kernels import launch_square, launch_square_backward
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime PLAIN = is_defined["VARIANT_plain"]()
comptime DEFAULT = not PLAIN


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if PLAIN or DEFAULT:
        record_plain(recorder, dims)


def record_plain(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("plain", dims)
    var rows = dims[0]
    var columns = dims[1]
    var input = recorder.tensor[dtype]("input", rows * columns).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * columns).as_imm()
    var output = recorder.tensor[dtype]("output", rows * columns)
    var grad_input = recorder.tensor[dtype]("grad_input", rows * columns)
    launch_square[dtype](recorder, output, input, Int32(rows), Int32(columns))
    launch_square_backward[dtype](recorder, grad_input, grad_output, input, Int32(rows), Int32(columns))
