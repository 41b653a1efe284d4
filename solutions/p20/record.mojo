"""Records the launches of puzzle 20 in one case, whose sizes are rows and columns.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_relu`; without a VARIANT_ flag all
three are taken.
"""

from std.math import ceildiv
from std.sys import get_defined_dtype, is_defined

from op.first_backward import WORD
from op.ops import (
    launch_layernorm,
    launch_layernorm_backward,
    launch_relu_mask,
    launch_relu_mask_backward,
    launch_softmax,
    launch_softmax_backward,
)
from op.shared.common import accum_type
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime RELU = is_defined["VARIANT_relu"]()
comptime SOFTMAX = is_defined["VARIANT_softmax"]()
comptime LAYERNORM = is_defined["VARIANT_layernorm"]()
comptime ALL = not (RELU or SOFTMAX or LAYERNORM)


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    comptime if RELU or ALL:
        record_relu(recorder, sizes[0], sizes[1])
    comptime if SOFTMAX or ALL:
        record_softmax(recorder, sizes[0], sizes[1])
    comptime if LAYERNORM or ALL:
        record_layernorm(recorder, sizes[0], sizes[1])


def record_relu(mut recorder: Recorder, R: Int, C: Int) raises:
    """ReLU's ops on tensors with the names of the spec."""
    recorder.case(String(t"relu {R} {C}"))
    var input = recorder.tensor[dtype]("input", R * C).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", R * C).as_imm()
    var relu = recorder.tensor[dtype]("relu", R * C)
    var mask = recorder.tensor[DType.int32]("mask", ceildiv(R * C, WORD))
    var grad_relu = recorder.tensor[dtype]("grad_relu", R * C)
    launch_relu_mask[dtype](recorder, relu, mask, input, R * C)
    launch_relu_mask_backward[dtype](recorder, grad_relu, grad_output, mask.as_imm(), R * C)


def record_softmax(mut recorder: Recorder, R: Int, C: Int) raises:
    """Softmax's ops on tensors with the names of the spec."""
    recorder.case(String(t"softmax {R} {C}"))
    var logits = recorder.tensor[dtype]("logits", R * C).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", R * C).as_imm()
    var softmax = recorder.tensor[dtype]("softmax", R * C)
    var grad_softmax = recorder.tensor[dtype]("grad_softmax", R * C)
    launch_softmax[dtype](recorder, softmax, logits, R, C)
    launch_softmax_backward[dtype](recorder, grad_softmax, grad_output, softmax.as_imm(), R, C)


def record_layernorm(mut recorder: Recorder, R: Int, C: Int) raises:
    """LayerNorm's ops on tensors with the names of the spec."""
    recorder.case(String(t"layernorm {R} {C}"))
    var input = recorder.tensor[dtype]("input", R * C).as_imm()
    var weight = recorder.tensor[dtype]("weight", C).as_imm()
    var bias = recorder.tensor[dtype]("bias", C).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", R * C).as_imm()
    var layernorm = recorder.tensor[dtype]("layernorm", R * C)
    var mean = recorder.tensor[accum]("mean", R)
    var rstd = recorder.tensor[accum]("rstd", R)
    var grad_input = recorder.tensor[dtype]("grad_input", R * C)
    var grad_weight = recorder.tensor[dtype]("grad_weight", C)
    var grad_bias = recorder.tensor[dtype]("grad_bias", C)
    launch_layernorm[dtype](recorder, layernorm, mean, rstd, input, weight, bias, R, C, Scalar[accum](1e-5))
    launch_layernorm_backward[dtype](
        recorder, grad_input, grad_weight, grad_bias, grad_output, input, mean.as_imm(), rstd.as_imm(),
        weight, R, C,
    )  # fmt: skip
