"""The mistakes that people make in puzzle 23, as changes of its derivation.

Shapes are those of `derivation.py`. Where two mistakes give the same values in every failing case, the first is named.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p23.derivation import share, shift, transposed
from harness.spec.derivation import Derivation, Mistake, Step

TILE = 16
BLOCK = 128
"""What kernels cut a matrix and a row into."""


def as_stored(array: np.ndarray) -> np.ndarray:
    """Matrices [.., m, n] read as if they were stored [n, m]: [.., n, m], the transpose that was forgotten."""
    *heads, m, n = array.shape
    return array.reshape(*heads, n, m)


def without_rest(array: np.ndarray, axis: int) -> np.ndarray:
    """With zeros after the last whole tile along an axis."""
    kept = np.moveaxis(array.copy(), axis, -1)
    kept[..., kept.shape[-1] // TILE * TILE :] = 0
    return np.moveaxis(kept, -1, axis)


def apart(mistakes: Iterable[Mistake]) -> Iterator[Mistake]:
    """Each step that a mistake changes as a mistake of its own: who makes it in one product has the others right."""
    for mistake in mistakes:
        for step, change in mistake.changes.items():
            yield replace(mistake, changes={step: change})


def by_tiles(v: Derivation, weights: Callable[[formulas.Online], np.ndarray]) -> np.ndarray:
    """What replaces the exponentials [B, N, S, T] in an online softmax over the tiles of keys."""
    online = formulas.Online.of(v.masked, 1, TILE)
    return online.rows(weights(online))


def tile_transposed(array: np.ndarray) -> np.ndarray:
    """Matrices whose tiles are each transposed, and stand where they stood."""
    rest = [(0, -size % TILE) for size in array.shape[-2:]]
    whole = np.pad(array, [(0, 0)] * (array.ndim - 2) + rest)
    rows, columns = (size // TILE for size in whole.shape[-2:])
    apart = whole.reshape(*array.shape[:-2], rows, TILE, columns, TILE).swapaxes(-1, -3)
    return apart.reshape(whole.shape)[..., : array.shape[-2], : array.shape[-1]]


def by_query(v: Derivation) -> np.ndarray:
    """The softmax taken over the queries, not the keys."""
    weights = np.exp(v.masked - shift(v.masked.max(-2, keepdims=True)))
    total = weights.sum(-2, keepdims=True)
    return np.where(total == 0, 0.0, weights / np.where(total == 0, 1.0, total))


def heads(array: np.ndarray, index: Callable[[np.ndarray, int, int], np.ndarray]) -> np.ndarray:
    """Every head replaced by another one: `index(i, B, N)` is what head i of B * N reads."""
    B, N = array.shape[:2]
    chosen = index(np.arange(B * N), B, N) % (B * N)
    return array.reshape(B * N, *array.shape[2:])[chosen].reshape(array.shape)


def other_heads(name: str, words: str, index: Callable[[np.ndarray, int, int], np.ndarray]) -> list[Mistake]:
    """A tensor read from another head than its own: each of the operands of the products."""
    readers: dict[str, dict[str, Step]] = {
        "query": {
            "scores": lambda v: v.scale * (heads(v.query, index) @ transposed(v.key)),
            "grad_key": lambda v: v.scale * (transposed(v.grad_scores) @ heads(v.query, index)),
        },
        "key": {
            "scores": lambda v: v.scale * (v.query @ transposed(heads(v.key, index))),
            "grad_query": lambda v: v.scale * (v.grad_scores @ heads(v.key, index)),
        },
        "value": {
            "output": lambda v: v.probabilities @ heads(v.value, index),
            "grad_probabilities": lambda v: v.grad_output @ transposed(heads(v.value, index)),
        },
        "probabilities": {
            "output": lambda v: heads(v.probabilities, index) @ v.value,
            "grad_value": lambda v: transposed(heads(v.probabilities, index)) @ v.grad_output,
        },
        "grad_output": {
            "grad_value": lambda v: transposed(v.probabilities) @ heads(v.grad_output, index),
            "grad_probabilities": lambda v: heads(v.grad_output, index) @ transposed(v.value),
        },
        "grad_scores": {
            "grad_query": lambda v: v.scale * (heads(v.grad_scores, index) @ v.key),
            "grad_key": lambda v: v.scale * (transposed(heads(v.grad_scores, index)) @ v.query),
        },
    }
    return [
        Mistake(f"{tensor}-{name}", f"with {tensor} {words}", steps, 3) for tensor, steps in readers.items()
    ]


SCORES = (
    Mistake(
        "scale-forgotten",
        "without the scale 1 / sqrt(d)",
        {
            "scores": lambda v: v.query @ transposed(v.key),
            "grad_query": lambda v: v.grad_scores @ v.key,
            "grad_key": lambda v: transposed(v.grad_scores) @ v.query,
        },
    ),
    Mistake(
        "scale-twice",
        "with the scale 1 / sqrt(d) applied twice",
        {
            "scores": lambda v: v.scale**2 * (v.query @ transposed(v.key)),
            "grad_query": lambda v: v.scale**2 * (v.grad_scores @ v.key),
            "grad_key": lambda v: v.scale**2 * (transposed(v.grad_scores) @ v.query),
        },
    ),
    Mistake(
        "scale-by-length",
        "with 1 / sqrt(key length) for the scale",
        {"scores": lambda v: v.query @ transposed(v.key) / np.sqrt(v.key.shape[-2])},
    ),
    Mistake(
        "scale-in-the-chain",
        "scaled where nothing is: the scale belongs to the scores, dQ and dK alone",
        {
            "masked": lambda v: v.scale * v.scores + v.mask,
            "output": lambda v: v.scale * (v.probabilities @ v.value),
            "grad_value": lambda v: v.scale * (transposed(v.probabilities) @ v.grad_output),
            "grad_probabilities": lambda v: v.scale * (v.grad_output @ transposed(v.value)),
            "grad_scores": lambda v: v.scale * v.probabilities * (v.grad_probabilities - v.dot),
        },
    ),
)

TRANSPOSES = (
    Mistake(
        "key-not-transposed",
        "with the key read as if it were stored [d, T]",
        {"scores": lambda v: v.scale * (v.query @ as_stored(v.key))},
        3,
    ),
    Mistake(
        "value-not-transposed",
        "with the value read as if it were stored [d, T]",
        {"grad_probabilities": lambda v: v.grad_output @ as_stored(v.value)},
        3,
    ),
    Mistake(
        "value-transposed",
        "with the value read as if it were stored [d, T], transposed for nothing",
        {"output": lambda v: v.probabilities @ transposed(as_stored(v.value))},
        3,
    ),
    Mistake(
        "probabilities-not-transposed",
        "with P not transposed, P[t, s] read at t * S + s: by the launch, or by matmul, whose load of a transposed factor is not turned",
        {"grad_value": lambda v: as_stored(v.probabilities) @ v.grad_output},
        3,
    ),
    Mistake(
        "probabilities-transposed",
        "with P transposed for nothing: P[s, t] read at t * S + s",
        {"output": lambda v: transposed(as_stored(v.probabilities)) @ v.value},
        3,
    ),
    Mistake(
        "grad-scores-not-transposed",
        "with dS not transposed, dS[t, s] read at t * S + s: by the launch, or by matmul, whose load of a transposed factor is not turned",
        {"grad_key": lambda v: v.scale * (as_stored(v.grad_scores) @ v.query)},
        3,
    ),
    Mistake(
        "grad-scores-transposed",
        "with dS transposed for nothing: dS[s, t] read at t * S + s",
        {"grad_query": lambda v: v.scale * (transposed(as_stored(v.grad_scores)) @ v.key)},
        3,
    ),
    Mistake(
        "other-factor-transposed",
        "with transpose_a for transpose_b, or the other way round: the factor that is stored as it is needed is turned, the other is not",
        {
            "grad_value": lambda v: as_stored(v.probabilities) @ transposed(as_stored(v.grad_output)),
            "grad_probabilities": lambda v: transposed(as_stored(v.grad_output)) @ as_stored(v.value),
            "grad_key": lambda v: v.scale * (as_stored(v.grad_scores) @ transposed(as_stored(v.query))),
        },
        3,
    ),
    Mistake(
        "query-not-transposed",
        "with the query read as if it were stored [d, S]",
        {"transposed_product": lambda v: as_stored(v.query) @ v.grad_output},
        3,
    ),
    Mistake(
        "key-transposed",
        "with the key read as if it were stored [d, T], transposed for nothing",
        {"grad_query": lambda v: v.scale * (v.grad_scores @ transposed(as_stored(v.key)))},
        3,
    ),
)

SOFTMAX = (
    Mistake("softmax-over-queries", "taken over the queries, not the keys", {"probabilities": by_query}, 1),
    Mistake(
        "largest-of-hidden",
        "with the largest of all scores subtracted, those that the mask hides included",
        {"weights": lambda v: np.exp(v.masked - v.scores.max(-1, keepdims=True))},
    ),
    *formulas.softmax("weights", "total", "probabilities", "masked", BLOCK),
    Mistake("mask-forgotten", "without the mask", {"masked": lambda v: v.scores}),
    Mistake(
        "mask-as-factor",
        "with the scores multiplied by the mask, not added to it",
        {"masked": lambda v: v.scores * v.mask},
    ),
    Mistake(
        "mask-exponential",
        "with the scores multiplied by exp(mask): what is added to a score multiplies its exponential, and 0 hides nothing",
        {"masked": lambda v: v.scores * np.exp(v.mask)},
    ),
    Mistake(
        "mask-hides-alone",
        "with the mask's -inf alone: its other numbers are added too",
        {"masked": lambda v: np.where(np.isneginf(v.mask), -np.inf, v.scores)},
    ),
    Mistake("mask-subtracted", "with the mask subtracted", {"masked": lambda v: v.scores - v.mask}),
    Mistake(
        "mask-after-softmax",
        "with the mask applied after the softmax: what it hides still counts in the sum of the row",
        {"probabilities": lambda v: softmax(v.scores) * np.exp(v.mask)},
        1,
    ),
    Mistake(
        "mask-of-first-query",
        "with the mask of the first query for all of them",
        {"masked": lambda v: v.scores + v.mask[:1]},
        3,
    ),
    Mistake(
        "mask-of-head",
        "with the mask read at the head, not at the query",
        {"masked": lambda v: v.scores + v.mask[head_of(v) % v.mask.shape[0]]},
        3,
    ),
    Mistake(
        "masked-row-nan",
        "with NaN in the rows that are masked everywhere: -inf - -inf, or 0 / 0",
        {"probabilities": lambda v: np.where(v.total == 0, np.nan, share(v.weights, v.total))},
    ),
    Mistake(
        "masked-row-uniform",
        "with 1 / T in the rows that are masked everywhere",
        {"probabilities": lambda v: np.where(v.total == 0, 1 / v.mask.shape[-1], share(v.weights, v.total))},
    ),
)

SOFTMAX_BACKWARD = (
    *formulas.softmax_backward("grad_scores", "probabilities", "grad_probabilities", "dot", BLOCK),
    Mistake(
        "lse-for-delta",
        "with lse instead of the row sum of dP * P",
        {"dot": lambda v: lse_or_0(v)},
    ),
)

CHAIN = (
    Mistake(
        "probabilities-squared",
        "with P multiplied twice",
        {"grad_value": lambda v: transposed(v.probabilities**2) @ v.grad_output},
    ),
    Mistake(
        "scores-for-probabilities",
        "taken from the scores, not from the probabilities",
        {
            "output": lambda v: v.scores @ v.value,
            "grad_value": lambda v: transposed(v.scores) @ v.grad_output,
        },
    ),
    Mistake(
        "grad-probabilities-for-grad-scores",
        "taken from dP, not from dS",
        {
            "grad_query": lambda v: v.scale * (v.grad_probabilities @ v.key),
            "grad_key": lambda v: v.scale * (transposed(v.grad_probabilities) @ v.query),
        },
    ),
    Mistake(
        "probabilities-for-grad-scores",
        "taken from P, not from dS",
        {
            "grad_query": lambda v: v.scale * (v.probabilities @ v.key),
            "grad_key": lambda v: v.scale * (transposed(v.probabilities) @ v.query),
        },
    ),
    Mistake(
        "value-for-key",
        "with the value instead of the key",
        {
            "scores": lambda v: v.scale * (v.query @ transposed(v.value)),
            "grad_query": lambda v: v.scale * (v.grad_scores @ v.value),
        },
    ),
    Mistake(
        "key-for-value",
        "with the key instead of the value",
        {
            "output": lambda v: v.probabilities @ v.key,
            "grad_probabilities": lambda v: v.grad_output @ transposed(v.key),
        },
    ),
    Mistake(
        "grad-output-for-query",
        "with dO instead of the query",
        {"grad_key": lambda v: v.scale * (transposed(v.grad_scores) @ v.grad_output)},
    ),
    Mistake(
        "query-for-grad-output",
        "with the query instead of dO",
        {
            "grad_value": lambda v: transposed(v.probabilities) @ v.query,
            "grad_probabilities": lambda v: v.query @ transposed(v.value),
        },
    ),
    Mistake(
        "last-tile-dropped",
        "without the last part of a tile of 16 in the sums of the product",
        {
            "scores": lambda v: v.scale * (without_rest(v.query, -1) @ transposed(v.key)),
            "output": lambda v: without_rest(v.probabilities, -1) @ v.value,
            "grad_value": lambda v: transposed(without_rest(v.probabilities, -2)) @ v.grad_output,
            "grad_probabilities": lambda v: without_rest(v.grad_output, -1) @ transposed(v.value),
            "grad_query": lambda v: v.scale * (without_rest(v.grad_scores, -1) @ v.key),
            "grad_key": lambda v: v.scale * (transposed(without_rest(v.grad_scores, -2)) @ v.query),
        },
        3,
    ),
)

FLASH = (
    *formulas.online(
        "the total",
        "score",
        lambda weights: {
            "output": lambda v: v.weights / or_1(formulas.total(by_tiles(v, weights))) @ v.value,
            "lse": lambda v: lse_of(v, formulas.total(by_tiles(v, weights))),
        },
        "total-",
    ),
    *formulas.online(
        "the sums",
        "score",
        lambda weights: {"output": lambda v: share(by_tiles(v, weights), v.total) @ v.value},
        "sums-",
    ),
    *formulas.online(
        "total and sums",
        "score",
        lambda weights: {
            "output": lambda v: (tiled := by_tiles(v, weights)) / or_1(formulas.total(tiled)) @ v.value
        },
    ),
    Mistake(
        "last-tile-alone",
        "of the last tile of keys alone: what came before is overwritten",
        {
            "output": lambda v: last_tile(v.probabilities) @ v.value,
            "grad_query": lambda v: v.scale * (last_tile(v.grad_scores) @ v.key),
        },
    ),
    Mistake(
        "past-the-end-counted",
        "with the total counting keys past the end, as if their score were 0",
        {
            "total": lambda v: (
                v.weights.sum(-1, keepdims=True) + -v.masked.shape[-1] % TILE * np.exp(-shift(v.largest))
            )
        },
    ),
    Mistake(
        "lse-without-largest",
        "without the largest score of the row",
        {"lse": lambda v: np.log(v.total[..., 0])},
    ),
    Mistake(
        "lse-without-log",
        "without the logarithm of the total",
        {"lse": lambda v: np.where(v.total == 0, -np.inf, v.largest + v.total)[..., 0]},
    ),
    Mistake(
        "delta-without-grad-output", "with the sum of O, without dO", {"delta": lambda v: v.output.sum(-1)}
    ),
    Mistake(
        "delta-mean",
        "with the mean over the elements of the head, not the sum",
        {"delta": lambda v: (v.grad_output * v.output).mean(-1)},
    ),
    *(
        mistake
        for mistake in formulas.sums(
            lambda v: v.grad_output * v.output,
            BLOCK,
            {"delta": lambda change: lambda v: change(v)[..., 0]},
            "delta-",
        )
        # No case has heads as wide; of one number a thread's own share is the first thread's, and its warp the first.
        if mistake.id.removeprefix("delta-")
        not in ("first-columns-only", "last-columns-only", "own-share-only", "own-warp-only")
    ),
    Mistake(
        "delta-of-grad-output",
        "with the row sum of dO * dO, not of dO * O",
        {"delta": lambda v: (v.grad_output**2).sum(-1)},
    ),
    Mistake(
        "total-of-own-keys",
        "divided by what each thread adds up of its own keys: row_total adds up the threads of a row",
        {
            "output": lambda v: (
                (v.weights @ v.value) / or_1(own_keys(v)[..., np.arange(v.value.shape[-1]) % TILE])
            ),
            "lse": lambda v: np.log(own_keys(v)[..., 0]) + shift(v.largest[..., 0]),
        },
    ),
    *(
        Mistake(
            f"weights-{name}",
            words,
            {
                "grad_scores": lambda v, weights=weights: weights(v) * (v.grad_probabilities - v.dot),
                "grad_value": lambda v, weights=weights: transposed(weights(v)) @ v.grad_output,
            },
        )
        for name, words, weights in (
            (
                "lse-in-bits",
                "with lse divided by ln 2: exp takes natural logarithms",
                lambda v: np.exp(v.masked - lse_or_0(v) / np.log(2)),
            ),
            (
                "lse-times-ln-2",
                "with lse multiplied by ln 2: it is a natural logarithm already",
                lambda v: np.exp(v.masked - lse_or_0(v) * np.log(2)),
            ),
            (
                "powers-of-2",
                "with exp2 for exp: the scores are natural logarithms",
                lambda v: np.exp2(v.masked - lse_or_0(v)),
            ),
            (
                "lse-added",
                "with lse added to the score, not subtracted",
                lambda v: np.exp(v.masked + lse_or_0(v)),
            ),
        )
    ),
    Mistake(
        "last-queries-alone",
        "of the last tile of queries alone: what came before is overwritten",
        {
            "grad_key": lambda v: (
                v.scale * (transposed(last_tile(v.grad_scores, -2)) @ last_of_group(v.query, v))
            ),
            "grad_value": lambda v: (
                transposed(last_tile(v.probabilities, -2)) @ last_of_group(v.grad_output, v)
            ),
        },
    ),
    Mistake(
        "first-queries-alone",
        "of the first tile of queries alone",
        {
            "grad_key": lambda v: (
                v.scale * (transposed(v.grad_scores[..., :TILE, :]) @ v.query[..., :TILE, :])
            ),
            "grad_value": lambda v: transposed(v.probabilities[..., :TILE, :]) @ v.grad_output[..., :TILE, :],
        },
    ),
    Mistake(
        "first-keys-alone",
        "of the first tile of keys alone",
        {
            "output": lambda v: v.probabilities[..., :TILE] @ v.value[..., :TILE, :],
            "grad_query": lambda v: v.scale * (v.grad_scores[..., :TILE] @ v.key[..., :TILE, :]),
        },
    ),
    Mistake(
        "queries-at-the-keys",
        "with the rows of a tile of queries read at the place of the keys, t0 for s0",
        {
            "grad_value": lambda v: at_the_keys(v.probabilities, v.grad_output),
            "grad_key": lambda v: v.scale * at_the_keys(v.grad_scores, v.query),
        },
        3,
    ),
    *(
        Mistake(
            id,
            words,
            {
                "output": lambda v, read=read: v.probabilities @ read(v.value),
                "grad_query": lambda v, read=read: v.scale * (v.grad_scores @ read(v.key)),
                "grad_key": lambda v, read=read: v.scale * (transposed(v.grad_scores) @ read(v.query)),
                "grad_value": lambda v, read=read: transposed(v.probabilities) @ read(v.grad_output),
            },
            3,
        )
        for id, words, read in (
            (
                "factor-tile-transposed",
                "with each tile of the factor read as its transpose: [x, i] for [i, x]",
                tile_transposed,
            ),
            (
                "first-chunk-again",
                "with the first 16 elements of each row in every chunk: chunk * TILE is missing",
                lambda rows: rows[..., np.arange(rows.shape[-1]) % TILE],
            ),
        )
    ),
    Mistake(
        "keys-at-the-queries",
        "with the rows of a tile of keys read at the place of the queries, s0 for t0",
        {
            "output": lambda v: at_the_keys(transposed(v.probabilities), v.value),
            "grad_query": lambda v: v.scale * at_the_keys(transposed(v.grad_scores), v.key),
        },
        3,
    ),
    Mistake(
        "weights-transposed",
        "with each tile of weights read as its transpose: weights[i, y] for weights[y, i]",
        {"output": lambda v: weights_transposed(v) @ v.value / or_1(v.total)},
        3,
    ),
    Mistake(
        "lse-forgotten",
        "with exp(score) for P, without lse",
        {
            "grad_scores": lambda v: in_float32(np.exp, v.masked) * (v.grad_probabilities - v.dot),
            "grad_value": lambda v: transposed(in_float32(np.exp, v.masked)) @ v.grad_output,
        },
    ),
    Mistake(
        "slopes-for-weights",
        "with scale * dS instead of P",
        {"grad_value": lambda v: v.scale * (transposed(v.grad_scores) @ v.grad_output)},
    ),
    Mistake(
        "weights-for-slopes",
        "with P instead of scale * dS",
        {
            "grad_query": lambda v: v.probabilities @ v.key,
            "grad_key": lambda v: transposed(v.probabilities) @ v.query,
        },
    ),
    Mistake(
        "one-query-head",
        "with the last alone of the query heads that share a head of key and value",
        {
            "grad_key": lambda v: v.scale * (transposed(v.grad_scores) @ last_of_group(v.query, v)),
            "grad_value": lambda v: transposed(v.probabilities) @ last_of_group(v.grad_output, v),
        },
        3,
    ),
    Mistake(
        "tile-transposed",
        "with each tile read as its transpose: [i, y] for [y, i]",
        {
            "output": lambda v: tile_transposed(v.probabilities) @ v.value,
            "grad_query": lambda v: v.scale * (tile_transposed(v.grad_scores) @ v.key),
            "grad_key": lambda v: v.scale * (transposed(tile_transposed(v.grad_scores)) @ v.query),
            "grad_value": lambda v: transposed(tile_transposed(v.probabilities)) @ v.grad_output,
            "transposed_product": lambda v: tile_transposed(transposed(v.query)) @ v.grad_output,
        },
        3,
    ),
)


def last_of_group(array: np.ndarray, v: Derivation) -> np.ndarray:
    """With zeros in each head but the last of those that share a head of key and value."""
    last = np.arange(1, array.shape[1] + 1) % v.group == 0
    return array * last[:, None, None]


def in_float32(function: Callable, array: np.ndarray) -> np.ndarray:
    """What a function gives in float32, which overflows sooner."""
    return np.asarray(function(array.astype(np.float32)), np.float64)


def lse_or_0(v: Derivation) -> np.ndarray:
    """[B, N, S, 1]: lse, and 0 for a row that sees no key."""
    return shift(v.lse[..., None])


def lse_of(v: Derivation, total: np.ndarray) -> np.ndarray:
    """[B, N, S]: the lse with another total [B, N, S, 1]."""
    return np.where(total == 0, -np.inf, shift(v.largest) + np.log(or_1(total)))[..., 0]


def or_1(total: np.ndarray) -> np.ndarray:
    """A total as a divisor: 1 where it is 0."""
    return np.where(total == 0, 1.0, total)


def own_keys(v: Derivation) -> np.ndarray:
    """[B, N, S, TILE]: the total of each thread's own keys."""
    thread = np.arange(v.weights.shape[-1]) % TILE
    return v.weights @ (thread[:, None] == np.arange(TILE))


