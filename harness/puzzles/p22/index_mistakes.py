"""Indexing mistakes in puzzle 22: a wrong row is read, or the tail after the last whole vector is mishandled.

Shapes are those of `derivation.py`.
"""

from collections.abc import Callable, Iterator

import numpy as np

from harness.puzzles.p22.derivation import STEPS, each_row, means, row_sums, truncate, values
from harness.spec.derivation import Derivation, Mistake, Step


def row_of(index) -> Callable[[np.ndarray], np.ndarray]:
    """Return a reader of other rows: `index(b, s, B, S)` is the row that (b, s) reads."""

    def read(array: np.ndarray) -> np.ndarray:
        B, S = array.shape[:2]
        b, s = np.indices((B, S))
        return each_row(array)[index(b, s, B, S) % (B * S)]

    return read


def wrong_rows() -> Iterator[Mistake]:
    """Yield mistakes that read an input, grad_output, or the statistics from another row."""
    places = (
        ("next-row", "of the next row", lambda b, s, B, S: b * S + s + 1),
        ("previous-row", "of the row before", lambda b, s, B, S: b * S + s - 1),
        ("first-batch", "of the first batch, the batch left out of the index", lambda b, s, B, S: s),
        ("first-position", "of the first position, the position left out of the index", lambda b, s, B, S: b * S),
        ("batch-stride", "at b * B + s, not b * S + s", lambda b, s, B, S: b * B + s),
        ("sum-of-indices", "at b + s, not b * S + s", lambda b, s, B, S: b + s),
        ("batch-by-position", "at the row of the batch, b", lambda b, s, B, S: b + 0 * s),
    )  # fmt: skip
    for name, where, index in places:
        for reader, what, changes in readers(row_of(index)):
            yield Mistake(f"{reader}-{name}", f"with {what} {where}", changes, 3)


def readers(read: Callable[[np.ndarray], np.ndarray]) -> tuple[tuple[str, str, dict[str, Step]], ...]:
    """Return what may be read from a wrong row, and what that changes."""
    return (
        ("statistics", "mean and rstd", {
            "x_hat": lambda v: (v.input - read(v.row_mean)) * read(v.row_rstd),
            "grad_input": lambda v: read(v.row_rstd) * (v.g - v.c2 - v.x_hat * v.c1),
        }),
        ("input", "the input", {"x_hat": lambda v: (read(v.input) - v.row_mean) * v.row_rstd}),
        ("row", "the input and its statistics", {"input": lambda v: read(v.original("input"))}),
        ("grad-output", "grad_output", {"grad_output": lambda v: read(v.original("grad_output"))}),
        ("dln", "dln", {
            "dln": lambda v: read(v.grad_output @ v.linear_weight),
            "given_dln": lambda v: read(v.original("given_dln")),
        }),
        ("row-sums", "c1 and c2", {
            "grad_input": lambda v: v.row_rstd * (v.g - read(v.c2) - v.x_hat * read(v.c1)),
            **means(*(lambda v, dln, k=k: read(row_sums(v, dln)[k]) for k in (0, 1)), inside=False),
        }),
    )  # fmt: skip


def tails() -> Iterator[Mistake]:
    """Yield mistakes that skip the tail after the last whole vector of 2, 4, ... elements."""
    for width in (2, 4, 8, 16, 32, 128):
        for name, words, changes in tail(width):
            yield Mistake(
                f"{name}-tail-{width}", words.format(f"past the last full {width} elements"), changes, 3
            )


def tail(width: int) -> tuple[tuple[str, str, dict[str, Step]], ...]:
    """Return what may skip the tail after the last whole vector of `width` elements: id, words, changed
    steps."""

    def whole(v: Derivation) -> np.ndarray:
        return (np.arange(values(v)) < values(v) // width * width).astype(float)

    def mean(terms: np.ndarray) -> np.ndarray:
        return truncate(terms, width).sum(-1, keepdims=True) / terms.shape[-1]

    def c1(v: Derivation, dln: np.ndarray) -> np.ndarray:
        return mean(dln * v.ln_weight * v.x_hat)

    def c2(v: Derivation, dln: np.ndarray) -> np.ndarray:
        return mean(dln * v.ln_weight)

    variance: dict[str, Step] = {"variance": lambda v: mean((v.input - v.row_mean) ** 2)}
    return (
        ("product", "without the columns h {} in the product with W", {"product": lambda v: truncate(v.ln_out, width) @ v.linear_weight.T}),
        ("dln", "without the columns o {} in dln", {"dln": lambda v: truncate(v.grad_output, width) @ v.linear_weight}),
        ("statistics", "without the elements h {} in mean and variance", {"row_mean": lambda v: mean(v.input), **variance}),
        ("variance", "without the elements h {} in the variance", variance),
        ("sums", "without the elements h {} in c1 and c2", means(c1, c2)),
        ("c1", "without the elements h {} in c1", means(c1=c1)),
        ("c2", "without the elements h {} in c2", means(c2=c2)),
        ("mean-term", "without the mean term c2 in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 * whole(v) - v.x_hat * v.c1)}),
        ("variance-term", "without the variance term x_hat * c1 in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1 * whole(v))}),
        ("both-terms", "without both correction terms in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - (v.c2 + v.x_hat * v.c1) * whole(v))}),
        ("zero", "with zeros {}", {
            name: lambda v, right=STEPS[name]: truncate(right(v), width)
            for name in ("ln_out", "output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_bias")
        }),
    )  # fmt: skip
