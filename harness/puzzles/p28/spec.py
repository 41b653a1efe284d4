"""Puzzle 28, make it fast: eight steps from slow kernels of LayerNorm and Linear to fast ones, each judged by values and by a
counter of the virtual GPU.

Names: x [rows, hidden] is the input, dln the gradient of LayerNorm's output, ln_out what the Linear multiplies, its weight
[outputs, hidden]. Every step is a variant by itself, with tensors of its own, so that nobody's slow step holds up another.
"""

import numpy as np

from harness.puzzles.formulas import EPS
from harness.puzzles.p28.limits import LIMITS
from harness.puzzles.p28.mistakes import MISTAKES, derive
from harness.spec.baseline import unluckiest
from harness.spec.cases import chapter_and, covering, listed_axis, not_finite, tiled_axis, with_not_finite
from harness.spec.ops import ACCUM, Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Dims, Gate, Puzzle, ids, printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung

DIMS = (16, 8, 16)
"""The chapter's rows, hidden and outputs, which are puzzle 22's."""
COUNTED = (64, 768, 64)
"""Where the counters are held to the limits: GPT-2's width, and no more of the rest than a laptop likes."""
LANES, BLOCK_ROWS = 32, 4
MOST = 1024
"""Elements of a row, at most."""

MATRIX = Argument(("rows", "hidden"))
VECTOR = Argument(("hidden",))
STATISTIC = Argument(("rows",), ACCUM)
RESULT = Argument(("rows", "outputs"))
LAYERNORM = {"input": MATRIX, "ln_weight": VECTOR, "ln_bias": VECTOR}
BACKWARD = {"dln": MATRIX, "input": MATRIX, "mean": STATISTIC, "rstd": STATISTIC}
PRODUCT = {"ln_out": MATRIX, "linear_weight": Argument(("outputs", "hidden"))}

FORWARD_STEPS = ("rows", "once", "vectors", "shuffles")
PRODUCT_STEPS = ("tiled", "registers")
OPS = {
    **{step: OpSpec(f"fast_{step}", {f"{step}_out": MATRIX}, LAYERNORM) for step in FORWARD_STEPS},
    "dx": OpSpec("fast_dx", {"grad_input": MATRIX}, {**BACKWARD, "ln_weight": VECTOR}),
    "dgamma": OpSpec("fast_dgamma", {"grad_ln_weight": VECTOR, "grad_ln_bias": VECTOR}, BACKWARD),
    **{step: OpSpec(f"fast_{step}", {f"{step}_out": RESULT}, PRODUCT) for step in PRODUCT_STEPS},
}
LAUNCHES = {
    **{s: f"launch_layernorm[dtype, {n}](..., rows, hidden)" for n, s in enumerate(FORWARD_STEPS, 1)},
    **{s: f"launch_{s}[dtype](..., rows, hidden)" for s in ("dx", "dgamma")},
    **{s: f"launch_product[dtype, {n}](..., rows, hidden, outputs)" for n, s in enumerate(PRODUCT_STEPS, 7)},
}
ABOUT = {
    "rows": "neighbouring threads read neighbouring elements",
    "once": "x is read once and kept in registers",
    "vectors": "16 bytes a load",
    "shuffles": "sums inside the warp",
    "dx": "both sums and dx from one reading",
    "dgamma": "sums over the rows in two stages",
    "tiled": "the product through shared memory",
    "registers": "a tile of results in registers",
}
GATES = tuple(Gate(id, id, tuple(op.writes), ABOUT[id], limits=LIMITS[id]) for id, op in OPS.items())
AXES = (
    tiled_axis("rows", BLOCK_ROWS, 67),
    tiled_axis("hidden", LANES, 8 * LANES + 8, 515),
    listed_axis("outputs", 1, 31, 65),
)
"""What the cases vary: rows by blocks, hidden by warps of one element and of a vector a thread, outputs by tiles."""


