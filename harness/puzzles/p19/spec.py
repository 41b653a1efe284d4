"""Puzzle 19, the ramp: eight ops with one gate each, their cases and reference.

Vectors are [n], matrices [rows, columns]. Every op is a variant of its own, so that a gate compiles only its
own kernel.
"""

import numpy as np

from harness.puzzles.p19.mistakes import EPS, MISTAKES, ROW_THREADS, TILE, derive
from harness.spec.baseline import sum_sequentially
from harness.spec.cases import (
    make_cases_function,
    make_covering_cases,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung

DIMS = (70, 10, 20)
"""The default n, rows and columns."""
BLOCK_SIDE = 8
"""Rows and columns of a thread block of `index`."""

VECTOR = {"vector": Argument(("n",))}
MATRIX = {"matrix": Argument(("rows", "columns"))}
PER_COLUMN = Argument(("columns",))
BFLOAT16_INPUTS = {
    "half_matrix": Argument(("rows", "columns"), "bfloat16"),
    "half_vector": Argument(("columns",), "bfloat16"),
}
OPS = {
    "map": OpSpec("ramp_map", {"mapped": Argument(("n",))}, VECTOR),
    "index": OpSpec("ramp_index", {"shifted": MATRIX["matrix"]}, {**MATRIX, "offset": PER_COLUMN}),
    "cast": OpSpec("ramp_cast", {"products": Argument(("rows",), "float32")}, BFLOAT16_INPUTS),
    "reduce": OpSpec("ramp_reduce", {"row_sums": Argument(("rows",), ACCUM_DTYPE)}, MATRIX),
    "tile": OpSpec("ramp_tile", {"mirrored": Argument(("n",))}, VECTOR),
    "atomic": OpSpec("ramp_atomic", {"column_sums": Argument(("columns",), ACCUM_DTYPE)}, MATRIX),
    "stages": OpSpec("ramp_stages", {"staged_sums": Argument(("columns",), ACCUM_DTYPE)}, MATRIX),
    "rmsnorm": OpSpec("ramp_rmsnorm", {"normalised": MATRIX["matrix"]}, {**MATRIX, "weight": PER_COLUMN}),
}
LAUNCHES = {
    **{id: f"launch_{id}[dtype](..., n)" for id in ("map", "tile")},
    **{id: f"launch_{id}[dtype](..., rows, columns)" for id in ("index", "reduce", "atomic", "stages")},
    "cast": "launch_cast(..., rows, columns)",
    "rmsnorm": "launch_rmsnorm[dtype](..., rows, columns, Scalar[accum](EPS))",
}
DESCRIPTIONS = {
    "map": "a thread for each element, with a guard",
    "index": "rows and columns of a matrix",
    "cast": "bfloat16 in, sums in float32",
    "reduce": "the sum of a row by a whole block",
    "tile": "shared memory and a barrier",
    "atomic": "column sums by atomics",
    "stages": "column sums in two launches",
    "rmsnorm": "RMSNorm, forward",
}
AXES = (
    make_tiled_axis("n", TILE),
    make_tiled_axis("rows", BLOCK_SIDE, TILE + 1),
    make_tiled_axis("columns", ROW_THREADS, 4 * ROW_THREADS + 1),
)
"""Axes of the cases, with sizes around a vector's tile, a square block's side and a row's threads."""
GATES = tuple(Gate(id, id, tuple(op.writes), DESCRIPTIONS[id]) for id, op in OPS.items())


cases = make_cases_function(
    DIMS, "the default sizes", "a mean of 3, and some rows so small that eps matters",
    (
        Case("one of each", "a single element", (1, 1, 1), "hard"),
        Case("square", "swapped row and column indices stay in bounds", (33, 12, 12), "hard"),
        *make_nonfinite_cases({"vector": ("the vector", "NaN"), "matrix": ("the matrix", "inf")}, DIMS),
        *make_covering_cases(AXES, ("hard",), lambda *sizes: sizes),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return vector [n], matrix and half_matrix [rows, columns], offset, half_vector and weight [columns].

    They are float64, rounded to `dtype`; half_matrix and half_vector are always rounded to bfloat16.
    """
    n, rows, columns = case.dims
    random = np.random.default_rng([seed, n, rows, columns])
    matrix = random.standard_normal((rows, columns))
    if case.values == "hard":
        # In every fourth row, the squares are about as large as eps.
        matrix = (matrix + 3) * np.where(np.arange(rows) % 4 == 3, 1e-3, 1.0)[:, None]
    arrays: Arrays = {
        "vector": random.standard_normal(n),
        "matrix": matrix,
        "offset": random.standard_normal(columns),
        "weight": 1 + 0.5 * random.standard_normal(columns),
    }
    write_nonfinite(arrays, case.values)
    bfloat16_arrays = {
        "half_matrix": 1 + random.standard_normal((rows, columns)),
        "half_vector": 1 + 0.5 * random.standard_normal(columns),
    }
    return {
        **{name: round_to_dtype(array, dtype) for name, array in arrays.items()},
        **{name: round_to_dtype(array, "bfloat16") for name, array in bfloat16_arrays.items()},
    }


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by output name, with sequential sums, the least accurate order of a kernel."""
    import torch

    x, vector = tensors["matrix"], tensors["vector"]
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_accum, terms = x.to(accum), tensors["half_matrix"].to(accum) * tensors["half_vector"].to(accum)
    column_sums = sum_sequentially(x_accum.T)[:, 0]
    rstd = torch.rsqrt(sum_sequentially(x_accum * x_accum) / x.shape[-1] + EPS)
    return {
        "mapped": 2 * vector + 1,
        "shifted": x + tensors["offset"],
        "products": sum_sequentially(terms)[:, 0],
        "row_sums": sum_sequentially(x_accum)[:, 0],
        "mirrored": torch.cat([tile.flip(0) for tile in vector.split(TILE)]),
        "column_sums": column_sums,
        "staged_sums": column_sums,
        "normalised": (x_accum * rstd * tensors["weight"].to(accum)).to(x.dtype),
    }


PUZZLE = Puzzle(
    name="p19",
    title="The ramp: eight small kernels",
    subject="The ramp",
    gates=GATES,
    rungs=(MojoRung(file="op/ramp.mojo", gates=tuple(OPS)),),
    dims=DIMS,
    dim_names=("n", "rows", "columns"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    forward=map_printed_names(*(quantity for op in OPS.values() for quantity in op.writes)),
    variants={id: (Call(op, (), id, LAUNCHES[id]),) for id, op in OPS.items()},
    variant_help={id: f"only {id}: {DESCRIPTIONS[id]}" for id in OPS},
    atomic_sums=frozenset({("atomic", "column_sums")}),
    count_terms=lambda dims: dims[1],
    count_multiply_adds=lambda dims: dims[0] + 8 * dims[1] * dims[2],
)
