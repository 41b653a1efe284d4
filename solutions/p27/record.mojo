"""Records the launches of puzzle 27 in one case, whose sizes are B, T, C, V.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_loss`; without a VARIANT_ name, the default variants are recorded.
"""

from std.math import ceildiv
from std.sys import get_defined_dtype, is_defined

from op.ops import (
    launch_adamw,
    launch_clip,
    launch_cross_entropy,
    launch_cross_entropy_backward,
    launch_embedding_backward,
    launch_gelu,
    launch_gelu_backward,
    launch_mean_loss,
)
from op.parts import CHUNK
from op.shared.common import accum_type
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime LOSS = is_defined["VARIANT_loss"]()
comptime GELU = is_defined["VARIANT_gelu"]()
comptime EMBEDDING = is_defined["VARIANT_embedding"]()
comptime ADAMW = is_defined["VARIANT_adamw"]()
comptime CLIP = is_defined["VARIANT_clip"]()
comptime DEFAULT = not LOSS and not GELU and not EMBEDDING and not ADAMW and not CLIP


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if LOSS or DEFAULT:
        record_loss(recorder, dims)
    comptime if GELU or DEFAULT:
        record_gelu(recorder, dims)
    comptime if EMBEDDING or DEFAULT:
        record_embedding(recorder, dims)
    comptime if ADAMW or DEFAULT:
        record_adamw(recorder, dims)
    comptime if CLIP or DEFAULT:
        record_clip(recorder, dims)


def record_loss(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("loss", dims)
    var B = dims[0]
    var T = dims[1]
    var V = dims[3]
    var rows = B * T
    var logits = recorder.tensor[dtype]("logits", B * T * V).as_imm()
    var targets = recorder.tensor[DType.int64]("targets", B * T).as_imm()
    var row_loss = recorder.tensor[accum]("row_loss", B * T)
    var row_lse = recorder.tensor[accum]("row_lse", B * T)
    var mean_loss = recorder.tensor[accum]("mean_loss", 1)
    var places = recorder.tensor[accum]("places", 1)
    var grad_rows = recorder.tensor[dtype]("grad_rows", B * T * V)
    launch_cross_entropy[dtype](recorder, row_loss, row_lse, logits, targets, rows, V)
    launch_mean_loss[accum](recorder, mean_loss, places, row_loss.as_imm(), targets, rows)
    launch_cross_entropy_backward[dtype](
        recorder,
        grad_rows,
        logits,
        targets,
        row_lse.as_imm(),
        places.as_imm(),
        rows,
        V,
    )


def record_gelu(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("gelu", dims)
    var B = dims[0]
    var T = dims[1]
    var C = dims[2]
    var rows = B * T
    var x = recorder.tensor[dtype]("x", B * T * C).as_imm()
    var dx = recorder.tensor[dtype]("dx", B * T * C).as_imm()
    var gelu = recorder.tensor[dtype]("gelu", B * T * C)
    var grad_gelu = recorder.tensor[dtype]("grad_gelu", B * T * C)
    launch_gelu[dtype](recorder, gelu, x, rows * C)
    launch_gelu_backward[dtype](recorder, grad_gelu, dx, x, rows * C)


def record_embedding(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("embedding", dims)
    var B = dims[0]
    var T = dims[1]
    var C = dims[2]
    var V = dims[3]
    var rows = B * T
    var ends = V + 1
    var dx = recorder.tensor[dtype]("dx", B * T * C).as_imm()
    var order = recorder.tensor[DType.int32]("order", rows).as_imm()
    var starts = recorder.tensor[DType.int32]("starts", ends).as_imm()
    var grad_token = recorder.tensor[dtype]("grad_token", V * C)
    launch_embedding_backward[dtype](recorder, grad_token, dx, order, starts, V, C)


def record_adamw(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("adamw", dims)
    var B = dims[0]
    var T = dims[1]
    var C = dims[2]
    var rows = B * T
    var x = recorder.tensor[dtype]("x", B * T * C).as_imm()
    var dx = recorder.tensor[dtype]("dx", B * T * C).as_imm()
    var mean = recorder.tensor[accum]("mean", B * T * C).as_imm()
    var square = recorder.tensor[accum]("square", B * T * C).as_imm()
    var new_x = recorder.tensor[dtype]("new_x", B * T * C)
    var corrections = recorder.tensor[accum]("corrections", 2)
    var new_mean = recorder.tensor[accum]("new_mean", B * T * C)
    var new_square = recorder.tensor[accum]("new_square", B * T * C)
    launch_adamw[dtype](
        recorder,
        corrections,
        new_x,
        new_mean,
        new_square,
        x,
        dx,
        mean,
        square,
        0.125,
        0.875,
        0.96875,
        0.015625,
        0.25,
        3,
        rows * C,
    )


def record_clip(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("clip", dims)
    var B = dims[0]
    var T = dims[1]
    var C = dims[2]
    var rows = B * T
    var chunks = ceildiv(B * T * C, CHUNK)
    var dx = recorder.tensor[dtype]("dx", B * T * C).as_imm()
    var clipped = recorder.tensor[dtype]("clipped", B * T * C)
    var square_sums = recorder.tensor[accum]("square_sums", chunks)
    var norm = recorder.tensor[accum]("norm", 1)
    launch_clip[dtype](recorder, square_sums, norm, clipped, dx, 3.0, rows * C)
