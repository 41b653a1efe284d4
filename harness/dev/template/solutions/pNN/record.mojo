"""Records the launches of puzzle NN: one case for each two sizes R C."""

from std.sys import argv, get_defined_dtype

from op.kernels import launch_square, launch_square_backward
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()


def main() raises:
    var arguments = argv()
    var recorder = Recorder()
    for first in range(1, len(arguments) - 1, 2):
        var R = Int(String(arguments[first]))
        var C = Int(String(arguments[first + 1]))
        recorder.case(String(t"plain {R} {C}"))
        var input = recorder.tensor[dtype]("input", R * C).as_imm()
        var grad_output = recorder.tensor[dtype]("grad_output", R * C).as_imm()
        var output = recorder.tensor[dtype]("output", R * C)
        var grad_input = recorder.tensor[dtype]("grad_input", R * C)
        launch_square[dtype](recorder, output, input, Int32(R), Int32(C))
        launch_square_backward[dtype](recorder, grad_input, grad_output, input, Int32(R), Int32(C))
