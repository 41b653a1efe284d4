"""Puzzle NN: ops, gates, cases and reference. A placeholder: y = x * x elementwise, and its gradient."""

import numpy as np

from harness.spec.derivation import Mistake, make_derive
from harness.spec.ops import Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import MojoRung

MATRIX = Argument(("rows", "columns"))
FORWARD = OpSpec("puzzle_NN_train", writes={"output": MATRIX}, reads={"input": MATRIX})
BACKWARD = OpSpec(
    "puzzle_NN_train_backward", writes={"grad_input": MATRIX}, reads={"grad_output": MATRIX, "input": MATRIX}
)

GATES = (
    Gate("square", "plain", ("output",), "the square of every element"),
    Gate("dsquare", "plain", ("grad_input",), "the gradient of the input"),
)

STEPS = {"output": lambda v: v.input**2, "grad_input": lambda v: 2 * v.input * v.grad_output}
MISTAKES = (
    Mistake("two-forgotten", "without the factor 2", {"grad_input": lambda v: v.input * v.grad_output}),
)


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and one whose columns are not a multiple of the block."""
    chapter = Case("chapter", "the chapter's sizes", dims or (4, 8), "plain")
    return [chapter] if dims else [chapter, Case("wide", "more columns than threads", (3, 131), "plain")]


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return `input` and `grad_output`, both [rows, columns]."""
    random = np.random.default_rng([seed, *case.dims])
    kind = dtype if dtype != "bfloat16" else "float16"
    return {
        name: random.standard_normal(case.dims).astype(kind).astype(np.float64)
        for name in ("input", "grad_output")
    }


def reference(tensors: dict) -> dict:
    """Return PyTorch's results, the gradient by autograd."""
    import torch

    x = tensors["input"].detach().clone().requires_grad_(True)
    y = x * x
    return {"output": y.detach(), "grad_input": torch.autograd.grad(y, x, tensors["grad_output"])[0]}


derive = make_derive(STEPS)


PUZZLE = Puzzle(
    name="pNN",
    title="A placeholder: square, forward and backward",
    subject="Square",
    variants={
        "plain": (
            Call(FORWARD, (), "plain", "launch_square[dtype](..., Int32(rows), Int32(columns))"),
            Call(BACKWARD, (), "plain", "launch_square_backward[dtype](..., Int32(rows), Int32(columns))"),
        )
    },
    gates=GATES,
    rungs=(MojoRung(file="op/kernels.mojo", gates=("square", "dsquare")),),
    forward={"output": "output"},
    backward={"grad_input": "grad_input"},
    dims=(4, 8),
    dim_names=("rows", "columns"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
)
