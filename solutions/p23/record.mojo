"""Records the launches of puzzle 23 in one case, whose sizes are B, N, S, T, d.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_unfused`; without a VARIANT_ name, the default variants are recorded.
"""

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
    launch_backward_fast,
    launch_delta_fast,
    launch_forward_fast,
    launch_mask_gradient_fast,
)
from op.fast_layout import Layout
from op.flash_launches import launch_delta, launch_flash_backward, launch_flash_forward
from op.flash_tensors import FlashBackward, FlashForward
from op.mask_gradient import MaskGradient, launch_mask_gradient
from op.one_pass import launch_one_pass
from op.recorded_sizes import mask_axis, recorded_sizes, size_or
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
comptime DEFAULT = not UNFUSED and not FUSED and not ATOMIC and not MASKED and not FAST


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if UNFUSED or DEFAULT:
        record_unfused(recorder, dims)
    comptime if FUSED or DEFAULT:
        record_fused(recorder, dims)
    comptime if ATOMIC:
        record_atomic(recorder, dims)
    comptime if MASKED:
        record_masked(recorder, dims)
    comptime if FAST:
        record_fast(recorder, dims)


def record_unfused(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("unfused", dims)
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var steps = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var query = recorder.tensor[dtype]("query", B * N * S * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * N * T * d).as_imm()
    var mask = recorder.tensor[dtype]("mask", S * T).as_imm()
    var value = recorder.tensor[dtype]("value", B * N * T * d).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * S * d).as_imm()
    var scores = recorder.tensor[accum]("scores", B * N * S * T)
    var probabilities = recorder.tensor[accum]("probabilities", B * N * S * T)
    var output = recorder.tensor[dtype]("output", B * N * S * d)
    var grad_value = recorder.tensor[dtype]("grad_value", B * N * T * d)
    var grad_probabilities = recorder.tensor[accum]("grad_probabilities", B * N * S * T)
    var grad_scores = recorder.tensor[accum]("grad_scores", B * N * S * T)
    var grad_query = recorder.tensor[dtype]("grad_query", B * N * S * d)
    var grad_key = recorder.tensor[dtype]("grad_key", B * N * T * d)
    var transposed_product = recorder.tensor[accum]("transposed_product", B * N * d * d)
    launch_scores[dtype](recorder, scores, query, key, steps)
    launch_softmax[dtype](recorder, probabilities, scores.as_imm(), mask, steps, Int32(S))
    launch_output[dtype](recorder, output, probabilities.as_imm(), value, steps)
    launch_output_backward[dtype](
        recorder,
        grad_value,
        grad_probabilities,
        grad_output,
        probabilities.as_imm(),
        value,
        steps,
    )
    launch_softmax_backward[dtype](
        recorder,
        grad_scores,
        grad_probabilities.as_imm(),
        probabilities.as_imm(),
        steps,
    )
    launch_scores_backward[dtype](recorder, grad_query, grad_key, grad_scores.as_imm(), query, key, steps)
    launch_matmul[transpose_a=True](
        recorder,
        "transposed_product",
        transposed_product,
        query,
        grad_output,
        batches=steps.batches,
        m=steps.head_dim,
        n=steps.head_dim,
        k=steps.query_len,
    )


