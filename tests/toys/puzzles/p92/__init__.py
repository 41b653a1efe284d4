"""Puzzle 92, a toy for the tests: the sum of the rows of a matrix that two processes hold half of each."""

import numpy as np

from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import TorchFunction, TorchRung

GATE = Gate("total", quantities=("output", "grad_input"), about="the sum of all rows, and its gradient")
TOTAL = TorchFunction(
    "Total",
    takes=("input",),
    returns=("output",),
    gradients={"input": "grad_input"},
    grad_outputs=("grad_output",),
    split={"input": 0, "grad_input": 0},
)


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """All rows in one process, and in two of which one has a row more."""
    return [
        Case("alone", "one process has all rows", dims or (4, 3), "plain"),
        Case("two ranks", "each process has some rows", dims or (5, 3), "plain", world_size=2),
    ]


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """input [rows, columns] and grad_output [columns]."""
    random = np.random.default_rng([seed, *case.dims])
    x, dy = random.standard_normal(case.dims), random.standard_normal(case.dims[1])
    return {
        "input": x.astype(np.float32).astype(np.float64),
        "grad_output": dy.astype(np.float32).astype(np.float64),
    }


def reference(tensors: dict) -> dict:
    """PyTorch's answer in one process."""
    x, dy = tensors["input"], tensors["grad_output"]
    return {"output": x.sum(0), "grad_input": dy.expand(x.shape)}


PUZZLE = Puzzle(
    name="p92",
    title="A toy of two processes: a sum",
    gates=(GATE,),
    rungs=(TorchRung(file="in_torch.py", gates=("total",), functions={"total": TOTAL}),),
    dims=(4, 3),
    dim_names=("rows", "columns"),
    cases=cases,
    inputs=inputs,
    reference=reference,
    forward={"output": "output"},
    backward={"grad_input": "grad_input"},
)
