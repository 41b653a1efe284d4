"""Puzzle 19, the ramp: eight ops with a gate each, their cases and reference.

Names: n = elements of a vector; a matrix has rows and columns. Every op writes its own quantity and is its
own variant, so that a gate compiles only its own kernel.
"""

import numpy as np

from harness.puzzles.p19.mistakes import EPS, MISTAKES, ROW_THREADS, TILE, derive
from harness.spec.cases import chapter_and, covering, not_finite, tiled_axis, with_not_finite
from harness.spec.ops import ACCUM, Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle, printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung

DIMS = (70, 10, 20)
"""The default n, rows and columns."""
SIDE = 8
"""Rows, and columns, of a block of `index`."""

VECTOR = {"vector": Argument(("n",))}
MATRIX = {"matrix": Argument(("rows", "columns"))}
BY_COLUMN = Argument(("columns",))
HALF = {
    "half_matrix": Argument(("rows", "columns"), "bfloat16"),
    "half_vector": Argument(("columns",), "bfloat16"),
}
OPS = {
    "map": OpSpec("ramp_map", {"mapped": Argument(("n",))}, VECTOR),
    "index": OpSpec("ramp_index", {"shifted": MATRIX["matrix"]}, {**MATRIX, "offset": BY_COLUMN}),
    "cast": OpSpec("ramp_cast", {"products": Argument(("rows",), "float32")}, HALF),
    "reduce": OpSpec("ramp_reduce", {"row_sums": Argument(("rows",), ACCUM)}, MATRIX),
    "tile": OpSpec("ramp_tile", {"mirrored": Argument(("n",))}, VECTOR),
    "atomic": OpSpec("ramp_atomic", {"column_sums": Argument(("columns",), ACCUM)}, MATRIX),
    "stages": OpSpec("ramp_stages", {"staged_sums": Argument(("columns",), ACCUM)}, MATRIX),
    "rmsnorm": OpSpec("ramp_rmsnorm", {"normalised": MATRIX["matrix"]}, {**MATRIX, "weight": BY_COLUMN}),
}
LAUNCHES = {
    **{id: f"launch_{id}[dtype](..., n)" for id in ("map", "tile")},
    **{id: f"launch_{id}[dtype](..., rows, columns)" for id in ("index", "reduce", "atomic", "stages")},
    "cast": "launch_cast(..., rows, columns)",
    "rmsnorm": "launch_rmsnorm[dtype](..., rows, columns, Scalar[accum](EPS))",
}
ABOUT = {
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
    tiled_axis("n", TILE),
    tiled_axis("rows", SIDE, TILE + 1),
    tiled_axis("columns", ROW_THREADS, 4 * ROW_THREADS + 1),
)
"""Axes of the cases: a vector by tiles, rows by square blocks and by threads of a block, columns by threads of a row."""
GATES = tuple(Gate(id, id, tuple(op.writes), ABOUT[id]) for id, op in OPS.items())


cases = chapter_and(
    DIMS, "the chapter's sizes", "a mean of 3, some rows so small that eps counts",
    (
        Case("one of each", "a single element", (1, 1, 1), "hard"),
        Case("square", "an exchange of row and column stays inside", (33, 12, 12), "hard"),
        *not_finite({"vector": ("the vector", "NaN"), "matrix": ("the matrix", "inf")}, DIMS),
        *covering(AXES, ("hard",), lambda *sizes: sizes),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return vector [n], matrix and half_matrix [rows, columns], offset, half_vector and weight [columns].

    Float64, rounded to `dtype`; half_matrix and half_vector always to bfloat16.
    """
    n, rows, columns = case.dims
    random = np.random.default_rng([seed, n, rows, columns])
    matrix = random.standard_normal((rows, columns))
    if case.values == "hard":
        # Every fourth row has squares of the size of eps.
        matrix = (matrix + 3) * np.where(np.arange(rows) % 4 == 3, 1e-3, 1.0)[:, None]
    run: Arrays = {
        "vector": random.standard_normal(n),
        "matrix": matrix,
        "offset": random.standard_normal(columns),
        "weight": 1 + 0.5 * random.standard_normal(columns),
    }
    with_not_finite(run, case.values)
    half = {
        "half_matrix": 1 + random.standard_normal((rows, columns)),
        "half_vector": 1 + 0.5 * random.standard_normal(columns),
    }
    return {
        **{name: round_to_dtype(array, dtype) for name, array in run.items()},
        **{name: round_to_dtype(array, "bfloat16") for name, array in half.items()},
    }


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by the ops' names. Sums are sequential, the least accurate order that a kernel
    may use."""
    import torch

    x, vector = tensors["matrix"], tensors["vector"]
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, terms = x.to(accum), tensors["half_matrix"].to(accum) * tensors["half_vector"].to(accum)
    columns = one_by_one(wide)
    squares = one_by_one((wide * wide).T) / x.shape[-1]
    rstd = torch.rsqrt(squares + EPS)[:, None]
    return {
        "mapped": 2 * vector + 1,
        "shifted": x + tensors["offset"],
        "products": one_by_one(terms.T),
        "row_sums": one_by_one(wide.T),
        "mirrored": torch.cat([tile.flip(0) for tile in vector.split(TILE)]),
        "column_sums": columns,
        "staged_sums": columns,
        "normalised": (wide * rstd * tensors["weight"].to(accum)).to(x.dtype),
    }


def one_by_one(terms):
    """Sum a tensor over the first axis, one term after the other."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


PUZZLE = Puzzle(
    name="p19",
    title="The ramp: eight small kernels",
    subject="The ramp",
    gates=GATES,
    rungs=(MojoRung(file="op/ramp.mojo", gates=tuple(OPS)),),
    dims=DIMS,
    dim_names=("n", "rows", "columns"),
    cases=cases,
    inputs=inputs,
    reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    forward=printed_names(*(quantity for op in OPS.values() for quantity in op.writes)),
    variants={id: (Call(op, (), id, LAUNCHES[id]),) for id, op in OPS.items()},
    about_variants={id: f"only {id}: {ABOUT[id]}" for id in OPS},
    atomic=frozenset({("atomic", "column_sums")}),
    summands=lambda dims: dims[1],
    multiply_adds=lambda dims: dims[0] + 8 * dims[1] * dims[2],
)
