"""Records the launches of puzzle 19 in one case, whose sizes are n, rows, columns.

The dtype and the variants are defined at compile time, as `-D DTYPE=float32 -D VARIANT_map`; without a VARIANT_ flag all
are taken. Each goes through the launch function of its op.
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
from op.shared.common import ImmPtr, accum_type
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
comptime ALL = not (MAP or INDEX or CAST or REDUCE or TILE or ATOMIC or STAGES or RMSNORM)


def record_launches(mut recorder: Recorder, sizes: List[Int]) raises:
    var n = sizes[0]
    var rows = sizes[1]
    var columns = sizes[2]
    comptime if MAP or ALL:
        recorder.case(String(t"map {n} {rows} {columns}"))
        var vector = recorder.tensor[dtype]("vector", n).as_imm()
        launch_map[dtype](recorder, recorder.tensor[dtype]("mapped", n), vector, n)
    comptime if INDEX or ALL:
        recorder.case(String(t"index {n} {rows} {columns}"))
        var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
        var offset = recorder.tensor[dtype]("offset", columns).as_imm()
        var shifted = recorder.tensor[dtype]("shifted", rows * columns)
        launch_index[dtype](recorder, shifted, matrix, offset, rows, columns)
    comptime if CAST or ALL:
        recorder.case(String(t"cast {n} {rows} {columns}"))
        var matrix = recorder.tensor[DType.bfloat16]("half_matrix", rows * columns).as_imm()
        var vector = recorder.tensor[DType.bfloat16]("half_vector", columns).as_imm()
        var products = recorder.tensor[DType.float32]("products", rows)
        launch_cast(recorder, products, matrix, vector, rows, columns)
    comptime if REDUCE or ALL:
        recorder.case(String(t"reduce {n} {rows} {columns}"))
        var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
        var row_sums = recorder.tensor[accum]("row_sums", rows)
        launch_reduce[dtype](recorder, row_sums, matrix, rows, columns)
    comptime if TILE or ALL:
        recorder.case(String(t"tile {n} {rows} {columns}"))
        var vector = recorder.tensor[dtype]("vector", n).as_imm()
        var mirrored = recorder.tensor[dtype]("mirrored", n)
        launch_tile[dtype](recorder, mirrored, vector, n)
    comptime if ATOMIC or ALL:
        recorder.case(String(t"atomic {n} {rows} {columns}"))
        var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
        var column_sums = recorder.tensor[accum]("column_sums", columns)
        launch_atomic[dtype](recorder, column_sums, matrix, rows, columns)
    comptime if STAGES or ALL:
        recorder.case(String(t"stages {n} {rows} {columns}"))
        var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
        var staged_sums = recorder.tensor[accum]("staged_sums", columns)
        launch_stages[dtype](recorder, staged_sums, matrix, rows, columns)
    comptime if RMSNORM or ALL:
        recorder.case(String(t"rmsnorm {n} {rows} {columns}"))
        var matrix = recorder.tensor[dtype]("matrix", rows * columns).as_imm()
        var weight = recorder.tensor[dtype]("weight", columns).as_imm()
        var normalised = recorder.tensor[dtype]("normalised", rows * columns)
        launch_rmsnorm[dtype](recorder, normalised, matrix, weight, rows, columns, Scalar[accum](EPS))
