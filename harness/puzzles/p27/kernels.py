"""Puzzle 27's Mojo rung: ops, the derivation beyond `derivation.py`, known mistakes, and PyTorch's results.

Shapes: logits and grad_rows [B, T, V]; row_loss and row_lse [B, T]; mean_loss, places (the number of valid
targets) and norm [1]; x, dx, gelu, clipped, mean and square (running means of the gradient and its square),
and new_... [B, T, C]; order [B * T], positions sorted by token; starts [V + 1], the offset of each token's
first position in `order`; corrections [2]; square_sums [chunks].
"""

from collections.abc import Callable, Mapping

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p27 import derivation
from harness.puzzles.p27.derivation import IGNORE_INDEX
from harness.spec.derivation import Derivation, Mistake, Step, make_derive
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, Scalar, get_accum_dtype
from harness.spec.puzzle import Arrays, Gate, Symptom
from harness.spec.rounding import round_to_dtype

THREADS, CHUNK = 128, 256
"""Constants of `solutions/p27/op/parts.mojo`: threads per block, elements per block of the norm's first stage."""
RATE, BETA1, BETA2, EPS, DECAY, STEP = 1 / 8, 7 / 8, 31 / 32, 1 / 64, 1 / 4, 3
"""AdamW's constants in the checks: exact in binary, and an eps large enough to reveal where it is added."""
LIMIT = 3.0
"""The norm to which gradients are clipped; cases are on both sides of it."""
NORM_EPS = 1e-6
"""Added to the norm before it divides the limit, as in PyTorch."""

ROW = Argument(("B", "T"), ACCUM_DTYPE)
TARGETS = Argument(("B", "T"), "int64")
LOGITS = Argument(("B", "T", "V"))
STREAM = Argument(("B", "T", "C"))
MOMENT = Argument(("B", "T", "C"), ACCUM_DTYPE)
SINGLE = Argument((1,), ACCUM_DTYPE)

OPS = {
    "loss": (
        OpSpec("cross_entropy_train", {"row_loss": ROW, "row_lse": ROW}, {"logits": LOGITS, "targets": TARGETS}),
        OpSpec("mean_loss_train", {"mean_loss": SINGLE, "places": SINGLE}, {"row_loss": ROW, "targets": TARGETS}),
        OpSpec("cross_entropy_backward_train", {"grad_rows": LOGITS},
               {"logits": LOGITS, "targets": TARGETS, "row_lse": ROW, "places": SINGLE}),
    ),
    "gelu": (
        OpSpec("gelu_train", {"gelu": STREAM}, {"x": STREAM}),
        OpSpec("gelu_backward_train", {"grad_gelu": STREAM}, {"dx": STREAM, "x": STREAM}),
    ),
    "embedding": (
        OpSpec("embedding_backward_train", {"grad_token": Argument(("V", "C"))},
               {"dx": STREAM, "order": Argument(("rows",), "int32"), "starts": Argument(("ends",), "int32")}),
    ),
    "adamw": (
        OpSpec("adamw_train",
               {"new_x": STREAM, "corrections": Argument((2,), ACCUM_DTYPE), "new_mean": MOMENT, "new_square": MOMENT},
               {"x": STREAM, "dx": STREAM, "mean": MOMENT, "square": MOMENT},
               {"rate": Scalar(RATE), "beta1": Scalar(BETA1), "beta2": Scalar(BETA2),
                "eps": Scalar(EPS), "decay": Scalar(DECAY), "step": Scalar(STEP, "int32")}),
    ),
    "clip": (
        OpSpec("clip_train", {"clipped": STREAM, "square_sums": Argument(("chunks",), ACCUM_DTYPE), "norm": SINGLE},
               {"dx": STREAM}, {"limit": Scalar(LIMIT)}),
    ),
}  # fmt: skip
"""Variant -> its ops; one variant per part, so that a gate compiles only its own part."""
SIZES = {"rows": "B * T", "ends": "V + 1", "chunks": "ceildiv(B * T * C, CHUNK)"}
"""Sizes derived from B, T, C and V, as Mojo expressions."""
LAUNCHES = {
    "cross_entropy_train": "launch_cross_entropy[dtype](..., rows, V)",
    "mean_loss_train": "launch_mean_loss[accum](..., rows)",
    "cross_entropy_backward_train": "launch_cross_entropy_backward[dtype](..., rows, V)",
    "gelu_train": "launch_gelu[dtype](..., rows * C)",
    "gelu_backward_train": "launch_gelu_backward[dtype](..., rows * C)",
    "embedding_backward_train": "launch_embedding_backward[dtype](..., V, C)",
    "adamw_train": (
        "launch_adamw[dtype](recorder, corrections, new_x, new_mean, new_square, x, dx, mean, square, "
        f"{RATE}, {BETA1}, {BETA2}, {EPS}, {DECAY}, {STEP}, rows * C)"
    ),
    "clip_train": f"launch_clip[dtype](recorder, square_sums, norm, clipped, dx, {LIMIT}, rows * C)",
}
VARIANTS = {name: tuple(Call(op, (), name, LAUNCHES[op.name]) for op in ops) for name, ops in OPS.items()}
VARIANT_DESCRIPTIONS = {
    "loss": "only cross-entropy, its mean and its gradient",
    "gelu": "only GELU and its gradient",
    "embedding": "only the gradient of an embedding's table",
    "adamw": "only a step of AdamW",
    "clip": "only the norm of all gradients, and clipping",
}
QUANTITIES = tuple(name for ops in OPS.values() for op in ops for name in op.writes)
FORWARD = ("row_loss", "row_lse", "mean_loss", "places", "gelu")
"""Quantities of the forward pass; the others are gradients or computed from gradients."""
PRINTED_NAMES = {**{name: name for name in FORWARD}, "row_lse": "lse", "places": "counted"}
"""Quantity of the forward pass -> its name in the kernels."""

