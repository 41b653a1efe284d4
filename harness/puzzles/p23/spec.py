"""Puzzle 23, self-attention: ops, gates, rungs, cases, inputs and reference.

B = batch, N = heads, S = query length, T = key length, d = head dimension.
"""

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p23.baseline import reference
from harness.puzzles.p23.derivation import derive
from harness.puzzles.p23.mistakes import MISTAKES, TILE
from harness.puzzles.rows import repeat_heads, sum_heads, transpose
from harness.spec.cases import (
    CANCELLING,
    draw_cancelling,
    make_basic_cases,
    make_covering_cases,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, get_accum_dtype, get_itemsize
from harness.spec.puzzle import Arrays, Case, Gate, Ledger, Puzzle, Symptom, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, NumpyRung, TorchFunction, TorchRung

DIMS = (2, 2, 8, 8, 4)
"""The default sizes: B, N, S, T, d."""
ROW_THREADS = 128
"""Threads that share a row in the unfused kernels."""

QUERY = Argument(("B", "N", "S", "d"))
KEY = Argument(("B", "N", "T", "d"))
SCORES = Argument(("B", "N", "S", "T"), ACCUM_DTYPE)

# Each step is a separate op with correct inputs, so that a wrong step fails only its own gate.
STEPS = (
    OpSpec("attention_scores", writes={"scores": SCORES}, reads={"query": QUERY, "key": KEY}),
    OpSpec("attention_softmax", writes={"probabilities": SCORES},
           reads={"scores": SCORES, "mask": Argument(("S", "T"))}),
    OpSpec("attention_output", writes={"output": QUERY}, reads={"probabilities": SCORES, "value": KEY}),
    OpSpec("attention_output_backward", writes={"grad_value": KEY, "grad_probabilities": SCORES},
           reads={"grad_output": QUERY, "probabilities": SCORES, "value": KEY}),
    OpSpec("attention_softmax_backward", writes={"grad_scores": SCORES},
           reads={"grad_probabilities": SCORES, "probabilities": SCORES}),
    OpSpec("attention_scores_backward", writes={"grad_query": QUERY, "grad_key": KEY},
           reads={"grad_scores": SCORES, "query": QUERY, "key": KEY}),
)  # fmt: skip
TRANSPOSED_PRODUCT = OpSpec(
    "attention_transposed_product",
    writes={"transposed_product": Argument(("B", "N", "d", "d"), ACCUM_DTYPE)},
    reads={"query": QUERY, "grad_output": QUERY},
)
"""A product that is not a step of attention: it is recorded to check the transposed loads, which the scores do not use."""
STEP_LAUNCHES = {
    "attention_softmax": "launch_softmax[dtype](..., steps, Int32(S))",
    "attention_transposed_product": (
        'launch_matmul[transpose_a=True](recorder, "transposed_product", transposed_product, query, grad_output, '
        "batches=steps.batches, m=steps.head_dim, n=steps.head_dim, k=steps.query_len)"
    ),
}
"""Step -> its launch, if it is not `launch_NAME` with the tensors and sizes."""
# G = heads of key and value.
SHARED_KEY = Argument(("B", "G", "T", "d"))
ROW = Argument(("B", "N", "S"), ACCUM_DTYPE)
MASK = Argument(("S", "T"))
FORWARD = OpSpec(
    "attention_train",
    writes={"output": QUERY, "lse": ROW},
    reads={"query": QUERY, "key": SHARED_KEY, "value": SHARED_KEY, "mask": MASK},
)
DELTA = OpSpec("attention_delta", writes={"delta": ROW}, reads={"grad_output": QUERY, "output": QUERY})
BACKWARD = OpSpec(
    "attention_train_backward",
    writes={"grad_query": QUERY, "grad_key": SHARED_KEY, "grad_value": SHARED_KEY},
    reads={"grad_output": QUERY, "query": QUERY, "key": SHARED_KEY, "value": SHARED_KEY,
           "lse": ROW, "delta": ROW, "mask": MASK},
)  # fmt: skip
FLASH_ARGUMENTS = "sizes=sizes.copy(), scale=steps.scale().cast[accum]())"
FLASH_LAUNCHES = {
    "attention_train": f"launch_flash_forward(recorder, FlashForward[dtype](=, {FLASH_ARGUMENTS})",
    "attention_delta": "launch_delta[dtype](..., B * N * S, Int32(d))",
    "attention_train_backward": f"launch_flash_backward(recorder, FlashBackward[dtype](=, {FLASH_ARGUMENTS})",
}
MOJO_SIZES = {
    "steps": "Sizes(Int32(B * N), Int32(S), Int32(T), Int32(d))",
    "G": "dims[5] if len(dims) > 5 else N",
    "sizes": "FlashSizes(Int32(B), Int32(N), Int32(G), Int32(S), Int32(T), Int32(d))",
}


def make_step_call(op: OpSpec) -> Call:
    launch = f"launch_{op.name.removeprefix('attention_')}[dtype](..., steps)"
    return Call(op, (), "unfused", STEP_LAUNCHES.get(op.name, launch))


VARIANTS = {
    "unfused": tuple(map(make_step_call, (*STEPS, TRANSPOSED_PRODUCT))),
    "fused": tuple(Call(op, (), "fused", FLASH_LAUNCHES[op.name]) for op in (FORWARD, DELTA, BACKWARD)),
}
GATES = (
    Gate("matmul", "unfused", ("scores",),
         "the scores and Q^T dO, by a tiled product that can transpose its factors",
         recorded_quantities=("transposed_product",)),
    Gate("softmax", "unfused", ("probabilities",), "the probabilities, with a mask and fully masked rows"),
    Gate("output", "unfused", ("output",), "the output, O = P V"),
    Gate("dV", "unfused", ("grad_value",), "the gradient of the value"),
    Gate("dP", "unfused", ("grad_probabilities",), "the gradient of the probabilities"),
    Gate("dsoftmax", "unfused", ("grad_scores",), "the gradient of the scores, through the softmax"),
    Gate("dQ", "unfused", ("grad_query",), "the gradient of the query"),
    Gate("dK", "unfused", ("grad_key",), "the gradient of the key"),
    Gate("online", "fused", ("output", "lse"), "the output and lse, by the online softmax"),
    Gate("delta", "fused", ("delta",), "the row sum of dP * P, from dO and the output"),
    Gate("flash_dQ", "fused", ("grad_query",), "the gradient of the query, from a recomputed P"),
    Gate("flash_dKdV", "fused", ("grad_key", "grad_value"), "the gradients of key and value, likewise"),
)  # fmt: skip

# ---- Cases --------------------------------------------------------------------------------------------------


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, one of each at those sizes."""
    dims = dims or DIMS
    basic_cases = make_basic_cases(
        dims, "no mask, grad_output = 1", "means far from 0, a fully masked row, grad_output follows V"
    )
    if dims != DIMS:
        return basic_cases
    return [
        *basic_cases,
        Case("odd sizes", "S != T, nothing divides a tile", (1, 3, 7, 13, 5), "hard"),
        Case("square", "S = T = d: every transpose has the shape of the matrix", (1, 2, 12, 12, 12), "hard"),
        Case("one query", "no sum over queries, which could hide an error", (1, 2, 1, 6, 8), "unmasked"),
        Case("one key", "P = 1, so that dS, dQ and dK are 0", (2, 1, 5, 1, 3), "unmasked"),
        Case("causal", "a query sees the keys up to its own position", (1, 2, 10, 10, 8), "causal"),
        Case("expanded", "grad_output has stride 0, as from sum()", (2, 1, 7, 6, 10), "expanded"),
        Case("transposed", "grad_output is not contiguous", (2, 2, 7, 6, 10), "transposed"),
        Case("large scores", "scores in the hundreds: no exponential may overflow", (1, 2, 6, 9, 16), "large"),
        Case("far below 0", "every score is near -1,000, so that the maximum is far below 0", (1, 2, 6, 9, 16), "low"),
        Case("hidden", "the mask hides the largest score", (1, 2, 6, 9, 16), "hidden"),
        Case("sums that cancel",
             "in 16-bit dtypes, sums over queries and keys nearly cancel: partial sums must not be rounded",
             (1, 1, 34, 64, 8), CANCELLING, in_16_bits=True),
        *make_nonfinite_cases(NONFINITE_VALUES, dims),
        *make_covering_cases(AXES, ("hard", "unmasked"), lambda S, T, d: (1, 1, S, T, d)),
        Case("many queries", "more rows than a tile, more heads than a small grid has blocks", (3, 2, 18, 19, 6),
             "hard"),
        Case("many keys", "a thread handles more than two keys of a row", (1, 1, 3, 2 * ROW_THREADS + 3, 9),
             "hard"),
        Case("wide heads", "d is larger than a block, and not a multiple of a tile",
             (1, 2, 5, 6, ROW_THREADS + TILE + 3), "hard"),
    ]  # fmt: skip


GATE_CASES = (
    Case("grouped queries", "query heads share a key head, with more than one tile of queries",
         (2, 4, 18, 20, 5, 2), "hard", variant="fused"),
)  # fmt: skip
"""The sizes are B, N, S, T, d and G, the number of key heads; the unfused kernels need G = N."""
AXES = (make_tiled_axis("S", TILE), make_tiled_axis("T", TILE), make_tiled_axis("d", TILE))
"""Axes of the cases."""
NONFINITE_VALUES = {
    "query": ("Q", "NaN"),
    "key": ("K", "inf"),
    "value": ("V", "NaN"),
    "grad_output": ("dO", "inf"),
}
"""Tensor -> its symbol in the book, and the non-finite value that a case writes into it."""


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return a case's query and grad_output [B, N, S, d], key and value [B, G, T, d], mask [S, T].

    They are float64, rounded to `dtype`.
    """
    B, N, S, T, d, *_ = case.dims
    G = count_key_heads(case.dims)
    random = np.random.default_rng([seed, *case.dims])
    shapes = ((N, S), (G, T), (G, T), (N, S))
    query, key, value, grad = (random.standard_normal((B, *shape, d)) for shape in shapes)
    mask = np.zeros((S, T))
    if case.values == "plain":
        grad = np.ones_like(grad)
    else:
        # A common offset moves a row's scores away from 0; a grad_output with a mean and a component along
        # V makes the row sum of dP * P large.
        query, key, value = query + 0.5, key + 0.5, value + 1
        grad = grad + 0.5 + repeat_heads(value, query).mean(-2, keepdims=True)
        if case.values not in ("unmasked", "large", "low", "hidden"):
            mask = draw_mask(S, T, random)
    if case.values == "causal":
        mask = np.where(np.tri(S, T, dtype=bool), 0.0, -np.inf)
    elif case.values == "expanded":
        grad = np.broadcast_to(np.float64(1.25), grad.shape)
    elif case.values == "transposed":
        grad = grad.swapaxes(1, 2).copy().swapaxes(1, 2)
    elif case.values == "large":
        # Integers, so that the scores are exact: one ulp of a score in the hundreds, which depends on the
        # order of a sum, is hundreds of ulps of a probability.
        query, key = np.round(7 * query), np.round(7 * key)
    elif case.values in ("low", "hidden"):
        query, key = np.round(query), np.round(key)  # exact scores
        query[..., 0], key[..., 0] = 64, -64
        if case.values == "hidden":
            key[:, :, 0, 0] = 64
            mask[:, 0] = -np.inf
    arrays = {"query": query, "key": key, "value": value, "mask": mask, "grad_output": grad}
    if case.values == CANCELLING:
        cancel = dtype in ("float16", "bfloat16")
        arrays |= {**draw_cancelling_values(B * N, S, T, d, random, cancel), "mask": np.zeros((S, T))}
    write_nonfinite(arrays, case.values)
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()}


