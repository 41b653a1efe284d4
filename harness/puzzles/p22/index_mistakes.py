"""Mistakes of indexing in puzzle 22: a wrong row is read, or what comes after the last whole vector is mishandled.

Shapes are those of `derivation.py`.
"""

from collections.abc import Callable, Iterator

import numpy as np

from harness.puzzles.p22.derivation import each_row, packed, row_sums, truncated, values
from harness.spec.derivation import Derivation, Mistake


def row_of(index) -> Callable[[np.ndarray], np.ndarray]:
    """Rows read at another place: `index(b, s, B, S)` is the row that (b, s) reads."""

    def read(array: np.ndarray) -> np.ndarray:
        B, S = array.shape[:2]
        b, s = np.indices((B, S))
        return each_row(array)[index(b, s, B, S) % (B * S)]

    return read


def wrong_rows() -> Iterator[Mistake]:
    """An input, grad_output, or the statistics read from another row than their own."""
    places = (
        ("next-row", "of the next row", lambda b, s, B, S: b * S + s + 1),
        ("previous-row", "of the row before", lambda b, s, B, S: b * S + s - 1),
        ("first-batch", "of the first batch, the batch left out of the index", lambda b, s, B, S: s),
        (
            "first-position",
            "of the first position, the position left out of the index",
            lambda b, s, B, S: b * S,
        ),
        ("batch-stride", "at b * B + s, not b * S + s", lambda b, s, B, S: b * B + s),
        ("sum-of-indices", "at b + s, not b * S + s", lambda b, s, B, S: b + s),
        ("batch-by-position", "at the row of the batch, b", lambda b, s, B, S: b + 0 * s),
    )
    for name, where, index in places:
        read = row_of(index)
        yield Mistake(
            f"statistics-{name}",
            f"with mean and rstd {where}",
            {
                "x_hat": lambda v, read=read: (v.input - read(v.row_mean)) * read(v.row_rstd),
                "grad_input": lambda v, read=read: read(v.row_rstd) * (v.g - v.c2 - v.x_hat * v.c1),
            },
            3,
        )
        yield Mistake(
            f"input-{name}",
            f"with the input {where}",
            {"x_hat": lambda v, read=read: (read(v.input) - v.row_mean) * v.row_rstd},
            3,
        )
        yield Mistake(
            f"row-{name}",
            f"with the input and its statistics {where}",
            {"input": lambda v, read=read: read(v.original("input"))},
            3,
        )
        yield Mistake(
            f"grad-output-{name}",
            f"with grad_output {where}",
            {"grad_output": lambda v, read=read: read(v.original("grad_output"))},
            3,
        )
        yield Mistake(
            f"dln-{name}",
            f"with dln {where}",
            {
                "dln": lambda v, read=read: read(v.grad_output @ v.linear_weight),
                "given_dln": lambda v, read=read: read(v.original("given_dln")),
            },
            3,
        )
        yield Mistake(
            f"row-sums-{name}",
            f"with c1 and c2 {where}",
            {
                "grad_input": lambda v, read=read: v.row_rstd * (v.g - read(v.c2) - v.x_hat * read(v.c1)),
                "row_sums": lambda v, read=read: packed(*map(read, row_sums(v, v.given_dln))),
            },
            3,
        )


def tail(v: Derivation, width: int) -> np.ndarray:
    """[H]: 1 after the last whole multiple of `width` along H, 0 before."""
    return (np.arange(values(v)) >= values(v) // width * width).astype(float)


def without_tail(v: Derivation, array: np.ndarray, width: int) -> np.ndarray:
    """The mean over H of all but the tail, divided by H all the same, [B, S, 1]."""
    return truncated(array, width).sum(-1, keepdims=True) / values(v)


def tails() -> Iterator[Mistake]:
    """What is left out after the last whole vector of 2, 4, ... elements."""
    for w in (2, 4, 8, 16, 32, 128):
        behind = f"past the last full {w} elements"
        yield Mistake(
            f"product-tail-{w}",
            f"without the columns h {behind} in the product with W",
            {"product": lambda v, w=w: truncated(v.ln_out, w) @ v.linear_weight.T},
            3,
        )
        yield Mistake(
            f"dln-tail-{w}",
            f"without the columns o {behind} in dln",
            {"dln": lambda v, w=w: truncated(v.grad_output, w) @ v.linear_weight},
            3,
        )
        yield Mistake(
            f"statistics-tail-{w}",
            f"without the elements h {behind} in mean and variance",
            {
                "row_mean": lambda v, w=w: without_tail(v, v.input, w),
                "variance": lambda v, w=w: without_tail(v, (v.input - v.row_mean) ** 2, w),
            },
            3,
        )
        yield Mistake(
            f"variance-tail-{w}",
            f"without the elements h {behind} in the variance",
            {"variance": lambda v, w=w: without_tail(v, (v.input - v.row_mean) ** 2, w)},
            3,
        )
        sums = {
            "c1": lambda v, w=w: without_tail(v, v.g * v.x_hat, w),
            "c2": lambda v, w=w: without_tail(v, v.g, w),
        }
        given = {
            "c1": lambda v, w=w: without_tail(v, v.given_dln * v.ln_weight * v.x_hat, w),
            "c2": lambda v, w=w: without_tail(v, v.given_dln * v.ln_weight, w),
        }
        yield Mistake(
            f"sums-tail-{w}",
            f"without the elements h {behind} in c1 and c2",
            {**sums, "row_sums": lambda v, given=given: packed(given["c1"](v), given["c2"](v))},
            3,
        )
        yield Mistake(
            f"c1-tail-{w}",
            f"without the elements h {behind} in c1",
            {
                "c1": sums["c1"],
                "row_sums": lambda v, given=given: packed(given["c1"](v), row_sums(v, v.given_dln)[1]),
            },
            3,
        )
        yield Mistake(
            f"c2-tail-{w}",
            f"without the elements h {behind} in c2",
            {
                "c2": sums["c2"],
                "row_sums": lambda v, given=given: packed(row_sums(v, v.given_dln)[0], given["c2"](v)),
            },
            3,
        )
        yield Mistake(
            f"mean-term-tail-{w}",
            f"without the mean term c2 in the columns {behind}",
            {"grad_input": lambda v, w=w: v.row_rstd * (v.g - v.c2 * (1 - tail(v, w)) - v.x_hat * v.c1)},
            3,
        )
        yield Mistake(
            f"variance-term-tail-{w}",
            f"without the variance term x_hat * c1 in the columns {behind}",
            {"grad_input": lambda v, w=w: v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1 * (1 - tail(v, w)))},
            3,
        )
        yield Mistake(
            f"both-terms-tail-{w}",
            f"without both correction terms in the columns {behind}",
            {"grad_input": lambda v, w=w: v.row_rstd * (v.g - (v.c2 + v.x_hat * v.c1) * (1 - tail(v, w)))},
            3,
        )
        yield Mistake(
            f"zero-tail-{w}",
            f"with zeros {behind}",
            {
                "ln_out": lambda v, w=w: truncated(v.scaled + v.ln_bias, w),
                "output": lambda v, w=w: truncated(v.product + v.linear_bias, w),
                "grad_input": lambda v, w=w: truncated(v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1), w),
                "grad_ln_weight": lambda v, w=w: truncated((v.dln * v.x_hat).sum((0, 1)), w),
                "grad_ln_bias": lambda v, w=w: truncated(v.dln.sum((0, 1)), w),
                "grad_bias": lambda v, w=w: truncated(v.grad_output.sum((0, 1)), w),
            },
            3,
        )
