"""The derivation of puzzle 25 in NumPy, on the whole sequence, and its known mistakes.

Shapes: query, output and grad_output [B, N, S, d]; key and value [B, G, S, d]; scores [B, N, S, S]. For each
rank's block of keys: block_lse and share [blocks, B, N, S], block_output [blocks, B, N, S, d]. `owner` and
`index` [S] are the rank that holds a position and the index there; `block` [S] is the block of a key: all
that a rank holds, or one of its ranges.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p25.layout import cut, homes
from harness.puzzles.rows import log_sum_exp, or_0, repeat_heads, sum_shared
from harness.spec.derivation import Derivation, Mistake, Step, derive_by
from harness.spec.rounding import round_to_dtype


def of_blocks(v: Derivation) -> list[np.ndarray]:
    """Return for every block the scores, -inf for keys of other blocks."""
    return [np.where(v.block == number, v.masked, -np.inf) for number in range(int(v.block.max()) + 1)]


def mislabel_blocks(v: Derivation, label: np.ndarray) -> np.ndarray:
    """Return the visible keys if the block of rank owner(t), held by owner(s), is used as that of rank
    label[s, t]."""
    behind = np.full((int(v.ranks), len(v.owner)), 2**31)
    behind[v.owner, v.index] = np.arange(len(v.owner))
    place = behind[label, v.index[None, :]]
    return (place <= np.arange(len(v.owner))[:, None]) | (v.causal == 0)


def move_gradient(array: np.ndarray, v: Derivation, by: int) -> np.ndarray:
    """Return a gradient [B, G, S, d] that ended at another rank: every rank has that of rank + by; NaN if
    there is none."""
    source = np.full((int(v.ranks), len(v.owner)), -1)
    source[v.owner, v.index] = np.arange(len(v.owner))
    chosen = source[(v.owner + by) % int(v.ranks), v.index]
    return np.where((chosen >= 0)[:, None], array[:, :, chosen], np.nan)


STEPS = {
    "home": lambda v: homes(int(v.ranks), v.query.shape[2], bool(v.balanced)),
    "owner": lambda v: v.home[0],
    "index": lambda v: v.home[1],
    "block": lambda v: v.owner,
    "scale": lambda v: 1 / np.sqrt(v.query.dtype.type(v.query.shape[-1])),
    "scores": lambda v: v.scale * (v.query @ repeat_heads(v.key, v.query).swapaxes(-1, -2)),
    "visible": lambda v: np.tri(len(v.owner), dtype=bool) | (v.causal == 0),
    "masked": lambda v: np.where(v.visible, v.scores, -np.inf),
    "block_lse": lambda v: np.stack([log_sum_exp(scores) for scores in of_blocks(v)]),
    "block_output": lambda v: np.stack(
        [
            np.exp(scores - or_0(lse)[..., None]) @ repeat_heads(v.value, v.query)
            for scores, lse in zip(of_blocks(v), v.block_lse, strict=True)
        ]
    ),
    "lse": lambda v: log_sum_exp(v.masked),
    "share": lambda v: np.exp(v.block_lse - or_0(v.lse)),
    "output": lambda v: (v.share[..., None] * v.block_output).sum(0),
    "probabilities": lambda v: np.exp(v.masked - or_0(v.lse)[..., None]),
    "grad_probabilities": lambda v: v.grad_output @ repeat_heads(v.value, v.query).swapaxes(-1, -2),
    "delta": lambda v: (v.grad_output * v.output).sum(-1, keepdims=True),
    "grad_scores": lambda v: v.probabilities * (v.grad_probabilities - v.delta),
    "grad_query": lambda v: v.scale * (v.grad_scores @ repeat_heads(v.key, v.query)),
    "grad_key": lambda v: sum_shared(v.scale * (v.grad_scores.swapaxes(-1, -2) @ v.query), v.key),
    "grad_value": lambda v: sum_shared(v.probabilities.swapaxes(-1, -2) @ v.grad_output, v.key),
}
derive = derive_by(STEPS)


def distance(v: Derivation) -> np.ndarray:
    """Return how many steps the block of a key has travelled when it meets a query, [S, S]."""
    return (v.owner[:, None] - v.owner[None, :]) % int(v.ranks)


def without(steps: Step) -> Step:
    """Return a step that leaves out some pairs of blocks; `steps` is True for those."""
    return lambda v: (np.tri(len(v.owner), dtype=bool) | (v.causal == 0)) & ~steps(v)


def last_share(v: Derivation) -> np.ndarray:
    """Return 1 for the block that came last, 0 for the others."""
    last = (np.arange(int(v.ranks))[:, None] - v.owner[None, :] - 1) % int(v.ranks) == 0
    return np.where(last[:, None, None], 1.0, 0.0) * np.ones_like(v.block_lse)


RINGS = (
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)",
            {"grad_query": lambda v: v.grad_scores @ repeat_heads(v.key, v.query),
             "grad_key": lambda v: sum_shared(v.grad_scores.swapaxes(-1, -2) @ v.query, v.key)}),
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d) in the scores",
            {"scores": lambda v: v.query @ repeat_heads(v.key, v.query).swapaxes(-1, -2)}),
    Mistake("not-renormalised",
            "with the outputs of the blocks added as they are: each must be weighed by exp(its lse - the lse of all)",
            {"share": lambda v: np.where(np.isneginf(v.block_lse), 0.0, 1.0)}),
    Mistake("step-too-few",
            "without the block that takes the longest way: a ring of n ranks has n steps, and n - 1 transfers between them",
            {"visible": without(lambda v: distance(v) == v.ranks - 1)}),
    Mistake("own-block-only", "with the rank's own keys alone", {"visible": without(lambda v: distance(v) > 0)}),
    Mistake("own-block-missing", "without the rank's own keys", {"visible": without(lambda v: distance(v) == 0)}),
    Mistake("local-index",
            "with the causal mask by the index within a block: it must compare positions in the whole sequence",
            {"visible": lambda v: (v.index[None, :] <= v.index[:, None]) | (v.causal == 0)}),
    Mistake("mask-forgotten", "without the causal mask",
            {"visible": lambda v: np.ones((len(v.owner),) * 2, bool)}),
    Mistake("diagonal-hidden", "with a query's own key hidden",
            {"visible": lambda v: np.tri(len(v.owner), k=-1, dtype=bool) | (v.causal == 0)}),
    Mistake("backwards",
            "with the blocks taken for those of other ranks: they travel in the opposite direction to the steps' count",
            {"visible": lambda v: mislabel_blocks(v, ((2 * v.owner[:, None] - v.owner[None, :]) % int(v.ranks)).astype(int))}),
    Mistake("lse-of-the-block",
            "with P from the lse of the block alone: it must be that of all keys, which the forward pass has kept",
            {"probabilities": lambda v: np.exp(v.masked - or_0(np.moveaxis(v.block_lse[v.block], 0, -1)))}),
    Mistake("delta-forgotten", "without delta: dS = P * (dP - delta)", {"delta": lambda v: np.zeros(1)}),
    Mistake("lse-for-delta", "with lse instead of delta: dS = P * (dP - delta)",
            {"delta": lambda v: v.lse[..., None]}),
    Mistake("delta-of-the-block",
            "with the row sum of dP * P over the keys of the block alone: delta is that over all keys, the row sum of dO * out",
            {"delta": lambda v: np.einsum("bnsu,tu->bnst", v.probabilities * v.grad_probabilities, (v.block[:, None] == v.block) * 1.0)}),
    Mistake("not-returned",
            "with the gradients of another rank's block: they have one more step to go to their owner",
            {name: lambda v, name=name: move_gradient(STEPS[name](v), v, 1) for name in ("grad_key", "grad_value")}),
    Mistake("one-step-too-far", "with the gradients of another rank's block: they have gone a step too far",
            {name: lambda v, name=name: move_gradient(STEPS[name](v), v, -1) for name in ("grad_key", "grad_value")}),
    Mistake("own-share-only", "with what the rank's own queries add alone",
            {"grad_key": lambda v: sum_shared(v.scale * (within(v.grad_scores, v).swapaxes(-1, -2) @ v.query), v.key),
             "grad_value": lambda v: sum_shared(within(v.probabilities, v).swapaxes(-1, -2) @ v.grad_output, v.key)}),
    Mistake("last-share-only",
            "with what the last rank on the way adds alone: each rank must add to what has come",
            {"grad_key": lambda v: sum_shared(v.scale * (only_last_rank(v.grad_scores, v).swapaxes(-1, -2) @ v.query), v.key),
             "grad_value": lambda v: sum_shared(only_last_rank(v.probabilities, v).swapaxes(-1, -2) @ v.grad_output, v.key)}),
    Mistake("travels-in-bfloat16",
            "as a sum that is rounded to bfloat16 at every rank: it must travel in float32",
            {"grad_key": lambda v: in_bfloat16(v, v.scale * v.grad_scores, v.query),
             "grad_value": lambda v: in_bfloat16(v, v.probabilities, v.grad_output)}, 3),
)  # fmt: skip


def within(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Return scores [.., S, S] with 0 where query and key are on different ranks."""
    return np.where(v.owner[:, None] == v.owner, array, 0.0)


