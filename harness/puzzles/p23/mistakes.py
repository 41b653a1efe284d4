"""The known mistakes of puzzle 23, as changes of its derivation.

Shapes are those of `derivation.py`. If two mistakes give the same values in every failing case, the first is
named.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p23.derivation import lse_of, share
from harness.puzzles.rows import or_0, or_1, softmax, transpose
from harness.spec.derivation import Derivation, Mistake, Step

TILE = 16
BLOCK = 128
"""Tile sizes of a matrix and of a row."""
Read = Callable[[np.ndarray], np.ndarray]
"""A reader of an operand."""

# ---- Products -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A step that multiplies two operands: their names, which one is transposed, and whether it includes the
    scale."""

    left: str
    right: str
    turned: str = ""
    scaled: bool = False

    def step(self, left: Read = np.asarray, right: Read = np.asarray, power: int = 0) -> Step:
        """Return the step with its operands read by these functions, and the scale to an extra `power`."""

        def product(v: Derivation) -> np.ndarray:
            a, b = left(getattr(v, self.left)), right(getattr(v, self.right))
            rows = (transpose(a) if self.turned == "left" else a) @ (
                transpose(b) if self.turned == "right" else b
            )
            return v.scale ** (self.scaled + power) * rows if self.scaled + power else rows

        return product


PRODUCTS = {
    "scores": Product("query", "key", "right", scaled=True),
    "output": Product("probabilities", "value"),
    "grad_value": Product("probabilities", "grad_output", "left"),
    "grad_probabilities": Product("grad_output", "value", "right"),
    "grad_query": Product("grad_scores", "key", scaled=True),
    "grad_key": Product("grad_scores", "query", "left", scaled=True),
}
TRANSPOSED = Product("query", "grad_output", "left")
SCALED = tuple(step for step, product in PRODUCTS.items() if product.scaled)
OPERANDS = ("query", "key", "value", "probabilities", "grad_output", "grad_scores")


def misreading(read: Read, *tensors: str, steps: Iterable[str] = PRODUCTS) -> dict[str, Step]:
    """Return the products that use one of these tensors, with it read by `read`."""
    reads = dict.fromkeys(tensors, read)
    products = ((step, PRODUCTS[step]) for step in steps)
    return {
        step: p.step(reads.get(p.left, np.asarray), reads.get(p.right, np.asarray))
        for step, p in products if p.left in reads or p.right in reads
    }  # fmt: skip


def instead(tensor: str, other: str, power: int = 0, steps: Iterable[str] = PRODUCTS) -> dict[str, Step]:
    """Return the products that use a tensor, with another one in its place."""
    products = ((step, PRODUCTS[step]) for step in steps)
    return {
        step: (replace(p, left=other) if p.left == tensor else replace(p, right=other)).step(power=power)
        for step, p in products if tensor in (p.left, p.right)
    }  # fmt: skip


def misread_strides(array: np.ndarray) -> np.ndarray:
    """Return matrices [.., m, n] read as if they were stored [n, m]."""
    *heads, m, n = array.shape
    return transpose(array.reshape(*heads, n, m))


