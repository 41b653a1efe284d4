"""Derivation of puzzle 25 in NumPy, on the whole sequence, and its known mistakes.

Shapes: query, output and grad_output [B, N, S, d]; key and value [B, G, S, d]; scores [B, N, S, S]. For each
rank's block of keys: block_lse and block_weight [blocks, B, N, S], block_output [blocks, B, N, S, d]. `owner` and
`index` [S] are a position's rank and its index on that rank; `block` [S] is a key's block, which is a rank's
keys or one of its ranges.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p25.layout import locate_positions, split_range
from harness.puzzles.rows import finite_max, log_sum_exp, repeat_heads, sum_heads
from harness.spec.derivation import Derivation, Mistake, Step, make_derive
from harness.spec.rounding import round_to_dtype


def mask_by_block(v: Derivation) -> list[np.ndarray]:
    return [np.where(v.block == number, v.masked, -np.inf) for number in range(int(v.block.max()) + 1)]


def mislabel_blocks(v: Derivation, label: np.ndarray) -> np.ndarray:
    """Return the visible keys if rank owner[s] mistakes the block of owner[t] for that of rank label[s, t]."""
    positions = np.full((int(v.ranks), len(v.owner)), 2**31)
    positions[v.owner, v.index] = np.arange(len(v.owner))
    key = positions[label, v.index[None, :]]
    return (key <= np.arange(len(v.owner))[:, None]) | (v.causal == 0)


def shift_gradient(array: np.ndarray, v: Derivation, num_ranks: int) -> np.ndarray:
    """Return a gradient [B, G, S, d] in which each rank has the part of rank + `num_ranks`, or NaN if there is none."""
    source = np.full((int(v.ranks), len(v.owner)), -1)
    source[v.owner, v.index] = np.arange(len(v.owner))
    source_positions = source[(v.owner + num_ranks) % int(v.ranks), v.index]
    return np.where((source_positions >= 0)[:, None], array[:, :, source_positions], np.nan)


STEPS = {
    "owner_and_index": lambda v: locate_positions(int(v.ranks), v.query.shape[2], bool(v.balanced)),
    "owner": lambda v: v.owner_and_index[0],
    "index": lambda v: v.owner_and_index[1],
    "block": lambda v: v.owner,
    "scale": lambda v: 1 / np.sqrt(v.query.dtype.type(v.query.shape[-1])),
    "scores": lambda v: v.scale * (v.query @ repeat_heads(v.key, v.query).swapaxes(-1, -2)),
    "visible": lambda v: np.tri(len(v.owner), dtype=bool) | (v.causal == 0),
    "masked": lambda v: np.where(v.visible, v.scores, -np.inf),
    "block_lse": lambda v: np.stack([log_sum_exp(scores) for scores in mask_by_block(v)]),
    "block_output": lambda v: np.stack(
        [
            np.exp(scores - finite_max(lse)[..., None]) @ repeat_heads(v.value, v.query)
            for scores, lse in zip(mask_by_block(v), v.block_lse, strict=True)
        ]
    ),
    "lse": lambda v: log_sum_exp(v.masked),
    "block_weight": lambda v: np.exp(v.block_lse - finite_max(v.lse)),
    "output": lambda v: (v.block_weight[..., None] * v.block_output).sum(0),
    "probabilities": lambda v: np.exp(v.masked - finite_max(v.lse)[..., None]),
    "grad_probabilities": lambda v: v.grad_output @ repeat_heads(v.value, v.query).swapaxes(-1, -2),
    "delta": lambda v: (v.grad_output * v.output).sum(-1, keepdims=True),
    "grad_scores": lambda v: v.probabilities * (v.grad_probabilities - v.delta),
    "grad_query": lambda v: v.scale * (v.grad_scores @ repeat_heads(v.key, v.query)),
    "grad_key": lambda v: sum_heads(v.scale * (v.grad_scores.swapaxes(-1, -2) @ v.query), v.key),
    "grad_value": lambda v: sum_heads(v.probabilities.swapaxes(-1, -2) @ v.grad_output, v.key),
}
derive = make_derive(STEPS)


def count_ring_steps(v: Derivation) -> np.ndarray:
    """Return the number of steps after which a key's block reaches a query, [S, S]."""
    return (v.owner[:, None] - v.owner[None, :]) % int(v.ranks)


def make_visible_step(is_hidden: Step) -> Step:
    """Return a `visible` step that hides the pairs for which `is_hidden` is True."""
    return lambda v: (np.tri(len(v.owner), dtype=bool) | (v.causal == 0)) & ~is_hidden(v)


