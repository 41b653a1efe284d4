"""The known mistakes of puzzle 22, as changes of its derivation.

Shapes are those of `derivation.py`. If two mistakes give the same values in every failing case, the first is
named.
"""

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p22.derivation import (
    Mean,
    derive,
    means,
    one_row_only,
    pack,
    parameter_gradients,
    row_sums,
    truncate,
    values,
)
from harness.puzzles.p22.index_mistakes import tails, wrong_rows
from harness.spec.derivation import Derivation, Mistake
from harness.spec.rounding import round_to_dtype

__all__ = ["MISTAKES", "derive", "pack"]


def padding(v: Derivation) -> float:
    """Return the zeros between a row and the next power of two, as a share of the row."""
    return ((1 << (values(v) - 1).bit_length()) - values(v)) / values(v)


def by_row(v: Derivation, parameter: np.ndarray, again: bool) -> np.ndarray:
    """Return [B, S, 1]: a parameter [H] indexed by the row; from H on 0, or with `again` wrapped around."""
    rows = v.input.shape[0] * v.input.shape[1]
    longer = np.resize(parameter, rows) if again else np.append(parameter, np.zeros(rows))
    return longer[:rows].reshape(*v.input.shape[:2], 1)


def swap_batch(array: np.ndarray) -> np.ndarray:
    """Return the rows read with batch and sequence exchanged: row (b, s) reads s * B + b."""
    B, S, n = array.shape
    return array.reshape(S, B, n).swapaxes(0, 1)


def as_stored(matrix: np.ndarray) -> np.ndarray:
    """Return an [O, H] matrix read as if it were stored [H, O]: element (o, h) reads h * O + o."""
    O, H = matrix.shape
    return matrix.reshape(H, O).T


