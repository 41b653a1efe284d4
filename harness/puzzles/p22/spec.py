"""Puzzle 22, LayerNorm + Linear: ops, variants, gates, cases, constants and reference.

B = batch_size, S = seq_len, H = hidden_dim, O = output_dim; a row is one of the B * S sequence positions.
"""

import numpy as np

from harness.puzzles.formulas import explain_cancellation
from harness.puzzles.p22 import derive_rung, transfer_mistakes
from harness.puzzles.p22.mistakes import MISTAKES, derive, stack_means
from harness.puzzles.p22.ops import BACKWARD, EPS, FORWARD, INPUT, LN_PARAMETER, OUTPUT, STATISTIC, WEIGHT
from harness.spec.baseline import compute_worst_baseline
from harness.spec.cases import (
    CANCELLING,
    draw_cancelling,
    make_cases_function,
    make_nonfinite_cases,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, Scalar, get_accum_dtype, get_itemsize
from harness.spec.puzzle import Arrays, Case, Gate, Ledger, Puzzle, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, NumpyRung

BATCH_SIZE = 4
SEQ_LEN = 4
HIDDEN_DIM = 8
OUTPUT_DIM = 16

ROW_SUMS = OpSpec(
    "layernorm_linear_row_sums",
    writes={"row_sums": Argument(("rows", 2), ACCUM_DTYPE)},
    reads={"dln": INPUT, "input": INPUT, "mean": STATISTIC, "rstd": STATISTIC, "ln_weight": LN_PARAMETER},
)


RMSNORM_BACKWARD = OpSpec(
    "rmsnorm_linear_train_backward",
    writes={"rms_grad_input": INPUT, "grad_rms_weight": LN_PARAMETER, "rms_grad_weight": WEIGHT},
    reads={"grad_output": OUTPUT, "input": INPUT, "ln_weight": LN_PARAMETER, "linear_weight": WEIGHT},
    scalars={"eps": Scalar(EPS)},
)
"""The last gate: the backward pass of RMSNorm + Linear, with ln_weight as gamma."""


def make_variant(algorithm: str) -> tuple[Call, ...]:
    parameters = (("algorithm", algorithm),)
    forward = "recorder, ForwardTensors[dtype](=, sizes=sizes.copy(), eps=Scalar[accum](EPS))"
    backward = "recorder, BackwardTensors[dtype](=, sizes=sizes.copy())"
    return (
        Call(FORWARD, parameters, algorithm, f"launch_forward_{algorithm}({forward})"),
        Call(BACKWARD, parameters, algorithm, f"launch_backward_{algorithm}({backward})"),
    )


RMSNORM_LAUNCH = "launch_rmsnorm_linear_backward[dtype](..., sizes, Scalar[accum](EPS))"
VARIANTS = {
    "fused": make_variant("fused"),
    # The row sums are internal to the unfused backward pass; this call exposes them.
    "unfused": (
        *make_variant("unfused"),
        Call(ROW_SUMS, (), "unfused", "launch_row_sums[dtype](..., sizes)"),
    ),
    "rmsnorm": (Call(RMSNORM_BACKWARD, (), "rmsnorm", RMSNORM_LAUNCH),),
}


STATISTICS = ("mean", "rstd")
GATES = (
    Gate("ln", "unfused", ("output", "grad_weight"), "the LayerNorm output from given statistics",
         provided_quantities=STATISTICS),
    Gate("forward", "fused", ("output",), "the whole forward pass in one kernel", provided_quantities=STATISTICS),
    Gate("row_sums", "unfused", ("row_sums", "grad_input"), "the two means c1 and c2 of every row",
         provided_quantities=("grad_ln_weight", "grad_ln_bias", "grad_bias")),
    Gate("db", "fused", ("grad_bias",), "the gradient of the linear bias"),
    Gate("dW", "fused", ("grad_weight",), "the gradient of the linear weight"),
    Gate("dgamma", "fused", ("grad_ln_weight", "grad_ln_bias"), "the gradients of the LayerNorm parameters"),
    Gate("dx", "fused", ("grad_input",), "the gradient of the input"),
    Gate("transfer", "rmsnorm", tuple(RMSNORM_BACKWARD.writes), "RMSNorm + Linear, backward, on your own"),
)  # fmt: skip

# Sums that blocks accumulate with atomics on a GPU.
ATOMIC_SUMS = frozenset(
    ("fused", quantity) for quantity in ("grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
) | {("rmsnorm", "grad_rms_weight"), ("rmsnorm", "rms_grad_weight")}


SYMBOLS = {"input": "x", "ln_weight": "gamma", "grad_output": "dy"}
NONFINITE_VALUES = {tensor: (symbol, "NaN", "inf") for tensor, symbol in SYMBOLS.items()}
"""Tensor -> its symbol in the book, and the non-finite values that cases write into it."""
DIMS = (BATCH_SIZE, SEQ_LEN, HIDDEN_DIM, OUTPUT_DIM)

cases = make_cases_function(
    DIMS, "gamma = 1, beta = 0, grad_output = 1", "mean 3, tiny variance, grad_output follows x_hat",
    (
        Case("odd sizes", "B != S, nothing divides a tile", (3, 9, 7, 13), "hard"),
        Case("wide", "H is larger than a block, and not a multiple of it", (3, 7, 131, 5), "hard"),
        Case("wide output", "O is larger than a block, and not a multiple of it", (2, 5, 9, 133), "hard"),
        Case("many rows", "more rows than fit in one tile", (2, 33, 12, 20), "hard"),
        Case("one row", "no sum over rows, which could hide an error", (1, 1, 24, 8), "hard"),
        Case("expanded", "grad_output has stride 0, as from sum()", (5, 7, 10, 6), "expanded"),
        Case("transposed", "grad_output is not contiguous", (5, 7, 10, 6), "transposed"),
        Case("large values", "input in the hundreds, small grad_output: nothing may overflow", (3, 6, 16, 20),
             "large"),
        Case("square", "O = H: W transposed has the shape of W", (2, 3, 10, 10), "hard"),
        Case("sums that cancel",
             "in 16-bit dtypes, sums over rows cancel to a tenth of one term: partial sums must not be rounded",
             (2, 33, 12, 20), CANCELLING, in_16_bits=True),
        *make_nonfinite_cases(NONFINITE_VALUES, DIMS),
    ),
)  # fmt: skip


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return a case's input arrays, float64 rounded to `dtype`.

    These are input [B, S, H], ln_weight and ln_bias [H], linear_weight [O, H], linear_bias [O], grad_output
    [B, S, O], and, for the row-sums kernel, dln [B, S, H], the gradient of the LayerNorm output.
    """
    B, S, H, O = case.dims
    random = np.random.default_rng([seed, B, S, H, O])
    weights = {
        "linear_weight": random.standard_normal((O, H)) / np.sqrt(H),
        "linear_bias": random.standard_normal(O),
    }
    if case.values == "plain":
        arrays = {
            "input": random.standard_normal((B, S, H)),
            "ln_weight": np.ones(H),
            "ln_bias": np.zeros(H),
            **weights,
            "grad_output": np.ones((B, S, O)),
        }
    else:
        # With a constant grad_output, the rounding errors of tiny-variance rows would dominate dgamma.
        small_std = 1.0 if case.values in ("expanded", "large") else 0.05
        arrays = {**draw_adversarial_values(B, S, H, O, random, small_std), **weights}
        if case.values == CANCELLING:
            arrays |= draw_cancelling_values(B, S, H, O, random, cancel=dtype in ("float16", "bfloat16"))
        if case.values == "expanded":
            arrays["grad_output"] = np.broadcast_to(np.float64(1.25), (B, S, O))
        elif case.values == "transposed":
            arrays["grad_output"] = arrays["grad_output"].transpose(1, 0, 2).copy().transpose(1, 0, 2)
        elif case.values == "large":
            arrays["input"] *= 128
            arrays["grad_output"] /= 64
        write_nonfinite(arrays, case.values)
    arrays = {name: round_to_dtype(array, dtype) for name, array in arrays.items()}
    # Shift dln away from 0: for a single row, both means could vanish and leave only rounding errors.
    dln = 1 + arrays["grad_output"] @ arrays["linear_weight"]
    return {**arrays, "dln": round_to_dtype(dln, dtype)}


def draw_adversarial_values(
    B: int, S: int, H: int, O: int, random: np.random.Generator, small_std: float
) -> Arrays:
    """Return adversarial inputs, on which wrong backward passes fail.

    Row means differ and are far from 0; every fourth row has the standard deviation `small_std`; for H > 1, one
    gamma is 0; grad_output has a nonzero mean and is correlated with x_hat, so that neither correction term of
    dx is small.
    """
    rows = np.arange(B * S).reshape(B, S, 1)
    deviation = random.standard_normal((B, S, H)) * np.where(rows % 4 == 3, small_std, 1.0)
    row_mean = 3 + 0.5 * random.standard_normal((B, S, 1))
    centred = deviation - deviation.mean(-1, keepdims=True)
    x_hat = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    correlated = x_hat @ random.standard_normal((H, O)) / np.sqrt(H)
    gamma = 1 + 0.5 * random.standard_normal(H)
    if H > 1:
        gamma[H // 3] = 0.0
    return {
        "input": row_mean + deviation,
        "ln_weight": gamma,
        "ln_bias": 0.5 * random.standard_normal(H),
        "grad_output": random.standard_normal((B, S, O)) + 1 + correlated,
    }


def draw_cancelling_values(
    B: int, S: int, H: int, O: int, random: np.random.Generator, cancel: bool
) -> Arrays:
    """Return input, linear_weight and grad_output whose sums over rows reveal rounding to 16 bits.

    The rows of a group share one x_hat. All rows have the same standard deviation, and all values, like dln,
    have few significant bits.
    """
    rows = B * S
    dy, group = draw_cancelling(rows, O, random, cancel)
    steps = np.stack([random.permutation(H) for _ in range(rows)])[group] - (H - 1) / 2
    signs = np.zeros((O, H))
    signs[np.arange(H) % O, random.permutation(H)] = random.choice([-1.0, 1.0], H)
    return {
        "input": (steps / 2 + random.integers(8, 17, (rows, 1)) / 4).reshape(B, S, H),
        "linear_weight": signs,
        "grad_output": dy.reshape(B, S, O),
    }


def count_rows(dims: tuple[int, ...]) -> int:
    """Return the number of rows of a case, B * S, over which parameter gradients are summed."""
    B, S, _, _ = dims
    return B * S


# Above this many multiply-adds, PyTorch runs only once.
MAX_REPEATED_MULTIPLY_ADDS = 2**22


def reference(tensors: dict) -> dict:
    """Return output, mean, rstd, the gradients and the row sums by name, in the tensors' dtype and on their device.

    For 16-bit tensors, mean and rstd are float32. Below float64, each result is the least accurate of several
    orders of the columns h.
    """
    x = tensors["input"]
    large = x.numel() * len(tensors["linear_bias"]) > MAX_REPEATED_MULTIPLY_ADDS
    rmsnorm = compute_rmsnorm_with_autograd(tensors)  # in only one order
    quantities = [name for name in BACKWARD.writes if name != "grad_bias"]
    return rmsnorm | compute_worst_baseline(compute_with_autograd, tensors, COLUMN_TENSORS, quantities, large)


COLUMN_TENSORS = ("input", "ln_weight", "ln_bias", "linear_weight", "dln")
"""Tensors whose last axis is h."""


def compute_with_autograd(tensors: dict) -> dict:
    import torch
    import torch.nn.functional as F

    x, gamma, beta, W, dln = (tensors[name].detach().contiguous() for name in COLUMN_TENSORS)
    b = tensors["linear_bias"].detach().clone()
    for tensor in (x, gamma, beta, W, b):
        tensor.requires_grad_(True)
    # For 16-bit dtypes, LayerNorm runs in float32 and rounds once, as in PyTorch on a GPU and under autocast;
    # its CPU kernel sums dgamma and dbeta in 16 bits, with errors large enough to hide a wrong kernel.
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    ln_out = F.layer_norm(x.to(accum), x.shape[-1:], gamma.to(accum), beta.to(accum), EPS).to(x.dtype)
    output = F.linear(ln_out, W, b)
    gradients = torch.autograd.grad(output, (x, gamma, beta, W, b), tensors["grad_output"])
    x_accum = x.detach().to(accum)
    # The statistics that PyTorch's LayerNorm saves.
    _, mean, rstd = torch.native_layer_norm(x_accum, x.shape[-1:], None, None, EPS)
    return {
        "output": output.detach(),
        "mean": mean[..., 0],
        "rstd": rstd[..., 0],
        **dict(zip(BACKWARD.writes, gradients, strict=True)),
        "row_sums": compute_row_sums(dln.to(accum), x_accum, gamma.detach().to(accum)),
    }


def compute_rmsnorm_with_autograd(tensors: dict) -> dict:
    """Return autograd's gradients of RMSNorm + Linear; in float32 for 16-bit tensors, like LayerNorm."""
    import torch
    import torch.nn.functional as F

    x, gamma, W = (tensors[name].detach().clone() for name in ("input", "ln_weight", "linear_weight"))
    for tensor in (x, gamma, W):
        tensor.requires_grad_(True)
    accum = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_accum = x.to(accum)
    rstd = torch.rsqrt(x_accum.square().mean(-1, keepdim=True) + EPS)
    output = F.linear((x_accum * rstd * gamma.to(accum)).to(x.dtype), W)
    gradients = torch.autograd.grad(output, (x, gamma, W), tensors["grad_output"])
    return dict(zip(RMSNORM_BACKWARD.writes, gradients, strict=True))


def compute_row_sums(dln, x, gamma):
    """Return c1 and c2 of every row, [B * S, 2], computed with PyTorch from dln [B, S, H]."""
    import torch

    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    x_hat = (x - mean) * torch.rsqrt(variance + EPS)
    g = dln * gamma
    return torch.stack([(g * x_hat).mean(-1), g.mean(-1)], -1).reshape(-1, 2)


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the magnitude of the terms of dx = rstd * (g - c2 - x_hat * c1), which cancel for H = 1."""
    if not all(np.isfinite(arrays[name]).all() for name in NONFINITE_VALUES):
        return {}
    v = derive(arrays)
    dx = v.row_rstd * (np.abs(v.g) + np.abs(v.c2) + np.abs(v.x_hat * v.c1))
    rms_dx = v.rms_rstd * (np.abs(v.g) + np.abs(v.rms_x_hat * v.rms_c))
    return {"grad_input": float(dx.max(initial=0.0)), "rms_grad_input": float(rms_dx.max(initial=0.0))}


def propagate_rounding(arrays: Arrays, saved: Arrays) -> dict[str, float]:
    """Return the largest change of c1 and c2 due to the rounding of the saved mean and rstd.

    In a row with a small standard deviation, one ulp of the mean is many ulps of x - mean, and so of x_hat. An
    accurate sum and Welford's algorithm differ by that ulp, and both are correct.
    """
    finite = all(np.isfinite(array).all() for array in (*arrays.values(), *saved.values()))
    if not finite or not saved.keys() >= set(STATISTICS):
        return {}
    changes = {f"row_{name}": lambda v, value=saved[name][..., None]: value for name in STATISTICS}
    rounded = derive(arrays, changes)
    return {"row_sums": float(np.abs(rounded.row_sums - derive(arrays).row_sums).max(initial=0.0))}


def describe_dims(dims: tuple[int, ...]) -> str:
    B, S, H, O = dims
    return f"{[B, S, H]} -> {[B, S, O]}"


def ledger(dims: tuple[int, ...], dtype: str) -> Ledger:
    """Return the bytes saved for the backward pass, not counting parameters and grad_output, and of temporaries.

    Eager mode saves the input and the statistics for LayerNorm, and the LayerNorm output for Linear.
    """
    B, S, H, O = dims
    rows = B * S
    itemsize, accum_size = get_itemsize(dtype), get_itemsize(get_accum_dtype(dtype))
    statistics = {"mean": rows * accum_size, "rstd": rows * accum_size}
    # The fused backward pass accumulates in float32 for 16-bit dtypes, else in float64.
    atomic_size = 4 if itemsize == 2 else 8
    return Ledger(
        eager_saved={"input": rows * H * itemsize, **statistics, "ln_out": rows * H * itemsize},
        our_saved={"input": rows * H * itemsize, **statistics},
        temporaries={
            "unfused": {
                "forward ln_out": rows * H * itemsize,
                "forward linear_weight_t": O * H * itemsize,
                **dict.fromkeys(("backward ln_out", "backward dln"), rows * H * itemsize),
                "backward grad_output_t": rows * O * itemsize,
                "backward row_sums": 2 * rows * accum_size,
            },
            "fused": {"backward sums of the parameter gradients": (O * H + O + 2 * H) * atomic_size},
        },
    )


def pack_row_sums(c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    for name, array in (("c1", c1), ("c2", c2)):
        if array.ndim != 3 or array.shape[-1] != 1:
            raise ValueError(f"{name} has shape {list(array.shape)}, expected [B, S, 1] (keepdims=True)")
    return stack_means(c1, c2)


NUMPY_RUNG = NumpyRung(
    file="backward.py",
    note="optional, before the kernels",
    optional=True,
    gates=("db", "dW", "dgamma", "row_sums", "dx"),
    returns={"row_sums": ("row_sums",)},
    step_names={
        "dy": "grad_output",
        "gamma": "ln_weight",
        "beta": "ln_bias",
        "rstd": "row_rstd",
        "row_sums.dln": "input_dln",
    },
    packers={"row_sums": pack_row_sums},
)

PUZZLE = Puzzle(
    name="p22",
    title="LayerNorm + Linear, forward and backward, unfused and fused",
    subject="LayerNorm + Linear",
    gates=(*derive_rung.GATES, *GATES),
    rungs=(
        derive_rung.RUNG,
        NUMPY_RUNG,
        MojoRung(
            file="op/layernorm_linear.mojo",
            gates=list_gate_ids(GATES),
            sizes={"rows": "B * S", "sizes": "Sizes(Int32(B), Int32(S), Int32(H), Int32(O))"},
        ),
    ),
    dims=DIMS,
    dim_names=("B", "S", "H", "O"),
    list_cases=cases,
    make_inputs=inputs,
    compute_derived_sizes=lambda dims: {"rows": count_rows(dims)},
    compute_reference=reference,
    derive=derive,
    mistakes=(*MISTAKES, *transfer_mistakes.MISTAKES, *derive_rung.MISTAKES),
    find_symptom=explain_cancellation,
    compute_propagated_errors=propagate_rounding,
    compute_term_magnitudes=terms,
    forward=map_printed_names("output", "mean", "rstd"),
    backward=map_printed_names(
        *("grad_input", "grad_ln_weight", "grad_ln_bias"),
        grad_weight="grad_linear_weight",
        grad_bias="grad_linear_bias",
    ),
    intermediate=("row_sums", *RMSNORM_BACKWARD.writes),
    variants=VARIANTS,
    variant_help={"rmsnorm": "only RMSNorm + Linear, the kernel of the last gate, transfer"},
    optional_variants=("rmsnorm",),
    cpu_variants=("fused", "unfused"),
    atomic_sums=ATOMIC_SUMS,
    count_terms=count_rows,
    make_ledger=ledger,
    format_custom_dims=describe_dims,
    bench="harness.puzzles.p22.candidates",
)
