"""Records the launches of puzzle 24 in one case, whose sizes are B, N, H, W, d, r, T.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_curve`; without a VARIANT_ name, the default variants are recorded.
"""

from std.bit import next_power_of_two
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
comptime DEFAULT = not CURVE and not PERMUTE and not WINDOW


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if CURVE or DEFAULT:
        record_curve(recorder, dims)
    comptime if PERMUTE or DEFAULT:
        record_permute(recorder, dims)
    comptime if WINDOW or DEFAULT:
        record_window(recorder, dims)


def record_curve(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("curve", dims)
    var H = dims[2]
    var W = dims[3]
    var side = next_power_of_two(max(H, W))
    var cells = side * side
    var steps = side * side
    var index = recorder.tensor[DType.int32]("index", steps)
    var inverse = recorder.tensor[DType.int32]("inverse", cells)
    launch_curve(recorder, index, inverse, side)


def record_permute(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("permute", dims)
    var B = dims[0]
    var N = dims[1]
    var H = dims[2]
    var W = dims[3]
    var d = dims[4]
    var L = H * W
    var input = recorder.tensor[dtype]("input", B * N * L * d).as_imm()
    var order = recorder.tensor[DType.int32]("order", L).as_imm()
    var grad_gathered = recorder.tensor[dtype]("grad_gathered", B * N * L * d).as_imm()
    var gathered = recorder.tensor[dtype]("gathered", B * N * L * d)
    var grad_input = recorder.tensor[dtype]("grad_input", B * N * L * d)
    launch_gather[dtype](recorder, gathered, input, order, B * N, L, d)
    launch_scatter[dtype](recorder, grad_input, grad_gathered, order, B * N, L, d)


def record_window(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("window", dims)
    var B = dims[0]
    var N = dims[1]
    var H = dims[2]
    var W = dims[3]
    var d = dims[4]
    var r = dims[5]
    var T = dims[6]
    var L = H * W
    var sizes = WindowSizes(Int32(B * N), Int32(L), Int32(d), Int32(W), Int32(r), Int32(T))
    var t = sizes.tiles()
    var order = recorder.tensor[DType.int32]("order", L).as_imm()
    var query = recorder.tensor[dtype]("query", B * N * L * d).as_imm()
    var key = recorder.tensor[dtype]("key", B * N * L * d).as_imm()
    var value = recorder.tensor[dtype]("value", B * N * L * d).as_imm()
    var grad_output = recorder.tensor[dtype]("grad_output", B * N * L * d).as_imm()
    var tiles = recorder.tensor[DType.int32]("tiles", t * t)
    var output = recorder.tensor[dtype]("output", B * N * L * d)
    var lse = recorder.tensor[accum]("lse", B * N * L)
    var grad_query = recorder.tensor[dtype]("grad_query", B * N * L * d)
    var grad_key = recorder.tensor[dtype]("grad_key", B * N * L * d)
    var grad_value = recorder.tensor[dtype]("grad_value", B * N * L * d)
    var delta = recorder.tensor[accum]("delta", B * N * L)
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