def without_rest(array: np.ndarray, axis: int) -> np.ndarray:
    """Replace what follows the last whole tile along an axis by zeros."""
    kept = np.moveaxis(array.copy(), axis, -1)
    kept[..., kept.shape[-1] // TILE * TILE :] = 0
    return np.moveaxis(kept, -1, axis)


def apart(mistakes: Iterable[Mistake]) -> Iterator[Mistake]:
    """Yield each changed step as its own mistake: one product may have it while the others are correct."""
    for mistake in mistakes:
        for step, change in mistake.changes.items():
            yield replace(mistake, changes={step: change})


def by_tiles(v: Derivation, weights: Callable[[formulas.Online], np.ndarray]) -> np.ndarray:
    """Return what replaces the exponentials [B, N, S, T] in an online softmax over the tiles of keys."""
    online = formulas.Online.of(v.masked, 1, TILE)
    return online.rows(weights(online))


def tile_transposed(array: np.ndarray) -> np.ndarray:
    rest = [(0, -size % TILE) for size in array.shape[-2:]]
    whole = np.pad(array, [(0, 0)] * (array.ndim - 2) + rest)
    rows, columns = (size // TILE for size in whole.shape[-2:])
    apart = whole.reshape(*array.shape[:-2], rows, TILE, columns, TILE).swapaxes(-1, -3)
    return apart.reshape(whole.shape)[..., : array.shape[-2], : array.shape[-1]]


def by_query(v: Derivation) -> np.ndarray:
    """Return the softmax taken over the queries, not the keys."""
    weights = np.exp(v.masked - or_0(v.masked.max(-2, keepdims=True)))
    total = weights.sum(-2, keepdims=True)
    return weights / or_1(total)


def heads(array: np.ndarray, index: Callable[[np.ndarray, int, int], np.ndarray]) -> np.ndarray:
    """Replace every head by another one: `index(i, B, N)` is what head i of B * N reads."""
    B, N = array.shape[:2]
    chosen = index(np.arange(B * N), B, N) % (B * N)
    return array.reshape(B * N, *array.shape[2:])[chosen].reshape(array.shape)


def other_heads(name: str, words: str, index: Callable[[np.ndarray, int, int], np.ndarray]) -> list[Mistake]:
    """Return mistakes that read a tensor from another head, for each operand of the products."""
    return [
        Mistake(f"{tensor}-{name}", f"with {tensor} {words}", misreading(lambda array: heads(array, index), tensor), 3)
        for tensor in OPERANDS
    ]  # fmt: skip


def last_of_group(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Replace all but the last head of those that share a key and value head by zeros."""
    last = np.arange(1, array.shape[1] + 1) % v.group == 0
    return array * last[:, None, None]


def in_float32(function: Callable, array: np.ndarray) -> np.ndarray:
    """Evaluate a function in float32, which overflows sooner."""
    return np.asarray(function(array.astype(np.float32)), np.float64)


def lse_or_0(v: Derivation) -> np.ndarray:
    """Return [B, N, S, 1]: lse, and 0 for a row that sees no key."""
    return or_0(v.lse[..., None])


def own_keys(v: Derivation) -> np.ndarray:
    """Return [B, N, S, TILE]: the total of each thread's own keys."""
    thread = np.arange(v.weights.shape[-1]) % TILE
    return v.weights @ (thread[:, None] == np.arange(TILE))


def at_the_keys(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights^T rows, with the rows of each tile of queries read at the tile of the keys: [.., S, T],
    [.., S, d] -> [.., T, d]."""
    S, T = weights.shape[-2:]
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-2], max(T, S) + TILE, rows.shape[-1]))], -2)
    place = np.arange(S) % TILE
    tiles = [transpose(weights[..., t0 : t0 + TILE]) @ padded[..., t0 + place, :] for t0 in range(0, T, TILE)]
    return np.concatenate(tiles, -2)


def weights_transposed(v: Derivation) -> np.ndarray:
    """Return the exponentials of an online softmax [B, N, S, T] with each tile transposed, as finally
    weighted."""
    online = formulas.Online.of(v.masked, 1, TILE)
    tiles = tile_transposed(online.rows(np.exp(online.scores - online.after)))
    rescaled = formulas.later(np.exp(online.before - online.after))
    return tiles * online.rows(np.broadcast_to(rescaled, online.scores.shape))


def last_tile(array: np.ndarray, axis: int = -1) -> np.ndarray:
    """Replace what precedes the last tile of keys, or along another axis, by zeros."""
    kept = np.moveaxis(np.zeros_like(array), axis, -1)
    first = (kept.shape[-1] - 1) // TILE * TILE
    kept[..., first:] = np.moveaxis(array, axis, -1)[..., first:]
    return np.moveaxis(kept, -1, axis)


def head_of(v: Derivation) -> np.ndarray:
    """Return [B, N, S]: the number of each row's head."""
    B, N, S = v.query.shape[:3]
    return np.broadcast_to(np.arange(B * N).reshape(B, N, 1), (B, N, S))


SCORES = (
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)", {step: PRODUCTS[step].step(power=-1) for step in SCALED}),
    Mistake("scale-twice", "with the scale 1 / sqrt(d) applied twice", {step: PRODUCTS[step].step(power=1) for step in SCALED}),
    Mistake("scale-by-length", "with 1 / sqrt(key length) for the scale",
            {"scores": lambda v: v.query @ transpose(v.key) / np.sqrt(v.key.shape[-2])}),
    Mistake("scale-in-the-chain", "scaled where nothing is: the scale belongs to the scores, dQ and dK alone",
            {"masked": lambda v: v.scale * v.scores + v.mask,
             **{step: product.step(power=1) for step, product in PRODUCTS.items() if step not in SCALED},
             "grad_scores": lambda v: v.scale * v.probabilities * (v.grad_probabilities - v.dot)}),
)  # fmt: skip

FOR_NOTHING = "read as if it were stored [d, T], transposed for nothing"
NOT_TURNED = "by the launch, or by matmul, whose load of a transposed factor is not turned"
TRANSPOSES = tuple(
    Mistake(id, words, misreading(misread_strides, *tensors, steps=steps), 3)
    for id, words, tensors, steps in (
        ("key-not-transposed", "with the key read as if it were stored [d, T]", ("key",), ("scores",)),
        ("value-not-transposed", "with the value read as if it were stored [d, T]", ("value",), ("grad_probabilities",)),
        ("value-transposed", f"with the value {FOR_NOTHING}", ("value",), ("output",)),
        ("probabilities-not-transposed", f"with P not transposed, P[t, s] read at t * S + s: {NOT_TURNED}", ("probabilities",), ("grad_value",)),
        ("probabilities-transposed", "with P transposed for nothing: P[s, t] read at t * S + s", ("probabilities",), ("output",)),
        ("grad-scores-not-transposed", f"with dS not transposed, dS[t, s] read at t * S + s: {NOT_TURNED}", ("grad_scores",), ("grad_key",)),
        ("grad-scores-transposed", "with dS transposed for nothing: dS[s, t] read at t * S + s", ("grad_scores",), ("grad_query",)),
        ("other-factor-transposed", "with transpose_a for transpose_b, or the other way round: the factor that is stored as it is "
         "needed is turned, the other is not", OPERANDS, ("grad_value", "grad_probabilities", "grad_key")),
        ("key-transposed", f"with the key {FOR_NOTHING}", ("key",), ("grad_query",)),
    )
)  # fmt: skip

SOFTMAX = (
    Mistake("softmax-over-queries", "taken over the queries, not the keys", {"probabilities": by_query}, 1),
    Mistake("largest-of-hidden", "with the largest of all scores subtracted, those that the mask hides included",
            {"weights": lambda v: np.exp(v.masked - v.scores.max(-1, keepdims=True))}),
    *formulas.softmax("weights", "total", "probabilities", "masked", BLOCK),
    Mistake("mask-forgotten", "without the mask", {"masked": lambda v: v.scores}),
    Mistake("mask-as-factor", "with the scores multiplied by the mask, not added to it", {"masked": lambda v: v.scores * v.mask}),
    Mistake("mask-exponential", "with the scores multiplied by exp(mask): what is added to a score multiplies its exponential, "
            "and 0 hides nothing", {"masked": lambda v: v.scores * np.exp(v.mask)}),
    Mistake("mask-hides-alone", "with the mask's -inf alone: its other numbers are added too",
            {"masked": lambda v: np.where(np.isneginf(v.mask), -np.inf, v.scores)}),
    Mistake("mask-subtracted", "with the mask subtracted", {"masked": lambda v: v.scores - v.mask}),
    Mistake("mask-after-softmax", "with the mask applied after the softmax: what it hides still counts in the sum of the row",
            {"probabilities": lambda v: softmax(v.scores) * np.exp(v.mask)}, 1),
    Mistake("mask-of-first-query", "with the mask of the first query for all of them", {"masked": lambda v: v.scores + v.mask[:1]}, 3),
    Mistake("mask-of-head", "with the mask read at the head, not at the query",
            {"masked": lambda v: v.scores + v.mask[head_of(v) % v.mask.shape[0]]}, 3),
    Mistake("masked-row-nan", "with NaN in the rows that are masked everywhere: -inf - -inf, or 0 / 0",
            {"probabilities": lambda v: np.where(v.total == 0, np.nan, share(v.weights, v.total))}),
    Mistake("masked-row-uniform", "with 1 / T in the rows that are masked everywhere",
            {"probabilities": lambda v: np.where(v.total == 0, 1 / v.mask.shape[-1], share(v.weights, v.total))}),
)  # fmt: skip

SOFTMAX_BACKWARD = (
    *formulas.softmax_backward("grad_scores", "probabilities", "grad_probabilities", "dot", BLOCK),
    Mistake("lse-for-delta", "with lse instead of the row sum of dP * P", {"dot": lambda v: lse_or_0(v)}),
)

CHAIN = (
    Mistake("probabilities-squared", "with P multiplied twice", misreading(np.square, "probabilities", steps=("grad_value",))),
    Mistake("scores-for-probabilities", "taken from the scores, not from the probabilities", instead("probabilities", "scores")),
    Mistake("grad-probabilities-for-grad-scores", "taken from dP, not from dS", instead("grad_scores", "grad_probabilities")),
    Mistake("probabilities-for-grad-scores", "taken from P, not from dS", instead("grad_scores", "probabilities")),
    Mistake("value-for-key", "with the value instead of the key", instead("key", "value")),
    Mistake("key-for-value", "with the key instead of the value", instead("value", "key")),
    Mistake("grad-output-for-query", "with dO instead of the query", instead("query", "grad_output", steps=("grad_key",))),
    Mistake("query-for-grad-output", "with the query instead of dO", instead("grad_output", "query")),
    Mistake("last-tile-dropped", "without the last part of a tile of 16 in the sums of the product",
            {step: product.step(lambda a, axis=-2 if product.turned == "left" else -1: without_rest(a, axis))
             for step, product in PRODUCTS.items()}, 3),
)  # fmt: skip

# ---- Flash attention ----------------------------------------------------------------------------------------

# Of one number a thread's own share is the first thread's, and no case has heads as wide as a block.
OF_WIDE_ROWS = ("first-columns-only", "last-columns-only", "own-share-only", "own-warp-only")
DELTA = (
    Mistake("delta-without-grad-output", "with the sum of O, without dO", {"delta": lambda v: v.output.sum(-1)}),
    Mistake("delta-mean", "with the mean over the elements of the head, not the sum",
            {"delta": lambda v: (v.grad_output * v.output).mean(-1)}),
    *(
        mistake
        for mistake in formulas.sums(
            lambda v: v.grad_output * v.output, BLOCK, {"delta": lambda change: lambda v: change(v)[..., 0]}, "delta-"
        )
        if not mistake.id.endswith(OF_WIDE_ROWS)
    ),
    Mistake("delta-of-grad-output", "with the row sum of dO * dO, not of dO * O", {"delta": lambda v: (v.grad_output**2).sum(-1)}),
)  # fmt: skip


def other_weights(id: str, words: str, weights: Step) -> Mistake:
    """Return a mistake with another matrix for P, where it is recomputed."""
    return Mistake(
        id, words,
        {"grad_scores": lambda v: weights(v) * (v.grad_probabilities - v.dot),
         "grad_value": lambda v: transpose(weights(v)) @ v.grad_output},
    )  # fmt: skip


def first_rows(array: np.ndarray) -> np.ndarray:
    return array[..., :TILE, :]


FLASH = (
    *formulas.online("the total", "score", lambda weights: {
        "output": lambda v: v.weights / or_1(formulas.total(by_tiles(v, weights))) @ v.value,
        "lse": lambda v: lse_of(v, formulas.total(by_tiles(v, weights))),
    }, "total-"),
    *formulas.online("the sums", "score", lambda weights: {
        "output": lambda v: share(by_tiles(v, weights), v.total) @ v.value,
    }, "sums-"),
    *formulas.online("total and sums", "score", lambda weights: {
        "output": lambda v: (tiled := by_tiles(v, weights)) / or_1(formulas.total(tiled)) @ v.value
    }),
    Mistake("last-tile-alone", "of the last tile of keys alone: what came before is overwritten",
            misreading(last_tile, "probabilities", "grad_scores", steps=("output", "grad_query"))),
    Mistake("past-the-end-counted", "with the total counting keys past the end, as if their score were 0",
            {"total": lambda v: v.weights.sum(-1, keepdims=True) + -v.masked.shape[-1] % TILE * np.exp(-or_0(v.largest))}),
    Mistake("lse-without-largest", "without the largest score of the row", {"lse": lambda v: np.log(v.total[..., 0])}),
    Mistake("lse-without-log", "without the logarithm of the total",
            {"lse": lambda v: np.where(v.total == 0, -np.inf, v.largest + v.total)[..., 0]}),
    *DELTA,
    Mistake("total-of-own-keys", "divided by what each thread adds up of its own keys: row_total adds up the threads of a row",
            {"output": lambda v: (v.weights @ v.value) / or_1(own_keys(v)[..., np.arange(v.value.shape[-1]) % TILE]),
             "lse": lambda v: np.log(own_keys(v)[..., 0]) + or_0(v.largest[..., 0])}),
    other_weights("weights-lse-in-bits", "with lse divided by ln 2: exp takes natural logarithms",
                  lambda v: np.exp(v.masked - lse_or_0(v) / np.log(2))),
    other_weights("weights-lse-times-ln-2", "with lse multiplied by ln 2: it is a natural logarithm already",
                  lambda v: np.exp(v.masked - lse_or_0(v) * np.log(2))),
    other_weights("weights-powers-of-2", "with exp2 for exp: the scores are natural logarithms",
                  lambda v: np.exp2(v.masked - lse_or_0(v))),
    other_weights("weights-lse-added", "with lse added to the score, not subtracted", lambda v: np.exp(v.masked + lse_or_0(v))),
    Mistake("last-queries-alone", "of the last tile of queries alone: what came before is overwritten",
            {"grad_key": lambda v: v.scale * (transpose(last_tile(v.grad_scores, -2)) @ last_of_group(v.query, v)),
             "grad_value": lambda v: transpose(last_tile(v.probabilities, -2)) @ last_of_group(v.grad_output, v)}),
    Mistake("first-queries-alone", "of the first tile of queries alone",
            misreading(first_rows, *OPERANDS, steps=("grad_key", "grad_value"))),
    Mistake("first-keys-alone", "of the first tile of keys alone",
            {step: PRODUCTS[step].step(lambda weights: weights[..., :TILE], first_rows) for step in ("output", "grad_query")}),
    Mistake("queries-at-the-keys", "with the rows of a tile of queries read at the place of the keys, t0 for s0",
            {"grad_value": lambda v: at_the_keys(v.probabilities, v.grad_output),
             "grad_key": lambda v: v.scale * at_the_keys(v.grad_scores, v.query)}, 3),
    *(
        Mistake(id, words, {step: PRODUCTS[step].step(right=read) for step in ("output", "grad_query", "grad_key", "grad_value")}, 3)
        for id, words, read in (
            ("factor-tile-transposed", "with each tile of the factor read as its transpose: [x, i] for [i, x]", tile_transposed),
            ("first-chunk-again", "with the first 16 elements of each row in every chunk: chunk * TILE is missing",
             lambda rows: rows[..., np.arange(rows.shape[-1]) % TILE]),
        )
    ),
    Mistake("keys-at-the-queries", "with the rows of a tile of keys read at the place of the queries, s0 for t0",
            {"output": lambda v: at_the_keys(transpose(v.probabilities), v.value),
             "grad_query": lambda v: v.scale * at_the_keys(transpose(v.grad_scores), v.key)}, 3),
    Mistake("weights-transposed", "with each tile of weights read as its transpose: weights[i, y] for weights[y, i]",
            {"output": lambda v: weights_transposed(v) @ v.value / or_1(v.total)}, 3),
    other_weights("lse-forgotten", "with exp(score) for P, without lse", lambda v: in_float32(np.exp, v.masked)),
    Mistake("slopes-for-weights", "with scale * dS instead of P", instead("probabilities", "grad_scores", 1, ("grad_value",))),
    Mistake("weights-for-slopes", "with P instead of scale * dS", instead("grad_scores", "probabilities", -1)),
    Mistake("one-query-head", "with the last alone of the query heads that share a head of key and value",
            {"grad_key": lambda v: v.scale * (transpose(v.grad_scores) @ last_of_group(v.query, v)),
             "grad_value": lambda v: transpose(v.probabilities) @ last_of_group(v.grad_output, v)}, 3),
    Mistake("tile-transposed", "with each tile read as its transpose: [i, y] for [y, i]",
            {**misreading(tile_transposed, "probabilities", "grad_scores"), "transposed_product": TRANSPOSED.step(tile_transposed)}, 3),
)  # fmt: skip

MISTAKES = tuple(
    apart(
        (
            *SCORES,
            *TRANSPOSES,
            Mistake("query-not-transposed", "with the query read as if it were stored [d, S]", {"transposed_product": TRANSPOSED.step(misread_strides)}, 3),
            *SOFTMAX,
            *SOFTMAX_BACKWARD,
            *CHAIN,
            *FLASH,
            *other_heads("of-next-head", "of the next head", lambda i, B, N: i + 1),
            *other_heads("of-first-head", "of the first head, the head left out of the index", lambda i, B, N: 0 * i),
            *other_heads("of-first-sequence", "of the first sequence, the batch left out of the index", lambda i, B, N: i % N),
        )
    )
)  # fmt: skip
