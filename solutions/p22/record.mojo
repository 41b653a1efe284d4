"""Records the launches of puzzle 22 in one case, whose sizes are B, S, H, O.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_fused`; without a VARIANT_ name, the default variants are recorded.
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
comptime DEFAULT = not FUSED and not UNFUSED and not FAST and not RMSNORM


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if FUSED or DEFAULT:
        record_fused(recorder, dims)
    comptime if UNFUSED or DEFAULT:
        record_unfused(recorder, dims)
    comptime if FAST:
        record_fast(recorder, dims)
    comptime if RMSNORM:
        record_rmsnorm(recorder, dims)


def record_fused(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("fused", dims)
    var B = dims[0]
    var S = dims[1]
    var H = dims[2]
    var O = dims[3]
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    var input = recorder.tensor[dtype]("input", B * S * H).as_imm()
    var ln_weight = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var ln_bias = recorder.tensor[dtype]("ln_bias", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var linear_bias = recorder.tensor[dtype]("linear_bias", O).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * S * O).as_imm()
    var output = recorder.tensor[dtype]("output", B * S * O)
    var mean = recorder.tensor[accum]("mean", B * S)
    var rstd = recorder.tensor[accum]("rstd", B * S)
    var grad_input = recorder.tensor[dtype]("grad_input", B * S * H)
    var grad_ln_weight = recorder.tensor[dtype]("grad_ln_weight", H)
    var grad_ln_bias = recorder.tensor[dtype]("grad_ln_bias", H)
    var grad_weight = recorder.tensor[dtype]("grad_weight", O * H)
    var grad_bias = recorder.tensor[dtype]("grad_bias", O)
    launch_forward_fused(
        recorder,
        ForwardTensors[dtype](
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
        ),
    )
    launch_backward_fused(
        recorder,
        BackwardTensors[dtype](
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
        ),
    )


def record_unfused(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("unfused", dims)
    var B = dims[0]
    var S = dims[1]
    var H = dims[2]
    var O = dims[3]
    var rows = B * S
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    var input = recorder.tensor[dtype]("input", B * S * H).as_imm()
    var ln_weight = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var ln_bias = recorder.tensor[dtype]("ln_bias", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var linear_bias = recorder.tensor[dtype]("linear_bias", O).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * S * O).as_imm()
    var dln = recorder.tensor[dtype]("dln", B * S * H).as_imm()
    var output = recorder.tensor[dtype]("output", B * S * O)
    var mean = recorder.tensor[accum]("mean", B * S)
    var rstd = recorder.tensor[accum]("rstd", B * S)
    var grad_input = recorder.tensor[dtype]("grad_input", B * S * H)
    var grad_ln_weight = recorder.tensor[dtype]("grad_ln_weight", H)
    var grad_ln_bias = recorder.tensor[dtype]("grad_ln_bias", H)
    var grad_weight = recorder.tensor[dtype]("grad_weight", O * H)
    var grad_bias = recorder.tensor[dtype]("grad_bias", O)
    var row_sums = recorder.tensor[accum]("row_sums", rows * 2)
    launch_forward_unfused(
        recorder,
        ForwardTensors[dtype](
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
        ),
    )
    launch_backward_unfused(
        recorder,
        BackwardTensors[dtype](
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
        ),
    )
    launch_row_sums[dtype](recorder, row_sums, dln, input, mean.as_imm(), rstd.as_imm(), ln_weight, sizes)


def record_fast(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("fast", dims)
    var B = dims[0]
    var S = dims[1]
    var H = dims[2]
    var O = dims[3]
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    var input = recorder.tensor[dtype]("input", B * S * H).as_imm()
    var ln_weight = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var ln_bias = recorder.tensor[dtype]("ln_bias", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var linear_bias = recorder.tensor[dtype]("linear_bias", O).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * S * O).as_imm()
    var output = recorder.tensor[dtype]("output", B * S * O)
    var mean = recorder.tensor[accum]("mean", B * S)
    var rstd = recorder.tensor[accum]("rstd", B * S)
    var grad_input = recorder.tensor[dtype]("grad_input", B * S * H)
    var grad_ln_weight = recorder.tensor[dtype]("grad_ln_weight", H)
    var grad_ln_bias = recorder.tensor[dtype]("grad_ln_bias", H)
    var grad_weight = recorder.tensor[dtype]("grad_weight", O * H)
    var grad_bias = recorder.tensor[dtype]("grad_bias", O)
    launch_forward_fast(
        recorder,
        ForwardTensors[dtype](
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
        ),
    )
    launch_backward_fast(
        recorder,
        BackwardTensors[dtype](
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
        ),
    )


def record_rmsnorm(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("rmsnorm", dims)
    var B = dims[0]
    var S = dims[1]
    var H = dims[2]
    var O = dims[3]
    var sizes = Sizes(Int32(B), Int32(S), Int32(H), Int32(O))
    var grad_output = recorder.tensor[dtype]("grad_output", B * S * O).as_imm()
    var input = recorder.tensor[dtype]("input", B * S * H).as_imm()
    var ln_weight = recorder.tensor[dtype]("ln_weight", H).as_imm()
    var linear_weight = recorder.tensor[dtype]("linear_weight", O * H).as_imm()
    var rms_grad_input = recorder.tensor[dtype]("rms_grad_input", B * S * H)
    var grad_rms_weight = recorder.tensor[dtype]("grad_rms_weight", H)
    var rms_grad_weight = recorder.tensor[dtype]("rms_grad_weight", O * H)
    launch_rmsnorm_linear_backward[dtype](
        recorder,
        rms_grad_input,
        grad_rms_weight,
        rms_grad_weight,
        grad_output,
        input,
        ln_weight,
        linear_weight,
        sizes,
        Scalar[accum](EPS),
    )