def alternatives(count) -> dict:
    """Return parameter gradients from one group of rows each; `count` picks the axis kept."""

    def by_group(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        rows = one_row_only(v)[name]
        return rows.reshape(B, S, *rows.shape[1:]).sum(count)

    return parameter_gradients(by_group)


def weight_rows(weight) -> dict:
    """Return parameter gradients in which row (b, s) has the weight `weight(b, s, B, S)`."""

    def total(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        times = weight(*np.indices((B, S)), B, S) * np.ones((B, S))
        return np.tensordot(times.reshape(-1), one_row_only(v)[name], 1)

    return parameter_gradients(total)


def only_rows(keep) -> dict:
    """Return parameter gradients from the rows with `keep(b, s, B, S)` only."""

    def total(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        kept = keep(*np.indices((B, S)), B, S)
        return one_row_only(v)[name][kept.reshape(-1)].sum(0)

    return parameter_gradients(total)


def first_thread(terms: np.ndarray) -> np.ndarray:
    """Return the contribution of the first of 128 threads to a row's mean, [B, S, 1]."""
    return terms[..., ::128].sum(-1, keepdims=True) / terms.shape[-1]


def mean(terms: np.ndarray) -> np.ndarray:
    return terms.mean(-1, keepdims=True)


def over_one_less(name: str) -> Mean:
    """Return c1 or c2 divided by H - 1 in place of H."""
    i = ("c1", "c2").index(name)
    return lambda v, dln: row_sums(v, dln)[i] * values(v) / max(1, values(v) - 1)


MISTAKES = (
    Mistake("rstd-not-on-variance-term",
            "with rstd not on the variance term x_hat * c1: the bracket ends too early",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.c2) - v.x_hat * v.c1}),
    *formulas.layernorm_statistics(),
    Mistake("padding-counted", "with zeros after the row, up to a power of two, counted in the variance",
            {"variance": lambda v: ((v.input - v.row_mean) ** 2).mean(-1, keepdims=True) + padding(v) * v.row_mean**2},
            3),
    # The LayerNorm output.
    *formulas.layernorm_x_hat(),
    Mistake("from-x-hat", "taken from x_hat instead of the LayerNorm output", {"ln_out": lambda v: v.x_hat}),
    Mistake("from-input", "taken from the input instead of the LayerNorm output",
            {"ln_out": lambda v: v.input}),
    Mistake("beta-forgotten", "without beta in the LayerNorm output", {"ln_out": lambda v: v.scaled}),
    Mistake("gamma-forgotten", "without gamma in the LayerNorm output", {"scaled": lambda v: v.x_hat}),
    Mistake("beta-scaled", "with beta multiplied by gamma too",
            {"ln_out": lambda v: (v.x_hat + v.ln_bias) * v.ln_weight}),
    Mistake("gamma-beta-swapped", "with gamma and beta exchanged",
            {"ln_out": lambda v: v.x_hat * v.ln_bias + v.ln_weight}),
    *(
        Mistake(f"{name}-by-row{'-again' * again}",
                f"with {name.replace('-', ' and ')} read at the index of the row, not of the column",
                {"ln_out": lambda v, g=gamma, b=beta, again=again: v.x_hat * (by_row(v, v.ln_weight, again) if g else v.ln_weight) + (by_row(v, v.ln_bias, again) if b else v.ln_bias)},
                3)
        for name, gamma, beta in (("beta", False, True), ("gamma", True, False), ("gamma-beta", True, True))
        for again in (False, True)
    ),
    Mistake("bias-forgotten", "without the linear bias", {"output": lambda v: v.product}),
    Mistake("bias-forgotten-behind-block", "without the linear bias past the first 128 columns",
            {"linear_bias": lambda v: v.original("linear_bias") * (np.arange(v.linear_weight.shape[0]) < 128)},
            3),
    Mistake("bias-in-every-term", "with the linear bias added once for every h, inside of the loop",
            {"output": lambda v: v.product + values(v) * v.linear_bias}),
    Mistake("total-never-reset",
            "with a sum that goes on from one o to the next, because it begins outside of the loop over o",
            {"output": lambda v: np.cumsum(v.product + v.linear_bias, -1)}, 3),
    Mistake("bias-twice", "with the linear bias added twice",
            {"output": lambda v: v.product + 2 * v.linear_bias}),
    Mistake("weight-strides-swapped", "with W read as if it were stored [H, O]",
            {"linear_weight": lambda v: as_stored(v.original("linear_weight"))}, 3),
    Mistake("grad-weight-strides-swapped", "stored as [H, O]: written at h * O + o, not o * H + h",
            {"grad_weight": lambda v: np.einsum("bso,bsh->ho", v.grad_output, v.ln_out).reshape(v.linear_weight.shape)},
            3),
    Mistake("last-tile-dropped", "without the last part of a tile of 16 along H",
            {"product": lambda v: truncate(v.ln_out, 16) @ v.linear_weight.T}, 3),
    # grad_output.
    Mistake("grad-output-ignored", "with grad_output taken to be 1",
            {"grad_output": lambda v: np.ones_like(v.original("grad_output"))}, 1),
    Mistake("grad-output-swapped", "with batch and sequence of grad_output exchanged",
            {"grad_output": lambda v: swap_batch(v.original("grad_output"))}, 3),
    Mistake("grad-output-first-row", "with the grad_output of the first row used for all",
            {"grad_output": lambda v: np.broadcast_to(v.original("grad_output")[:1, :1], v.original("grad_output").shape)},
            3),
    Mistake("grad-output-reversed", "with the rows of grad_output in reverse order",
            {"grad_output": lambda v: v.original("grad_output")[::-1, ::-1]}, 3),
    Mistake("input-swapped", "with batch and sequence of the input exchanged",
            {"x_hat": lambda v: swap_batch((v.input - v.row_mean) * v.row_rstd)}, 3),
    # dx.
    *formulas.layernorm_dx("dln", "ln_weight"),
    Mistake("sums-not-means", "with sums over H in c1 and c2, not means",
            {"grad_input": lambda v: v.row_rstd * (v.g - values(v) * (v.c2 + v.x_hat * v.c1)),
             "row_sums": lambda v: values(v) * pack(*row_sums(v, v.given_dln))}),
    *formulas.layernorm_means(128),
    *(
        Mistake(f"row-sums-{name}-not-divided", f"with {name} a sum, not a mean: {name} is divided by H too",
                {"row_sums": lambda v, times=times: pack(*row_sums(v, v.given_dln)) * np.where(times, values(v), 1)})
        for name, times in (("c1", (True, False)), ("c2", (False, True)))
    ),
    Mistake("means-not-complete",
            "with c1 and c2 as they are on the way, taken inside of the loop that still sums them up",
            {"grad_input": lambda v: v.row_rstd * (v.g - (np.cumsum(v.g, -1) + v.x_hat * np.cumsum(v.g * v.x_hat, -1)) / values(v))},
            3),
    Mistake("means-over-output", "with c1 and c2 divided by O, not H",
            {"grad_input": lambda v: v.row_rstd * (v.g - values(v) / v.grad_output.shape[-1] * (v.c2 + v.x_hat * v.c1))}),
    Mistake("gamma-forgotten-in-dx", "without gamma in g",
            {"g": lambda v: v.dln, **means(lambda v, dln: mean(dln * v.x_hat), lambda v, dln: mean(dln), inside=False)}),
    Mistake("gamma-forgotten-in-c1", "with gamma in g and c2 but not in c1", means(c1=lambda v, dln: mean(dln * v.x_hat))),
    Mistake("gamma-forgotten-in-c2", "with gamma in g and c1 but not in c2", means(c2=lambda v, dln: mean(dln))),
    *(
        Mistake(f"{id}-over-h-minus-1", f"with {words} divided by H - 1, not H", means(c1, c2))
        for id, words, c1, c2 in (
            ("sums", "c1 and c2", over_one_less("c1"), over_one_less("c2")),
            ("c1", "c1", over_one_less("c1"), None),
            ("c2", "c2", None, over_one_less("c2")),
        )
    ),
    Mistake("rstd-forgotten-in-terms",
            "with the deviation from the mean where x_hat belongs, in c1 and in front of it",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - (v.input - v.row_mean) * (v.g * (v.input - v.row_mean)).mean(-1, keepdims=True))}),
    Mistake("dx-negated", "with the sign turned",
            {"grad_input": lambda v: -v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1)}),
    # The row sums alone.
    Mistake("first-thread-only", "of the first thread's columns alone, not summed over the block",
            means(lambda v, dln: first_thread(dln * v.ln_weight * v.x_hat), lambda v, dln: first_thread(dln * v.ln_weight)), 3),
    Mistake("c1-first-thread-only", "with c1 of the first thread's columns alone, not summed over the block",
            means(c1=lambda v, dln: first_thread(dln * v.ln_weight * v.x_hat), inside=False), 3),
    Mistake("c2-first-thread-only", "with c2 of the first thread's columns alone, not summed over the block",
            means(c2=lambda v, dln: first_thread(dln * v.ln_weight), inside=False), 3),
    Mistake("no-stride",
            "with every column h counted h + 1 times: each thread goes on to the next column, not to the one 128 further",
            {"row_sums": lambda v: pack(*row_sums(v, v.given_dln * np.minimum(np.arange(values(v)) + 1, 128)))},
            3),
    Mistake("every-thread-all-columns",
            "of all columns by each of the 128 threads, and then added up over the block: 128 times too large",
            {"row_sums": lambda v: 128 * pack(*row_sums(v, v.given_dln))}, 3),
    Mistake("row-sums-exchanged", "with c1 and c2 written in each other's place",
            {"row_sums": lambda v: pack(*row_sums(v, v.given_dln)[::-1])}),
    Mistake("row-sums-x-hat-forgotten", "with x_hat left out of c1", means(c1=lambda v, dln: mean(dln * v.ln_weight))),
    *(
        Mistake(id, words, means(c1=c1, inside=False))
        for id, words, c1 in (
            ("product-of-means", "with c1 = mean(g) * mean(x_hat): it is the mean of their product",
             lambda v, dln: mean(dln * v.ln_weight) * mean(v.x_hat)),
            ("gamma-twice-in-c1", "with gamma twice in c1: g holds it already",
             lambda v, dln: mean(dln * v.ln_weight * v.ln_weight * v.x_hat)),
            ("x-hat-squared-in-c1", "with x_hat squared in c1", lambda v, dln: mean(dln * v.ln_weight * v.x_hat**2)),
        )
    ),
    Mistake("c2-over-the-tensor", "with the mean of g over the whole tensor in c2, not over each row",
            means(c2=lambda v, dln: np.full_like(v.row_rstd, (dln * v.ln_weight).mean()), inside=False)),
    Mistake("gamma-on-the-means", "with gamma outside of the bracket: c1 and c2 hold it already",
            {"grad_input": lambda v: v.row_rstd * v.ln_weight * (v.dln - v.c2 - v.x_hat * v.c1)}),
    Mistake("divided-by-h-twice", "with c1 and c2 divided by H once more: they are means",
            {"grad_input": lambda v: v.row_rstd * (v.g - (v.c2 + v.x_hat * v.c1) / v.input.shape[-1])}),
    # The parameter gradients.
    Mistake("product-of-sums", "of the sum of dln times the sum of x_hat: it is the sum of their products",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1)) * v.x_hat.sum((0, 1))}),
    Mistake("from-ln-out", "multiplied with the LayerNorm output instead of x_hat",
            {"grad_ln_weight": lambda v: (v.dln * v.ln_out).sum((0, 1))}),
    Mistake("gamma-twice", "with gamma multiplied in: dgamma and dbeta want dln, not g",
            {"grad_ln_weight": lambda v: (v.g * v.x_hat).sum((0, 1)),
             "grad_ln_bias": lambda v: v.g.sum((0, 1))}),
    Mistake("dgamma-dbeta-exchanged", "with dgamma and dbeta in each other's place",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1)),
             "grad_ln_bias": lambda v: (v.dln * v.x_hat).sum((0, 1))}, together=True),
    Mistake("x-hat-forgotten-in-dgamma", "without x_hat: the sum of dln alone, which is dbeta",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1))}),
    Mistake("averaged-over-rows", "divided by the number of rows: a mean, not a sum",
            parameter_gradients(lambda v, name: one_row_only(v)[name].mean(0))),
    *(
        Mistake(id, words, only_rows(keep), 3)
        for id, words, keep in (
            ("only-first-batch", "of the first batch alone", lambda b, s, B, S: b == 0),
            ("only-first-position", "of the first sequence position alone", lambda b, s, B, S: s == 0),
            ("only-first-row", "of the first row alone", lambda b, s, B, S: (b == 0) & (s == 0)),
            ("last-row-missed", "without the last row", lambda b, s, B, S: (b < B - 1) | (s < S - 1)),
            ("first-row-missed", "without the first row", lambda b, s, B, S: (b > 0) | (s > 0)),
            ("last-batch-missed", "without the last batch", lambda b, s, B, S: b < B - 1),
            ("first-batch-missed", "without the first batch", lambda b, s, B, S: b > 0),
            ("last-position-missed", "without the last position", lambda b, s, B, S: s < S - 1),
            ("first-position-missed", "without the first position", lambda b, s, B, S: s > 0),
            *((f"rows-tail-{w}", f"without the rows past the last full {w}",
               lambda b, s, B, S, w=w: b * S + s < B * S // w * w) for w in (2, 4, 8, 16, 32)),
            *((f"rows-from-{w}", f"of the first {w} rows alone: a loop over the rows stops or was left out",
               lambda b, s, B, S, w=w: b * S + s < w) for w in (16, 32, 64)),
        )
    ),
    Mistake("last-row-twice", "with the last row counted twice", weight_rows(lambda b, s, B, S: 1 + (b == B - 1) * (s == S - 1)), 3),
    Mistake("first-row-twice", "with the first row counted twice", weight_rows(lambda b, s, B, S: 1 + (b == 0) * (s == 0)), 3),
    *(
        Mistake(f"terms-rounded-to-{kind}", f"with every term rounded to {kind} before it is added",
                parameter_gradients(lambda v, name, kind=kind: round_to_dtype(one_row_only(v)[name], kind).sum(0)), 3)
        for kind in ("bfloat16", "float16")
    ),
    Mistake("overwritten", "of one row only, in each element: what the other rows added is overwritten or lost",
            {**parameter_gradients(lambda v, name: one_row_only(v)[name])}, 3),
    Mistake("not-accumulated-over-batch", "of one batch only, in each element: not summed over the batch",
            alternatives(1), 3),
    Mistake("not-accumulated-over-sequence",
            "of one sequence position only, in each element: not summed over the sequence", alternatives(0), 3),
    Mistake("doubled", "twice over", parameter_gradients(lambda v, name: 2 * one_row_only(v)[name].sum(0)), 3),
    *wrong_rows(),
    *tails(),
)  # fmt: skip