def compute_last_block_weight(v: Derivation) -> np.ndarray:
    last = (np.arange(int(v.ranks))[:, None] - v.owner[None, :] - 1) % int(v.ranks) == 0
    return np.where(last[:, None, None], 1.0, 0.0) * np.ones_like(v.block_lse)


RING_MISTAKES = (
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)",
            {"grad_query": lambda v: v.grad_scores @ repeat_heads(v.key, v.query),
             "grad_key": lambda v: sum_heads(v.grad_scores.swapaxes(-1, -2) @ v.query, v.key)}),
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d) in the scores",
            {"scores": lambda v: v.query @ repeat_heads(v.key, v.query).swapaxes(-1, -2)}),
    Mistake("not-renormalised",
            "with the blocks' outputs added without weights: weigh each by exp(its lse - the lse of all keys)",
            {"block_weight": lambda v: np.where(np.isneginf(v.block_lse), 0.0, 1.0)}),
    Mistake("step-too-few",
            "without the block that arrives last: a ring of n ranks has n steps, with n - 1 transfers between them",
            {"visible": make_visible_step(lambda v: count_ring_steps(v) == v.ranks - 1)}),
    Mistake("own-block-only", "with only the rank's own keys", {"visible": make_visible_step(lambda v: count_ring_steps(v) > 0)}),
    Mistake("own-block-missing", "without the rank's own keys", {"visible": make_visible_step(lambda v: count_ring_steps(v) == 0)}),
    Mistake("local-index",
            "with a causal mask that compares indices within a block: compare positions in the whole sequence",
            {"visible": lambda v: (v.index[None, :] <= v.index[:, None]) | (v.causal == 0)}),
    Mistake("mask-forgotten", "without the causal mask",
            {"visible": lambda v: np.ones((len(v.owner),) * 2, bool)}),
    Mistake("diagonal-hidden", "with a query's own key hidden",
            {"visible": lambda v: np.tri(len(v.owner), k=-1, dtype=bool) | (v.causal == 0)}),
    Mistake("backwards",
            "with blocks mistaken for those of other ranks: blocks travel in the opposite direction",
            {"visible": lambda v: mislabel_blocks(v, ((2 * v.owner[:, None] - v.owner[None, :]) % int(v.ranks)).astype(int))}),
    Mistake("lse-of-the-block",
            "with P from the block's lse: use the lse of all keys, which the forward pass saved",
            {"probabilities": lambda v: np.exp(v.masked - finite_max(np.moveaxis(v.block_lse[v.block], 0, -1)))}),
    Mistake("delta-forgotten", "without delta: dS = P * (dP - delta)", {"delta": lambda v: np.zeros(1)}),
    Mistake("lse-for-delta", "with lse instead of delta: dS = P * (dP - delta)",
            {"delta": lambda v: v.lse[..., None]}),
    Mistake("delta-of-the-block",
            "with the row sum of dP * P over the block's keys: delta is the sum over all keys, the row sum of dO * out",
            {"delta": lambda v: np.einsum("bnsu,tu->bnst", v.probabilities * v.grad_probabilities, (v.block[:, None] == v.block) * 1.0)}),
    Mistake("not-returned",
            "with the gradients of another rank's block: they must be sent one step further, to their owner",
            {name: lambda v, name=name: shift_gradient(STEPS[name](v), v, 1) for name in ("grad_key", "grad_value")}),
    Mistake("one-step-too-far", "with the gradients of another rank's block: they were sent one step too far",
            {name: lambda v, name=name: shift_gradient(STEPS[name](v), v, -1) for name in ("grad_key", "grad_value")}),
    Mistake("own-share-only", "with only the terms of the rank's own queries",
            {"grad_key": lambda v: sum_heads(v.scale * (zero_other_ranks(v.grad_scores, v).swapaxes(-1, -2) @ v.query), v.key),
             "grad_value": lambda v: sum_heads(zero_other_ranks(v.probabilities, v).swapaxes(-1, -2) @ v.grad_output, v.key)}),
    Mistake("last-share-only",
            "with only the terms of the last rank on the way: each rank must add to the received sum",
            {"grad_key": lambda v: sum_heads(v.scale * (zero_except_last_rank(v.grad_scores, v).swapaxes(-1, -2) @ v.query), v.key),
             "grad_value": lambda v: sum_heads(zero_except_last_rank(v.probabilities, v).swapaxes(-1, -2) @ v.grad_output, v.key)}),
    Mistake("travels-in-bfloat16",
            "as a sum rounded to bfloat16 at every rank: send it in float32",
            {"grad_key": lambda v: sum_in_bfloat16(v, v.scale * v.grad_scores, v.query),
             "grad_value": lambda v: sum_in_bfloat16(v, v.probabilities, v.grad_output)}, 3),
)  # fmt: skip


