"""Records the launches of puzzle 23 in one case, whose sizes are B, N, S, T, d.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_fused`; without a VARIANT_ flag both
are taken. Every step goes through the launch function of its op, on tensors with the ops' names.
"""

from std.math import ceildiv
from std.sys import get_defined_dtype, is_defined

from op.attention import (
    launch_output,
    launch_output_backward,
    launch_scores,
    launch_scores_backward,
    launch_softmax,
    launch_softmax_backward,
)
from op.flash_launches import launch_delta, launch_flash_backward, launch_flash_forward
from op.flash_tensors import FlashBackward, FlashForward, FlashSizes
from op.shared.common import accum_type
from op.sizes import Sizes
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if is_defined["VARIANT_unfused"]() or not is_defined["VARIANT_fused"]():
        record_unfused(recorder, dims)
    comptime if is_defined["VARIANT_fused"]() or not is_defined["VARIANT_unfused"]():
        record_fused(recorder, dims)


def record_unfused(mut recorder: Recorder, dims: List[Int]) raises:
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    recorder.case(String(t"unfused {B} {N} {S} {T} {d}"))
    var sizes = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var queries = B * N * S * d
    var keys = B * N * T * d
    var query = recorder.tensor[dtype]("query", queries).as_imm()
    var key = recorder.tensor[dtype]("key", keys).as_imm()
    var value = recorder.tensor[dtype]("value", keys).as_imm()
    var mask = recorder.tensor[dtype]("mask", S * T).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", queries).as_imm()
    var scores = recorder.tensor[accum]("scores", sizes.scores())
    var probabilities = recorder.tensor[accum]("probabilities", sizes.scores())
    var output = recorder.tensor[dtype]("output", queries)
    var grad_value = recorder.tensor[dtype]("grad_value", keys)
    var grad_probabilities = recorder.tensor[accum]("grad_probabilities", sizes.scores())
    var grad_scores = recorder.tensor[accum]("grad_scores", sizes.scores())
    var grad_query = recorder.tensor[dtype]("grad_query", queries)
    var grad_key = recorder.tensor[dtype]("grad_key", keys)
    var P = probabilities.as_imm()
    launch_scores[dtype](recorder, scores, query, key, sizes)
    launch_softmax[dtype](recorder, probabilities, scores.as_imm(), mask, sizes, Int32(S))
    launch_output[dtype](recorder, output, P, value, sizes)
    launch_output_backward[dtype](recorder, grad_value, grad_probabilities, grad_output, P, value, sizes)
    launch_softmax_backward[dtype](recorder, grad_scores, grad_probabilities.as_imm(), P, sizes)
    launch_scores_backward[dtype](recorder, grad_query, grad_key, grad_scores.as_imm(), query, key, sizes)


def record_fused(mut recorder: Recorder, dims: List[Int]) raises:
    """Behind B, N, S, T, d there may stand the heads of key and value, the diagonal, and the size of the mask's blocks.
    """
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var G = dims[5] if len(dims) > 5 else N
    var diagonal = dims[6] if len(dims) > 6 else T
    var block = dims[7] if len(dims) > 7 else 1
    var name = String("fused")
    for i in range(len(dims)):
        name += String(t" {dims[i]}")
    recorder.case(name)
    var rows = B * N * S
    var keys = B * G * T * d
    var mask_columns = ceildiv(T, block)
    var query = recorder.tensor[dtype]("query", rows * d).as_imm()
    var key = recorder.tensor[dtype]("key", keys).as_imm()
    var value = recorder.tensor[dtype]("value", keys).as_imm()
    var mask = recorder.tensor[dtype]("attn_mask", ceildiv(S, block) * mask_columns).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * d).as_imm()
    var output = recorder.tensor[dtype]("output", rows * d)
    var lse = recorder.tensor[accum]("lse", rows)
    var delta = recorder.tensor[accum]("delta", rows)
    var grad_query = recorder.tensor[dtype]("grad_query", rows * d)
    var grad_key = recorder.tensor[dtype]("grad_key", keys)
    var grad_value = recorder.tensor[dtype]("grad_value", keys)
    var sizes = FlashSizes(
        batch=Int32(B),
        query_heads=Int32(N),
        key_heads=Int32(G),
        query_len=Int32(S),
        key_len=Int32(T),
        head_dim=Int32(d),
        diagonal=Int32(diagonal),
        mask_b=0,
        mask_n=0,
        mask_s=Int32(mask_columns),
        mask_t=1,
        mask_block=Int32(block),
    )
    var scale = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d)).scale().cast[accum]()
    var forward = FlashForward[dtype](
        output=output,
        lse=lse,
        query=query,
        key=key,
        value=value,
        mask=mask,
        sizes=sizes.copy(),
        scale=scale,
    )
    var backward = FlashBackward[dtype](
        grad_query=grad_query,
        grad_key=grad_key,
        grad_value=grad_value,
        grad_output=grad_output,
        query=query,
        key=key,
        value=value,
        lse=lse.as_imm(),
        delta=delta.as_imm(),
        mask=mask,
        sizes=sizes.copy(),
        scale=scale,
    )
    launch_flash_forward(recorder, forward)
    launch_delta[dtype](recorder, delta, grad_output, output.as_imm(), rows, Int32(d))
    launch_flash_backward(recorder, backward)
