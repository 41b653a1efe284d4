"""Puzzle 21, the bug hunt: wrong backward passes to fix in PyTorch and in Mojo, and a test to write.

Every blank of the first and the last rung contains wrong code to fix. The kernels have no forward pass.
"""

import numpy as np

from harness.puzzles.p21.derivation import EPS, MISTAKES, derive
from harness.spec.baseline import compute_worst_baseline
from harness.spec.cases import make_cases_function
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Demo, Gate, Puzzle, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, Rung

DIMS = (2, 3, 8)
"""The default batch, sequence and width."""
TENSOR = Argument(("batch", "sequence", "width"))
COLUMN = Argument(("width",))

VARIANT = "kernels"
"""The only variant; it runs every op once."""
OPS = (
    OpSpec("bias_gradient_train", writes={"grad_bias": COLUMN}, reads={"grad_output": TENSOR}),
    OpSpec("scale_gradient_train", writes={"grad_scale": Argument(("width",), ACCUM_DTYPE)},
           reads={"grad_output": TENSOR, "input": TENSOR}),
    OpSpec("softmax_gradient_train", writes={"grad_logits": TENSOR},
           reads={"grad_output": TENSOR, "input": TENSOR}),
    OpSpec("standardise_gradient_train", writes={"grad_input": TENSOR},
           reads={"grad_output": TENSOR, "input": TENSOR}),
)  # fmt: skip


def make_call(op: OpSpec) -> Call:
    sizes = "batch, sequence, width" if op.name == "bias_gradient_train" else "batch * sequence, width"
    return Call(op, (), VARIANT, f"launch_{op.name.removesuffix('_train')}[dtype](..., {sizes})")


HUNT_GATES = (
    Gate("softmax", description="softmax along the last axis"),
    Gate("logsoftmax", description="log softmax along the last axis"),
    Gate("crossentropy", description="a loss, the mean over all rows"),
    Gate("attention", description="scores, softmax and values"),
    Gate("silu", description="x sigmoid(x), in a loop over memory"),
    Gate("sigmoid", description="the gradient from sigmoid's result"),
    Gate("dropout", description="elements set to 0 by a mask"),
    Gate("rmsnorm", description="the divisor is a second output"),
    Gate("standardise", description="mean 0 and variance 1 for each row"),
    Gate("addbias", description="one number added to each column"),
    Gate("scale", description="each column times a number, in any dtype"),
    Gate("linear", description="a matrix product, for any leading shape"),
    Gate("lowrank", description="two narrow matrices, next to a frozen layer"),
)
CATCH_GATES = (Gate("check", description="a test that tells right from wrong"),)
KERNEL_GATES = (
    Gate("dbias", VARIANT, ("grad_bias",), "the gradient of a bias"),
    Gate("dscale", VARIANT, ("grad_scale",), "the gradient of a scale, by atomics"),
    Gate("dsoftmax", VARIANT, ("grad_logits",), "the gradient of softmax"),
    Gate("dstandardise", VARIANT, ("grad_input",), "the gradient through mean and variance"),
)


RUNGS = (
    Rung(
        id="torch",
        file="hunt.py",
        gates=list_gate_ids(HUNT_GATES),
        checker=".hunt:HuntChecker",
        title="Fix it, in PyTorch",
    ),
    Rung(
        id="catch",
        file="catch.py",
        gates=list_gate_ids(CATCH_GATES),
        checker=".catch:CatchChecker",
        title="Catch it: a test of your own",
    ),
    MojoRung(file="op/hunt.mojo", gates=list_gate_ids(KERNEL_GATES), title="Fix it, in Mojo"),
)


