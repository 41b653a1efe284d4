"""Known mistakes of puzzle 23, as changes to its derivation; the first of equal ones is reported."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p23.derivation import compute_lse, normalise
from harness.puzzles.rows import finite_max, read_with_swapped_strides, safe_total, softmax, transpose
from harness.spec.derivation import Derivation, Mistake, Step

TILE = 16
BLOCK = 128
"""TILE is the side of a matrix tile, BLOCK the number of threads that share a row."""
ReadOperand = Callable[[np.ndarray], np.ndarray]
"""Returns an operand as a kernel reads it."""

# ---- Products -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A matmul. `transposed` is the operand to transpose, "left", "right" or ""; if `scaled`, it is multiplied by scale."""

    left: str
    right: str
    transposed: str = ""
    scaled: bool = False

    def make_step(
        self, left: ReadOperand = np.asarray, right: ReadOperand = np.asarray, scale_power: int = 0
    ) -> Step:
        """Return the step with its operands read by `left` and `right`, times scale**scale_power."""

        def compute_product(v: Derivation) -> np.ndarray:
            a, b = left(getattr(v, self.left)), right(getattr(v, self.right))
            a = transpose(a) if self.transposed == "left" else a
            b = transpose(b) if self.transposed == "right" else b
            return v.scale ** (self.scaled + scale_power) * (a @ b) if self.scaled + scale_power else a @ b

        return compute_product


PRODUCTS = {
    "scores": Product("query", "key", "right", scaled=True),
    "output": Product("probabilities", "value"),
    "grad_value": Product("probabilities", "grad_output", "left"),
    "grad_probabilities": Product("grad_output", "value", "right"),
    "grad_query": Product("grad_scores", "key", scaled=True),
    "grad_key": Product("grad_scores", "query", "left", scaled=True),
}
TRANSPOSED_PRODUCT = Product("query", "grad_output", "left")
SCALED_STEPS = tuple(step for step, product in PRODUCTS.items() if product.scaled)
OPERANDS = ("query", "key", "value", "probabilities", "grad_output", "grad_scores")


def change_reads(read: ReadOperand, *tensors: str, steps: Iterable[str] = PRODUCTS) -> dict[str, Step]:
    """Return the products that use any of `tensors`, with these tensors read by `read`."""
    readers = dict.fromkeys(tensors, read)
    products = ((step, PRODUCTS[step]) for step in steps)
    return {
        step: p.make_step(readers.get(p.left, np.asarray), readers.get(p.right, np.asarray))
        for step, p in products if p.left in readers or p.right in readers
    }  # fmt: skip


def substitute(
    tensor: str, replacement: str, scale_power: int = 0, steps: Iterable[str] = PRODUCTS
) -> dict[str, Step]:
    """Return the products that use `tensor`, with `replacement` instead."""
    products = ((step, PRODUCTS[step]) for step in steps)
    return {
        step: (replace(p, left=replacement) if p.left == tensor else replace(p, right=replacement)).make_step(scale_power=scale_power)
        for step, p in products if tensor in (p.left, p.right)
    }  # fmt: skip