GATES = (
    Gate("row_loss", "loss", ("row_loss", "row_lse"), "the loss of each place, in one pass over its logits"),
    Gate("mean_loss", "loss", ("mean_loss", "places"), "the mean over the places that count"),
    Gate("row_gradient", "loss", ("grad_rows",), "softmax minus one-hot, from the saved lse"),
    Gate("gelu_forward", "gelu", ("gelu",), "the tanh form, with one exponential"),
    Gate("gelu_backward", "gelu", ("grad_gelu",), "GELU's gradient, from dy and the input"),
    Gate("token_gradient", "embedding", ("grad_token",), "many places, one row of the table, no atomics"),
    Gate("correction", "adamw", ("corrections",), "the weight of a running mean, on the host"),
    Gate("adamw_update", "adamw", ("new_mean", "new_square", "new_x"), "parameter and means, in one pass"),
    Gate("square_sums", "clip", ("square_sums",), "the norm's first stage, one sum per chunk"),
    Gate("grad_norm", "clip", ("norm",), "the norm's second stage, in one block"),
    Gate("clip_gradients", "clip", ("clipped",), "one factor for all, never above 1"),
)


def derive_sizes(dims: tuple[int, ...]) -> dict[str, int]:
    B, T, C, V = dims
    return {"rows": B * T, "ends": V + 1, "chunks": -(-B * T * C // CHUNK)}


def sort_positions(tokens: np.ndarray, V: int) -> Arrays:
    """Return the positions stably sorted by token, and the start of each token's positions."""
    flat = tokens.reshape(-1)
    order = np.argsort(flat, kind="stable")
    return {
        "order": order.astype(np.int32),
        "starts": np.searchsorted(flat[order], np.arange(V + 1)).astype(np.int32),
    }


# ---- The mathematics ----------------------------------------------------------------------------------------


def sum_chunks(v: Derivation, terms: np.ndarray | None = None) -> np.ndarray:
    terms = (v.dx**2 if terms is None else terms).reshape(-1)
    return np.add.reduceat(terms, np.arange(0, terms.size, CHUNK))


def update_parameter(v: Derivation, step: np.ndarray, decay: np.ndarray | None = None) -> np.ndarray:
    """Return x after `step`, with weight decay `decay`, by default the derivation's."""
    return v.x - RATE * (step + (v.decay if decay is None else decay) * v.x)


STEPS: Mapping[str, Step] = {
    **derivation.STEPS,
    "row_max": lambda v: v.logits.max(-1, keepdims=True),
    "row_total": lambda v: np.exp(v.logits - v.row_max).sum(-1, keepdims=True),
    "row_lse": lambda v: (v.row_max + np.log(v.row_total))[..., 0],
    "row_target": lambda v: np.where(v.onehot > 0, v.logits, 0).sum(-1),
    "row_loss": lambda v: np.where(v.valid[..., 0], v.row_lse - v.row_target, 0),
    "places": lambda v: np.reshape(v.count, 1),
    "mean_loss": lambda v: v.row_loss.sum() / v.places,
    "row_p": lambda v: np.exp(v.logits - v.row_lse[..., None]),
    "grad_rows": lambda v: v.valid * (v.row_p - v.onehot) / v.places,
    "gelu": lambda v: v.x * (1 + v.tanh) / 2,
    "corrections": lambda v: 1 - v.betas**v.step + 0 * v.x.flat[0],
    # A rung may have other values of step and decay, as inputs of the derivation.
    "betas": lambda v: np.asarray([BETA1, BETA2]),
    "step": lambda v: np.asarray(STEP),
    "decay": lambda v: np.asarray(DECAY),
    "decayed_g": lambda v: v.dx,
    "new_mean": lambda v: BETA1 * v.mean + (1 - BETA1) * v.decayed_g,
    "new_square": lambda v: BETA2 * v.square + (1 - BETA2) * v.decayed_g**2,
    "corrected_mean": lambda v: v.new_mean / v.corrections[0],
    "corrected_square": lambda v: v.new_square / v.corrections[1],
    "new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS)),
    "square_sums": sum_chunks,
    "norm": lambda v: np.sqrt(v.square_sums.sum()).reshape(1),
    "factor": lambda v: np.minimum(1, LIMIT / (v.norm + NORM_EPS)),
    "clipped": lambda v: v.dx * v.factor,
}
derive = make_derive(STEPS)


# ---- Known mistakes -----------------------------------------------------------------------------------------


def sum_over_threads(v: Derivation, total: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the sum over a row's threads of `total` applied to each thread's logits, [B, T, 1]."""
    per_thread = (v.logits[..., first::THREADS] for first in range(min(THREADS, v.logits.shape[-1])))
    return np.stack([total(logits) for logits in per_thread], -1).sum(-1, keepdims=True)


def compute_overflowing_lse(v: Derivation) -> np.ndarray:
    """Return the lse [B, T] from float32 exponentials without the maximum subtracted."""
    with np.errstate(over="ignore"):
        return np.log(np.exp(v.logits.astype(np.float32)).sum(-1)).astype(np.float64)


def compute_exponentials(v: Derivation, subtracted: np.ndarray | None = None) -> np.ndarray:
    """Return exp(logits - subtracted), by default with each row's maximum; 0 where float32 underflows."""
    weights = np.exp(v.logits - (v.row_max if subtracted is None else subtracted))
    return np.where(weights < np.finfo(np.float32).smallest_subnormal, 0, weights)


def compute_first_thread_lse(v: Derivation) -> np.ndarray:
    """Return the lse [B, T] of the logits that each row's first thread reads."""
    return find_first_thread_max(v)[..., 0] + np.log(sum_shifted_exponentials(v.logits[..., ::THREADS]))


def sum_shifted_exponentials(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def find_first_thread_max(v: Derivation) -> np.ndarray:
    return v.logits[..., ::THREADS].max(-1, keepdims=True)


def sum_by_steps(v: Derivation, weights: Callable[[formulas.OnlineSteps], np.ndarray]) -> np.ndarray:
    """Return the total [B, T, 1] of an online softmax whose threads take one column per step."""
    online = formulas.OnlineSteps.split(v.logits, THREADS, 1)
    terms = weights(online)
    # A thread without columns has no largest logit, and adds nothing.
    rescaled = np.where(terms == 0, 0, terms * np.exp(online.final_max - v.row_max[..., None, None]))
    return formulas.sum_rows(online.join(rescaled))


def update_without_decay(v: Derivation) -> np.ndarray:
    return v.x - RATE * v.corrected_mean / (np.sqrt(v.corrected_square) + EPS)


def sum_by_order(v: Derivation, get_rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Return a table [V, C] in which a token's row sums the rows of dx with the indices `get_rows(begin, end)`."""
    flat = v.dx.reshape(-1, v.dx.shape[-1])
    return np.stack([flat[get_rows(a, b)].sum(0) for a, b in zip(v.starts[:-1], v.starts[1:], strict=True)])


def add_in_dtype(dtype: str, v: Derivation) -> np.ndarray:
    flat, table = v.dx.reshape(-1, v.dx.shape[-1]), np.zeros((int(v.V), v.dx.shape[-1]))
    for row, token in enumerate(v.tokens.reshape(-1)):
        table[token] = round_to_dtype(table[token] + flat[row], dtype)
    return table


def compute_gelu(v: Derivation, s: np.ndarray) -> dict[str, np.ndarray]:
    """Return GELU and its gradients for a wrong sigmoid `s`; the gradients with and without the 2 of s'."""
    return {
        "gelu": v.x * s,
        "grad_gelu": np.stack([v.dx * (s + v.x * factor * s * (1 - s) * v.slope) for factor in (1, 2)]),
    }


def make_sigmoid_mistake(id: str, description: str, exponent_scale: float) -> Mistake:
    """Return the mistake of exp(exponent_scale * u) in the sigmoid of GELU."""
    return Mistake(id, description, {
        name: lambda v, name=name: compute_gelu(v, 1 / (1 + np.exp(exponent_scale * v.u)))[name] for name in ("gelu", "grad_gelu")
    })  # fmt: skip


def compute_product_rule(v: Derivation, first: float, second: float) -> np.ndarray:
    """Return GELU's gradient with the product rule's terms multiplied by `first` and `second`."""
    return v.dx * (first * (1 + v.tanh) / 2 + second * v.x / 2 * (1 - v.tanh**2) * v.slope)


def compute_sigmoid_gradient(v: Derivation, inner: float) -> np.ndarray:
    """Return the gradient of x sigmoid(1.702 x), with `inner` instead of the inner derivative 1.702."""
    s = 1 / (1 + np.exp(-1.702 * v.x))
    return v.dx * (s + inner * v.x * s * (1 - s))


MISTAKES = (
    *derivation.MISTAKES,
    Mistake("largest-not-subtracted", "without the largest logit subtracted: exponentials overflow, or are all 0",
            {"row_lse": compute_overflowing_lse}),
    *formulas.list_sum_mistakes(compute_exponentials, THREADS, {"row_total": lambda change: change}, "exponentials-"),
    Mistake("not-joined", "of the first thread's columns alone: block.max and block.sum are missing",
            {"row_lse": compute_first_thread_lse}),
    *formulas.list_online_softmax_mistakes("a thread's total", "logit", lambda weights: {"row_total": lambda v: sum_by_steps(v, weights)}),
    Mistake("joined-without-rescaling", "of the threads' totals added without rescaling: each is relative to its own thread's largest logit",
            {"row_total": lambda v: sum_over_threads(v, sum_shifted_exponentials)}, 3),
    Mistake("joined-by-first", "of the threads' totals rescaled by the first thread's largest logit: each is relative to its own thread's",
            {"row_total": lambda v: sum_over_threads(v, sum_shifted_exponentials) * np.exp(find_first_thread_max(v) - v.row_max)}, 3),
    Mistake("joined-the-other-way", "of the threads' totals multiplied by exp(widest - largest): to the widest it is exp(largest - widest)",
            {"row_total": lambda v: sum_over_threads(v, lambda z: sum_shifted_exponentials(z) * np.exp(v.row_max[..., 0] - z.max(-1)))}, 3),
    Mistake("largest-from-0", "with a largest logit that begins at 0: far below it every exponential is 0",
            {"row_lse": lambda v: np.log(compute_exponentials(v, np.maximum(v.row_max, 0)).sum(-1)) + np.maximum(v.row_max[..., 0], 0)}, 3),
    Mistake("largest-of-first-thread", "with the first thread's largest logit for the row's",
            {"row_lse": lambda v: (find_first_thread_max(v) + np.log(v.row_total))[..., 0]}, 3),
    Mistake("largest-not-joined", "with each thread's own largest logit for the row's: block.max is missing",
            {"row_lse": lambda v: (find_first_thread_max(v) + np.log(sum_over_threads(v, sum_shifted_exponentials)))[..., 0]}, 3),
    Mistake("own-places-only", "of the first thread's places alone: block.sum is missing", {
        "places": lambda v: v.valid.reshape(-1)[::THREADS].sum().reshape(1),
        "mean_loss": lambda v: v.row_loss.reshape(-1)[::THREADS].sum() / v.valid.reshape(-1)[::THREADS].sum().reshape(1)}, 3),
    Mistake("losses-not-joined", "with the first thread's losses alone: block.sum is missing there, and not for their number",
            {"mean_loss": lambda v: v.row_loss.reshape(-1)[::THREADS].sum() / v.places}, 3),
    Mistake("number-not-joined", "with the first thread's number of places alone: block.sum is missing there, and not for their losses", {
        "places": lambda v: v.valid.reshape(-1)[::THREADS].sum().reshape(1),
        "mean_loss": lambda v: v.row_loss.sum() / v.valid.reshape(-1)[::THREADS].sum().reshape(1)}, 3),
    Mistake("lse-without-largest", "without the largest logit, which every exponential has subtracted",
            {"row_lse": lambda v: np.log(v.row_total)[..., 0]}),
    Mistake("target-forgotten", "of lse alone: the target's logit is not subtracted",
            {"row_loss": lambda v: v.valid[..., 0] * v.row_lse}),
    Mistake("first-places-only", f"of the first {THREADS} places alone, one for each thread: a loop is missing", {
        "places": lambda v: v.valid.reshape(-1)[:THREADS].sum().reshape(1),
        "mean_loss": lambda v: v.row_loss.reshape(-1)[:THREADS].sum() / v.valid.reshape(-1)[:THREADS].sum().reshape(1)},
        3),
    Mistake("onehot-added", "with 1 added to the target's p, not subtracted",
            {"grad_rows": lambda v: v.valid * (v.row_p + v.onehot) / v.places}),
    Mistake("onehot-not-shared-out", "with p divided by the places that count, but not the target's 1",
            {"grad_rows": lambda v: v.valid * (v.row_p / v.places - v.onehot)}),
    *(
        Mistake(f"p-rounded-to-{kind}", f"with p rounded to {kind} before 1 is subtracted from the target's",
                {"grad_rows": lambda v, kind=kind: v.valid * (round_to_dtype(v.row_p, kind) - v.onehot) / v.places})
        for kind in ("bfloat16", "float16")
    ),
    Mistake("ignored-unscaled", "with p in ignored places: their rows are 0",
            {"grad_rows": lambda v: np.where(v.valid, (v.row_p - v.onehot) / v.places, v.row_p)}),
    Mistake("ignored-alone", "of the ignored places alone: the condition is reversed", {
        "grad_rows": lambda v: np.where(v.valid, 0, v.row_p / v.places),
        "places": lambda v: np.reshape(1 - v.valid, -1).sum().reshape(1),
        "mean_loss": lambda v: v.row_loss[v.valid[..., 0] == 0].sum() / np.reshape(1 - v.valid, -1).sum().reshape(1)}),
    Mistake("mean-upside-down", "inverted: it is the sum of the losses over their number",
            {"mean_loss": lambda v: v.places / v.row_loss.sum()}),
    Mistake("lse-forgotten", "with exp(z) for p: it is exp(z - lse)",
            {"grad_rows": lambda v: v.valid * (np.exp(v.logits) - v.onehot) / v.places}),
    Mistake("exponent-negated", "with exp(lse - z) for p, which is exp(z - lse)",
            {"grad_rows": lambda v: v.valid * (1 / v.row_p - v.onehot) / v.places}),
    make_sigmoid_mistake("u-not-doubled", "with exp(-u) for exp(-2 u): half of 1 + tanh u is 1 / (1 + exp(-2 u))", -1),
    make_sigmoid_mistake("u-negated", "with exp(2 u) for exp(-2 u): half of 1 + tanh u is 1 / (1 + exp(-2 u))", 2),
    Mistake("half-forgotten", "without the factor 1/2 of 1 + tanh u", {"gelu": lambda v: v.x * (1 + v.tanh), "grad_gelu": lambda v: compute_product_rule(v, 2, 2)}),
    Mistake("half-forgotten-in-first", "with 1 + tanh u in the first term, not half of it", {"grad_gelu": lambda v: compute_product_rule(v, 2, 1)}),
    Mistake("half-forgotten-in-second", "with the second term twice as large: s' is half of (1 - tanh^2 u) u', or 2 s (1 - s) u'",
            {"grad_gelu": lambda v: compute_product_rule(v, 1, 2)}),
    Mistake("two-divided", "with s (1 - s) u' / 2 for the derivative of s, which is 2 s (1 - s) u'", {"grad_gelu": lambda v: compute_product_rule(v, 1, 1 / 4)}),
    Mistake("cube-forgotten", "without the term of x^3 in u", {"tanh": lambda v: np.tanh(v.k * v.x)}),
    Mistake("two-forgotten", "with s (1 - s) u' for the derivative of s, which is 2 s (1 - s) u'",
            {"grad_gelu": lambda v: compute_product_rule(v, 1, 1 / 2)}),
    Mistake("three-forgotten", "with the cube's derivative x^2, not 3 x^2",
            {"slope": lambda v: v.k * (1 + derivation.CUBIC_COEFF * v.x**2)}),
    Mistake("rule-multiplied", "with the two terms of the product rule multiplied, not added",
            {"grad_gelu": lambda v: v.dx * (1 + v.tanh) / 2 * v.x * (1 - v.tanh**2) / 2 * v.slope}),
    Mistake("gelu-sigmoid", "of the other approximation, x sigmoid(1.702 x)",
            {"grad_gelu": lambda v: compute_sigmoid_gradient(v, 1.702), "gelu": lambda v: v.x / (1 + np.exp(-1.702 * v.x))}),
    Mistake("gelu-sigmoid-inner", "of the other approximation, x sigmoid(1.702 x), and without its inner 1.702",
            {"grad_gelu": lambda v: compute_sigmoid_gradient(v, 1)}),
    Mistake("gelu-erf-inner", "of the other GELU, x Phi(x), with the density of erf, exp(-x^2 / 2) / sqrt(pi): the inner 1 / sqrt(2) is missing",
            {"grad_gelu": lambda v: v.dx * (derivation.normal_cdf(v.x) + v.x * np.exp(-(v.x**2) / 2) / np.sqrt(np.pi))}),
    Mistake("first-term-forgotten", "of the second term of the product alone",
            {"grad_gelu": lambda v: v.dx * v.x / 2 * (1 - v.tanh**2) * v.slope}),
    Mistake("x-forgotten", "without the x before the derivative of tanh",
            {"grad_gelu": lambda v: v.dx * ((1 + v.tanh) / 2 + (1 - v.tanh**2) / 2 * v.slope)}),
    Mistake("tanh-not-squared", "with 1 - tanh for the derivative of tanh, which is 1 - tanh^2",
            {"grad_gelu": lambda v: v.dx * ((1 + v.tanh) / 2 + v.x / 2 * (1 - v.tanh) * v.slope)}),
    Mistake("gradient-in-one-term", "with the gradient that came in as a factor of the first term alone: the brackets are missing",
            {"grad_gelu": lambda v: v.dx * (1 + v.tanh) / 2 + v.x / 2 * (1 - v.tanh**2) * v.slope}),
    *(
        Mistake(f"added-in-{kind}", f"added up in {kind}: each addition is rounded", {"grad_token": lambda v, kind=kind: add_in_dtype(kind, v)})
        for kind in ("bfloat16", "float16")
    ),
    Mistake("mean-of-places", "with a mean over the places of each token: their gradients are added",
            {"grad_token": lambda v: derivation.scatter_add(v.tokens, v.dx, int(v.V)) / np.maximum(np.diff(v.starts), 1)[:, None]}),
    Mistake("order-inverted", "with the inverse of `order`: order[i] is the place at position i, not the position of place i",
            {"grad_token": lambda v: sum_by_order(v, lambda a, b: np.argsort(v.order)[a:b])}),
    Mistake("order-twice", "with `order` taken twice", {"grad_token": lambda v: sum_by_order(v, lambda a, b: v.order[v.order[a:b]])}),
    Mistake("first-place-only", "of the first place of each token alone: a loop is missing",
            {"grad_token": lambda v: sum_by_order(v, lambda a, b: v.order[a : min(a + 1, b)])}),
    Mistake("start-forgotten", "of the places of all earlier tokens too: a token's places begin at its own start",
            {"grad_token": lambda v: sum_by_order(v, lambda a, b: v.order[:b])}),
    Mistake("order-forgotten", "of the rows at the sorted positions: `order` has the place of each",
            {"grad_token": lambda v: sum_by_order(v, lambda a, b: np.arange(a, b))}),
    Mistake("segment-too-short", "without the last place of each token",
            {"grad_token": lambda v: sum_by_order(v, lambda a, b: v.order[a : max(a, b - 1)])}),
    Mistake("correction-early", "of the step before: steps are counted from 1",
            {"corrections": lambda v: 1 - v.betas ** (v.step - 1)}),
    Mistake("correction-late", "of the step after: steps are counted from 1",
            {"corrections": lambda v: 1 - v.betas ** (v.step + 1)}),
    Mistake("beta-times-step", "with beta * step for beta^step", {"corrections": lambda v: 1 - v.betas * v.step}),
    Mistake("not-subtracted", "of beta^step, which must be subtracted from 1",
            {"corrections": lambda v: v.betas ** v.step}),
    Mistake("decay-in-gradient", "with the decay added to the gradient, so that both means include it",
            {"decayed_g": lambda v: v.dx + v.decay * v.x, "new_x": update_without_decay}),
    Mistake("eps-inside-root", "with epsilon inside the root",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / np.sqrt(v.corrected_square + EPS))}),
    Mistake("not-corrected", "with running means that are not corrected for their start at 0",
            {"new_x": lambda v: update_parameter(v, v.new_mean / (np.sqrt(v.new_square) + EPS))}),
    Mistake("decay-forgotten", "without decay",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS), 0 * v.decay)}),
    Mistake("square-alone-corrected", "with only the mean of the square corrected: the gradient's mean began at 0 too",
            {"new_x": lambda v: update_parameter(v, v.new_mean / (np.sqrt(v.corrected_square) + EPS))}),
    Mistake("mean-alone-corrected", "with only the mean of the gradient corrected: the square's mean began at 0 too",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.new_square) + EPS))}),
    Mistake("eps-forgotten", "without epsilon", {"new_x": lambda v: update_parameter(v, v.corrected_mean / np.sqrt(v.corrected_square))}),
    Mistake("step-added", "with the step added, not subtracted",
            {"new_x": lambda v: update_parameter(v, -v.corrected_mean / (np.sqrt(v.corrected_square) + EPS))}),
    Mistake("all-added", "with the step and the decay added, not subtracted",
            {"new_x": lambda v: update_parameter(v, -v.corrected_mean / (np.sqrt(v.corrected_square) + EPS), -v.decay)}),
    Mistake("decay-added", "with the decay added, not subtracted",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS), -v.decay)}),
    Mistake("betas-for-rest", "with beta and 1 - beta exchanged",
            {"new_mean": lambda v: (1 - BETA1) * v.mean + BETA1 * v.dx, "new_square": lambda v: (1 - BETA2) * v.square + BETA2 * v.dx**2}),
    Mistake("correction-outside-root", "with the square's correction outside the root",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.new_square) / v.corrections[1] + EPS))}),
    Mistake("gradient-not-squared", "of the gradients, not of their squares",
            {"new_square": lambda v: BETA2 * v.square + (1 - BETA2) * v.dx}),
    Mistake("absolute-gradient", "of the gradients' absolute values, not of their squares",
            {"new_square": lambda v: BETA2 * v.square + (1 - BETA2) * np.abs(v.dx)}),
    Mistake("square-not-rooted", "divided by the mean square itself: its root is missing",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (v.corrected_square + EPS))}),
    Mistake("gradient-for-mean", "with the gradient in place of its mean",
            {"new_x": lambda v: update_parameter(v, v.dx / v.corrections[0] / (np.sqrt(v.corrected_square) + EPS))}),
    Mistake("corrections-exchanged", "with the two corrections exchanged",
            {"new_x": lambda v: update_parameter(v, v.new_mean / v.corrections[1] / (np.sqrt(v.new_square / v.corrections[0]) + EPS))}),
    Mistake("decay-rate-twice", "with a decay that is multiplied by the learning rate twice",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS), v.decay * RATE)}),
    Mistake("decay-without-parameter", "with the decay itself subtracted: it is a share of the parameter",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS) + v.decay, 0 * v.decay)}),
    Mistake("decay-without-rate", "with a decay that is not multiplied by the learning rate",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.corrected_square) + EPS), v.decay / RATE)}),
    Mistake("old-means", "of the means before this step",
            {"new_x": lambda v: update_parameter(v, v.mean / v.corrections[0] / (np.sqrt(v.square / v.corrections[1]) + EPS))}),
    Mistake("old-mean", "with the mean before this step",
            {"new_x": lambda v: update_parameter(v, v.mean / v.corrections[0] / (np.sqrt(v.corrected_square) + EPS))}),
    Mistake("old-square", "with the mean of the squares before this step",
            {"new_x": lambda v: update_parameter(v, v.corrected_mean / (np.sqrt(v.square / v.corrections[1]) + EPS))}),
    Mistake("rest-of-other-beta", "with the gradient weighted by 1 minus the other mean's beta",
            {"new_mean": lambda v: BETA1 * v.mean + (1 - BETA2) * v.dx, "new_square": lambda v: BETA2 * v.square + (1 - BETA1) * v.dx**2}),
    Mistake("beta-of-other", "with the old mean weighted by the other mean's beta",
            {"new_mean": lambda v: BETA2 * v.mean + (1 - BETA1) * v.dx, "new_square": lambda v: BETA1 * v.square + (1 - BETA2) * v.dx**2}),
    Mistake("betas-exchanged", "with the two betas exchanged",
            {"new_mean": lambda v: BETA2 * v.mean + (1 - BETA2) * v.dx, "new_square": lambda v: BETA1 * v.square + (1 - BETA1) * v.dx**2}),
    Mistake("not-squared", "of the elements, not of their squares", {"square_sums": lambda v: sum_chunks(v, v.dx)}),
    Mistake("absolute-not-squared", "of the elements' absolute values, not of their squares",
            {"square_sums": lambda v: sum_chunks(v, np.abs(v.dx))}),
    *(
        Mistake(f"squared-in-{kind}", f"of squares that are rounded to {kind}: square in float32",
                {"square_sums": lambda v, kind=kind: sum_chunks(v, round_to_dtype(v.dx**2, kind))})
        for kind in ("bfloat16", "float16")
    ),
    Mistake("first-of-each-thread", f"of the first {THREADS} elements of each chunk, one for each thread: a loop is missing", {
        "square_sums": lambda v: sum_chunks(v, np.where(np.arange(v.dx.size) % CHUNK < THREADS, v.dx.reshape(-1) ** 2, 0))},
        3),
    Mistake("own-share-only", "of the first thread's elements alone: block.sum is missing", {
        "square_sums": lambda v: sum_chunks(v, np.where(np.arange(v.dx.size) % THREADS == 0, v.dx.reshape(-1) ** 2, 0))},
        3),
    Mistake("own-chunks-only", "of the first thread's chunks alone: block.sum is missing",
            {"norm": lambda v: np.sqrt(v.square_sums[::THREADS].sum()).reshape(1)}, 3),
    Mistake("not-rooted", "of the sum of squares: its root is missing", {"norm": lambda v: v.square_sums.sum().reshape(1)}),
    Mistake("squared-twice", "with the sums of squares squared once more", {"norm": lambda v: np.sqrt((v.square_sums**2).sum()).reshape(1)}),
    Mistake("root-of-each", "of the chunks' norms, added: the root is taken of the whole sum",
            {"norm": lambda v: np.sqrt(v.square_sums).sum().reshape(1)}),
    Mistake("first-chunks-only", f"of the first {THREADS} chunks alone, one for each thread: a loop is missing",
            {"norm": lambda v: np.sqrt(v.square_sums[:THREADS].sum()).reshape(1)}, 3),
    Mistake("scaled-up", "scaled up if the norm is below the limit: the factor is at most 1",
            {"factor": lambda v: LIMIT / (v.norm + NORM_EPS)}),
    Mistake("each-clamped", "with each element clamped to [-limit, limit]: the direction changes",
            {"clipped": lambda v: np.clip(v.dx, -LIMIT, LIMIT)}),
    Mistake("not-clipped", "without scaling", {"clipped": lambda v: v.dx}),
    Mistake("factor-upside-down", "times the norm over the limit: it is the limit over the norm",
            {"factor": lambda v: np.minimum(1, (v.norm + NORM_EPS) / LIMIT)}),
    Mistake("clipped-the-other-way", "scaled up only if the norm is below the limit: the factor is at most 1, not at least 1",
            {"factor": lambda v: np.maximum(1, LIMIT / (v.norm + NORM_EPS))}),
)  # fmt: skip