def only_last_rank(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Return scores [.., S, S] with 0 except for the queries of the rank that a block of keys reaches last."""
    return np.where(distance(v) == v.ranks - 1, array, 0.0)


def in_bfloat16(v: Derivation, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights^T rows, [B, G, S, d], summed rank after rank along the ring with a rounding at each."""
    total = np.zeros(v.key.shape)
    for step in range(int(v.ranks)):
        share = np.where(distance(v) == step, weights, 0.0).swapaxes(-1, -2) @ rows
        total = round_to_dtype(total + round_to_dtype(sum_shared(share, v.key), "bfloat16"), "bfloat16")
    return total


def ranges(v: Derivation) -> np.ndarray:
    """Return the range of each position, [S], counted from the front."""
    size, length = int(v.ranks), len(v.owner)
    edges = [stop for _, stop in cut(length, 2 * size if v.balanced else size)]
    return np.searchsorted(edges, np.arange(length), side="right")


def within_ranges(v: Derivation) -> np.ndarray:
    """Return the visible keys by the index within a range, of the ranges that do not start after it."""
    number = ranges(v)
    index = np.arange(len(number)) - np.searchsorted(number, number)
    return ((index <= index[:, None]) & (number <= number[:, None])) | (v.causal == 0)


def same_range(v: Derivation) -> np.ndarray:
    """Return which keys are in the range of a query, [S, S]."""
    number = ranges(v)
    return number[:, None] == number


def transpose_mask(v: Derivation, number: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the visible keys if a mask of two blocks of one length is transposed: `number` is a position's
    block, [S]."""
    place = np.full((int(number.max()) + 1, int(index.max()) + 1), 2**31)
    place[number, index] = np.arange(len(number))
    query = place[number[:, None], index]
    key = place[number, index[:, None]]
    return (key <= query) | (v.causal == 0)


def by_range(mistakes: tuple[Mistake, ...]) -> Iterator[Mistake]:
    """Yield each mistake as it is, and with the ranges of a rank attended to one by one."""
    for mistake in mistakes:
        yield mistake
        if {"share", "probabilities", "delta"} & mistake.changes.keys():
            yield replace(mistake, changes={**mistake.changes, "block": ranges})


def at_block_edges(mistake: Mistake) -> Mistake:
    """Return the mistake with ranges of keys that are entirely after a range of queries left out, not masked."""

    def grad_scores(v: Derivation) -> np.ndarray:
        number = ranges(v)
        meets = (number <= number[:, None]) | (v.causal == 0)
        return np.where(meets, mistake.changes["grad_scores"](v), 0.0)

    return replace(mistake, changes={"grad_scores": grad_scores})


SOFTMAX_BACKWARD = tuple(
    mistake
    for mistake in formulas.softmax_backward("grad_scores", "probabilities", "grad_probabilities", "delta", 1)
    if "grad_scores" in mistake.changes  # the summation of delta is given code here
)


MISTAKES = (
    *by_range(RINGS),
    *SOFTMAX_BACKWARD,
    *map(at_block_edges, SOFTMAX_BACKWARD),
    Mistake("last-block-only", "with the block that came last alone", {"share": last_share}),
    Mistake("local-index",
            "with the causal mask by the index within a range: it must compare positions in the whole sequence",
            {"visible": within_ranges}),
    Mistake("sees-later",
            "with a query that sees its own key and the later ones: the mask hides what it should show",
            {"visible": lambda v: np.tri(len(v.owner), dtype=bool).T | (v.causal == 0)}),
    Mistake("sees-later",
            "with a query that sees its own key and the later ones of its range: the mask hides what it should show",
            {"visible": lambda v: (np.tri(len(v.owner), dtype=bool).T & same_range(v)) | (v.causal == 0)}),
    Mistake("mask-turned",
            "with rows and columns of the mask exchanged: it has a row for each query and a column for each key",
            {"visible": lambda v: transpose_mask(v, v.owner, v.index)}),
    Mistake("mask-turned",
            "with rows and columns of the mask exchanged: it has a row for each query and a column for each key",
            {"visible": lambda v: np.where(same_range(v), np.tri(len(v.owner), dtype=bool).T, STEPS["visible"](v)) | (v.causal == 0)}),
)  # fmt: skip
