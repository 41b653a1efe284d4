"""Puzzle 25, ring attention: rungs, gates, cases, inputs and reference.

B = batch, N = query heads, G = key heads, S = sequence length, d = head dimension. A case of `world_size` ranks
has one process per rank in PyTorch, and one list entry per rank in NumPy.
"""

import functools

import numpy as np

from harness.puzzles.p25.derivation import MISTAKES, derive
from harness.puzzles.p25.layout import locate_positions, split_range
from harness.spec.baseline import compute_worst_baseline
from harness.spec.puzzle import Arrays, Case, Demo, Gate, Puzzle, Symptom, list_gate_ids, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import Rung

DIMS = (1, 2, 2, 8, 4)
"""The default sizes: B, N, G, S, d."""

OUTPUT = ("output",)
GRADIENTS = ("grad_query", "grad_key", "grad_value")
RESULTS = (*OUTPUT, *GRADIENTS)
GATES = (
    Gate("merge", quantities=OUTPUT, description="two partial outputs combined by their log-sum-exp"),
    Gate("steps", quantities=OUTPUT, description="the owner of the block at each step"),
    Gate("exchange", quantities=RESULTS, description="send to the next rank, receive from the previous rank"),
    Gate(
        "recompute",
        quantities=GRADIENTS,
        description="P recomputed from the saved log-sum-exp, then dQ, dK and dV",
    ),
    Gate("home", quantities=GRADIENTS, description="dK and dV travel with their block, back to its owner"),
    Gate("causal", quantities=RESULTS, description="no query sees a later key"),
    Gate("balanced", quantities=RESULTS, description="zig-zag: every rank has the same work"),
)

# ---- Cases --------------------------------------------------------------------------------------------------


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, three cases at those sizes, on four ranks.

    Cases with blocks of equal length come first, because a wrong ring returns values for them, not an error.
    """
    if dims:
        return [
            Case("all keys", "every query sees every key", dims, "full", 4),
            Case("causal", "a query sees the keys up to its own position", dims, "causal", 4),
            Case("balanced", "the same, zig-zag", dims, "causal balanced", 4),
        ]
    return [
        Case("chapter", "two ranks, small enough to print", DIMS, "full", 2),
        Case("four ranks", "more than one step", (1, 2, 2, 16, 4), "full", 4),
        Case("causal", "a query sees the keys up to its own position", (1, 2, 2, 16, 4), "causal", 4),
        Case("balanced", "zig-zag", (1, 2, 2, 16, 4), "causal balanced", 4),
        Case("one rank", "a ring without transfers", (2, 2, 2, 5, 4), "causal", 1),
        Case("three ranks", "in a group whose ranks differ from the world's", (2, 2, 2, 9, 4), "full", 3),
        Case("grouped heads",
             "two query heads share a key head; tensors are stored as in a model: [B, s, heads, d]",
             (2, 4, 2, 12, 4), "causal transposed", 3),
        Case("large scores", "no exponential may overflow", (1, 2, 2, 12, 8), "large bfloat16", 3),
        Case("uneven", "blocks of different lengths", (1, 2, 1, 11, 4), "causal", 4),
        Case("uneven, balanced", "chunks of different lengths", (1, 2, 2, 19, 5), "causal balanced", 3),
        Case("fewer than ranks", "fewer positions than ranks: a rank has none", (1, 2, 2, 3, 4), "causal", 4),
        Case("bfloat16", "inputs and outputs in 16 bits, sums in float32", (1, 2, 2, 16, 8), "causal bfloat16", 4),
    ]  # fmt: skip


def get_dtype(case: Case) -> str:
    return "bfloat16" if "bfloat16" in case.values else "float32"


def is_transposed(case: Case) -> bool:
    """Return whether tensors are stored as [B, s, heads, d], so that they cannot be sent without a copy."""
    return "transposed" in case.values


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return a case's query and grad_output [B, N, S, d], key and value [B, G, S, d], float64 rounded to `dtype`,
    and the integer scalars causal, balanced and ranks.
    """
    B, N, G, S, d = case.dims
    if N % G:
        raise ValueError(f"{N} heads of the query cannot share {G} heads of the key")
    random = np.random.default_rng([seed, *case.dims])
    query, key, value, grad = (random.standard_normal((B, heads, S, d)) for heads in (N, G, G, N))
    # Nonzero means and a gradient correlated with the value make the blocks' weights differ and delta large.
    query, key, value = query + 0.5, key + 0.5, value + 0.25
    grad = grad + 0.25 + value.mean(-2, keepdims=True).repeat(N // G, 1)
    if "large" in case.values:
        query, key = 5 * query, 5 * key
    arrays = {"query": query, "key": key, "value": value, "grad_output": grad}
    flags: dict[str, int] = {name: name in case.values for name in ("causal", "balanced")}
    flags["ranks"] = case.world_size
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()} | {
        name: np.asarray(value, np.int64) for name, value in flags.items()
    }


# ---- Reference ----------------------------------------------------------------------------------------------


def reference(tensors: dict) -> dict:
    """Return autograd's results on one device, in the tensors' dtype and on their device.

    Below float64, they come from PyTorch's kernel that, like a ring, saves the output and the log-sum-exp
    instead of the probabilities, and each is the least accurate of several orders of the head dimension; for the
    output, also of the ring's order of merging blocks.
    """
    columns = ("query", "key", "value", "grad_output")
    return compute_worst_baseline(
        compute_with_autograd, tensors, columns, RESULTS, other_formulas=(merge_blocks,)
    )


