"""Records the launches of puzzle 24 in one case, whose sizes are B, N, H, W, d, r, T.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_curve`; without a VARIANT_ flag all
three are taken.
"""

from std.math import ceildiv
from std.sys import get_defined_dtype, is_defined

from op.launches import (
    launch_curve,
    launch_gather,
    launch_scatter,
    launch_tiles,
    launch_window_backward,
    launch_window_forward,
)
from op.shared.common import accum_type
from op.window import WindowBackward, WindowForward, WindowSizes
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime CURVE = is_defined["VARIANT_curve"]()
comptime PERMUTE = is_defined["VARIANT_permute"]()
comptime WINDOW = is_defined["VARIANT_window"]()
comptime ALL = not (CURVE or PERMUTE or WINDOW)


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if CURVE or ALL:
        record_curve(recorder, dims)
    comptime if PERMUTE or ALL:
        record_permute(recorder, dims)
    comptime if WINDOW or ALL:
        record_window(recorder, dims)


def named(variant: String, dims: List[Int]) -> String:
    """What a case is called."""
    var name = variant
    for i in range(len(dims)):
        name += String(t" {dims[i]}")
    return name


def record_curve(mut recorder: Recorder, dims: List[Int]) raises:
    """The curve through the smallest square of a power of two that holds the grid."""
    recorder.case(named("curve", dims))
    var side = 1
    while side < max(dims[2], dims[3]):
        side *= 2
    var index = recorder.tensor[DType.int32]("index", side * side)
    var inverse = recorder.tensor[DType.int32]("inverse", side * side)
    launch_curve(recorder, index, inverse, side)


def record_permute(mut recorder: Recorder, dims: List[Int]) raises:
    """Gather, and its backward pass."""
    recorder.case(named("permute", dims))
    var batches = dims[0] * dims[1]
    var L = dims[2] * dims[3]
    var d = dims[4]
    var input = recorder.tensor[dtype]("input", batches * L * d).as_imm()
    var grad_gathered = recorder.tensor[dtype]("grad_gathered", batches * L * d).as_imm()
    var order = recorder.tensor[DType.int32]("order", L).as_imm()
    var gathered = recorder.tensor[dtype]("gathered", batches * L * d)
    var grad_input = recorder.tensor[dtype]("grad_input", batches * L * d)
    launch_gather[dtype](recorder, gathered, input, order, batches, L, d)
    launch_scatter[dtype](recorder, grad_input, grad_gathered, order, batches, L, d)


def record_window(mut recorder: Recorder, dims: List[Int]) raises:
    """The tiles of a window, and attention within it, forward and backward."""
    recorder.case(named("window", dims))
    var rows = dims[0] * dims[1] * dims[2] * dims[3]
    var L = dims[2] * dims[3]
    var d = dims[4]
    var sizes = WindowSizes(
        Int32(dims[0] * dims[1]), Int32(L), Int32(d), Int32(dims[3]), Int32(dims[5]), Int32(dims[6])
    )
    var order = recorder.tensor[DType.int32]("order", L).as_imm()
    var query = recorder.tensor[dtype]("query", rows * d).as_imm()
    var key = recorder.tensor[dtype]("key", rows * d).as_imm()
    var value = recorder.tensor[dtype]("value", rows * d).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", rows * d).as_imm()
    var tiles = recorder.tensor[DType.int32]("tiles", sizes.tiles() * sizes.tiles())
    var output = recorder.tensor[dtype]("output", rows * d)
    var lse = recorder.tensor[accum]("lse", rows)
    var delta = recorder.tensor[accum]("delta", rows)
    var grad_query = recorder.tensor[dtype]("grad_query", rows * d)
    var grad_key = recorder.tensor[dtype]("grad_key", rows * d)
    var grad_value = recorder.tensor[dtype]("grad_value", rows * d)
    launch_tiles(recorder, tiles, order, sizes)
    launch_window_forward(
        recorder,
        WindowForward[dtype](
            output=output,
            lse=lse,
            query=query,
            key=key,
            value=value,
            order=order,
            tiles=tiles.as_imm(),
            sizes=sizes.copy(),
        ),
    )
    launch_window_backward(
        recorder,
        WindowBackward[dtype](
            grad_query=grad_query,
            grad_key=grad_key,
            grad_value=grad_value,
            delta=delta,
            grad_output=grad_output,
            query=query,
            key=key,
            value=value,
            output=output.as_imm(),
            lse=lse.as_imm(),
            order=order,
            tiles=tiles.as_imm(),
            sizes=sizes.copy(),
        ),
    )