def zero_other_ranks(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Return scores [..., S, S], set to 0 where query and key are on different ranks."""
    return np.where(v.owner[:, None] == v.owner, array, 0.0)


def zero_except_last_rank(array: np.ndarray, v: Derivation) -> np.ndarray:
    """Return scores [..., S, S], set to 0 except for queries of the rank that a key's block reaches last."""
    return np.where(count_ring_steps(v) == v.ranks - 1, array, 0.0)


def sum_in_bfloat16(v: Derivation, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights^T rows, [B, G, S, d], summed along the ring and rounded to bfloat16 at every rank."""
    total = np.zeros(v.key.shape)
    for step in range(int(v.ranks)):
        share = np.where(count_ring_steps(v) == step, weights, 0.0).swapaxes(-1, -2) @ rows
        total = round_to_dtype(total + round_to_dtype(sum_heads(share, v.key), "bfloat16"), "bfloat16")
    return total


def get_range_ids(v: Derivation) -> np.ndarray:
    size, length = int(v.ranks), len(v.owner)
    edges = [stop for _, stop in split_range(length, 2 * size if v.balanced else size)]
    return np.searchsorted(edges, np.arange(length), side="right")


def mask_within_ranges(v: Derivation) -> np.ndarray:
    """Return the visible keys if the mask compares indices within ranges, and hides later ranges."""
    range_ids = get_range_ids(v)
    index = np.arange(len(range_ids)) - np.searchsorted(range_ids, range_ids)
    return ((index <= index[:, None]) & (range_ids <= range_ids[:, None])) | (v.causal == 0)


def is_same_range(v: Derivation) -> np.ndarray:
    range_ids = get_range_ids(v)
    return range_ids[:, None] == range_ids


def transpose_mask(v: Derivation, block: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the visible keys if the mask of two blocks of equal length is transposed.

    `block` and `index` [S] are a position's block and its index in that block.
    """
    positions = np.full((int(block.max()) + 1, int(index.max()) + 1), 2**31)
    positions[block, index] = np.arange(len(block))
    query = positions[block[:, None], index]
    key = positions[block, index[:, None]]
    return (key <= query) | (v.causal == 0)


def add_range_variants(mistakes: tuple[Mistake, ...]) -> Iterator[Mistake]:
    """Yield each mistake, and its variant in code that processes a rank's ranges separately."""
    for mistake in mistakes:
        yield mistake
        if {"block_weight", "probabilities", "delta"} & mistake.changes.keys():
            yield replace(mistake, changes={**mistake.changes, "block": get_range_ids})


def skip_hidden_ranges(mistake: Mistake) -> Mistake:
    """Return the mistake's variant in code that skips fully masked key ranges instead of masking them."""

    def grad_scores(v: Derivation) -> np.ndarray:
        range_ids = get_range_ids(v)
        computed = (range_ids <= range_ids[:, None]) | (v.causal == 0)
        return np.where(computed, mistake.changes["grad_scores"](v), 0.0)

    return replace(mistake, changes={"grad_scores": grad_scores})


SOFTMAX_BACKWARD = tuple(
    mistake
    for mistake in formulas.list_softmax_backward_mistakes(
        "grad_scores", "probabilities", "grad_probabilities", "delta", 1
    )
    if "grad_scores" in mistake.changes  # the code that computes delta is provided
)


MISTAKES = (
    *add_range_variants(RING_MISTAKES),
    *SOFTMAX_BACKWARD,
    *map(skip_hidden_ranges, SOFTMAX_BACKWARD),
    Mistake("last-block-only", "with only the block that arrived last", {"block_weight": compute_last_block_weight}),
    Mistake("local-index",
            "with a causal mask that compares indices within a range: compare positions in the whole sequence",
            {"visible": mask_within_ranges}),
    Mistake("sees-later",
            "with queries that see their own key and later keys: the mask is inverted",
            {"visible": lambda v: np.tri(len(v.owner), dtype=bool).T | (v.causal == 0)}),
    Mistake("sees-later",
            "with queries that see their own key and later keys of their range: the mask is inverted",
            {"visible": lambda v: (np.tri(len(v.owner), dtype=bool).T & is_same_range(v)) | (v.causal == 0)}),
    Mistake("mask-turned",
            "with the mask transposed: it has a row for each query and a column for each key",
            {"visible": lambda v: transpose_mask(v, v.owner, v.index)}),
    Mistake("mask-turned",
            "with the mask transposed: it has a row for each query and a column for each key",
            {"visible": lambda v: np.where(is_same_range(v), np.tri(len(v.owner), dtype=bool).T, STEPS["visible"](v)) | (v.causal == 0)}),
)  # fmt: skip