def zero_partial_tile(array: np.ndarray, axis: int) -> np.ndarray:
    """Set elements after the last full tile along an axis to zero."""
    result = np.moveaxis(array.copy(), axis, -1)
    result[..., result.shape[-1] // TILE * TILE :] = 0
    return np.moveaxis(result, -1, axis)


def split_by_step(mistakes: Iterable[Mistake]) -> Iterator[Mistake]:
    """Yield each changed step as a separate mistake, since one product may be wrong and another correct."""
    for mistake in mistakes:
        for step, change in mistake.changes.items():
            yield replace(mistake, changes={step: change})


def rescale_by_tiles(v: Derivation, weights: Callable[[formulas.OnlineSteps], np.ndarray]) -> np.ndarray:
    """Return the exponentials [B, N, S, T] that an online softmax with wrong `weights` has over tiles of keys."""
    online = formulas.OnlineSteps.split(v.masked, 1, TILE)
    return online.join(weights(online))


def transpose_tiles(array: np.ndarray) -> np.ndarray:
    padding = [(0, -size % TILE) for size in array.shape[-2:]]
    padded = np.pad(array, [(0, 0)] * (array.ndim - 2) + padding)
    rows, columns = (size // TILE for size in padded.shape[-2:])
    tiles = padded.reshape(*array.shape[:-2], rows, TILE, columns, TILE).swapaxes(-1, -3)
    return tiles.reshape(padded.shape)[..., : array.shape[-2], : array.shape[-1]]


def softmax_over_queries(v: Derivation) -> np.ndarray:
    weights = np.exp(v.masked - finite_max(v.masked.max(-2, keepdims=True)))
    total = weights.sum(-2, keepdims=True)
    return weights / safe_total(total)


def read_other_heads(array: np.ndarray, index: Callable[[np.ndarray, int, int], np.ndarray]) -> np.ndarray:
    """Return the heads that wrong indices read: head i of B * N reads head `index(i, B, N)`."""
    B, N = array.shape[:2]
    heads = index(np.arange(B * N), B, N) % (B * N)
    return array.reshape(B * N, *array.shape[2:])[heads].reshape(array.shape)


def list_head_mistakes(
    name: str, description: str, index: Callable[[np.ndarray, int, int], np.ndarray]
) -> list[Mistake]:
    return [
        Mistake(f"{tensor}-{name}", f"with {tensor} {description}", change_reads(lambda array: read_other_heads(array, index), tensor), 3)
        for tensor in OPERANDS
    ]  # fmt: skip


def keep_last_of_group(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Zero all but the last of the query heads that share a key head."""
    last = np.arange(1, array.shape[1] + 1) % v.group == 0
    return array * last[:, None, None]


def get_finite_lse(v: Derivation) -> np.ndarray:
    return finite_max(v.lse[..., None])


def sum_thread_keys(v: Derivation) -> np.ndarray:
    thread = np.arange(v.weights.shape[-1]) % TILE
    return v.weights @ (thread[:, None] == np.arange(TILE))


def multiply_at_key_position(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights^T rows, [..., T, d], with the rows [..., S, d] of a query tile read at the key tile's position.

    The weights are [..., S, T].
    """
    S, T = weights.shape[-2:]
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-2], max(T, S) + TILE, rows.shape[-1]))], -2)
    row = np.arange(S) % TILE
    tiles = [transpose(weights[..., t0 : t0 + TILE]) @ padded[..., t0 + row, :] for t0 in range(0, T, TILE)]
    return np.concatenate(tiles, -2)


def transpose_weight_tiles(v: Derivation) -> np.ndarray:
    """Return an online softmax's exponentials [B, N, S, T] with each tile transposed before it is rescaled."""
    online = formulas.OnlineSteps.split(v.masked, 1, TILE)
    tiles = transpose_tiles(online.join(np.exp(online.scores - online.running_max)))
    rescaled = formulas.multiply_later_factors(np.exp(online.previous_max - online.running_max))
    return tiles * online.join(np.broadcast_to(rescaled, online.scores.shape))


def keep_last_tile(array: np.ndarray, axis: int = -1) -> np.ndarray:
    result = np.moveaxis(np.zeros_like(array), axis, -1)
    first = (result.shape[-1] - 1) // TILE * TILE
    result[..., first:] = np.moveaxis(array, axis, -1)[..., first:]
    return np.moveaxis(result, -1, axis)


def get_head_index(v: Derivation) -> np.ndarray:
    B, N, S = v.query.shape[:3]
    return np.broadcast_to(np.arange(B * N).reshape(B, N, 1), (B, N, S))


SCALE_MISTAKES = (
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)", {step: PRODUCTS[step].make_step(scale_power=-1) for step in SCALED_STEPS}),
    Mistake("scale-twice", "with the scale 1 / sqrt(d) applied twice", {step: PRODUCTS[step].make_step(scale_power=1) for step in SCALED_STEPS}),
    Mistake("scale-by-length", "with 1 / sqrt(key length) as the scale",
            {"scores": lambda v: v.query @ transpose(v.key) / np.sqrt(v.key.shape[-2])}),
    Mistake("scale-in-the-chain", "scaled by mistake: only the scores, dQ and dK are scaled",
            {"masked": lambda v: v.scale * v.scores + v.mask,
             **{step: product.make_step(scale_power=1) for step, product in PRODUCTS.items() if step not in SCALED_STEPS},
             "grad_scores": lambda v: v.scale * v.probabilities * (v.grad_probabilities - v.dot)}),
)  # fmt: skip