def draw_cancelling_values(
    heads: int, S: int, T: int, d: int, random: np.random.Generator, cancel: bool
) -> Arrays:
    """Return query, key, value and grad_output whose sums over queries and keys reveal rounding to 16 bits.

    The queries of a group are equal, and so are its keys; value and grad_output cancel within each group.
    Queries are nonzero only at even elements and keys only at odd ones, so that all scores are 0 and each
    probability is 1 / T. If T is a power of two, the output is exact in 16 bits, and only delta is rounded.
    """
    drawn = [[draw_cancelling(rows, d, random, cancel) for _ in range(heads)] for rows in (S, T)]
    grad, value = (np.stack([dy / 16 for dy, _ in heads_of_tensor])[None] for heads_of_tensor in drawn)
    query, key = (
        np.stack([random.integers(1, 16, (rows, d))[group] / 8 for _, group in heads_of_tensor])[None]
        for rows, heads_of_tensor in zip((S, T), drawn, strict=True)
    )
    even = np.arange(d) % 2 == 0
    return {"query": query * even, "key": key * ~even, "value": value, "grad_output": grad}


def count_key_heads(dims: tuple[int, ...]) -> int:
    """Return G, the number of key heads: the sixth size, or N if there are only five."""
    return (*dims, dims[1])[5]


