"""Records the launches of puzzle 21 in one case, whose sizes are batch, sequence, width.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_kernels`; without a VARIANT_ name, the default variants are recorded.
"""

from std.sys import get_defined_dtype, is_defined

from op.hunt import (
    launch_bias_gradient,
    launch_scale_gradient,
    launch_softmax_gradient,
    launch_standardise_gradient,
)
from op.shared.common import accum_type
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime KERNELS = is_defined["VARIANT_kernels"]()
comptime DEFAULT = not KERNELS


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if KERNELS or DEFAULT:
        record_kernels(recorder, dims)


def record_kernels(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("kernels", dims)
    var batch = dims[0]
    var sequence = dims[1]
    var width = dims[2]
    var grad_output = recorder.tensor[dtype]("grad_output", batch * sequence * width).as_imm()
    var input = recorder.tensor[dtype]("input", batch * sequence * width).as_imm()
    var grad_bias = recorder.tensor[dtype]("grad_bias", width)
    var grad_scale = recorder.tensor[accum]("grad_scale", width)
    var grad_logits = recorder.tensor[dtype]("grad_logits", batch * sequence * width)
    var grad_input = recorder.tensor[dtype]("grad_input", batch * sequence * width)
    launch_bias_gradient[dtype](recorder, grad_bias, grad_output, batch, sequence, width)
    launch_scale_gradient[dtype](recorder, grad_scale, grad_output, input, batch * sequence, width)
    launch_softmax_gradient[dtype](recorder, grad_logits, grad_output, input, batch * sequence, width)
    launch_standardise_gradient[dtype](recorder, grad_input, grad_output, input, batch * sequence, width)
