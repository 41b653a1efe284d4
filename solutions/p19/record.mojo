"""Records the launches of puzzle 19 in one case, whose sizes are n, rows, columns.

`poe generate` writes this file from the ops of the spec. The dtype and the variants are compile-time names, as in
`-D DTYPE=float32 -D VARIANT_map`; without a VARIANT_ name, the default variants are recorded.
"""

from std.sys import get_defined_dtype, is_defined

from op.launches import (
    launch_atomic,
    launch_cast,
    launch_index,
    launch_map,
    launch_reduce,
    launch_rmsnorm,
    launch_stages,
    launch_tile,
)
from op.ramp import EPS
from op.shared.common import accum_type
from recorder import Recorder

comptime dtype = get_defined_dtype["DTYPE", DType.float32]()
comptime accum = accum_type[dtype]
comptime MAP = is_defined["VARIANT_map"]()
comptime INDEX = is_defined["VARIANT_index"]()
comptime CAST = is_defined["VARIANT_cast"]()
comptime REDUCE = is_defined["VARIANT_reduce"]()
comptime TILE = is_defined["VARIANT_tile"]()
comptime ATOMIC = is_defined["VARIANT_atomic"]()
comptime STAGES = is_defined["VARIANT_stages"]()
comptime RMSNORM = is_defined["VARIANT_rmsnorm"]()
comptime DEFAULT = not MAP and not INDEX and not CAST and not REDUCE and not TILE and not ATOMIC and not STAGES and not RMSNORM


def record_launches(mut recorder: Recorder, dims: List[Int]) raises:
    comptime if MAP or DEFAULT:
        record_map(recorder, dims)
    comptime if INDEX or DEFAULT:
        record_index(recorder, dims)
    comptime if CAST or DEFAULT:
        record_cast(recorder, dims)
    comptime if REDUCE or DEFAULT:
        record_reduce(recorder, dims)
    comptime if TILE or DEFAULT:
        record_tile(recorder, dims)
    comptime if ATOMIC or DEFAULT:
        record_atomic(recorder, dims)
    comptime if STAGES or DEFAULT:
        record_stages(recorder, dims)
    comptime if RMSNORM or DEFAULT:
        record_rmsnorm(recorder, dims)


def record_map(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("map", dims)
    var n = dims[0]
    var vector = recorder.tensor[dtype]("vector", n).as_imm()
    var mapped = recorder.tensor[dtype]("mapped", n)
    launch_map[dtype](recorder, mapped, vector, n)


def record_index(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("index", dims)
    var rows = dims[1]
    var columns = dims[2]
    var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
    var offset = recorder.tensor[dtype]("offset", columns).as_imm()
    var shifted = recorder.tensor[dtype]("shifted", rows * columns)
    launch_index[dtype](recorder, shifted, matrix, offset, rows, columns)


def record_cast(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("cast", dims)
    var rows = dims[1]
    var columns = dims[2]
    var half_matrix = recorder.tensor[DType.bfloat16]("half_matrix", rows * columns).as_imm()
    var half_vector = recorder.tensor[DType.bfloat16]("half_vector", columns).as_imm()
    var products = recorder.tensor[DType.float32]("products", rows)
    launch_cast(recorder, products, half_matrix, half_vector, rows, columns)


def record_reduce(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("reduce", dims)
    var rows = dims[1]
    var columns = dims[2]
    var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
    var row_sums = recorder.tensor[accum]("row_sums", rows)
    launch_reduce[dtype](recorder, row_sums, matrix, rows, columns)


def record_tile(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("tile", dims)
    var n = dims[0]
    var vector = recorder.tensor[dtype]("vector", n).as_imm()
    var mirrored = recorder.tensor[dtype]("mirrored", n)
    launch_tile[dtype](recorder, mirrored, vector, n)


def record_atomic(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("atomic", dims)
    var rows = dims[1]
    var columns = dims[2]
    var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
    var column_sums = recorder.tensor[accum]("column_sums", columns)
    launch_atomic[dtype](recorder, column_sums, matrix, rows, columns)


def record_stages(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("stages", dims)
    var rows = dims[1]
    var columns = dims[2]
    var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
    var staged_sums = recorder.tensor[accum]("staged_sums", columns)
    launch_stages[dtype](recorder, staged_sums, matrix, rows, columns)


def record_rmsnorm(mut recorder: Recorder, dims: List[Int]) raises:
    recorder.case("rmsnorm", dims)
    var rows = dims[1]
    var columns = dims[2]
    var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
    var weight = recorder.tensor[dtype]("weight", columns).as_imm()
    var normalised = recorder.tensor[dtype]("normalised", rows * columns)
    launch_rmsnorm[dtype](recorder, normalised, matrix, weight, rows, columns, Scalar[accum](EPS))