def explain_loss_error(name: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain an infinite lse, and a loss computed from a rounded lse."""
    if name not in ("row_lse", "row_loss"):
        return None
    unit = np.spacing(np.float32(np.abs(arrays["logits"]).max(initial=0.0)))
    if name == "row_loss" and np.abs(got - truth).max(initial=0.0) <= 2 * unit:
        return Symptom(
            "lse-cancels",
            "is off by a rounding of the lse: lse - z[target] cancels where lse is large; subtract the largest logit from z[target] "
            "first, log(total) - (z[target] - largest)",
        )
    return formulas.explain_infinite_lse(arrays["logits"], got, truth)


def propagate_rounding(arrays: Arrays, saved: Arrays) -> dict[str, float]:
    """Return the largest changes of the gradient and the mean loss due to the rounding of lse and losses."""
    exact, changes = derive(arrays), dict[str, float]()
    for name, quantity in (("row_lse", "grad_rows"), ("row_loss", "mean_loss")):
        if name in saved and np.isfinite(saved[name]).all():
            rounded = derive(arrays, {name: lambda v, value=saved[name]: value})
            change = np.abs(getattr(rounded, quantity) - getattr(exact, quantity))
            changes[quantity] = float(change.max(initial=0.0))
    return changes


# ---- PyTorch's results --------------------------------------------------------------------------------------


def compute_worst_gelu(x, dx) -> tuple:
    """Return GELU of x and its gradient, each from the form with PyTorch's larger error."""
    import torch
    import torch.nn.functional as F

    scale = (2 / np.pi) ** 0.5
    forms = (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * torch.sigmoid(2 * scale * (x + derivation.CUBIC_COEFF * x**3)),
    )

    def compute_with_grad(form, x) -> tuple:
        leaf = x.detach().clone().requires_grad_(True)
        output = form(leaf)
        return output.detach(), torch.autograd.grad(output, leaf, dx.to(x.dtype))[0]

    def select_worst(first, second, truth):
        return max((first, second), key=lambda result: (result.double() - truth).abs().max().item())

    truths = compute_with_grad(forms[0], x.double())
    return tuple(map(select_worst, *(compute_with_grad(form, x) for form in forms), truths))


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by output name, in the tensors' dtype and on their device.

    16-bit results are computed in float32 and rounded once, because PyTorch's intermediate rounding could
    hide a wrong kernel. GELU is the worse of its two forms, by tanh and by the sigmoid.
    """
    import torch
    import torch.nn.functional as F

    dtype, device = tensors["logits"].dtype, tensors["logits"].device
    accum = getattr(torch, get_accum_dtype(str(dtype).removeprefix("torch.")))

    def leaf(name: str):
        return tensors[name].detach().to(accum).clone().requires_grad_(True)

    logits, x, dx, targets = leaf("logits"), leaf("x"), tensors["dx"].to(accum), tensors["targets"]
    flat, flat_targets = logits.flatten(0, 1), targets.flatten()
    mean_loss = F.cross_entropy(flat, flat_targets, ignore_index=IGNORE_INDEX)
    gelu, grad_gelu = compute_worst_gelu(x, dx)
    table = torch.zeros(int(tensors["V"]), x.shape[-1], dtype=accum, device=device, requires_grad=True)
    new_x, clipped = leaf("x"), leaf("dx")
    optimizer = torch.optim.AdamW([new_x], RATE, (BETA1, BETA2), EPS, DECAY, foreach=False)
    exp_avg, exp_avg_sq = (tensors[name].to(accum).clone() for name in ("mean", "square"))
    optimizer.state[new_x] = {"step": torch.tensor(STEP - 1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    new_x.grad, clipped.grad = dx.clone(), dx.clone()
    optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_([clipped], LIMIT)
    chunks = [chunk.square().sum() for chunk in dx.flatten().split(CHUNK)]
    rounded = {
        "grad_rows": torch.autograd.grad(mean_loss, logits)[0],
        "gelu": gelu,
        "grad_gelu": grad_gelu,
        "grad_token": torch.autograd.grad(F.embedding(tensors["tokens"], table), table, dx)[0],
        "new_x": new_x.detach(),
        "clipped": clipped.grad,
    }
    row_loss = F.cross_entropy(flat, flat_targets, ignore_index=IGNORE_INDEX, reduction="none")
    return {name: tensor.to(dtype) for name, tensor in rounded.items()} | {
        "row_loss": row_loss.detach().view_as(targets),
        "row_lse": logits.detach().logsumexp(-1),
        "mean_loss": mean_loss.detach().reshape(1),
        "places": (targets != IGNORE_INDEX).sum().to(accum).reshape(1),
        "corrections": torch.tensor([1 - beta**STEP for beta in (BETA1, BETA2)], dtype=accum, device=device),
        "new_mean": exp_avg,
        "new_square": exp_avg_sq,
        "square_sums": torch.stack(chunks),
        "norm": norm.reshape(1),
    }
