"""The training ops of attention as data: names, arguments in order, symbolic shapes.

B = batch, N = heads of query, G = heads of key and value, S = query length, T = key length, d = head dimension; the axes of
the mask have sizes of their own, each that of the scores or 1. Loads neither MAX nor torch.
"""

import math

from harness.spec.ops import ACCUM, Argument, OpSpec, Scalar

QUERY = Argument(("B", "N", "S", "d"))
KEY = Argument(("B", "G", "T", "d"))
ROW = Argument(("B", "N", "S"), ACCUM)
MASK = Argument(("mask_b", "mask_n", "mask_s", "mask_t"))

DEFAULT_SCALE = math.nan
"""Stands for 1 / sqrt(d)."""
EVERY_KEY = 2**31 - 2**20
"""The diagonal of a query that sees all keys: more than there can be."""

SCALARS = {
    "scale": Scalar(DEFAULT_SCALE),
    "diagonal": Scalar(EVERY_KEY, "int32"),
    "mask_block": Scalar(1, "int32"),
}

FORWARD = OpSpec(
    "attention_train",
    writes={"output": QUERY, "lse": ROW},
    reads={"query": QUERY, "key": KEY, "value": KEY, "attn_mask": MASK},
    scalars=SCALARS,
)
DELTA = OpSpec("attention_delta", writes={"delta": ROW}, reads={"grad_output": QUERY, "output": QUERY})
BACKWARD = OpSpec(
    "attention_train_backward",
    writes={"grad_query": QUERY, "grad_key": KEY, "grad_value": KEY},
    reads={
        "grad_output": QUERY,
        "query": QUERY,
        "key": KEY,
        "value": KEY,
        "lse": ROW,
        "delta": ROW,
        "attn_mask": MASK,
    },
    scalars=SCALARS,
)
MASK_BACKWARD = OpSpec(
    "attention_train_mask_backward",
    writes={"grad_attn_mask": MASK},
    reads={**BACKWARD.reads, "output": QUERY},
    scalars={name: SCALARS[name] for name in ("scale", "diagonal")},
)