READ_TRANSPOSED = "read as if it were stored [d, T]: it must not be transposed"
NOT_TRANSPOSED = "transpose it in the launch, or fix matmul's load of a transposed factor"
TRANSPOSE_MISTAKES = tuple(
    Mistake(id, description, change_reads(read_with_swapped_strides, *tensors, steps=steps), 3)
    for id, description, tensors, steps in (
        ("key-not-transposed", "with the key read as if it were stored [d, T]", ("key",), ("scores",)),
        ("value-not-transposed", "with the value read as if it were stored [d, T]", ("value",), ("grad_probabilities",)),
        ("value-transposed", f"with the value {READ_TRANSPOSED}", ("value",), ("output",)),
        ("probabilities-not-transposed", f"with P not transposed, P[t, s] read at t * S + s: {NOT_TRANSPOSED}", ("probabilities",), ("grad_value",)),
        ("probabilities-transposed", "with P transposed by mistake: P[s, t] read at t * S + s", ("probabilities",), ("output",)),
        ("grad-scores-not-transposed", f"with dS not transposed, dS[t, s] read at t * S + s: {NOT_TRANSPOSED}", ("grad_scores",), ("grad_key",)),
        ("grad-scores-transposed", "with dS transposed by mistake: dS[s, t] read at t * S + s", ("grad_scores",), ("grad_query",)),
        ("other-factor-transposed", "with transpose_a instead of transpose_b, or the other way round: the wrong factor is transposed", OPERANDS, ("grad_value", "grad_probabilities", "grad_key")),
        ("key-transposed", f"with the key {READ_TRANSPOSED}", ("key",), ("grad_query",)),
    )
)  # fmt: skip

SOFTMAX_MISTAKES = (
    Mistake("softmax-over-queries", "taken over the queries, not the keys", {"probabilities": softmax_over_queries}, 1),
    Mistake("largest-of-hidden", "with the maximum of all scores subtracted, including masked scores",
            {"weights": lambda v: np.exp(v.masked - v.scores.max(-1, keepdims=True))}),
    *formulas.list_softmax_mistakes("weights", "total", "probabilities", "masked", BLOCK),
    Mistake("mask-forgotten", "without the mask", {"masked": lambda v: v.scores}),
    Mistake("mask-as-factor", "with the scores multiplied by the mask, not added to it", {"masked": lambda v: v.scores * v.mask}),
    Mistake("mask-exponential", "with the scores multiplied by exp(mask): a factor of 0 does not hide a score, whose exponential is then 1", {"masked": lambda v: v.scores * np.exp(v.mask)}),
    Mistake("mask-hides-alone", "with only the mask's -inf: its finite numbers must be added too",
            {"masked": lambda v: np.where(np.isneginf(v.mask), -np.inf, v.scores)}),
    Mistake("mask-subtracted", "with the mask subtracted", {"masked": lambda v: v.scores - v.mask}),
    Mistake("mask-after-softmax", "with the mask applied after the softmax: hidden keys still count in the sum of the row",
            {"probabilities": lambda v: softmax(v.scores) * np.exp(v.mask)}, 1),
    Mistake("mask-of-first-query", "with the first query's mask for all queries", {"masked": lambda v: v.scores + v.mask[:1]}, 3),
    Mistake("mask-of-head", "with the mask indexed by the head, not by the query",
            {"masked": lambda v: v.scores + v.mask[get_head_index(v) % v.mask.shape[0]]}, 3),
    Mistake("masked-row-nan", "with NaN in fully masked rows: -inf - -inf, or 0 / 0",
            {"probabilities": lambda v: np.where(v.total == 0, np.nan, normalise(v.weights, v.total))}),
    Mistake("masked-row-uniform", "with 1 / T in fully masked rows",
            {"probabilities": lambda v: np.where(v.total == 0, 1 / v.mask.shape[-1], normalise(v.weights, v.total))}),
)  # fmt: skip

SOFTMAX_BACKWARD_MISTAKES = (
    *formulas.list_softmax_backward_mistakes(
        "grad_scores", "probabilities", "grad_probabilities", "dot", BLOCK
    ),
    Mistake(
        "lse-for-delta", "with lse instead of the row sum of dP * P", {"dot": lambda v: get_finite_lse(v)}
    ),
)

CHAIN_MISTAKES = (
    Mistake("probabilities-squared", "with P squared", change_reads(np.square, "probabilities", steps=("grad_value",))),
    Mistake("scores-for-probabilities", "taken from the scores, not from the probabilities", substitute("probabilities", "scores")),
    Mistake("grad-probabilities-for-grad-scores", "taken from dP, not from dS", substitute("grad_scores", "grad_probabilities")),
    Mistake("probabilities-for-grad-scores", "taken from P, not from dS", substitute("grad_scores", "probabilities")),
    Mistake("value-for-key", "with the value instead of the key", substitute("key", "value")),
    Mistake("key-for-value", "with the key instead of the value", substitute("value", "key")),
    Mistake("grad-output-for-query", "with dO instead of the query", substitute("query", "grad_output", steps=("grad_key",))),
    Mistake("query-for-grad-output", "with the query instead of dO", substitute("grad_output", "query")),
    Mistake("last-tile-dropped", "without the last partial tile of 16 in the product's sums",
            {step: product.make_step(lambda a, axis=-2 if product.transposed == "left" else -1: zero_partial_tile(a, axis))
             for step, product in PRODUCTS.items()}, 3),
)  # fmt: skip

