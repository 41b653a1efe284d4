"""Puzzle 25, ring attention: rungs, gates, cases, inputs and reference.

Names: B = batch, N = heads of the query, G = heads of key and value, S = length of the sequence, d = head
dimension. A case of `world_size` ranks has one process per rank in PyTorch, and one list entry per rank in
NumPy.
"""

import functools

import numpy as np

from harness.puzzles.p25.derivation import MISTAKES, derive
from harness.puzzles.p25.layout import cut
from harness.spec.baseline import unluckiest
from harness.spec.puzzle import Arrays, Case, Demo, Gate, Puzzle, Symptom, ids, printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import Rung

DIMS = (1, 2, 2, 8, 4)
"""The default sizes: B, N, G, S, d."""

OUTPUT = ("output",)
GRADIENTS = ("grad_query", "grad_key", "grad_value")
EVERY = (*OUTPUT, *GRADIENTS)
GATES = (
    Gate("merge", quantities=OUTPUT, about="two partial outputs made one by their log-sum-exp"),
    Gate("steps", quantities=OUTPUT, about="whose block is here at each step"),
    Gate("exchange", quantities=EVERY, about="send to the next rank, receive from the one before"),
    Gate("recompute", quantities=GRADIENTS, about="P from the saved log-sum-exp, and its gradients"),
    Gate("home", quantities=GRADIENTS, about="dK and dV travel with their block, back to its owner"),
    Gate("causal", quantities=EVERY, about="no query sees a later key"),
    Gate("balanced", quantities=EVERY, about="zig-zag: every rank has the same work"),
)

# ---- Cases --------------------------------------------------------------------------------------------------


