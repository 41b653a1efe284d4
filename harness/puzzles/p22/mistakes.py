"""Known mistakes of puzzle 22, as changes to its derivation; the first of equal ones is reported."""

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p22.derivation import (
    Mean,
    compute_row_means,
    derive,
    get_row_length,
    list_row_contributions,
    make_parameter_steps,
    replace_means,
    stack_means,
    zero_tail,
)
from harness.puzzles.p22.index_mistakes import list_tail_mistakes, list_wrong_row_mistakes
from harness.puzzles.rows import mean, read_with_swapped_strides
from harness.spec.derivation import Derivation, Mistake
from harness.spec.rounding import round_to_dtype

__all__ = ["MISTAKES", "derive", "stack_means"]


def compute_padding_fraction(v: Derivation) -> float:
    """Return the number of zeros that pad a row to a power of two, divided by the row's length."""
    return ((1 << (get_row_length(v) - 1).bit_length()) - get_row_length(v)) / get_row_length(v)


def index_by_row(v: Derivation, parameter: np.ndarray, wrap: bool) -> np.ndarray:
    """Return a parameter [H] indexed by the row, [B, S, 1]; past H it is 0, or wraps around if `wrap`."""
    rows = v.input.shape[0] * v.input.shape[1]
    extended = np.resize(parameter, rows) if wrap else np.append(parameter, np.zeros(rows))
    return extended[:rows].reshape(*v.input.shape[:2], 1)


def swap_batch(array: np.ndarray) -> np.ndarray:
    """Return the rows read with batch and sequence swapped: row (b, s) reads s * B + b."""
    B, S, n = array.shape
    return array.reshape(S, B, n).swapaxes(0, 1)