def at_the_keys(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """weights^T rows, with the rows of each tile of queries read at the tile of the keys: [.., S, T], [.., S, d] -> [.., T, d]."""
    S, T = weights.shape[-2:]
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-2], max(T, S) + TILE, rows.shape[-1]))], -2)
    place = np.arange(S) % TILE
    tiles = [
        transposed(weights[..., t0 : t0 + TILE]) @ padded[..., t0 + place, :] for t0 in range(0, T, TILE)
    ]
    return np.concatenate(tiles, -2)


def weights_transposed(v: Derivation) -> np.ndarray:
    """The exponentials of an online softmax [B, N, S, T] whose tiles are each transposed, as they count in the end."""
    online = formulas.Online.of(v.masked, 1, TILE)
    tiles = tile_transposed(online.rows(np.exp(online.scores - online.after)))
    rescaled = formulas.later(np.exp(online.before - online.after))
    return tiles * online.rows(np.broadcast_to(rescaled, online.scores.shape))


def last_tile(array: np.ndarray, axis: int = -1) -> np.ndarray:
    """With zeros in front of the last tile of keys, or along another axis."""
    kept = np.moveaxis(np.zeros_like(array), axis, -1)
    first = (kept.shape[-1] - 1) // TILE * TILE
    kept[..., first:] = np.moveaxis(array, axis, -1)[..., first:]
    return np.moveaxis(kept, -1, axis)


def softmax(scores: np.ndarray) -> np.ndarray:
    """The softmax of scores without a mask."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def head_of(v: Derivation) -> np.ndarray:
    """[B, N, S]: the number of the head that each row belongs to."""
    B, N, S = v.query.shape[:3]
    return np.broadcast_to(np.arange(B * N).reshape(B, N, 1), (B, N, S))


MISTAKES = tuple(
    apart(
        (
            *SCORES,
            *TRANSPOSES,
            *SOFTMAX,
            *SOFTMAX_BACKWARD,
            *CHAIN,
            *FLASH,
            *other_heads("of-next-head", "of the next head", lambda i, B, N: i + 1),
            *other_heads(
                "of-first-head", "of the first head, the head left out of the index", lambda i, B, N: 0 * i
            ),
            *other_heads(
                "of-first-sequence",
                "of the first sequence, the batch left out of the index",
                lambda i, B, N: i % N,
            ),
        )
    )
)