def draw_mask(S: int, T: int, random: np.random.Generator) -> np.ndarray:
    """Return an additive mask, about a quarter of it -inf, with exactly one row fully masked."""
    mask = random.standard_normal((S, T))
    mask[random.random((S, T)) < 0.25] = -np.inf
    visible = random.integers(0, T, S)
    mask[np.arange(S), visible] = random.standard_normal(S)
    if S > 1:
        mask[S // 2] = -np.inf
    return mask


# ---- Reference ----------------------------------------------------------------------------------------------


def propagate_rounding(arrays: Arrays, saved: Arrays) -> dict[str, float]:
    """Return the largest change of delta, the row sum of dO * O, due to the error of the saved output.

    Tensor cores round the probabilities before the product, so that a correct output may differ from the truth
    by more than its own rounding.
    """
    truth = derive(arrays, dtype=np.longdouble).output
    if "output" not in saved or not np.isfinite(truth).all() or not np.isfinite(arrays["grad_output"]).all():
        return {}
    change = (arrays["grad_output"] * (saved["output"] - truth)).sum(-1)
    return {"delta": float(np.abs(change).max(initial=0.0))}


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the magnitude of the terms of dS = P * (dP - rowsum(dP * P)), dQ and dK; with one key, they cancel."""
    if not all(np.isfinite(arrays[name]).all() for name in ("query", "key", "value", "grad_output")):
        return {}
    v = derive(arrays)
    magnitudes = v.probabilities * (np.abs(v.grad_probabilities) + np.abs(v.dot))
    by_quantity = {
        "grad_scores": magnitudes,
        "grad_mask": magnitudes.sum((0, 1)),
        "grad_query": v.scale * (magnitudes @ np.abs(v.key)),
        "grad_key": sum_heads(v.scale * (transpose(magnitudes) @ np.abs(v.query)), arrays["key"]),
    }
    return {name: float(magnitude.max(initial=0.0)) for name, magnitude in by_quantity.items()}


# ---- Reports ------------------------------------------------------------------------------------------------


def explain_lse_error(name: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    if name != "lse":
        return None
    if np.isneginf(got).all() and np.isfinite(truth).any():
        message = "is -inf in every row: `largest` still has its initial value, it must become `new_largest`"
        return Symptom("largest-not-kept", message)
    return formulas.explain_infinite_lse(derive(arrays).masked, got, truth)


def multiply_adds(dims: tuple[int, ...]) -> int:
    B, N, S, T, d, *_ = dims
    return 2 * B * N * S * T * d


def describe_dims(dims: tuple[int, ...]) -> str:
    B, N, S, T, d, *_ = dims
    return f"query {[B, N, S, d]}, key {[B, count_key_heads(dims), T, d]}"


def ledger(dims: tuple[int, ...], dtype: str) -> Ledger:
    """Return the bytes saved for the backward pass, not counting grad_output, and of temporaries.

    Eager mode and the unfused kernels save query, key, value and the probabilities, which the kernels keep in
    the accumulation dtype. The fused kernels save the output and lse, and allocate delta, both one number per
    row, but nothing with S * T elements.
    """
    B, N, S, T, d = dims
    itemsize, accum_size = get_itemsize(dtype), get_itemsize(get_accum_dtype(dtype))
    scores = B * N * S * T
    rows = {"query": S, "key": T, "value": T}
    operands = {name: B * N * count * d * itemsize for name, count in rows.items()}
    steps = ("forward scores", "backward grad_probabilities", "backward grad_scores")
    return Ledger(
        eager_saved={**operands, "probabilities": scores * itemsize},
        our_saved={**operands, "probabilities": scores * accum_size},
        saved_by_variant={"fused": {**operands, "output": operands["query"], "lse": B * N * S * accum_size}},
        temporaries={
            "unfused": dict.fromkeys(steps, scores * accum_size),
            "fused": {"backward delta": B * N * S * accum_size},
        },
    )


# ---- Rungs --------------------------------------------------------------------------------------------------

NUMPY_RUNG = NumpyRung(
    file="in_numpy.py",
    note="optional, the formulas before the kernels",
    optional=True,
    gates=("softmax", "output", "dV", "dP", "dsoftmax", "dQ", "dK"),
    step_names={
        "Q": "query",
        "K": "key",
        "V": "value",
        "dO": "grad_output",
        "S": "scores",
        "P": "probabilities",
        "dP": "grad_probabilities",
        "dS": "grad_scores",
    },
)


def make_torch_function(**gradients: str) -> TorchFunction:
    """Describe the class of a PyTorch gate, of which the output and `gradients` are checked."""
    return TorchFunction(
        "Attention",
        arguments=("query", "key", "value", "mask"),
        returns=("output",),
        gradients=gradients,
        grad_outputs=("grad_output",),
    )


TORCH_RUNG = TorchRung(
    file="in_torch.py",
    note="optional, one autograd.Function",
    optional=True,
    gates=("output", "dsoftmax"),
    dependencies={"dsoftmax": ("output",)},
    functions={
        "output": make_torch_function(),
        # The mask is added to the scores of every head, so its gradient sums dS over the heads.
        "dsoftmax": make_torch_function(
            value="grad_value", mask="grad_mask", query="grad_query", key="grad_key"
        ),
    },
)

PUZZLE = Puzzle(
    name="p23",
    title="Self-attention, forward and backward, from five plain kernels to flash attention",
    subject="Self-Attention",
    gates=GATES,
    rungs=(
        NUMPY_RUNG,
        TORCH_RUNG,
        MojoRung(
            file="op/attention.mojo",
            gates=list_gate_ids(GATES),
            # These gates use the product's kernel, which is the first gate's blank.
            dependencies=dict.fromkeys(("output", "dV", "dP", "dQ", "dK"), ("matmul",)),
            sizes=MOJO_SIZES,
        ),
    ),
    dims=DIMS,
    dim_names=("B", "N", "S", "T", "d"),
    list_cases=cases,
    gate_cases=GATE_CASES,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    find_symptom=explain_lse_error,
    compute_term_magnitudes=terms,
    compute_propagated_errors=propagate_rounding,
    forward=map_printed_names("output"),
    backward=map_printed_names("grad_query", "grad_key", "grad_value"),
    compute_derived_sizes=lambda dims: {"G": count_key_heads(dims)},
    intermediate=("lse", "delta", "scores", "probabilities", "grad_probabilities", "grad_scores"),
    variants=VARIANTS,
    variant_help={
        "unfused": "only the unfused kernels, one for each step",
        "fused": "only the flash kernels, which store no matrix of scores",
    },
    count_multiply_adds=multiply_adds,
    make_ledger=ledger,
    format_custom_dims=describe_dims,
    bench="harness.puzzles.p23.candidates",
)