def sum_one_axis(axis: int) -> dict:
    """Return parameter gradients summed only over `axis` (0 batch, 1 sequence); each index of the other is an alternative."""

    def sum_axis(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        rows = list_row_contributions(v)[name]
        return rows.reshape(B, S, *rows.shape[1:]).sum(axis)

    return make_parameter_steps(sum_axis)


def sum_weighted_rows(get_weight) -> dict:
    """Return parameter gradients in which row (b, s) has the weight `get_weight(b, s, B, S)`."""

    def sum_weighted(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        weights = get_weight(*np.indices((B, S)), B, S) * np.ones((B, S))
        return np.tensordot(weights.reshape(-1), list_row_contributions(v)[name], 1)

    return make_parameter_steps(sum_weighted)


def sum_selected_rows(select) -> dict:
    """Return parameter gradients summed only over the rows for which `select(b, s, B, S)` is true."""

    def sum_rows(v: Derivation, name: str) -> np.ndarray:
        B, S = v.input.shape[:2]
        selected = select(*np.indices((B, S)), B, S)
        return list_row_contributions(v)[name][selected.reshape(-1)].sum(0)

    return make_parameter_steps(sum_rows)


def average_first_thread(terms: np.ndarray) -> np.ndarray:
    return terms[..., ::128].sum(-1, keepdims=True) / terms.shape[-1]


def divide_by_one_less(name: str) -> Mean:
    i = ("c1", "c2").index(name)
    return lambda v, dln: compute_row_means(v, dln)[i] * get_row_length(v) / max(1, get_row_length(v) - 1)


MISTAKES = (
    Mistake("rstd-not-on-variance-term",
            "without rstd on the variance term x_hat * c1: the bracket closes too early",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.c2) - v.x_hat * v.c1}),
    *formulas.list_statistics_mistakes(),
    Mistake("padding-counted", "with the zeros that pad the row to a power of two counted in the variance",
            {"variance": lambda v: ((v.input - v.row_mean) ** 2).mean(-1, keepdims=True) + compute_padding_fraction(v) * v.row_mean**2},
            3),
    # The LayerNorm output.
    *formulas.list_x_hat_mistakes(),
    Mistake("from-x-hat", "taken from x_hat instead of the LayerNorm output", {"ln_out": lambda v: v.x_hat}),
    Mistake("from-input", "taken from the input instead of the LayerNorm output",
            {"ln_out": lambda v: v.input}),
    Mistake("beta-forgotten", "without beta in the LayerNorm output", {"ln_out": lambda v: v.scaled}),
    Mistake("gamma-forgotten", "without gamma in the LayerNorm output", {"scaled": lambda v: v.x_hat}),
    Mistake("beta-scaled", "with beta multiplied by gamma too",
            {"ln_out": lambda v: (v.x_hat + v.ln_bias) * v.ln_weight}),
    Mistake("gamma-beta-swapped", "with gamma and beta swapped",
            {"ln_out": lambda v: v.x_hat * v.ln_bias + v.ln_weight}),
    *(
        Mistake(f"{name}-by-row{'-again' * wraps}",
                f"with {name.replace('-', ' and ')} indexed by the row, not by the column",
                {"ln_out": lambda v, g=gamma, b=beta, wrap=wraps: v.x_hat * (index_by_row(v, v.ln_weight, wrap) if g else v.ln_weight) + (index_by_row(v, v.ln_bias, wrap) if b else v.ln_bias)},
                3)
        for name, gamma, beta in (("beta", False, True), ("gamma", True, False), ("gamma-beta", True, True))
        for wraps in (False, True)
    ),
    Mistake("bias-forgotten", "without the linear bias", {"output": lambda v: v.product}),
    Mistake("bias-forgotten-behind-block", "without the linear bias past the first 128 columns",
            {"linear_bias": lambda v: v.get_original("linear_bias") * (np.arange(v.linear_weight.shape[0]) < 128)},
            3),
    Mistake("bias-in-every-term", "with the linear bias added once for every h, inside the loop",
            {"output": lambda v: v.product + get_row_length(v) * v.linear_bias}),
    Mistake("total-never-reset",
            "with a sum that is not reset for each o: initialize it inside the loop over o",
            {"output": lambda v: np.cumsum(v.product + v.linear_bias, -1)}, 3),
    Mistake("bias-twice", "with the linear bias added twice",
            {"output": lambda v: v.product + 2 * v.linear_bias}),
    Mistake("weight-strides-swapped", "with W read as if it were stored [H, O]",
            {"linear_weight": lambda v: read_with_swapped_strides(v.get_original("linear_weight"))}, 3),
    Mistake("grad-weight-strides-swapped", "stored as [H, O]: written at h * O + o, not o * H + h",
            {"grad_weight": lambda v: np.einsum("bso,bsh->ho", v.grad_output, v.ln_out).reshape(v.linear_weight.shape)},
            3),
    Mistake("last-tile-dropped", "without the last partial tile of 16 along H",
            {"product": lambda v: zero_tail(v.ln_out, 16) @ v.linear_weight.T}, 3),
    # grad_output.
    Mistake("grad-output-ignored", "with 1 instead of grad_output",
            {"grad_output": lambda v: np.ones_like(v.get_original("grad_output"))}, 1),
    Mistake("grad-output-swapped", "with batch and sequence of grad_output swapped",
            {"grad_output": lambda v: swap_batch(v.get_original("grad_output"))}, 3),
    Mistake("grad-output-first-row", "with grad_output's first row used for all rows",
            {"grad_output": lambda v: np.broadcast_to(v.get_original("grad_output")[:1, :1], v.get_original("grad_output").shape)},
            3),
    Mistake("grad-output-reversed", "with the rows of grad_output in reverse order",
            {"grad_output": lambda v: v.get_original("grad_output")[::-1, ::-1]}, 3),
    Mistake("input-swapped", "with batch and sequence of the input swapped",
            {"x_hat": lambda v: swap_batch((v.input - v.row_mean) * v.row_rstd)}, 3),
    # dx.
    *formulas.list_dx_mistakes("dln", "ln_weight"),
    Mistake("sums-not-means", "with sums over H in c1 and c2, not means",
            {"grad_input": lambda v: v.row_rstd * (v.g - get_row_length(v) * (v.c2 + v.x_hat * v.c1)),
             "row_sums": lambda v: get_row_length(v) * stack_means(*compute_row_means(v, v.input_dln))}),
    *formulas.list_mean_mistakes(128),
    *(
        Mistake(f"row-sums-{name}-not-divided", f"with {name} a sum, not a mean: divide {name} by H too",
                {"row_sums": lambda v, multiply=times: stack_means(*compute_row_means(v, v.input_dln)) * np.where(multiply, get_row_length(v), 1)})
        for name, times in (("c1", (True, False)), ("c2", (False, True)))
    ),
    Mistake("means-not-complete",
            "with incomplete c1 and c2: they are used inside the loop that computes them",
            {"grad_input": lambda v: v.row_rstd * (v.g - (np.cumsum(v.g, -1) + v.x_hat * np.cumsum(v.g * v.x_hat, -1)) / get_row_length(v))},
            3),
    Mistake("means-over-output", "with c1 and c2 divided by O, not H",
            {"grad_input": lambda v: v.row_rstd * (v.g - get_row_length(v) / v.grad_output.shape[-1] * (v.c2 + v.x_hat * v.c1))}),
    Mistake("gamma-forgotten-in-dx", "without gamma in g",
            {"g": lambda v: v.dln, **replace_means(lambda v, dln: mean(dln * v.x_hat), lambda v, dln: mean(dln), change_dx=False)}),
    Mistake("gamma-forgotten-in-c1", "with gamma in g and c2 but not in c1", replace_means(c1=lambda v, dln: mean(dln * v.x_hat))),
    Mistake("gamma-forgotten-in-c2", "with gamma in g and c1 but not in c2", replace_means(c2=lambda v, dln: mean(dln))),
    *(
        Mistake(f"{id}-over-h-minus-1", f"with {description} divided by H - 1, not H", replace_means(c1, c2))
        for id, description, c1, c2 in (
            ("sums", "c1 and c2", divide_by_one_less("c1"), divide_by_one_less("c2")),
            ("c1", "c1", divide_by_one_less("c1"), None),
            ("c2", "c2", None, divide_by_one_less("c2")),
        )
    ),
    Mistake("rstd-forgotten-in-terms",
            "with x - mean instead of x_hat, in c1 and in its factor",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - (v.input - v.row_mean) * (v.g * (v.input - v.row_mean)).mean(-1, keepdims=True))}),
    Mistake("dx-negated", "with the wrong sign",
            {"grad_input": lambda v: -v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1)}),
    # The row sums.
    Mistake("first-thread-only", "of the first thread's columns only, not summed over the block",
            replace_means(lambda v, dln: average_first_thread(dln * v.ln_weight * v.x_hat), lambda v, dln: average_first_thread(dln * v.ln_weight)), 3),
    Mistake("c1-first-thread-only", "with c1 of the first thread's columns only, not summed over the block",
            replace_means(c1=lambda v, dln: average_first_thread(dln * v.ln_weight * v.x_hat), change_dx=False), 3),
    Mistake("c2-first-thread-only", "with c2 of the first thread's columns only, not summed over the block",
            replace_means(c2=lambda v, dln: average_first_thread(dln * v.ln_weight), change_dx=False), 3),
    Mistake("no-stride",
            "with every column h counted h + 1 times: each thread steps by 1 column instead of 128",
            {"row_sums": lambda v: stack_means(*compute_row_means(v, v.input_dln * np.minimum(np.arange(get_row_length(v)) + 1, 128)))},
            3),
    Mistake("every-thread-all-columns",
            "128 times too large: each of the 128 threads adds up all columns, and the block adds up its threads",
            {"row_sums": lambda v: 128 * stack_means(*compute_row_means(v, v.input_dln))}, 3),
    Mistake("row-sums-exchanged", "with c1 and c2 swapped",
            {"row_sums": lambda v: stack_means(*compute_row_means(v, v.input_dln)[::-1])}),
    Mistake("row-sums-x-hat-forgotten", "with x_hat left out of c1", replace_means(c1=lambda v, dln: mean(dln * v.ln_weight))),
    *(
        Mistake(id, description, replace_means(c1=c1, change_dx=False))
        for id, description, c1 in (
            ("product-of-means", "with c1 = mean(g) * mean(x_hat) instead of mean(g * x_hat)",
             lambda v, dln: mean(dln * v.ln_weight) * mean(v.x_hat)),
            ("gamma-twice-in-c1", "with gamma twice in c1: g already includes gamma",
             lambda v, dln: mean(dln * v.ln_weight * v.ln_weight * v.x_hat)),
            ("x-hat-squared-in-c1", "with x_hat squared in c1", lambda v, dln: mean(dln * v.ln_weight * v.x_hat**2)),
        )
    ),
    Mistake("c2-over-the-tensor", "with the mean of g over the whole tensor in c2, not over each row",
            replace_means(c2=lambda v, dln: np.full_like(v.row_rstd, (dln * v.ln_weight).mean()), change_dx=False)),
    Mistake("gamma-on-the-means", "with gamma outside the bracket: c1 and c2 already include it",
            {"grad_input": lambda v: v.row_rstd * v.ln_weight * (v.dln - v.c2 - v.x_hat * v.c1)}),
    Mistake("divided-by-h-twice", "with c1 and c2 divided by H a second time: they are means already",
            {"grad_input": lambda v: v.row_rstd * (v.g - (v.c2 + v.x_hat * v.c1) / v.input.shape[-1])}),
    # The parameter gradients.
    Mistake("product-of-sums", "with sum(dln) * sum(x_hat) instead of sum(dln * x_hat)",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1)) * v.x_hat.sum((0, 1))}),
    Mistake("from-ln-out", "multiplied by the LayerNorm output instead of x_hat",
            {"grad_ln_weight": lambda v: (v.dln * v.ln_out).sum((0, 1))}),
    Mistake("gamma-twice", "with gamma multiplied in: dgamma and dbeta use dln, not g",
            {"grad_ln_weight": lambda v: (v.g * v.x_hat).sum((0, 1)),
             "grad_ln_bias": lambda v: v.g.sum((0, 1))}),
    Mistake("dgamma-dbeta-exchanged", "with dgamma and dbeta swapped",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1)),
             "grad_ln_bias": lambda v: (v.dln * v.x_hat).sum((0, 1))}, needs_all_wrong=True),
    Mistake("x-hat-forgotten-in-dgamma", "without x_hat: the sum of dln is dbeta",
            {"grad_ln_weight": lambda v: v.dln.sum((0, 1))}),
    Mistake("averaged-over-rows", "divided by the number of rows: a mean, not a sum",
            make_parameter_steps(lambda v, name: list_row_contributions(v)[name].mean(0))),
    *(
        Mistake(id, description, sum_selected_rows(keep), 3)
        for id, description, keep in (
            ("only-first-batch", "of the first batch element only", lambda b, s, B, S: b == 0),
            ("only-first-position", "of the first sequence position only", lambda b, s, B, S: s == 0),
            ("only-first-row", "of the first row only", lambda b, s, B, S: (b == 0) & (s == 0)),
            ("last-row-missed", "without the last row", lambda b, s, B, S: (b < B - 1) | (s < S - 1)),
            ("first-row-missed", "without the first row", lambda b, s, B, S: (b > 0) | (s > 0)),
            ("last-batch-missed", "without the last batch element", lambda b, s, B, S: b < B - 1),
            ("first-batch-missed", "without the first batch element", lambda b, s, B, S: b > 0),
            ("last-position-missed", "without the last position", lambda b, s, B, S: s < S - 1),
            ("first-position-missed", "without the first position", lambda b, s, B, S: s > 0),
            *((f"rows-tail-{w}", f"without the rows past the last full {w}",
               lambda b, s, B, S, w=w: b * S + s < B * S // w * w) for w in (2, 4, 8, 16, 32)),
            *((f"rows-from-{w}", f"of the first {w} rows only: the loop over the rows is missing or stops too early",
               lambda b, s, B, S, w=w: b * S + s < w) for w in (16, 32, 64)),
        )
    ),
    Mistake("last-row-twice", "with the last row counted twice", sum_weighted_rows(lambda b, s, B, S: 1 + (b == B - 1) * (s == S - 1)), 3),
    Mistake("first-row-twice", "with the first row counted twice", sum_weighted_rows(lambda b, s, B, S: 1 + (b == 0) * (s == 0)), 3),
    *(
        Mistake(f"terms-rounded-to-{kind}", f"with every term rounded to {kind} before it is added",
                make_parameter_steps(lambda v, name, kind=kind: round_to_dtype(list_row_contributions(v)[name], kind).sum(0)), 3)
        for kind in ("bfloat16", "float16")
    ),
    Mistake("overwritten", "of only one row in each element: the other rows' terms are overwritten or lost",
            {**make_parameter_steps(lambda v, name: list_row_contributions(v)[name])}, 3),
    Mistake("not-accumulated-over-batch", "of only one batch element in each element: not summed over the batch",
            sum_one_axis(1), 3),
    Mistake("not-accumulated-over-sequence",
            "of only one sequence position in each element: not summed over the sequence", sum_one_axis(0), 3),
    Mistake("doubled", "multiplied by 2", make_parameter_steps(lambda v, name: 2 * list_row_contributions(v)[name].sum(0)), 3),
    *list_wrong_row_mistakes(),
    *list_tail_mistakes(),
)  # fmt: skip
