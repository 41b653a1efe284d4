"""Records the launches of puzzle 21 in one case, whose sizes are batch, sequence and width."""

from std.sys import get_defined_dtype

from op.hunt import (
    launch_bias_gradient,
    launch_scale_gradient,
    launch_softmax_gradient,
    launch_standardise_gradient,
)
from op.shared.common import accum_type
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    """Every op once, on tensors with the names of the spec."""
    var batch = sizes[0]
    var sequence = sizes[1]
    var width = sizes[2]
    var rows = batch * sequence
    recorder.case(String(t"kernels {batch} {sequence} {width}"))
    var grad_output = recorder.tensor[dtype]("grad_output", rows * width).as_imm()
    var input = recorder.tensor[dtype]("input", rows * width).as_imm()
    var grad_bias = recorder.tensor[dtype]("grad_bias", width)
    var grad_scale = recorder.tensor[accum_type[dtype]]("grad_scale", width)
    var grad_logits = recorder.tensor[dtype]("grad_logits", rows * width)
    var grad_input = recorder.tensor[dtype]("grad_input", rows * width)
    launch_bias_gradient[dtype](recorder, grad_bias, grad_output, batch, sequence, width)
    launch_scale_gradient[dtype](recorder, grad_scale, grad_output, input, rows, width)
    launch_softmax_gradient[dtype](recorder, grad_logits, grad_output, input, rows, width)
    launch_standardise_gradient[dtype](recorder, grad_input, grad_output, input, rows, width)
