"""Puzzle 90, a toy for the tests: y[r] = scale * x[order[r]] ** 2 for the rows in a mask, on [rows, columns].

`order` is an int32 permutation of the rows, `mask` a bool per row, `kept` the mask again as an output.
"""

import numpy as np

from harness.spec.derivation import Derivation, Mistake, make_derive
from harness.spec.ops import Argument, Call, OpSpec, Scalar
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import MojoRung

SCALE = 0.5
MATRIX = Argument(("rows", "columns"))
ORDER = Argument(("rows",), "int32")
MASK = Argument(("rows",), "bool")
FORWARD = OpSpec(
    "square_train",
    writes={"output": MATRIX, "kept": MASK},
    reads={"input": MATRIX, "order": ORDER, "mask": MASK},
    scalars={"scale": Scalar(SCALE), "power": Scalar(2, "int32")},
)
BACKWARD = OpSpec(
    "square_train_backward",
    writes={"grad_input": MATRIX},
    reads={"grad_output": MATRIX, "input": MATRIX, "order": ORDER, "mask": MASK},
    scalars={"scale": Scalar(SCALE)},
)

GATES = (
    Gate("square", "plain", ("output",), "the square of every element", ("kept",)),
    Gate("dsquare", "plain", ("grad_input",), "the gradient of the input"),
)


def from_rows(v: Derivation, array: np.ndarray) -> np.ndarray:
    """Return rows in the input's order: row r belongs to row order[r] of the input."""
    return array[np.argsort(v.order)]


STEPS = {
    "output": lambda v: SCALE * v.input[v.order] ** 2 * v.mask[:, None],
    "kept": lambda v: v.mask,
    "dy": lambda v: from_rows(v, v.grad_output * v.mask[:, None]),
    "grad_input": lambda v: SCALE * 2 * v.input * v.dy,
}
MISTAKES = (
    Mistake("two-forgotten", "without the factor 2", {"grad_input": lambda v: SCALE * v.input * v.dy}),
)


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and one whose columns are not a multiple of the block."""
    chapter = Case("chapter", "the chapter's sizes", dims or (4, 8), "plain")
    return [chapter] if dims else [chapter, Case("wide", "more columns than threads", (3, 131), "plain")]


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return input and grad_output [rows, columns], order int32 [rows], mask bool [rows]."""
    rows, _ = case.dims
    random = np.random.default_rng([seed, *case.dims])
    kind = dtype if dtype != "bfloat16" else "float16"
    arrays = {
        name: random.standard_normal(case.dims).astype(kind).astype(np.float64)
        for name in ("input", "grad_output")
    }
    mask = np.arange(rows) % 3 != 1
    return {**arrays, "order": random.permutation(rows).astype(np.int32), "mask": mask}


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by autograd."""
    import torch

    x = tensors["input"].detach().clone().requires_grad_(True)
    mask = tensors["mask"]
    y = SCALE * x[tensors["order"].long()] ** 2 * mask[:, None]
    (dx,) = torch.autograd.grad(y, x, tensors["grad_output"])
    return {"output": y.detach(), "kept": mask, "grad_input": dx}


derive = make_derive(STEPS)


def calls(variant: str) -> tuple[Call, ...]:
    """Return the forward and the backward call."""
    sizes = "Int32(rows), Int32(columns), Float64(0.5)"
    return (
        Call(FORWARD, (), variant, f"launch_square[dtype](..., {sizes})"),
        Call(BACKWARD, (), variant, f"launch_square_backward[dtype](..., {sizes})"),
    )


PUZZLE = Puzzle(
    name="p90",
    title="A toy: square, forward and backward",
    subject="square",
    gates=GATES,
    rungs=(MojoRung(file="op/square.mojo", gates=("square", "dsquare")),),
    dims=(4, 8),
    dim_names=("rows", "columns"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    forward={"output": "output", "kept": "kept"},
    backward={"grad_input": "grad_input"},
    variants={"plain": calls("plain"), "again": calls("again")},
    optional_variants=("again",),
)
