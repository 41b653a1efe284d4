"""Indexing mistakes in puzzle 22: reads of a wrong row, and a skipped tail after the last full vector."""

from collections.abc import Callable, Iterator

import numpy as np

from harness.puzzles.p22.derivation import (
    STEPS,
    compute_row_means,
    flatten_rows,
    get_row_length,
    replace_means,
    zero_tail,
)
from harness.spec.derivation import Derivation, Mistake, Step


def make_row_reader(index) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that reads wrong rows: row (b, s) reads row `index(b, s, B, S)`."""

    def read(array: np.ndarray) -> np.ndarray:
        B, S = array.shape[:2]
        b, s = np.indices((B, S))
        return flatten_rows(array)[index(b, s, B, S) % (B * S)]

    return read


def list_wrong_row_mistakes() -> Iterator[Mistake]:
    """Yield mistakes that read an input, grad_output, or the statistics from another row."""
    wrong_rows = (
        ("next-row", "of the next row", lambda b, s, B, S: b * S + s + 1),
        ("previous-row", "of the previous row", lambda b, s, B, S: b * S + s - 1),
        ("first-batch", "of the first batch element: b is left out of the index", lambda b, s, B, S: s),
        ("first-position", "of the first position: s is left out of the index", lambda b, s, B, S: b * S),
        ("batch-stride", "at b * B + s, not b * S + s", lambda b, s, B, S: b * B + s),
        ("sum-of-indices", "at b + s, not b * S + s", lambda b, s, B, S: b + s),
        ("batch-by-position", "at b, not b * S + s", lambda b, s, B, S: b + 0 * s),
    )  # fmt: skip
    for name, location, index in wrong_rows:
        for tensor_id, description, changes in list_wrong_reads(make_row_reader(index)):
            yield Mistake(f"{tensor_id}-{name}", f"with {description} {location}", changes, 3)


def list_wrong_reads(
    read: Callable[[np.ndarray], np.ndarray],
) -> tuple[tuple[str, str, dict[str, Step]], ...]:
    """Return the tensors that may be read at a wrong row: id, description, changed steps."""
    return (
        ("statistics", "mean and rstd", {
            "x_hat": lambda v: (v.input - read(v.row_mean)) * read(v.row_rstd),
            "grad_input": lambda v: read(v.row_rstd) * (v.g - v.c2 - v.x_hat * v.c1),
        }),
        ("input", "the input", {"x_hat": lambda v: (read(v.input) - v.row_mean) * v.row_rstd}),
        ("row", "the input and its statistics", {"input": lambda v: read(v.get_original("input"))}),
        ("grad-output", "grad_output", {"grad_output": lambda v: read(v.get_original("grad_output"))}),
        ("dln", "dln", {
            "dln": lambda v: read(v.grad_output @ v.linear_weight),
            "input_dln": lambda v: read(v.get_original("input_dln")),
        }),
        ("row-sums", "c1 and c2", {
            "grad_input": lambda v: v.row_rstd * (v.g - read(v.c2) - v.x_hat * read(v.c1)),
            **replace_means(*(lambda v, dln, k=k: read(compute_row_means(v, dln)[k]) for k in (0, 1)), change_dx=False),
        }),
    )  # fmt: skip


def list_tail_mistakes() -> Iterator[Mistake]:
    """Yield mistakes that skip the tail after the last full vector of 2, 4, ... elements."""
    for width in (2, 4, 8, 16, 32, 128):
        location = f"past the last full {width} elements"
        for name, description, changes in list_tail_changes(width):
            yield Mistake(f"{name}-tail-{width}", description.format(location), changes, 3)


def list_tail_changes(width: int) -> tuple[tuple[str, str, dict[str, Step]], ...]:
    """Return the loops that may skip the tail past the last full `width` elements: id, description, steps."""

    def mask_full_vectors(v: Derivation) -> np.ndarray:
        return (np.arange(get_row_length(v)) < get_row_length(v) // width * width).astype(float)

    def mean(terms: np.ndarray) -> np.ndarray:
        return zero_tail(terms, width).sum(-1, keepdims=True) / terms.shape[-1]

    def compute_c1(v: Derivation, dln: np.ndarray) -> np.ndarray:
        return mean(dln * v.ln_weight * v.x_hat)

    def compute_c2(v: Derivation, dln: np.ndarray) -> np.ndarray:
        return mean(dln * v.ln_weight)

    variance: dict[str, Step] = {"variance": lambda v: mean((v.input - v.row_mean) ** 2)}
    return (
        ("product", "without the columns h {} in the product with W", {"product": lambda v: zero_tail(v.ln_out, width) @ v.linear_weight.T}),
        ("dln", "without the columns o {} in dln", {"dln": lambda v: zero_tail(v.grad_output, width) @ v.linear_weight}),
        ("statistics", "without the elements h {} in mean and variance", {"row_mean": lambda v: mean(v.input), **variance}),
        ("variance", "without the elements h {} in the variance", variance),
        ("sums", "without the elements h {} in c1 and c2", replace_means(compute_c1, compute_c2)),
        ("c1", "without the elements h {} in c1", replace_means(c1=compute_c1)),
        ("c2", "without the elements h {} in c2", replace_means(c2=compute_c2)),
        ("mean-term", "without the mean term c2 in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 * mask_full_vectors(v) - v.x_hat * v.c1)}),
        ("variance-term", "without the variance term x_hat * c1 in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1 * mask_full_vectors(v))}),
        ("both-terms", "without both correction terms in the columns {}",
         {"grad_input": lambda v: v.row_rstd * (v.g - (v.c2 + v.x_hat * v.c1) * mask_full_vectors(v))}),
        ("zero", "with zeros {}", {
            name: lambda v, step=STEPS[name]: zero_tail(step(v), width)
            for name in ("ln_out", "output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_bias")
        }),
    )  # fmt: skip
