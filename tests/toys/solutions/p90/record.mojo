"""Records the launches of the toy puzzle, in a case of each variant: its sizes are rows and columns."""

from std.sys import get_defined_dtype

from op.square import launch_square, launch_square_backward
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime SCALE = Float64(0.5)


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    var rows = sizes[0]
    var columns = sizes[1]
    for variant in ["plain", "again"]:
        recorder.case(String(t"{variant} {rows} {columns}"))
        var input = recorder.tensor[dtype]("input", rows * columns).as_imm()
        var order = recorder.tensor[DType.int32]("order", rows).as_imm()
        var mask = recorder.tensor[DType.bool]("mask", rows).as_imm()
        var grad_output = recorder.tensor[dtype]("grad_output", rows * columns).as_imm()
        var output = recorder.tensor[dtype]("output", rows * columns)
        var kept = recorder.tensor[DType.bool]("kept", rows)
        var grad_input = recorder.tensor[dtype]("grad_input", rows * columns)
        launch_square[dtype](recorder, output, kept, input, order, mask, Int32(rows), Int32(columns), SCALE)
        launch_square_backward[dtype](
            recorder, grad_input, grad_output, input, order, mask, Int32(rows), Int32(columns), SCALE
        )