cases = chapter_and(
    DIMS, "the chapter's sizes", "means far from 0, gradients that follow x_hat",
    (
        Case("counted", "GPT-2's width: here the counters are held to their limits", COUNTED, "hard",
             in_16_bits=True, counted=True),
        Case("a row as wide as may be", "every register that keeps an element is used", (3, MOST, 2), "hard"),
        *not_finite({"input": ("x", "NaN"), "dln": ("dln", "inf")}, DIMS),
        *covering(AXES, ("hard",), lambda *sizes: sizes),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """The input arrays of a case, in float64, rounded to what `dtype` can hold.

    Returns input, dln and ln_out [rows, hidden], ln_weight and ln_bias [hidden], mean and rstd [rows], linear_weight [outputs,
    hidden].
    """
    rows, hidden, outputs = case.dims
    random = np.random.default_rng([seed, rows, hidden, outputs])
    x = random.standard_normal((rows, hidden))
    arrays: Arrays = {
        "ln_weight": 1 + 0.5 * random.standard_normal(hidden),
        "ln_bias": 0.5 * random.standard_normal(hidden),
        "dln": random.standard_normal((rows, hidden)),
        "ln_out": random.standard_normal((rows, hidden)),
        "linear_weight": random.standard_normal((outputs, hidden)),
    }
    if case.values == "hard":
        arrays["dln"] += 1 + x
        x = 2 * x + 3 * random.standard_normal((rows, 1))
    arrays |= {"input": round_to_dtype(x, dtype)}
    arrays["mean"] = arrays["input"].mean(-1)
    arrays["rstd"] = 1 / np.sqrt(arrays["input"].var(-1) + EPS)
    with_not_finite(arrays, case.values)
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()}


def reference(tensors: dict) -> dict:
    """PyTorch's own answers, in the dtype and on the device of the tensors. Below float64 each is the unluckiest of several
    orders of the columns."""
    columns = ("input", "dln", "ln_out", "linear_weight", "ln_weight", "ln_bias")
    back = {*(f"{step}_out" for step in FORWARD_STEPS), "grad_input", "grad_ln_weight", "grad_ln_bias"}
    large = tensors["input"].numel() > 2**15
    return unluckiest(by_pytorch, tensors, columns, back, large)


def by_pytorch(tensors: dict) -> dict:
    """PyTorch's answers: everything is computed in the type of sums and rounded once, as on a GPU. Sums of the steps that begin
    with a thread a row, or a result, are added up one by one, which is how a thread may do it."""
    import torch

    x = tensors["input"]
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = {name: tensor.to(accum) for name, tensor in tensors.items()}
    gamma, beta, shape = wide["ln_weight"], wide["ln_bias"], x.shape[-1:]
    away = wide["input"] - one_by_one(wide["input"]) / x.shape[-1]
    layernorm = away * torch.rsqrt(one_by_one(away * away) / x.shape[-1] + EPS) * gamma + beta
    gradients = torch.ops.aten.native_layer_norm_backward(
        wide["dln"], wide["input"], list(shape), wide["mean"][:, None], wide["rstd"][:, None], gamma, beta,
        [True, True, True],
    )  # fmt: skip
    product = one_by_one(wide["ln_out"][:, None] * wide["linear_weight"]).squeeze(-1).to(x.dtype)
    names = ("grad_input", "grad_ln_weight", "grad_ln_bias")
    return {
        **{f"{step}_out": layernorm.to(x.dtype) for step in FORWARD_STEPS},
        **{name: grad.to(x.dtype) for name, grad in zip(names, gradients, strict=True)},
        **{f"{step}_out": product for step in PRODUCT_STEPS},
    }


def one_by_one(terms):
    """The sum over the last axis, kept as one element, added up one term after the other, as one thread does it."""
    total = terms[..., :1].clone()
    for k in range(1, terms.shape[-1]):
        total += terms[..., k : k + 1]
    return total


def terms(arrays: Arrays) -> dict[str, float]:
    """The size of the terms that cancel in dx: of a row with one element nothing is left."""
    if not all(np.isfinite(arrays[name]).all() for name in ("input", "dln")):
        return {}
    v = derive(arrays)
    sizes = v.column_rstd * (np.abs(v.g) + np.abs(v.c2) + np.abs(v.x_hat * v.c1))
    return {"grad_input": float(sizes.max(initial=0.0))}


def multiply_adds(dims: Dims) -> int:
    """Those of the products and of the rows, of which each launch has a part."""
    rows, hidden, outputs = dims
    return rows * hidden * (outputs + 8)


PUZZLE = Puzzle(
    name="p28",
    title="Make it fast: LayerNorm and Linear, step by step",
    subject="Fast LayerNorm and Linear",
    gates=GATES,
    rungs=(MojoRung(file="op/fast.mojo", gates=ids(GATES)),),
    dims=DIMS,
    dim_names=("rows", "hidden", "outputs"),
    cases=cases,
    inputs=inputs,
    reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    terms=terms,
    forward=printed_names(*(f"{step}_out" for step in (*FORWARD_STEPS, *PRODUCT_STEPS))),
    backward=printed_names("grad_input", "grad_ln_weight", "grad_ln_bias"),
    variants={id: (Call(op, (), id, LAUNCHES[id]),) for id, op in OPS.items()},
    about_variants={id: f"only {id}: {ABOUT[id]}" for id in OPS},
    multiply_adds=multiply_adds,
)