# ---- Flash attention ----------------------------------------------------------------------------------------

# Not used for delta: column 0 of a per-thread sum is the first thread's, and no head is as wide as a block.
WIDE_ROW_MISTAKES = ("first-columns-only", "last-columns-only", "own-share-only", "own-warp-only")
DELTA_MISTAKES = (
    Mistake("delta-without-grad-output", "with the sum of O, without dO", {"delta": lambda v: v.output.sum(-1)}),
    Mistake("delta-mean", "with the mean over the head dimension, not the sum",
            {"delta": lambda v: (v.grad_output * v.output).mean(-1)}),
    *(
        mistake
        for mistake in formulas.list_sum_mistakes(
            lambda v: v.grad_output * v.output, BLOCK, {"delta": lambda change: lambda v: change(v)[..., 0]}, "delta-"
        )
        if not mistake.id.endswith(WIDE_ROW_MISTAKES)
    ),
    Mistake("delta-of-grad-output", "with the row sum of dO * dO, not of dO * O", {"delta": lambda v: (v.grad_output**2).sum(-1)}),
)  # fmt: skip


def make_weights_mistake(id: str, description: str, weights: Step) -> Mistake:
    """Return a mistake in the recomputed P."""
    return Mistake(
        id, description,
        {"grad_scores": lambda v: weights(v) * (v.grad_probabilities - v.dot),
         "grad_value": lambda v: transpose(weights(v)) @ v.grad_output},
    )  # fmt: skip


def select_first_tile(array: np.ndarray) -> np.ndarray:
    return array[..., :TILE, :]


