"""Puzzle 91, a toy without kernels: y = x ** 3 elementwise on a vector, in NumPy and in PyTorch."""

import numpy as np

from harness.spec.derivation import Mistake, make_derive
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import NumpyRung, TorchFunction, TorchRung

GATES = (
    Gate("cube", quantities=("output",), description="the cube of every element"),
    Gate("dcube", quantities=("grad_input",), description="the gradient of the input"),
)
STEPS = {
    "output": lambda v: v.input**3,
    "grad_input": lambda v: 3 * v.input**2 * v.grad_output,
}
MISTAKES = (
    Mistake("three-forgotten", "without the factor 3", {"grad_input": lambda v: v.input**2 * v.grad_output}),
)

CUBE = TorchFunction("Cube", arguments=("input",), returns=("output",))
DCUBE = TorchFunction(
    "Cube",
    arguments=("input",),
    returns=("output",),
    gradients={"input": "grad_input"},
    grad_outputs=("grad_output",),
)


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and one with a non-contiguous gradient."""
    chapter = Case("chapter", "the chapter's size", dims or (5,), "plain")
    return [chapter] if dims else [chapter, Case("every other", "grad_output has stride 2", (9,), "strided")]


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return input and grad_output, [n]."""
    (n,) = case.dims
    random = np.random.default_rng([seed, n])
    kind = "float32" if dtype == "float32" else "float64"
    arrays = {
        name: random.standard_normal(2 * n).astype(kind).astype(np.float64)
        for name in ("input", "grad_output")
    }
    return {"input": arrays["input"][:n].copy(), "grad_output": arrays["grad_output"][::2]}


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by autograd."""
    import torch

    x = tensors["input"].detach().clone().requires_grad_(True)
    y = x * x * x
    (dx,) = torch.autograd.grad(y, x, tensors["grad_output"])
    return {"output": y.detach(), "grad_input": dx}


derive = make_derive(STEPS)


PUZZLE = Puzzle(
    name="p91",
    title="A toy without kernels: cube",
    gates=GATES,
    rungs=(
        NumpyRung(file="in_numpy.py", gates=("dcube",), returns={"dcube": ("grad_input",)}, optional=True),
        TorchRung(
            file="in_torch.py",
            gates=("cube", "dcube"),
            functions={"cube": CUBE, "dcube": DCUBE},
        ),
    ),
    dims=(5,),
    dim_names=("n",),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    forward={"output": "output"},
    backward={"grad_input": "grad_input"},
)