def compute_with_autograd(tensors: dict) -> dict:
    import torch
    import torch.nn.functional as F

    query, key, value = (tensors[name].detach().requires_grad_() for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(tensors["causal"])
    if query.dtype != torch.float64:
        output = F.scaled_dot_product_attention(query, keys, values, is_causal=causal)
    else:
        scores = query @ keys.mT / query.shape[-1] ** 0.5
        later_keys = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        output = torch.softmax(scores.masked_fill(later_keys & causal, -torch.inf), -1) @ values
    grads = torch.autograd.grad(output, (query, key, value), tensors["grad_output"])
    results = {"output": output, **dict(zip(GRADIENTS, grads, strict=True))}
    return {name: tensor.detach() for name, tensor in results.items()}


def merge_blocks(tensors: dict) -> dict:
    """Return the output merged in the ring's order, each block weighted by exp(its lse - the lse of both)."""
    import torch

    dtype, names = tensors["query"].dtype, ("query", "key", "value")
    query, key, value = (tensors[name].float() for name in names)
    keys, values = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores, size, S = query @ keys.mT / query.shape[-1] ** 0.5, int(tensors["ranks"]), query.shape[2]
    later_keys = torch.ones(S, S, dtype=torch.bool, device=query.device).triu(1) & bool(tensors["causal"])
    owner = torch.from_numpy(locate_positions(size, S, bool(tensors["balanced"]))[0]).to(query.device)
    output, lse = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
    for step in range(size):
        hidden = later_keys | ((owner[:, None] - step) % size != owner)
        block = scores.masked_fill(hidden, -torch.inf)
        block_lse = torch.logsumexp(block, -1, keepdim=True)
        new_lse = torch.logaddexp(lse, block_lse)
        finite_lse, finite_block_lse = (t.masked_fill(t == -torch.inf, 0) for t in (new_lse, block_lse))
        output = torch.exp(lse - finite_lse) * output
        output += torch.exp(block_lse - finite_lse) * (torch.exp(block - finite_block_lse) @ values)
        lse = new_lse
    return {"output": output.to(dtype)}


MAX_SCORE = 44.0
"""The exponential of the difference of two scores up to this magnitude fits into float32."""
READ_TOO_EARLY = Symptom(
    "read-too-early",
    "is NaN: a block is read before the wait for its transfer, or from a buffer into which nothing was received",
)
NOTHING_VISIBLE = Symptom(
    "nothing-visible",
    "is NaN: a row with no visible key in a block has lse = -inf there, and -inf - -inf is NaN",
)
OVERFLOWS = Symptom("overflows", "is not finite: an exponential overflows, or a sum of exponentials is 0")


def explain_not_finite(
    receives_blocks: bool, quantity: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray
) -> Symptom | None:
    """Explain non-finite values if their cause can be identified.

    `receives_blocks`: whether blocks come from other ranks; their buffers are NaN until a block arrives.
    """
    nonfinite = ~np.isfinite(got)
    if not nonfinite.any():
        return None
    causes = []
    if receives_blocks and arrays["ranks"] > 1 and np.isnan(got[nonfinite]).all():
        causes.append(READ_TOO_EARLY)
    if get_max_abs_score(arrays) > MAX_SCORE:
        causes.append(OVERFLOWS)
    masked = find_fully_masked_rows(arrays)
    is_per_query = quantity in ("output", "grad_query")
    if masked.any() and not (is_per_query and nonfinite[:, :, ~masked].any()):
        causes.append(NOTHING_VISIBLE)
    if len(causes) < 2:
        return causes[0] if causes else None
    descriptions = (cause.description.split(": ", 1)[1] for cause in causes)
    return Symptom("not-finite", f"is not finite: {'; or '.join(descriptions)}")


def get_max_abs_score(arrays: Arrays) -> float:
    query, key = arrays["query"], arrays["key"]
    keys = key.repeat(query.shape[1] // key.shape[1], 1)
    return float(np.abs(query @ keys.swapaxes(-1, -2)).max())


def find_fully_masked_rows(arrays: Arrays) -> np.ndarray:
    """Return a mask [S] of the rows for which some rank's range has no visible key."""
    size, S = int(arrays["ranks"]), arrays["query"].shape[2]
    ranges = split_range(S, size * (2 if arrays["balanced"] else 1))
    if any(start == stop for start, stop in ranges):
        return np.ones(S, bool)
    return (np.arange(S) < ranges[-1][0]) & bool(arrays["causal"])


def multiply_adds(dims: tuple[int, ...]) -> int:
    B, N, _, S, d = dims
    return 2 * B * N * S * S * d


RUNGS = (
    Rung(
        id="numpy",
        file="in_numpy.py",
        gates=tuple(id for id in list_gate_ids(GATES) if id != "exchange"),
        checker=".checker:ListChecker",
        note="a list with one entry per rank",
    ),
    Rung(
        id="torch",
        file="in_torch.py",
        gates=list_gate_ids(GATES),
        checker=".checker:RanksChecker",
        note="one process per rank",
    ),
)

PUZZLE = Puzzle(
    name="p25",
    title="Ring attention: a sequence that no device holds, forward and backward",
    subject="Ring Attention",
    gates=GATES,
    rungs=RUNGS,
    dims=DIMS,
    dim_names=("B", "N", "G", "S", "d"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    find_symptom=functools.partial(explain_not_finite, False),
    forward=map_printed_names("output"),
    backward=map_printed_names(*GRADIENTS),
    count_multiply_adds=multiply_adds,
    demos=(
        Demo(
            "backward",
            "start the ring and compare output and gradients with one device (--backward --help: its flags)",
            ".run:main",
            options=True,
        ),
    ),
)
