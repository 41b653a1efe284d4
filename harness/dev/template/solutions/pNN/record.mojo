"""Records the launches of puzzle NN, in one case: its sizes are R and C."""

from std.sys import get_defined_dtype

from op.kernels import launch_square, launch_square_backward
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    var R = sizes[0]
    var C = sizes[1]
    recorder.case(String(t"plain {R} {C}"))
    var input = recorder.tensor[dtype]("input", R * C).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", R * C).as_imm()
    var output = recorder.tensor[dtype]("output", R * C)
    var grad_input = recorder.tensor[dtype]("grad_input", R * C)
    launch_square[dtype](recorder, output, input, Int32(R), Int32(C))
    launch_square_backward[dtype](recorder, grad_input, grad_output, input, Int32(R), Int32(C))
