"""Records the launches of puzzle 22 in one case, whose sizes are B, S, H, O.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_fused`; without a VARIANT_ flag
the fused and the unfused one are taken. Forward and backward pass go through the launch functions of the ops.
"""

from std.sys import get_defined_dtype, is_defined

from op.fast import launch_backward_fast, launch_forward_fast
from op.launches import (
    launch_backward_fused,
    launch_backward_unfused,
    launch_forward_fused,
    launch_forward_unfused,
    launch_row_sums,
)
from op.layernorm_linear import EPS
from op.rmsnorm_linear import launch_rmsnorm_linear_backward
from op.shared.common import accum_type
from op.tensors import BackwardTensors, ForwardTensors, Sizes
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime FUSED = is_defined["VARIANT_fused"]()
comptime UNFUSED = is_defined["VARIANT_unfused"]()
comptime FAST = is_defined["VARIANT_fast"]()
comptime RMSNORM = is_defined["VARIANT_rmsnorm"]()
comptime DEFAULT = not (FUSED or UNFUSED or FAST or RMSNORM)


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    comptime if FUSED or DEFAULT:
        record["fused"](recorder, sizes[0], sizes[1], sizes[2], sizes[3])
    comptime if UNFUSED or DEFAULT:
        record["unfused"](recorder, sizes[0], sizes[1], sizes[2], sizes[3])
    comptime if FAST:
        record["fast"](recorder, sizes[0], sizes[1], sizes[2], sizes[3])
    comptime if RMSNORM:
        record_rmsnorm(recorder, sizes[0], sizes[1], sizes[2], sizes[3])


def record[algorithm: StaticString](mut recorder: Recorder, B: Int, S: Int, H: Int, O: Int) raises:
    """Forward, backward and, of the unfused variant, the row sums alone, on tensors with the ops' names."""
    recorder.case(String(t"{algorithm} {B} {S} {H} {O}"))
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    var rows = B * S
    var input = recorder.tensor[dtype]("input", rows * H).as_imm()
    var ln_weight = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var ln_bias = recorder.tensor[dtype]("ln_bias", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var linear_bias = recorder.tensor[dtype]("linear_bias", O).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * O).as_imm()
    var dln = recorder.tensor[dtype]("dln", rows * H).as_imm()
    var output = recorder.tensor[dtype]("output", rows * O)
    var mean = recorder.tensor[accum]("mean", rows)
    var rstd = recorder.tensor[accum]("rstd", rows)
    var grad_input = recorder.tensor[dtype]("grad_input", rows * H)
    var grad_ln_weight = recorder.tensor[dtype]("grad_ln_weight", H)
    var grad_ln_bias = recorder.tensor[dtype]("grad_ln_bias", H)
    var grad_weight = recorder.tensor[dtype]("grad_weight", O * H)
    var grad_bias = recorder.tensor[dtype]("grad_bias", O)
    var forward = ForwardTensors[dtype](
        output=output,
        mean=mean,
        rstd=rstd,
        input=input,
        ln_weight=ln_weight,
        ln_bias=ln_bias,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        sizes=sizes.copy(),
        eps=Scalar[accum](EPS),
    )
    var backward = BackwardTensors[dtype](
        grad_input=grad_input,
        grad_ln_weight=grad_ln_weight,
        grad_ln_bias=grad_ln_bias,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        grad_output=grad_output,
        input=input,
        mean=mean.as_imm(),
        rstd=rstd.as_imm(),
        ln_weight=ln_weight,
        ln_bias=ln_bias,
        linear_weight=linear_weight,
        sizes=sizes.copy(),
    )
    comptime if algorithm == "fused":
        launch_forward_fused(recorder, forward)
        launch_backward_fused(recorder, backward)
    elif algorithm == "fast":
        launch_forward_fast(recorder, forward)
        launch_backward_fast(recorder, backward)
    else:
        launch_forward_unfused(recorder, forward)
        launch_backward_unfused(recorder, backward)
        var row_sums = recorder.tensor[accum]("row_sums", 2 * rows)
        launch_row_sums[dtype](recorder, row_sums, dln, input, mean.as_imm(), rstd.as_imm(), ln_weight, sizes)


def record_rmsnorm(mut recorder: Recorder, B: Int, S: Int, H: Int, O: Int) raises:
    """The backward pass of RMSNorm + Linear; its tensors have the names of the spec."""
    recorder.case(String(t"rmsnorm {B} {S} {H} {O}"))
    var rows = B * S
    var input = recorder.tensor[dtype]("input", rows * H).as_imm()
    var gamma = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * O).as_imm()
    launch_rmsnorm_linear_backward[dtype](
        recorder,
        recorder.tensor[dtype]("rms_grad_input", rows * H),
        recorder.tensor[dtype]("grad_rms_weight", H),
        recorder.tensor[dtype]("rms_grad_weight", O * H),
        grad_output,
        input,
        gamma,
        linear_weight,
        Sizes(Int32(B), Int32(S), Int32(H), Int32(O)),
        Scalar[accum](EPS),
    )
