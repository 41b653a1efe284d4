"""Records the launches of puzzle 20 in one case, whose sizes are rows, columns.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_relu`; without a VARIANT_ name, the default variants are recorded.
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
comptime DEFAULT = not RELU and not SOFTMAX and not LAYERNORM


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if RELU or DEFAULT:
        record_relu(recorder, dims)
    comptime if SOFTMAX or DEFAULT:
        record_softmax(recorder, dims)
    comptime if LAYERNORM or DEFAULT:
        record_layernorm(recorder, dims)


def record_relu(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("relu", dims)
    var rows = dims[0]
    var columns = dims[1]
    var words = ceildiv(rows * columns, WORD)
    var input = recorder.tensor[dtype]("input", rows * columns).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * columns).as_imm()
    var relu = recorder.tensor[dtype]("relu", rows * columns)
    var mask = recorder.tensor[DType.int32]("mask", words)
    var grad_relu = recorder.tensor[dtype]("grad_relu", rows * columns)
    launch_relu_mask[dtype](recorder, relu, mask, input, rows * columns)
    launch_relu_mask_backward[dtype](recorder, grad_relu, grad_output, mask.as_imm(), rows * columns)


def record_softmax(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("softmax", dims)
    var rows = dims[0]
    var columns = dims[1]
    var logits = recorder.tensor[dtype]("logits", rows * columns).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * columns).as_imm()
    var softmax = recorder.tensor[dtype]("softmax", rows * columns)
    var grad_softmax = recorder.tensor[dtype]("grad_softmax", rows * columns)
    launch_softmax[dtype](recorder, softmax, logits, rows, columns)
    launch_softmax_backward[dtype](recorder, grad_softmax, grad_output, softmax.as_imm(), rows, columns)


def record_layernorm(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("layernorm", dims)
    var rows = dims[0]
    var columns = dims[1]
    var input = recorder.tensor[dtype]("input", rows * columns).as_imm()
    var weight = recorder.tensor[dtype]("weight", columns).as_imm()
    var bias = recorder.tensor[dtype]("bias", columns).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * columns).as_imm()
    var layernorm = recorder.tensor[dtype]("layernorm", rows * columns)
    var mean = recorder.tensor[accum]("mean", rows)
    var rstd = recorder.tensor[accum]("rstd", rows)
    var grad_input = recorder.tensor[dtype]("grad_input", rows * columns)
    var grad_weight = recorder.tensor[dtype]("grad_weight", columns)
    var grad_bias = recorder.tensor[dtype]("grad_bias", columns)
    launch_layernorm[dtype](
        recorder,
        layernorm,
        mean,
        rstd,
        input,
        weight,
        bias,
        rows,
        columns,
        Scalar[accum](1e-5),
    )
    launch_layernorm_backward[dtype](
        recorder,
        grad_input,
        grad_weight,
        grad_bias,
        grad_output,
        input,
        mean.as_imm(),
        rstd.as_imm(),
        weight,
        rows,
        columns,
    )
