"""Puzzle 20, the first custom backward: rungs, gates, cases and reference. Matrices are [rows, columns]."""

import numpy as np

from harness.puzzles.formulas import EPS
from harness.puzzles.p20.mistakes import MISTAKES, ROW_THREADS, WORD_BITS, derive
from harness.spec.baseline import compute_worst_baseline
from harness.spec.cases import (
    CANCELLING,
    choose_index,
    draw_cancelling,
    make_cases_function,
    make_covering_cases,
    make_listed_axis,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, Scalar, get_accum_dtype, get_itemsize
from harness.spec.puzzle import Arrays, Case, Dims, Gate, Ledger, Puzzle, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, Rung

ROWS = 4
COLUMNS = 8

MATRIX = Argument(("rows", "columns"))
COLUMN = Argument(("columns",))
ROW = Argument(("rows",), ACCUM_DTYPE)
MASK_WORDS = Argument(("words",), "int32", is_bitmask=True)

OPS = (
    OpSpec("relu_mask_train", writes={"relu": MATRIX, "mask": MASK_WORDS}, reads={"input": MATRIX}),
    OpSpec("relu_mask_backward_train", writes={"grad_relu": MATRIX},
           reads={"grad_output": MATRIX, "mask": MASK_WORDS}),
    OpSpec("softmax_train", writes={"softmax": MATRIX}, reads={"logits": MATRIX}),
    OpSpec("softmax_backward_train", writes={"grad_softmax": MATRIX},
           reads={"grad_output": MATRIX, "softmax": MATRIX}),
    OpSpec("layernorm_train", writes={"layernorm": MATRIX, "mean": ROW, "rstd": ROW},
           reads={"input": MATRIX, "weight": COLUMN, "bias": COLUMN}, scalars={"eps": Scalar(EPS)}),
    OpSpec("layernorm_backward_train",
           writes={"grad_input": MATRIX, "grad_weight": COLUMN, "grad_bias": COLUMN},
           reads={"grad_output": MATRIX, "input": MATRIX, "mean": ROW, "rstd": ROW, "weight": COLUMN}),
)  # fmt: skip

LAUNCH_SIZES = {
    "relu_mask_train": "rows * columns",
    "relu_mask_backward_train": "rows * columns",
    "layernorm_train": "rows, columns, Scalar[accum](1e-5)",
}
"""Op -> the arguments of its launch after the tensors, if they are not rows and columns."""


def make_call(op: OpSpec, variant: str) -> Call:
    sizes = LAUNCH_SIZES.get(op.name, "rows, columns")
    return Call(op, (), variant, f"launch_{op.name.removesuffix('_train')}[dtype](..., {sizes})")


VARIANTS = {
    name: tuple(make_call(op, name) for op in OPS if op.name.startswith(name))
    for name in ("relu", "softmax", "layernorm")
}
"""One variant per pair of kernels, so that a gate compiles only its own pair."""

GRAPH_GATES = (
    Gate("edges", description="the derivative along each edge of the graph"),
    Gate("backward", description="the gradient at each node, summed over its paths"),
)
FUNCTION_GATES = (
    Gate("relu_input", description="ReLU that saves its input"),
    Gate("relu_output", description="ReLU that saves its output"),
    Gate("relu_mask", description="ReLU that saves a bool per element"),
    Gate("relu_bits", description="ReLU that saves a bit per element"),
    Gate("layernorm", description="LayerNorm over any leading axes"),
)
KERNEL_GATES = (
    Gate("relu", "relu", ("relu", "mask"), "ReLU and the packed mask, by a warp vote"),
    Gate("drelu", "relu", ("grad_relu",), "the gradient of ReLU from the mask"),
    Gate("softmax", "softmax", ("softmax",), "softmax of a row"),
    Gate("dsoftmax", "softmax", ("grad_softmax",), "the gradient of softmax from its output"),
    Gate("dlayernorm", "layernorm", ("grad_input",), "the gradient of LayerNorm's input"),
    Gate("dweight", "layernorm", ("grad_weight", "grad_bias"), "the gradients of LayerNorm's parameters"),
)
REGISTRATION_GATES = (
    Gate("define", description="two operators around the kernels"),
    Gate("fake", description="shapes without values, for the compiler"),
    Gate("save", description="what the backward pass needs, and no more"),
    Gate("gradient", description="the registration of the backward pass"),
    Gate("second", description="a second derivative refused"),
    Gate("autocast", description="the dtype under autocast"),
    Gate("vmap", description="a batch axis in any position"),
)
RUNGS = (
    Rung(
        id="derive",
        file="graph.py",
        gates=list_gate_ids(GRAPH_GATES),
        checker=".graph:GraphChecker",
        title="The graph, by hand",
    ),
    Rung(
        id="torch",
        file="functions.py",
        gates=list_gate_ids(FUNCTION_GATES),
        checker=".functions:FunctionsChecker",
    ),
    MojoRung(
        file="op/first_backward.mojo",
        gates=list_gate_ids(KERNEL_GATES),
        sizes={"words": "ceildiv(rows * columns, WORD)"},
    ),
    Rung(
        id="register",
        file="register.py",
        gates=list_gate_ids(REGISTRATION_GATES),
        checker=".registration:RegistrationChecker",
        title="From kernel to loss.backward()",
    ),
)


AXES = (make_listed_axis("rows", 1, 3), make_tiled_axis("columns", ROW_THREADS, 4 * ROW_THREADS + 5))
"""Axes of the cases. A block handles one row, so one row and several rows are the only classes of `rows`."""
NONFINITE_VALUES = {"input": ("x", "NaN", "-inf"), "grad_output": ("dy", "inf")}
"""Tensor -> its symbol in the book, and the non-finite values that cases write into it."""

cases = make_cases_function(
    (ROWS, COLUMNS), "small enough to print", "means far from 0, gradients that follow the result",
    (
        Case("odd sizes", "fewer elements than a word has bits", (3, 7), "hard"),
        *make_nonfinite_cases(NONFINITE_VALUES, (ROWS, COLUMNS)),
        Case("minus infinity", "masked logits, and a fully masked row, which gives NaN", (6, 9), "masked"),
        Case("huge logits", "without the shift, an exponential overflows", (4, 33), "huge"),
        Case("far below 0", "rows around -1,000, whose maximum is far below 0", (5, 9), "low"),
        Case("expanded", "grad_output has stride 0, as from sum()", (5, 10), "expanded"),
        Case("transposed", "grad_output is not contiguous", (5, 10), "transposed"),
        *make_covering_cases(AXES, ("hard",), lambda *sizes: sizes),
        Case("sums that cancel",
             "in 16-bit dtypes, sums over rows cancel to a tenth of one term: partial sums must not be rounded",
             (2 * WORD_BITS + 2, 20), CANCELLING, in_16_bits=True),
        Case("small beside large",
             "in 16-bit dtypes, a rounded sum loses what a thread adds to its first exponential",
             (2, 9 * ROW_THREADS), "uneven", in_16_bits=True),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return a case's input, logits and grad_output [rows, columns], weight and bias [columns].

    They are float64, rounded to `dtype`.
    """
    R, C = case.dims
    random = np.random.default_rng([seed, R, C])
    arrays: Arrays = {
        "input": random.standard_normal((R, C)),
        "logits": random.standard_normal((R, C)),
        "weight": np.ones(C),
        "bias": np.zeros(C),
        "grad_output": random.standard_normal((R, C)),
    }
    if case.values != "plain":
        # The gradients of softmax and LayerNorm remove a constant in grad_output's rows, so add one.
        x_hat = arrays["input"] - arrays["input"].mean(-1, keepdims=True)
        arrays["grad_output"] += 1 + x_hat
        arrays["input"] += 0.5 * random.standard_normal((R, 1))
        zeros = arrays["input"].flat[:: max(3, R * C // 7)]
        arrays["input"].flat[:: max(3, R * C // 7)] = np.resize([0.0, -0.0], zeros.shape)  # at the kink
        arrays["logits"] *= 3
        arrays["weight"] = 1 + 0.5 * random.standard_normal(C)
        arrays["bias"] = 0.5 * random.standard_normal(C)
    if case.values == "masked":
        arrays["logits"][random.random((R, C)) < 0.3] = -np.inf
        arrays["logits"][R // 2] = -np.inf
        arrays["logits"][0, 0] = 1.0
    elif case.values == "huge":
        arrays["logits"] *= 3000
    elif case.values == "low":
        arrays["logits"] -= 1000
    elif case.values == "uneven":
        # exp(-5.5625) is just below half a unit in the last place of 1.0 in bfloat16.
        arrays["logits"][:] = np.where(np.arange(C) < ROW_THREADS, 0.0, -5.5625)
    elif case.values == CANCELLING:
        dy, group = draw_cancelling(R, C, random, cancel=dtype in ("float16", "bfloat16"))
        steps = np.stack([random.permutation(C) for _ in range(R)])[group] - (C - 1) / 2
        arrays["input"] = steps / 2 + random.integers(8, 17, (R, 1)) / 4
        arrays["grad_output"] = dy
    elif case.values.endswith("in grad_output"):
        # inf * 0 is NaN where ReLU blocks the gradient.
        arrays["input"].flat[choose_index(arrays["input"])] = -1.0
    elif case.values == "expanded":
        arrays["grad_output"] = np.broadcast_to(np.float64(1.25), (R, C))
    elif case.values == "transposed":
        arrays["grad_output"] = arrays["grad_output"].T.copy().T
    write_nonfinite(arrays, case.values)
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()}


FORWARD = map_printed_names("relu", mask="relu_mask")
FORWARD |= map_printed_names("softmax", "layernorm", "mean", "rstd")
BACKWARD = map_printed_names("grad_relu", "grad_softmax", grad_input="grad_layernorm")
BACKWARD |= map_printed_names("grad_weight", "grad_bias")
# Above this many elements, PyTorch runs only once.
MAX_REPEATED_ELEMENTS = 2**18


def reference(tensors: dict) -> dict:
    """Return autograd's results by output name, in the tensors' dtype and on their device.

    Below float64, each is the least accurate over several column orders and, for softmax, sequential sums.
    """
    columns = ("input", "logits", "weight", "bias", "grad_output")
    quantities = {"passes", *FORWARD, *BACKWARD} - {"mean", "rstd"}
    large = tensors["input"].numel() > MAX_REPEATED_ELEMENTS
    others = (compute_softmax_sequentially,)
    results = compute_worst_baseline(
        compute_with_autograd, tensors, columns, quantities, large, other_formulas=others
    )
    # Derive the mask from ReLU's gradient for an incoming gradient of ones.
    mask = pack_mask(results.pop("passes") != 0)
    return {**results, "mask": mask}


def compute_with_autograd(tensors: dict) -> dict:
    """Return PyTorch's results, without the mask."""
    import torch
    import torch.nn.functional as F

    dy = tensors["grad_output"]
    x, logits, weight, bias = (
        tensors[name].detach().contiguous().requires_grad_(True)
        for name in ("input", "logits", "weight", "bias")
    )
    relu, softmax = F.relu(x), F.softmax(logits, -1)
    (passes,) = torch.autograd.grad(relu, x, torch.ones_like(relu), retain_graph=True)
    # For 16-bit dtypes, LayerNorm runs in float32 and rounds once, as on a GPU: PyTorch's CPU kernel sums the
    # parameter gradients in 16 bits, with errors large enough to hide a wrong kernel.
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_accum, gamma, beta = (tensor.to(accum) for tensor in (x, weight, bias))
    layernorm, mean, rstd = torch.native_layer_norm(x_accum, x.shape[-1:], gamma, beta, EPS)
    layernorm = layernorm.to(x.dtype)
    gradients = torch.autograd.grad(layernorm, (x, weight, bias), dy)
    return {
        "passes": passes,
        "relu": relu.detach(),
        "grad_relu": torch.autograd.grad(relu, x, dy)[0],
        "softmax": softmax.detach(),
        "grad_softmax": torch.autograd.grad(softmax, logits, dy)[0],
        "layernorm": layernorm.detach(),
        **dict(zip(("grad_input", "grad_weight", "grad_bias"), gradients, strict=True)),
        "mean": mean.detach().flatten(),
        "rstd": rstd.detach().flatten(),
    }


def compute_softmax_sequentially(tensors: dict) -> dict:
    """Return softmax and its gradient with the columns summed sequentially, as one thread does."""
    import torch

    dtype = tensors["logits"].dtype
    logits, dy = tensors["logits"].float(), tensors["grad_output"].float()

    def sum_sequentially(terms):
        partial_sums = np.cumsum(terms.cpu().numpy(), -1)  # PyTorch's cumsum accumulates in float64
        return torch.from_numpy(partial_sums[..., -1:]).to(terms)

    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    P = (weights / sum_sequentially(weights)).to(dtype)
    dS = P.float() * (dy - sum_sequentially(dy * P.float()))
    return {"softmax": P, "grad_softmax": dS.to(dtype)}


def pack_mask(passes):
    import torch

    bits = torch.nn.functional.pad(passes.flatten(), (0, -passes.numel() % WORD_BITS)).view(-1, WORD_BITS)
    weights = torch.tensor([1 << i for i in range(WORD_BITS)], dtype=torch.int64, device=passes.device)
    return (bits * weights).sum(1).to(torch.int32)


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the magnitude of the terms that can cancel; with one column, they cancel completely."""
    if not all(np.isfinite(arrays[name]).all() for name in NONFINITE_VALUES):
        return {}
    v = derive(arrays)
    finite = np.isfinite(v.softmax)
    softmax = v.softmax * (np.abs(v.grad_output) + np.abs(v.dot))
    layernorm = v.row_rstd * (np.abs(v.g) + np.abs(v.c2) + np.abs(v.x_hat * v.c1))
    return {
        "grad_softmax": float(np.where(finite, softmax, 0.0).max(initial=0.0)),
        "grad_input": float(layernorm.max(initial=0.0)),
    }


def ledger(dims: Dims, dtype: str) -> Ledger:
    """Return the bytes saved for the backward pass, not counting parameters; PyTorch's ReLU saves its output."""
    R, C = dims
    itemsize = get_itemsize(dtype)
    statistics = 2 * R * get_itemsize(get_accum_dtype(dtype))
    others = {"softmax": R * C * itemsize, "layernorm": R * C * itemsize + statistics}
    return Ledger(
        eager_saved={"relu": R * C * itemsize, **others},
        our_saved={"relu": -(-R * C // WORD_BITS) * 4, **others},
        temporaries={name: {} for name in VARIANTS},
    )


PUZZLE = Puzzle(
    name="p20",
    title="The first custom backward: from a formula to loss.backward()",
    subject="ReLU, softmax and LayerNorm",
    gates=(*GRAPH_GATES, *FUNCTION_GATES, *KERNEL_GATES, *REGISTRATION_GATES),
    rungs=RUNGS,
    dims=(ROWS, COLUMNS),
    dim_names=("rows", "columns"),
    compute_derived_sizes=lambda dims: {"words": -(-dims[0] * dims[1] // WORD_BITS)},
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    compute_term_magnitudes=terms,
    forward=FORWARD,
    backward=BACKWARD,
    variants=VARIANTS,
    variant_help={name: f"only {name}, forward and backward" for name in VARIANTS},
    make_ledger=ledger,
)