FLASH_MISTAKES = (
    *formulas.list_online_softmax_mistakes("the total", "score", lambda weights: {
        "output": lambda v: v.weights / safe_total(formulas.sum_rows(rescale_by_tiles(v, weights))) @ v.value,
        "lse": lambda v: compute_lse(v, formulas.sum_rows(rescale_by_tiles(v, weights))),
    }, "total-"),
    *formulas.list_online_softmax_mistakes("the sums", "score", lambda weights: {
        "output": lambda v: normalise(rescale_by_tiles(v, weights), v.total) @ v.value,
    }, "sums-"),
    *formulas.list_online_softmax_mistakes("total and sums", "score", lambda weights: {
        "output": lambda v: (tiled := rescale_by_tiles(v, weights)) / safe_total(formulas.sum_rows(tiled)) @ v.value
    }),
    Mistake("last-tile-alone", "of the last tile of keys only: earlier tiles are overwritten",
            change_reads(keep_last_tile, "probabilities", "grad_scores", steps=("output", "grad_query"))),
    Mistake("past-the-end-counted", "with keys past the end counted in the total, as if their score were 0",
            {"total": lambda v: v.weights.sum(-1, keepdims=True) + -v.masked.shape[-1] % TILE * np.exp(-finite_max(v.row_max))}),
    Mistake("lse-without-largest", "without the row's maximum score", {"lse": lambda v: np.log(v.total[..., 0])}),
    Mistake("lse-without-log", "without the logarithm of the total",
            {"lse": lambda v: np.where(v.total == 0, -np.inf, v.row_max + v.total)[..., 0]}),
    *DELTA_MISTAKES,
    Mistake("total-of-own-keys", "divided by each thread's sum over its own keys: row_total adds up the threads of a row",
            {"output": lambda v: (v.weights @ v.value) / safe_total(sum_thread_keys(v)[..., np.arange(v.value.shape[-1]) % TILE]),
             "lse": lambda v: np.log(sum_thread_keys(v)[..., 0]) + finite_max(v.row_max[..., 0])}),
    make_weights_mistake("weights-lse-in-bits", "with lse divided by ln 2: exp takes natural logarithms",
                  lambda v: np.exp(v.masked - get_finite_lse(v) / np.log(2))),
    make_weights_mistake("weights-lse-times-ln-2", "with lse multiplied by ln 2: it is already a natural logarithm",
                  lambda v: np.exp(v.masked - get_finite_lse(v) * np.log(2))),
    make_weights_mistake("weights-powers-of-2", "with exp2 instead of exp: the scores are natural logarithms",
                  lambda v: np.exp2(v.masked - get_finite_lse(v))),
    make_weights_mistake("weights-lse-added", "with lse added to the score, not subtracted", lambda v: np.exp(v.masked + get_finite_lse(v))),
    Mistake("last-queries-alone", "of the last tile of queries only: earlier tiles are overwritten",
            {"grad_key": lambda v: v.scale * (transpose(keep_last_tile(v.grad_scores, -2)) @ keep_last_of_group(v.query, v)),
             "grad_value": lambda v: transpose(keep_last_tile(v.probabilities, -2)) @ keep_last_of_group(v.grad_output, v)}),
    Mistake("first-queries-alone", "of the first tile of queries only",
            change_reads(select_first_tile, *OPERANDS, steps=("grad_key", "grad_value"))),
    Mistake("first-keys-alone", "of the first tile of keys only",
            {step: PRODUCTS[step].make_step(lambda weights: weights[..., :TILE], select_first_tile) for step in ("output", "grad_query")}),
    Mistake("queries-at-the-keys", "with the rows of a tile of queries read at the keys' position, t0 instead of s0",
            {"grad_value": lambda v: multiply_at_key_position(v.probabilities, v.grad_output),
             "grad_key": lambda v: v.scale * multiply_at_key_position(v.grad_scores, v.query)}, 3),
    *(
        Mistake(id, description, {step: PRODUCTS[step].make_step(right=read) for step in ("output", "grad_query", "grad_key", "grad_value")}, 3)
        for id, description, read in (
            ("factor-tile-transposed", "with each tile of the factor read as its transpose: [x, i] instead of [i, x]", transpose_tiles),
            ("first-chunk-again", "with the first 16 elements of each row in every chunk: chunk * TILE is missing",
             lambda rows: rows[..., np.arange(rows.shape[-1]) % TILE]),
        )
    ),
    Mistake("keys-at-the-queries", "with the rows of a tile of keys read at the queries' position, s0 instead of t0",
            {"output": lambda v: multiply_at_key_position(transpose(v.probabilities), v.value),
             "grad_query": lambda v: v.scale * multiply_at_key_position(transpose(v.grad_scores), v.key)}, 3),
    Mistake("weights-transposed", "with each tile of weights read as its transpose: weights[i, y] instead of weights[y, i]",
            {"output": lambda v: transpose_weight_tiles(v) @ v.value / safe_total(v.total)}, 3),
    make_weights_mistake("lse-forgotten", "with exp(score) instead of P, without lse", lambda v: np.exp(v.masked.astype(np.float32)).astype(np.float64)),
    Mistake("slopes-for-weights", "with scale * dS instead of P", substitute("probabilities", "grad_scores", 1, ("grad_value",))),
    Mistake("weights-for-slopes", "with P instead of scale * dS", substitute("grad_scores", "probabilities", -1)),
    Mistake("one-query-head", "with only the last of the query heads that share a key head",
            {"grad_key": lambda v: v.scale * (transpose(v.grad_scores) @ keep_last_of_group(v.query, v)),
             "grad_value": lambda v: transpose(v.probabilities) @ keep_last_of_group(v.grad_output, v)}, 3),
    Mistake("tile-transposed", "with each tile read as its transpose: [i, y] instead of [y, i]",
            {**change_reads(transpose_tiles, "probabilities", "grad_scores"), "transposed_product": TRANSPOSED_PRODUCT.make_step(transpose_tiles)}, 3),
)  # fmt: skip

MISTAKES = tuple(
    split_by_step(
        (
            *SCALE_MISTAKES,
            *TRANSPOSE_MISTAKES,
            Mistake("query-not-transposed", "with the query read as if it were stored [d, S]", {"transposed_product": TRANSPOSED_PRODUCT.make_step(read_with_swapped_strides)}, 3),
            *SOFTMAX_MISTAKES,
            *SOFTMAX_BACKWARD_MISTAKES,
            *CHAIN_MISTAKES,
            *FLASH_MISTAKES,
            *list_head_mistakes("of-next-head", "of the next head", lambda i, B, N: i + 1),
            *list_head_mistakes("of-first-head", "of the first head: the head is left out of the index", lambda i, B, N: 0 * i),
            *list_head_mistakes("of-first-sequence", "of the first batch element: the batch is left out of the index", lambda i, B, N: i % N),
        )
    )
)  # fmt: skip
