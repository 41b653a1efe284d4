"""Records the launches of puzzle 27 in one case, whose sizes are B, T, C and V.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_gelu`; without a VARIANT_ flag all are
taken.
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
comptime ALL = not (LOSS or GELU or EMBEDDING or ADAMW or CLIP)


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    """Each variant on tensors with the names of the spec."""
    var places = sizes[0] * sizes[1]
    var C = sizes[2]
    var V = sizes[3]
    var dims = String(t"{sizes[0]} {sizes[1]} {C} {V}")
    comptime if LOSS or ALL:
        recorder.case(String("loss ", dims))
        record_loss(recorder, places, V)
    comptime if GELU or ALL:
        recorder.case(String("gelu ", dims))
        var x = recorder.tensor[dtype]("x", places * C).as_imm()
        var dx = recorder.tensor[dtype]("dx", places * C).as_imm()
        launch_gelu[dtype](recorder, recorder.tensor[dtype]("gelu", places * C), x, places * C)
        launch_gelu_backward[dtype](
            recorder, recorder.tensor[dtype]("grad_gelu", places * C), dx, x, places * C
        )
    comptime if EMBEDDING or ALL:
        recorder.case(String("embedding ", dims))
        var dx = recorder.tensor[dtype]("dx", places * C).as_imm()
        var order = recorder.tensor[DType.int32]("order", places).as_imm()
        var starts = recorder.tensor[DType.int32]("starts", V + 1).as_imm()
        var grad_token = recorder.tensor[dtype]("grad_token", V * C)
        launch_embedding_backward[dtype](recorder, grad_token, dx, order, starts, V, C)
    comptime if ADAMW or ALL:
        recorder.case(String("adamw ", dims))
        record_adamw(recorder, places * C)
    comptime if CLIP or ALL:
        recorder.case(String("clip ", dims))
        var dx = recorder.tensor[dtype]("dx", places * C).as_imm()
        var square_sums = recorder.tensor[accum]("square_sums", ceildiv(places * C, CHUNK))
        var norm = recorder.tensor[accum]("norm", 1)
        var clipped = recorder.tensor[dtype]("clipped", places * C)
        launch_clip[dtype](recorder, square_sums, norm, clipped, dx, 3, places * C)


def record_loss(mut recorder: Recorder, places: Int, V: Int) raises:
    """Cross-entropy, its mean and its gradient."""
    var logits = recorder.tensor[dtype]("logits", places * V).as_imm()
    var targets = recorder.tensor[DType.int64]("targets", places).as_imm()
    var row_loss = recorder.tensor[accum]("row_loss", places)
    var row_lse = recorder.tensor[accum]("row_lse", places)
    var mean_loss = recorder.tensor[accum]("mean_loss", 1)
    var counted = recorder.tensor[accum]("places", 1)
    var grad_rows = recorder.tensor[dtype]("grad_rows", places * V)
    launch_cross_entropy[dtype](recorder, row_loss, row_lse, logits, targets, places, V)
    launch_mean_loss[accum](recorder, mean_loss, counted, row_loss.as_imm(), targets, places)
    launch_cross_entropy_backward[dtype](
        recorder, grad_rows, logits, targets, row_lse.as_imm(), counted.as_imm(), places, V
    )


def record_adamw(mut recorder: Recorder, count: Int) raises:
    """A step of AdamW with the numbers of the spec."""
    var x = recorder.tensor[dtype]("x", count).as_imm()
    var dx = recorder.tensor[dtype]("dx", count).as_imm()
    var mean = recorder.tensor[accum]("mean", count).as_imm()
    var square = recorder.tensor[accum]("square", count).as_imm()
    var corrections = recorder.tensor[accum]("corrections", 2)
    var new_x = recorder.tensor[dtype]("new_x", count)
    var new_mean = recorder.tensor[accum]("new_mean", count)
    var new_square = recorder.tensor[accum]("new_square", count)
    launch_adamw[dtype](
        recorder, corrections, new_x, new_mean, new_square, x, dx, mean, square,
        0.125, 0.875, 0.96875, 0.015625, 0.25, 3, count,
    )  # fmt: skip