cases = make_cases_function(
    DIMS, "small enough to print", "means far from 0, gradients that follow the input",
    (
        Case("one sequence", "a batch of one: a sum over the sequence is enough", (1, 4, 6), "hard"),
        Case("one position", "sequences of one: a sum over the batch is enough", (4, 1, 6), "hard"),
        Case("odd sizes", "no size is a multiple of another", (3, 5, 7), "hard"),
        Case("wide", "a row is longer than a block, and not a multiple of it", (2, 2, 131), "hard"),
        Case("many rows", "more rows than a block has threads", (4, 37, 5), "hard"),
        Case("one column", "softmax is 1 and the variance 0: the gradients are 0", (2, 3, 1), "hard"),
        Case("expanded", "grad_output has stride 0, as from sum()", (2, 3, 10), "expanded"),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return input and grad_output [batch, sequence, width], float64 rounded to `dtype`."""
    random = np.random.default_rng([seed, *case.dims])
    x, dy = random.standard_normal(case.dims), random.standard_normal(case.dims)
    if case.values != "plain":
        # Means of 0 and standard deviations of 1 would hide a missing row sum or an extra factor rstd.
        dy += 1 + x
        x = 2 * x + 0.5 * random.standard_normal((*case.dims[:-1], 1))
    if case.values == "expanded":
        dy = np.broadcast_to(np.float64(1.25), case.dims)
    return {"input": round_to_dtype(x, dtype), "grad_output": round_to_dtype(dy, dtype)}


def reference(tensors: dict) -> dict:
    """Return autograd's gradients by output name, in the tensors' dtype and on their device.

    Below float64, each gradient is the least accurate over several column orders and a second formula.
    """
    output_names = [name for op in OPS for name in op.writes]
    columns, others = ("input", "grad_output"), (compute_with_other_formulas,)
    return compute_worst_baseline(
        compute_with_autograd, tensors, columns, output_names, other_formulas=others
    )


def compute_with_autograd(tensors: dict) -> dict:
    """Return autograd's gradients; `compute_worst_baseline` calls this once for each order of the columns."""
    import torch
    import torch.nn.functional as F

    dy, x = tensors["grad_output"], tensors["input"].detach().clone()
    width = x.shape[-1]

    def gradient(function, leaf):
        leaf = leaf.requires_grad_(True)
        return torch.autograd.grad(function(leaf), leaf, dy)[0]

    return {
        "grad_bias": gradient(lambda bias: x + bias, x.new_zeros(width)),
        "grad_scale": gradient(lambda scale: x * scale, x.new_ones(width)),
        "grad_logits": gradient(lambda logits: F.softmax(logits, -1), x.clone()),
        "grad_input": gradient(lambda leaf: F.layer_norm(leaf, (width,), eps=EPS), x.clone()),
    }


def compute_with_other_formulas(tensors: dict) -> dict:
    """Return softmax's gradient as P * dy - P * dot, with dot divided after the sum, and reversed row sums."""
    import torch

    dtype = tensors["input"].dtype
    x, dy = tensors["input"].float(), tensors["grad_output"].float()
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    P, dot = weights / total, (dy * weights).sum(-1, keepdim=True) / total

    def sum_rows_reversed(terms):
        return torch.from_numpy(np.cumsum(terms.flatten(0, -2).flip(0).cpu().numpy(), 0)[-1]).to(terms)

    return {
        "grad_logits": (P * dy - P * dot).to(dtype),
        "grad_bias": sum_rows_reversed(dy).to(dtype),
        "grad_scale": sum_rows_reversed(dy * x),
    }


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the magnitude of the terms that can cancel; with one column or a constant dy, they all do."""
    v = derive(arrays)
    softmax = v.P * (np.abs(v.grad_output) + np.abs(v.dot))
    standardise = v.rstd * (np.abs(v.grad_output) + np.abs(v.mean_dy) + np.abs(v.through_variance))
    return {"grad_logits": float(softmax.max(initial=0.0)), "grad_input": float(standardise.max(initial=0.0))}


PUZZLE = Puzzle(
    name="p21",
    title="The bug hunt: wrong backward passes, and tests that catch them",
    subject="bug hunt",
    gates=(*HUNT_GATES, *CATCH_GATES, *KERNEL_GATES),
    rungs=RUNGS,
    dims=DIMS,
    dim_names=("batch", "sequence", "width"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    compute_term_magnitudes=terms,
    backward=map_printed_names("grad_bias", "grad_scale", "grad_logits", "grad_input"),
    variants={VARIANT: tuple(map(make_call, OPS))},
    atomic_sums=frozenset({(VARIANT, "grad_scale")}),
    count_terms=lambda dims: dims[0] * dims[1],
    every_rung=True,
    demos=(
        Demo("matrix", "show which usual checks detect which wrong backward passes", ".hunt:show_matrix"),
    ),
)
