"""Records the launches of puzzle 23 in one case, whose sizes are B, N, S, T, d.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_fused`; without a VARIANT_ flag
unfused and fused are taken. Every step goes through the launch function of its op, on tensors with the ops' names.
"""

from std.math import ceildiv
from std.sys import get_defined_dtype, is_defined

from op.attention import (
    launch_matmul,
    launch_output,
    launch_output_backward,
    launch_scores,
    launch_scores_backward,
    launch_softmax,
    launch_softmax_backward,
)
from op.fast_launches import (
    Layout,
    launch_backward_fast,
    launch_delta_fast,
    launch_forward_fast,
    launch_mask_gradient_fast,
)
from op.flash_launches import launch_delta, launch_flash_backward, launch_flash_forward
from op.flash_tensors import FlashBackward, FlashForward, FlashSizes
from op.mask_gradient import MaskGradient, launch_mask_gradient
from op.one_pass import launch_one_pass
from op.shared.common import accum_type
from op.sizes import Sizes
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime UNFUSED = is_defined["VARIANT_unfused"]()
comptime FUSED = is_defined["VARIANT_fused"]()
comptime ATOMIC = is_defined["VARIANT_atomic"]()
comptime MASKED = is_defined["VARIANT_masked"]()
comptime FAST = is_defined["VARIANT_fast"]()
comptime DEFAULT = not (UNFUSED or FUSED or ATOMIC or MASKED or FAST)


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if UNFUSED or DEFAULT:
        record_unfused(recorder, dims)
    comptime if FUSED or DEFAULT:
        record_flash["fused"](recorder, dims)
    comptime if ATOMIC:
        record_flash["atomic"](recorder, dims)
    comptime if MASKED:
        record_flash["masked"](recorder, dims)
    comptime if FAST:
        record_flash["fast"](recorder, dims)


def record_unfused(mut recorder: Recorder, dims: List[Int]) raises:
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var name = String("unfused")
    for i in range(len(dims)):
        name += String(t" {dims[i]}")
    recorder.case(name)
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
    # Q^T dO, which is no step: with the scores it takes every way in which the product loads a factor.
    launch_matmul[transpose_a=True](
        recorder,
        "transposed_product",
        recorder.tensor[accum]("transposed_product", B * N * d * d),
        query,
        grad_output,
        batches=sizes.batches,
        m=sizes.head_dim,
        n=sizes.head_dim,
        k=sizes.query_len,
    )


def record_flash[variant: StaticString](mut recorder: Recorder, dims: List[Int]) raises:
    """Behind B, N, S, T, d there may stand the heads of key and value, the diagonal, the size of the mask's blocks, which is 0
    where the fast variant has no mask, and for each axis of the mask whether it has the size 1.
    """
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var G = dims[5] if len(dims) > 5 else N
    var diagonal = dims[6] if len(dims) > 6 else T
    var block = dims[7] if len(dims) > 7 else 1
    var one: List[Bool] = [True, True, False, False]
    for i in range(8, len(dims)):
        one[i - 8] = dims[i] == 1
    var side = max(1, block)
    var name = String(variant)
    for i in range(len(dims)):
        name += String(t" {dims[i]}")
    recorder.case(name)
    var rows = B * N * S
    var keys = B * G * T * d
    var mask_shape: List[Int] = [B, N, ceildiv(S, side), ceildiv(T, side)]
    var strides: List[Int32] = [0, 0, 0, 0]
    var elements = 1
    for i in range(4):
        if not one[3 - i]:
            strides[3 - i] = Int32(elements)
            elements *= mask_shape[3 - i]
    var query = recorder.tensor[dtype]("query", rows * d).as_imm()
    var key = recorder.tensor[dtype]("key", keys).as_imm()
    var value = recorder.tensor[dtype]("value", keys).as_imm()
    var mask = recorder.tensor[dtype]("attn_mask", elements).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * d).as_imm()
    var output = recorder.tensor[dtype]("output", rows * d)
    var lse = recorder.tensor[accum]("lse", rows)
    var delta = recorder.tensor[accum]("delta", rows)
    var sizes = FlashSizes(
        batch=Int32(B),
        query_heads=Int32(N),
        key_heads=Int32(G),
        query_len=Int32(S),
        key_len=Int32(T),
        head_dim=Int32(d),
        diagonal=Int32(diagonal),
        mask_b=strides[0],
        mask_n=strides[1],
        mask_s=strides[2],
        mask_t=strides[3],
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
    var layout = Layout.without_gaps(sizes)
    comptime if variant == "fast":
        launch_forward_fast(recorder, forward, layout)
        launch_delta_fast[dtype](
            recorder, delta, grad_output, output.as_imm(), lse.as_imm(), False, sizes, layout
        )
    else:
        launch_flash_forward(recorder, forward)
        launch_delta[dtype](recorder, delta, grad_output, output.as_imm(), rows, Int32(d))
    comptime if variant == "masked" or variant == "fast":
        if variant == "masked" or (len(dims) > 7 and block == 1):
            var gradient = MaskGradient[dtype](
                grad_mask=recorder.tensor[dtype]("grad_attn_mask", elements),
                grad_output=grad_output,
                query=query,
                key=key,
                value=value,
                output=output.as_imm(),
                lse=lse.as_imm(),
                delta=delta.as_imm(),
                mask=mask,
                sizes=sizes.copy(),
                scale=scale,
            )
            comptime if variant == "fast":
                launch_mask_gradient_fast(recorder, gradient, layout)
            else:
                launch_mask_gradient(recorder, gradient)
    comptime if variant != "masked":
        var backward = FlashBackward[dtype](
            grad_query=recorder.tensor[dtype]("grad_query", rows * d),
            grad_key=recorder.tensor[dtype]("grad_key", keys),
            grad_value=recorder.tensor[dtype]("grad_value", keys),
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
        comptime if variant == "atomic":
            launch_one_pass(recorder, backward)
        elif variant == "fast":
            launch_backward_fast(recorder, backward, layout)
        else:
            launch_flash_backward(recorder, backward)