def cases(dims: tuple[int, ...] | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, one of each kind at those sizes, on four
    ranks.

    Those with blocks of equal length come first: there a wrong ring ends with values, not with an error.
    """
    if dims:
        return [
            Case("all keys", "every query sees every key", dims, "full", 4),
            Case("causal", "a query sees the keys up to its own place", dims, "causal", 4),
            Case("balanced", "the same, zig-zag", dims, "causal balanced", 4),
        ]
    return [
        Case("chapter", "two ranks, small enough to print", DIMS, "full", 2),
        Case("four ranks", "more steps than one", (1, 2, 2, 16, 4), "full", 4),
        Case("causal", "a query sees the keys up to its own place", (1, 2, 2, 16, 4), "causal", 4),
        Case("balanced", "zig-zag", (1, 2, 2, 16, 4), "causal balanced", 4),
        Case("one rank", "no ring: no one to talk to", (2, 2, 2, 5, 4), "causal", 1),
        Case("three ranks", "in a group whose ranks are not those of the world", (2, 2, 2, 9, 4), "full", 3),
        Case("grouped heads",
             "two heads of the query share a head of the key; in memory as a model has them: [B, s, heads, d]",
             (2, 4, 2, 12, 4), "causal transposed", 3),
        Case("large scores", "no exponential may overflow", (1, 2, 2, 12, 8), "large bfloat16", 3),
        Case("uneven", "blocks of different lengths", (1, 2, 1, 11, 4), "causal", 4),
        Case("uneven, balanced", "chunks of different lengths", (1, 2, 2, 19, 5), "causal balanced", 3),
        Case("fewer than ranks", "a rank holds nothing", (1, 2, 2, 3, 4), "causal", 4),
        Case("bfloat16", "16 bits in, 16 bits out, sums in float32", (1, 2, 2, 16, 8), "causal bfloat16", 4),
    ]  # fmt: skip


def dtype_of(case: Case) -> str:
    return "bfloat16" if "bfloat16" in case.values else "float32"


def is_transposed(case: Case) -> bool:
    """Return whether the tensors of a case are stored as [B, s, heads, d], which cannot be sent without a
    copy."""
    return "transposed" in case.values


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return the input arrays of a case, in float64, rounded to `dtype`.

    These are query and grad_output [B, N, S, d], key and value [B, G, S, d]; causal, balanced and ranks are
    integers without axes.
    """
    B, N, G, S, d = case.dims
    if N % G:
        raise ValueError(f"{N} heads of the query cannot share {G} heads of the key")
    random = np.random.default_rng([seed, *case.dims])
    query, key, value, grad = (random.standard_normal((B, heads, S, d)) for heads in (N, G, G, N))
    # Means away from 0, and a gradient that follows the value: the shares of the blocks differ, and delta is large.
    query, key, value = query + 0.5, key + 0.5, value + 0.25
    grad = grad + 0.25 + value.mean(-2, keepdims=True).repeat(N // G, 1)
    if "large" in case.values:
        query, key = 5 * query, 5 * key
    arrays = {"query": query, "key": key, "value": value, "grad_output": grad}
    flags = {
        "causal": "causal" in case.values,
        "balanced": "balanced" in case.values,
        "ranks": case.world_size,
    }
    return {name: round_to_dtype(array, dtype) for name, array in arrays.items()} | {
        name: np.asarray(value, np.int64) for name, value in flags.items()
    }


# ---- Reference ----------------------------------------------------------------------------------------------


def reference(tensors: dict) -> dict:
    """Return autograd's results on one device, in the dtype and on the device of the tensors.

    Below float64 they are those of PyTorch's kernel that saves the output and the log-sum-exp, not the
    probabilities, as a ring does, in the worst of several orders of the head dimension.
    """
    return unluckiest(by_autograd, tensors, ("query", "key", "value", "grad_output"), EVERY)


def by_autograd(tensors: dict) -> dict:
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
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        output = torch.softmax(scores.masked_fill(later & causal, -torch.inf), -1) @ values
    grads = torch.autograd.grad(output, (query, key, value), tensors["grad_output"])
    results = {"output": output, **dict(zip(GRADIENTS, grads, strict=True))}
    return {name: tensor.detach() for name, tensor in results.items()}


LARGE = 44.0
"""The difference of two scores up to this size has an exponential that float32 can hold."""
EARLY = Symptom(
    "read-too-early",
    "is NaN: a block is read before its transfer has been waited for, or memory that nothing was received into",
)
NOTHING_VISIBLE = Symptom(
    "nothing-visible",
    "is no number: a row that sees no key of a block has the lse -inf there, and -inf - -inf is no number",
)
OVERFLOWS = Symptom("overflows", "is no number: an exponential overflows, or a sum of exponentials is 0")


def symptom(waits: bool, quantity: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain values that are not finite, as far as they and the inputs show.

    `waits` is whether the code receives blocks, which are NaN before they arrive.
    """
    bad = ~np.isfinite(got)
    if not bad.any():
        return None
    causes = []
    if waits and arrays["ranks"] > 1 and np.isnan(got[bad]).all():
        causes.append(EARLY)
    if largest_product(arrays) > LARGE:
        causes.append(OVERFLOWS)
    blind = fully_masked_rows(arrays)
    by_rows = quantity in ("output", "grad_query")
    if blind.any() and not (by_rows and bad[:, :, ~blind].any()):
        causes.append(NOTHING_VISIBLE)
    if len(causes) < 2:
        return causes[0] if causes else None
    words = (cause.words.split(": ", 1)[1] for cause in causes)
    return Symptom("not-finite", f"is no number: {'; or '.join(words)}")


def largest_product(arrays: Arrays) -> float:
    """Return the largest of the scores without their scale, which is below 1: an upper bound of scores and
    log-sum-exp."""
    query, key = arrays["query"], arrays["key"]
    keys = key.repeat(query.shape[1] // key.shape[1], 1)
    return float(np.abs(query @ keys.swapaxes(-1, -2)).max())


def fully_masked_rows(arrays: Arrays) -> np.ndarray:
    """Return a mask of the rows [S] that see no key of one of the ranks' ranges."""
    size, S = int(arrays["ranks"]), arrays["query"].shape[2]
    ranges = cut(S, size * (2 if arrays["balanced"] else 1))
    if any(start == stop for start, stop in ranges):
        return np.ones(S, bool)
    return (np.arange(S) < ranges[-1][0]) & bool(arrays["causal"])


def multiply_adds(dims: tuple[int, ...]) -> int:
    """Return those of the two products of the forward pass."""
    B, N, _, S, d = dims
    return 2 * B * N * S * S * d


RUNGS = (
    Rung(
        id="numpy",
        file="in_numpy.py",
        gates=tuple(id for id in ids(GATES) if id != "exchange"),
        checker=".checker:ListChecker",
        about="a list instead of ranks",
    ),
    Rung(
        id="torch",
        file="in_torch.py",
        gates=ids(GATES),
        checker=".checker:RanksChecker",
        about="processes that talk to each other",
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
    cases=cases,
    inputs=inputs,
    reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    symptom=functools.partial(symptom, False),
    forward=printed_names("output"),
    backward=printed_names(*GRADIENTS),
    multiply_adds=multiply_adds,
    demos=(
        Demo(
            "backward",
            "start the ring and compare output and gradients with one device (--backward --help: its flags)",
            ".run:main",
            options=True,
        ),
    ),
)