def record_fused(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("fused", dims)
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var steps = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var sizes = recorded_sizes(dims)
    var G = size_or(dims, 5, N)
    var mask_b = mask_axis(dims, 0)
    var mask_n = mask_axis(dims, 1)
    var mask_s = mask_axis(dims, 2)
    var mask_t = mask_axis(dims, 3)
    var query = recorder.tensor[dtype]("query", B * N * S * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * G * T * d).as_imm()
    var value = recorder.tensor[dtype]("value", B * G * T * d).as_imm()
    var attn_mask = recorder.tensor[dtype]("attn_mask", mask_b * mask_n * mask_s * mask_t).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * S * d).as_imm()
    var output = recorder.tensor[dtype]("output", B * N * S * d)
    var lse = recorder.tensor[accum]("lse", B * N * S)
    var delta = recorder.tensor[accum]("delta", B * N * S)
    var grad_query = recorder.tensor[dtype]("grad_query", B * N * S * d)
    var grad_key = recorder.tensor[dtype]("grad_key", B * G * T * d)
    var grad_value = recorder.tensor[dtype]("grad_value", B * G * T * d)
    launch_flash_forward(
        recorder,
        FlashForward[dtype](
            output=output,
            lse=lse,
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )
    launch_delta[dtype](recorder, delta, grad_output, output.as_imm(), B * N * S, Int32(d))
    launch_flash_backward(
        recorder,
        FlashBackward[dtype](
            grad_query=grad_query,
            grad_key=grad_key,
            grad_value=grad_value,
            grad_output=grad_output,
            query=query,
            key=key,
            value=value,
            lse=lse.as_imm(),
            delta=delta.as_imm(),
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )


def record_atomic(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("atomic", dims)
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var steps = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var sizes = recorded_sizes(dims)
    var G = size_or(dims, 5, N)
    var mask_b = mask_axis(dims, 0)
    var mask_n = mask_axis(dims, 1)
    var mask_s = mask_axis(dims, 2)
    var mask_t = mask_axis(dims, 3)
    var query = recorder.tensor[dtype]("query", B * N * S * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * G * T * d).as_imm()
    var value = recorder.tensor[dtype]("value", B * G * T * d).as_imm()
    var attn_mask = recorder.tensor[dtype]("attn_mask", mask_b * mask_n * mask_s * mask_t).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * S * d).as_imm()
    var output = recorder.tensor[dtype]("output", B * N * S * d)
    var lse = recorder.tensor[accum]("lse", B * N * S)
    var delta = recorder.tensor[accum]("delta", B * N * S)
    var grad_query = recorder.tensor[dtype]("grad_query", B * N * S * d)
    var grad_key = recorder.tensor[dtype]("grad_key", B * G * T * d)
    var grad_value = recorder.tensor[dtype]("grad_value", B * G * T * d)
    launch_flash_forward(
        recorder,
        FlashForward[dtype](
            output=output,
            lse=lse,
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )
    launch_delta[dtype](recorder, delta, grad_output, output.as_imm(), B * N * S, Int32(d))
    launch_one_pass(
        recorder,
        FlashBackward[dtype](
            grad_query=grad_query,
            grad_key=grad_key,
            grad_value=grad_value,
            grad_output=grad_output,
            query=query,
            key=key,
            value=value,
            lse=lse.as_imm(),
            delta=delta.as_imm(),
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )


def record_masked(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("masked", dims)
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var steps = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var sizes = recorded_sizes(dims)
    var G = size_or(dims, 5, N)
    var mask_b = mask_axis(dims, 0)
    var mask_n = mask_axis(dims, 1)
    var mask_s = mask_axis(dims, 2)
    var mask_t = mask_axis(dims, 3)
    var query = recorder.tensor[dtype]("query", B * N * S * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * G * T * d).as_imm()
    var value = recorder.tensor[dtype]("value", B * G * T * d).as_imm()
    var attn_mask = recorder.tensor[dtype]("attn_mask", mask_b * mask_n * mask_s * mask_t).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * S * d).as_imm()
    var output = recorder.tensor[dtype]("output", B * N * S * d)
    var lse = recorder.tensor[accum]("lse", B * N * S)
    var delta = recorder.tensor[accum]("delta", B * N * S)
    var grad_attn_mask = recorder.tensor[dtype]("grad_attn_mask", mask_b * mask_n * mask_s * mask_t)
    launch_flash_forward(
        recorder,
        FlashForward[dtype](
            output=output,
            lse=lse,
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )
    launch_delta[dtype](recorder, delta, grad_output, output.as_imm(), B * N * S, Int32(d))
    launch_mask_gradient(
        recorder,
        MaskGradient[dtype](
            grad_output=grad_output,
            query=query,
            key=key,
            value=value,
            lse=lse.as_imm(),
            delta=delta.as_imm(),
            output=output.as_imm(),
            grad_mask=grad_attn_mask,
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
    )


def record_fast(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("fast", dims)
    var B = dims[0]
    var N = dims[1]
    var S = dims[2]
    var T = dims[3]
    var d = dims[4]
    var steps = Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))
    var sizes = recorded_sizes(dims)
    var layout = Layout.without_gaps(sizes)
    var G = size_or(dims, 5, N)
    var mask_b = mask_axis(dims, 0)
    var mask_n = mask_axis(dims, 1)
    var mask_s = mask_axis(dims, 2)
    var mask_t = mask_axis(dims, 3)
    var query = recorder.tensor[dtype]("query", B * N * S * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * G * T * d).as_imm()
    var value = recorder.tensor[dtype]("value", B * G * T * d).as_imm()
    var attn_mask = recorder.tensor[dtype]("attn_mask", mask_b * mask_n * mask_s * mask_t).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * S * d).as_imm()
    var output = recorder.tensor[dtype]("output", B * N * S * d)
    var lse = recorder.tensor[accum]("lse", B * N * S)
    var delta = recorder.tensor[accum]("delta", B * N * S)
    var grad_query = recorder.tensor[dtype]("grad_query", B * N * S * d)
    var grad_key = recorder.tensor[dtype]("grad_key", B * G * T * d)
    var grad_value = recorder.tensor[dtype]("grad_value", B * G * T * d)
    var grad_attn_mask = recorder.tensor[dtype]("grad_attn_mask", mask_b * mask_n * mask_s * mask_t)
    launch_forward_fast(
        recorder,
        FlashForward[dtype](
            output=output,
            lse=lse,
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
        layout,
    )
    launch_delta_fast[dtype](
        recorder,
        delta,
        grad_output,
        output.as_imm(),
        lse.as_imm(),
        False,
        sizes,
        layout,
    )
    launch_backward_fast(
        recorder,
        FlashBackward[dtype](
            grad_query=grad_query,
            grad_key=grad_key,
            grad_value=grad_value,
            grad_output=grad_output,
            query=query,
            key=key,
            value=value,
            lse=lse.as_imm(),
            delta=delta.as_imm(),
            mask=attn_mask,
            sizes=sizes.copy(),
            scale=steps.scale().cast[accum](),
        ),
        layout,
    )
    if size_or(dims, 7, 0) == 1:
        launch_mask_gradient_fast(
            recorder,
            MaskGradient[dtype](
                grad_output=grad_output,
                query=query,
                key=key,
                value=value,
                lse=lse.as_imm(),
                delta=delta.as_imm(),
                output=output.as_imm(),
                grad_mask=grad_attn_mask,
                mask=attn_mask,
                sizes=sizes.copy(),
                scale=steps.scale().cast[accum](),
            ),
            layout,
        )
