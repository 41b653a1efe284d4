"""Puzzle 28, make it fast: twelve steps from slow to fast kernels of LayerNorm and Linear, checked by values and by
counters of the virtual GPU.

Names: x [rows, hidden] is the input, dln the gradient of LayerNorm's output, ln_out the Linear's input, its weight
[outputs, hidden]. Every step is a variant with its own tensors, so that no step slows down another.
"""

import numpy as np

from harness.puzzles.formulas import EPS, explain_cancellation
from harness.puzzles.p28.limits import LIMITS
from harness.puzzles.p28.mistakes import MISTAKES, derive
from harness.spec.baseline import compute_worst_baseline, sum_sequentially
from harness.spec.cases import (
    make_cases_function,
    make_covering_cases,
    make_listed_axis,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec
from harness.spec.puzzle import Arrays, Case, Demo, Dims, Gate, Puzzle, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung

DIMS = (16, 8, 16)
"""The default rows, hidden and outputs, the same as puzzle 22's."""
COUNTED_DIMS = (64, 768, 64)
"""Sizes at which the counters are checked: GPT-2's width, with few rows and outputs, to run on a laptop."""
TENSOR_CORE_DIMS = (128, 768, 192)
"""COUNTED_DIMS for steps on tensor cores, with whole tiles of results."""
MAX_ORDERED_TERMS = COUNTED_DIMS[0] * COUNTED_DIMS[1] * COUNTED_DIMS[2]
"""Multiply-adds of the largest matmul that the reference sums term by term."""
LANES, BLOCK_ROWS = 32, 4
MAX_HIDDEN = 1024
"""Maximum elements of a row."""

BF16 = "bfloat16"

MATRIX = Argument(("rows", "hidden"))
VECTOR = Argument(("hidden",))
STATISTIC = Argument(("rows",), ACCUM_DTYPE)
RESULT = Argument(("rows", "outputs"))
LAYERNORM_INPUTS = {"input": MATRIX, "ln_weight": VECTOR, "ln_bias": VECTOR}
BACKWARD_INPUTS = {"dln": MATRIX, "input": MATRIX, "mean": STATISTIC, "rstd": STATISTIC}
PRODUCT_INPUTS = {"ln_out": MATRIX, "linear_weight": Argument(("outputs", "hidden"))}

BF16_OPERANDS = {
    "ln_out_16": Argument(("rows", "hidden"), BF16),
    "weight_16": Argument(("outputs", "hidden"), BF16),
}
BF16_DY = {"dy_16": Argument(("rows", "outputs"), BF16)}
GRAD_WEIGHT = {"grad_linear_weight": Argument(("outputs", "hidden"), BF16)}
BF16_VECTOR = Argument(("outputs",), BF16)
BF16_RESULT = Argument(("rows", "outputs"), BF16)

FORWARD_STEPS = ("rows", "once", "vectors", "shuffles")
PRODUCT_STEPS = ("tiled", "registers")
BF16_STEPS = ("copies", "tensor")
OPS = {
    **{step: OpSpec("fast_layernorm", {f"{step}_out": MATRIX}, LAYERNORM_INPUTS) for step in FORWARD_STEPS},
    "dx": OpSpec("fast_dx", {"grad_input": MATRIX}, {**BACKWARD_INPUTS, "ln_weight": VECTOR}),
    "dgamma": OpSpec("fast_dgamma", {"grad_ln_weight": VECTOR, "grad_ln_bias": VECTOR}, BACKWARD_INPUTS),
    **{step: OpSpec("fast_product", {f"{step}_out": RESULT}, PRODUCT_INPUTS) for step in PRODUCT_STEPS},
    **{step: OpSpec("fast_product", {f"{step}_out": BF16_RESULT}, BF16_OPERANDS) for step in BF16_STEPS},
    "layouts": OpSpec(
        "fast_layouts",
        {"grad_ln_out": Argument(("rows", "hidden"), BF16), **GRAD_WEIGHT},
        {**BF16_DY, **BF16_OPERANDS},
    ),
    "epilogue": OpSpec(
        "fast_epilogue",
        {"output": BF16_RESULT, **GRAD_WEIGHT, "grad_linear_bias": BF16_VECTOR},
        {**BF16_DY, **BF16_OPERANDS, "bias_16": BF16_VECTOR},
    ),
}
NUMBERS = {step: str(number) for number, step in enumerate(OPS, 1)}
LAUNCHES = {
    **{s: f"launch_layernorm[dtype, {NUMBERS[s]}](..., rows, hidden)" for s in FORWARD_STEPS},
    **{s: f"launch_{s}[dtype](..., rows, hidden)" for s in ("dx", "dgamma")},
    **{s: f"launch_product[dtype, {NUMBERS[s]}](..., rows, hidden, outputs)" for s in PRODUCT_STEPS},
    **{s: f"launch_product[DType.bfloat16, {NUMBERS[s]}](..., rows, hidden, outputs)" for s in BF16_STEPS},
    **{s: f"launch_{s}(..., rows, hidden, outputs)" for s in ("layouts", "epilogue")},
}
NUMBERED_STEPS = (*FORWARD_STEPS, *PRODUCT_STEPS, *BF16_STEPS)
"""Steps whose op takes the step's number."""
DESCRIPTIONS = {
    "rows": "neighbouring threads read neighbouring elements",
    "once": "x is read once and kept in registers",
    "vectors": "16 bytes a load",
    "shuffles": "sums inside the warp",
    "dx": "both sums and dx from one reading",
    "dgamma": "sums over the rows in two stages",
    "tiled": "the product through shared memory",
    "registers": "a tile of results in registers",
    "copies": "tiles that arrive while others are multiplied",
    "tensor": "the product on tensor cores",
    "layouts": "the backward products without a transpose in memory",
    "epilogue": "bias and its gradient inside the products",
}
GATE_OUTPUTS = {"epilogue": ("output", "grad_linear_bias")}
"""Step -> its results, if they are not all of its op's."""
GATES = tuple(
    Gate(id, id, GATE_OUTPUTS.get(id, tuple(op.writes)), DESCRIPTIONS[id], limits=LIMITS[id])
    for id, op in OPS.items()
)
AXES = (
    make_tiled_axis("rows", BLOCK_ROWS, 67),
    make_tiled_axis("hidden", LANES, 8 * LANES + 8, 515),
    make_listed_axis("outputs", 1, 31, 65),
)
"""Axes of the cases: rows around a block's, hidden around a warp's elements or vectors, some outputs."""


cases = make_cases_function(
    DIMS, "the chapter's sizes", "means far from 0, gradients that follow x_hat",
    (
        Case("counted", "GPT-2's width; the counters are checked against their limits", COUNTED_DIMS, "hard",
             in_16_bits=True, checks_limits=True),
        *(Case(f"counted in {id}", "whole tiles, for tensor cores", TENSOR_CORE_DIMS, "hard", variant=id, checks_limits=True)
          for id in ("tensor", "layouts", "epilogue")),
        Case("a row as wide as may be", "uses every register for elements", (3, MAX_HIDDEN, 2), "hard"),
        Case("rows far from 0", "their mean is 30 times their deviation: E[x^2] - mean^2 cancels", (5, 40, 3), "far"),
        *make_nonfinite_cases({"input": ("x", "NaN"), "dln": ("dln", "inf")}, DIMS),
        *make_covering_cases(AXES, ("hard",), lambda *sizes: sizes),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return the input arrays of a case, float64 rounded to `dtype`.

    They are input, dln and ln_out [rows, hidden], ln_weight and ln_bias [hidden], mean and rstd [rows], linear_weight [outputs,
    hidden]; and for bfloat16-only steps ln_out_16, weight_16, dy_16 [rows, outputs] and bias_16 [outputs].
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
    bf16 = {
        "ln_out_16": arrays["ln_out"],
        "weight_16": arrays["linear_weight"],
        "dy_16": random.standard_normal((rows, outputs)),
        "bias_16": 8 + random.standard_normal(outputs),  # visible despite the rounding of sums
    }
    arrays |= {name: round_to_dtype(array, BF16) for name, array in bf16.items()}
    if case.values == "hard":
        arrays["dln"] += 1 + x
        x = 2 * x + 3 * random.standard_normal((rows, 1))
    if case.values == "far":
        x[::3] += 30  # two of five rows
    arrays |= {"input": round_to_dtype(x, dtype)}
    arrays["mean"] = arrays["input"].mean(-1)
    arrays["rstd"] = 1 / np.sqrt(arrays["input"].var(-1) + EPS)
    write_nonfinite(arrays, case.values)
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()}


def reference(tensors: dict) -> dict:
    """Return PyTorch's results, in the tensors' dtype and on their device. Below float64, each is the worst
    over several orders of the columns."""
    columns = ("input", "dln", "ln_out", "linear_weight", "ln_weight", "ln_bias", *BF16_OPERANDS)
    gradients = {
        *(f"{step}_out" for step in FORWARD_STEPS), "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_ln_out",
        "grad_linear_weight",
    }  # fmt: skip
    large = tensors["input"].numel() > 2**15
    return compute_worst_baseline(compute_with_pytorch, tensors, columns, gradients, large)


def compute_with_pytorch(tensors: dict) -> dict:
    """Return PyTorch's results, computed in the accumulation type and rounded once, as on a GPU. Sums that
    the initial code computes with one thread are added term by term."""
    import torch

    x = tensors["input"]
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    upcast = {name: tensor.to(accum) for name, tensor in tensors.items()}
    gamma, beta, shape = upcast["ln_weight"], upcast["ln_bias"], x.shape[-1:]
    diff = upcast["input"] - sum_sequentially(upcast["input"]) / x.shape[-1]
    layernorm = diff * torch.rsqrt(sum_sequentially(diff * diff) / x.shape[-1] + EPS) * gamma + beta
    gradients = torch.ops.aten.native_layer_norm_backward(
        upcast["dln"], upcast["input"], list(shape), upcast["mean"][:, None], upcast["rstd"][:, None], gamma, beta,
        [True, True, True],
    )  # fmt: skip
    if x.shape[0] * upcast["linear_weight"].numel() <= MAX_ORDERED_TERMS:
        product = (
            sum_sequentially(upcast["ln_out"][:, None] * upcast["linear_weight"]).squeeze(-1).to(x.dtype)
        )
    else:  # only in the cases for tensor cores
        product = (upcast["ln_out"] @ upcast["linear_weight"].T).to(x.dtype)
    names = ("grad_input", "grad_ln_weight", "grad_ln_bias")
    return {
        **{f"{step}_out": layernorm.to(x.dtype) for step in FORWARD_STEPS},
        **{name: grad.to(x.dtype) for name, grad in zip(names, gradients, strict=True)},
        **{f"{step}_out": product for step in PRODUCT_STEPS},
        **compute_bf16_products(upcast, tensors["dy_16"].dtype),
    }


def compute_bf16_products(tensors: dict, dtype) -> dict:
    """Return the results of the bfloat16 steps, in `dtype`; their sums are float32."""
    ln_out, weight, dy, bias = (tensors[name] for name in (*BF16_OPERANDS, *BF16_DY, "bias_16"))
    product = ln_out @ weight.T
    results = {
        **{f"{step}_out": product for step in BF16_STEPS},
        "grad_ln_out": dy @ weight,
        "grad_linear_weight": dy.T @ ln_out,
        "output": product + bias,
        "grad_linear_bias": dy.sum(0),
    }
    return {name: result.to(dtype) for name, result in results.items()}


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the size of the terms that cancel in dx; for a row of one element they cancel completely."""
    if not all(np.isfinite(arrays[name]).all() for name in ("input", "dln")):
        return {}
    v = derive(arrays)
    magnitudes = v.column_rstd * (np.abs(v.g) + np.abs(v.c2) + np.abs(v.x_hat * v.c1))
    return {"grad_input": float(magnitudes.max(initial=0.0))}


def multiply_adds(dims: Dims) -> int:
    """Return an estimate of the multiply-adds of a matmul and of the row kernels."""
    rows, hidden, outputs = dims
    return rows * hidden * (outputs + 8)


PUZZLE = Puzzle(
    name="p28",
    title="Make it fast: LayerNorm and Linear, step by step",
    subject="Fast LayerNorm and Linear",
    gates=GATES,
    rungs=(MojoRung(file="op/fast.mojo", gates=list_gate_ids(GATES)),),
    dims=DIMS,
    dim_names=("rows", "hidden", "outputs"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    find_symptom=explain_cancellation,
    compute_term_magnitudes=terms,
    forward=map_printed_names(*(f"{step}_out" for step in NUMBERED_STEPS), "output"),
    backward=map_printed_names(
        *("grad_input", "grad_ln_weight", "grad_ln_bias"),
        *("grad_ln_out", "grad_linear_weight", "grad_linear_bias"),
    ),
    variants={
        id: (Call(op, (("step", NUMBERS[id]),) if id in NUMBERED_STEPS else (), id, LAUNCHES[id]),)
        for id, op in OPS.items()
    },
    variant_help={id: f"only {id}: {DESCRIPTIONS[id]}" for id in OPS},
    count_multiply_adds=multiply_adds,
    after_costs=".whole_pass:format_lines",
    demos=(
        Demo("bench", "time your steps on a GPU (--bench --help: its flags)", ".bench:main", options=True),
    ),
)
