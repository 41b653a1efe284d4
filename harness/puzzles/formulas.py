"""Build known mistakes in formulas that several puzzles share: row sums, softmax, LayerNorm, their gradients.

Each function takes the names of the formula's steps in the puzzle's derivation, and returns mistakes that
change these steps. Matrices are [..., columns]; per-row values are [..., 1].
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.puzzles.rows import finite_max, mean
from harness.spec.derivation import Derivation, Mistake, Step
from harness.spec.puzzle import Arrays, Symptom
from harness.spec.rounding import round_to_dtype

EPS = 1e-5
"""The epsilon added to LayerNorm's variance."""
LARGEST_EXPONENT = 80
"""An exponent x at which exp(x) is still finite in float32."""
SIXTEEN_BIT_DTYPES = ("bfloat16", "float16")
Terms = Callable[[Derivation], np.ndarray]
"""The terms of a sum, [..., columns]."""


def sum_rows(terms: np.ndarray) -> np.ndarray:
    return terms.sum(-1, keepdims=True)


def sum_one_thread(terms: np.ndarray, threads: int, first: int = 0) -> np.ndarray:
    """Return thread `first`'s partial sum of a row, over columns first, first + threads, ..., as [..., 1]."""
    return sum_rows(terms[..., first::threads])


def sum_per_thread(terms: np.ndarray, threads: int) -> np.ndarray:
    """Return, for each column, the partial sum of the thread that handles it, [..., columns]."""
    sums = np.zeros_like(terms)
    for first in range(min(threads, terms.shape[-1])):
        sums[..., first::threads] = sum_one_thread(terms, threads, first)
    return sums


def sum_per_warp(terms: np.ndarray, threads: int) -> np.ndarray:
    """Return, for each column, the sum over the warp whose thread handles it, [..., columns]."""
    warp = np.arange(terms.shape[-1]) % threads // 32
    return terms @ (warp[:, None] == warp).astype(terms.dtype)


def list_sum_mistakes(
    terms: Terms, threads: int, steps: Mapping[str, Callable[[Terms], Step]], prefix: str = ""
) -> tuple[Mistake, ...]:
    """Return mistakes in a row sum that `threads` threads compute together.

    `steps` maps each step to its formula as a function of the wrong sum, [..., 1] or [..., columns].
    """

    def make_mistake(
        id: str, description: str, add_up: Callable[[np.ndarray], np.ndarray], hint: int = 2
    ) -> Mistake:
        changes = {step: make(lambda v: add_up(terms(v))) for step, make in steps.items()}
        return Mistake(f"{prefix}{id}", description, changes, hint)

    return (
        make_mistake("first-thread-only", "of the first thread's columns only, not summed over the block", lambda t: sum_one_thread(t, threads)),
        make_mistake("own-share-only", "with every thread's own share of the sum: block.sum is missing", lambda t: sum_per_thread(t, threads)),
        make_mistake("first-warp-only", "of the first warp only: warp.sum adds up 32 threads, block.sum the whole block",
                lambda t: sum_rows(np.where(np.arange(t.shape[-1]) % threads < 32, t, 0.0))),
        make_mistake("own-warp-only", "with the sum of each thread's own warp: warp.sum, and a block_size of 32, add up 32 threads, not the block",
                lambda t: sum_per_warp(t, threads)),
        make_mistake("first-columns-only", f"of the first {threads} columns only, one per thread: a loop is missing",
                lambda t: sum_rows(t[..., :threads]), 3),
        make_mistake("last-columns-only", f"of the last {threads} columns only, one per thread: each iteration overwrites the thread's sum",
                lambda t: sum_rows(t[..., -threads:])),
        make_mistake("every-thread-adds-all", f"{threads} times too large: every thread adds up the whole row, and the block adds up its threads",
                lambda t: threads * sum_rows(t), 3),
        make_mistake("first-term-missing", "without the first column: the loop begins at 1", lambda t: sum_rows(t[..., 1:])),
        make_mistake("last-term-missing", "without the last column: the loop ends one column too early", lambda t: sum_rows(t[..., :-1])),
        make_mistake("first-term-only", "of the first column only: the loop stops after one iteration", lambda t: t[..., :1]),
        make_mistake("last-term-only", "of the last column only: every iteration overwrites the total", lambda t: t[..., -1:]),
    )  # fmt: skip


def list_softmax_mistakes(
    weights: str, total: str, result: str, scores: str, threads: int
) -> tuple[Mistake, ...]:
    """Return mistakes in result = weights / whole, with weights = exp(scores - max) and whole their row sum."""
    get_weights: Terms = lambda v: getattr(v, weights)  # noqa: E731
    unshifted: Terms = lambda v: np.exp(getattr(v, scores).astype(np.float32)).astype(np.float64)  # noqa: E731
    shifted: Terms = lambda v: getattr(v, scores) - finite_max(getattr(v, scores).max(-1, keepdims=True))  # noqa: E731
    return (
        Mistake("not-normalised", "not divided by the sum of the row", {result: get_weights}),
        Mistake("divided-by-length", "divided by the number of columns, not by the sum of the row",
                {result: lambda v: get_weights(v) / get_weights(v).shape[-1]}),
        Mistake("largest-not-subtracted", "without the maximum subtracted: the exponentials overflow, or are all 0",
                {weights: unshifted}),
        Mistake("largest-in-the-sum-alone", "with the maximum subtracted only in the sum, not where each column is written",
                {result: lambda v: unshifted(v) / getattr(v, total)}),
        Mistake("largest-in-the-columns-alone", "with the maximum subtracted only where each column is written, not in the sum",
                {total: lambda v: sum_rows(unshifted(v))}),
        Mistake("exponential-forgotten-in-sum", "divided by a sum of scores, not of their exponentials", {total: lambda v: sum_rows(shifted(v))}),
        Mistake("largest-for-sum", "divided by the largest exponential, not by the sum", {total: lambda v: get_weights(v).max(-1, keepdims=True)}),
        *list_sum_mistakes(get_weights, threads, {total: lambda change: change}),
    )  # fmt: skip


@dataclass(frozen=True)
class OnlineSteps:
    """Rows of scores in the order in which an online softmax processes them.

    Arrays are [..., threads, steps, width], -inf past a row's end. In each step, the first thread gets the
    next `width` columns, the second thread the following `width`, and so on.

    Attributes:
        scores: The scores.
        previous_max, running_max: The thread's maximum before and after a step, -inf at first, [..., threads, steps, 1].
        final_max: The thread's final maximum, [..., threads, 1, 1].
        columns: The number of columns in a row.
    """

    scores: np.ndarray
    previous_max: np.ndarray
    running_max: np.ndarray
    final_max: np.ndarray
    columns: int

    @staticmethod
    def split(scores: np.ndarray, threads: int, width: int) -> "OnlineSteps":
        """Split rows [..., columns] into steps."""
        *rows, columns = scores.shape
        step = threads * width
        padded = np.full((*rows, -(-columns // step) * step), -np.inf)
        padded[..., :columns] = scores
        steps = padded.reshape(*rows, -1, threads, width).swapaxes(-3, -2)
        running_max = np.maximum.accumulate(steps.max(-1, keepdims=True), -2)
        previous_max = np.concatenate(
            [np.full_like(running_max[..., :1, :], -np.inf), running_max[..., :-1, :]], -2
        )
        return OnlineSteps(
            steps, previous_max, finite_max(running_max), finite_max(running_max[..., -1:, :]), columns
        )

    def join(self, weights: np.ndarray) -> np.ndarray:
        """Return the steps' weights as rows [..., columns]."""
        return weights.swapaxes(-3, -2).reshape(*weights.shape[:-3], -1)[..., : self.columns]


def multiply_later_factors(factors: np.ndarray) -> np.ndarray:
    """Return, for each step, the product of all later steps' factors, [..., steps, 1]."""
    shifted = np.concatenate([factors[..., 1:, :], np.ones_like(factors[..., :1, :])], -2)
    return np.flip(np.cumprod(np.flip(shifted, -2), -2), -2)


def list_online_softmax_mistakes(
    sum_name: str,
    score: str,
    changes: Callable[[Callable[[OnlineSteps], np.ndarray]], Mapping[str, Step]],
    prefix: str = "",
) -> tuple[Mistake, ...]:
    """Return mistakes in rescaling the sums of an online softmax to a new maximum.

    Args:
        sum_name: Name of the running sum in the messages, such as "the total".
        score: Name of a row's elements in the messages, such as "score".
        changes: Maps the wrong exponentials, a function of `OnlineSteps`, to the changed steps.
        name: Prefix of the ids, such as "total-".
    """

    def make_mistake(id: str, description: str, weights: Callable[[OnlineSteps], np.ndarray]) -> Mistake:
        return Mistake(f"{prefix}{id}", f"with {sum_name} {description}", changes(weights))

    return (
        make_mistake("not-rescaled", f"not scaled down when a larger {score} arrives", lambda o: np.exp(o.scores - o.running_max)),
        make_mistake("old-largest", f"of exponentials that subtract the previous maximum {score}: subtract the new maximum, and rescale the sum so far to it",
                     lambda o: np.exp(o.scores - finite_max(o.previous_max))),
        make_mistake("old-largest-rescaled", f"rescaled to the new maximum {score}, although each step's exponentials subtract the previous maximum",
                     lambda o: np.exp(o.scores - finite_max(o.previous_max)) * np.exp(o.running_max - o.final_max)),
        make_mistake("step-rescaled-too", "rescaled together with this step's exponentials, which already subtract the new maximum",
                     lambda o: np.exp(o.scores - o.running_max) * np.exp(o.previous_max - o.final_max)),
        make_mistake("step-rescaled-instead", "so far not rescaled, and this step's exponentials rescaled instead: it is the other way round",
                     lambda o: np.exp(o.scores - o.running_max) * np.exp(o.previous_max - o.running_max)),
        make_mistake("rescaled-by-old-alone", f"so far multiplied by exp(old maximum): subtract the new maximum {score} in the exponent",
                     lambda o: np.exp(o.scores - o.running_max) * multiply_later_factors(np.exp(o.previous_max))),
        *(
            make_mistake(f"of-{kind}", f"of exponentials rounded to {kind}: add up in float32",
                  lambda o, kind=kind: round_to_dtype(np.exp(o.scores - o.running_max), kind) * np.exp(o.running_max - o.final_max))
            for kind in SIXTEEN_BIT_DTYPES
        ),
    )  # fmt: skip


def explain_infinite_lse(scores: np.ndarray, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain an infinite lse when no score is large enough for its exponential to overflow."""
    finite = np.isfinite(truth) & (truth != 0)
    if not finite.any() or not np.isposinf(got[finite]).all() or scores.max() > LARGEST_EXPONENT:
        return None
    return Symptom(
        "infinite-at-first",
        "is infinite, although no score is large: the exponentials subtract the previous maximum, which is the lowest "
        "number of the dtype in the first step; subtract the new maximum",
    )


def list_softmax_backward_mistakes(
    result: str, P: str, dP: str, dot: str, threads: int, hints: Mapping[str, int] | None = None
) -> tuple[Mistake, ...]:
    """Return mistakes in result = P * (dP - dot), dot = sum(dP * P) over a row; `hints` maps ids to hints."""

    def p(v: Derivation) -> np.ndarray:
        return getattr(v, P)

    def dp(v: Derivation) -> np.ndarray:
        return getattr(v, dP)

    def row_sum(v: Derivation) -> np.ndarray:
        return getattr(v, dot)

    mistakes = (
        Mistake("row-sum-forgotten", "without the row sum of dP * P", {dot: lambda v: 0 * p(v)[..., :1]}, 1),
        Mistake("diagonal-jacobian", "with the diagonal of the Jacobian alone, P * (1 - P)", {result: lambda v: p(v) * (1 - p(v)) * dp(v)}, 1),
        *list_sum_mistakes(lambda v: dp(v) * p(v), threads, {dot: lambda change: change}),
        Mistake("sum-over-columns", "with the sum of dP * P taken along the columns, not along the row", {dot: lambda v: (dp(v) * p(v)).sum(-2, keepdims=True)}, 1),
        Mistake("sum-over-both", "with the sum of dP * P taken over rows and columns together, not along each row", {dot: lambda v: 0 * p(v)[..., :1] + (dp(v) * p(v)).sum((-2, -1), keepdims=True)}, 1),
        Mistake("probabilities-twice", "with P multiplied twice", {result: lambda v: p(v) ** 2 * (dp(v) - row_sum(v))}),
        Mistake("probabilities-inside", "with P multiplied in twice: P * (dP * P - sum(dP * P))", {result: lambda v: p(v) * (dp(v) * p(v) - row_sum(v))}),
        Mistake("probabilities-forgotten", "without the factor P", {result: lambda v: dp(v) - row_sum(v)}),
        Mistake("row-sum-times-p", "with the row sum multiplied by P inside the bracket too", {result: lambda v: p(v) * (dp(v) - p(v) * row_sum(v))}),
        Mistake("diagonal-beside-row-sum", "with P * (1 - P) instead of P: the row sum already includes the diagonal term", {result: lambda v: p(v) * (1 - p(v)) * (dp(v) - row_sum(v))}),
        Mistake("row-sum-outside", "with the row sum subtracted from P * dP, outside the bracket: it is P * (dP - sum)", {result: lambda v: p(v) * dp(v) - row_sum(v)}),
        Mistake("probabilities-forgotten-in-sum", "with the row sum of dP, not of dP * P", {dot: lambda v: sum_rows(dp(v))}),
        Mistake("gradient-forgotten-in-sum", "with the row sum of P, not of dP * P", {dot: lambda v: sum_rows(p(v))}),
        Mistake("mean-not-sum", "with the mean of dP * P over the row, not the sum", {dot: lambda v: (dp(v) * p(v)).mean(-1, keepdims=True)}),
        Mistake("row-sum-added", "with the row sum added, not subtracted", {result: lambda v: p(v) * (dp(v) + row_sum(v))}),
        Mistake("exchanged", "with P and dP swapped", {result: lambda v: dp(v) * (p(v) - row_sum(v))}),
    )  # fmt: skip
    return set_hints(mistakes, hints)


LAYERNORM: Mapping[str, Step] = {
    "row_mean": lambda v: v.input.mean(-1, keepdims=True),
    "variance": lambda v: ((v.input - v.row_mean) ** 2).mean(-1, keepdims=True),
    "row_rstd": lambda v: 1 / np.sqrt(v.variance + EPS),
    "mean": lambda v: v.row_mean[..., 0],
    "rstd": lambda v: v.row_rstd[..., 0],
    "x_hat": lambda v: (v.input - v.row_mean) * v.row_rstd,
    "c1": lambda v: (v.g * v.x_hat).mean(-1, keepdims=True),
    "c2": lambda v: v.g.mean(-1, keepdims=True),
    "grad_input": lambda v: v.row_rstd * (v.g - v.c2 - v.x_hat * v.c1),
}
"""The steps of LayerNorm and its gradient, computed from `input` and `g`, the gradient of x_hat."""


WRONG_EPS_VALUES = (1e-2, 1e-3, 1e-4, 1e-7, 1e-12)


def list_statistics_mistakes() -> tuple[Mistake, ...]:
    """Return mistakes in a row's variance, and in rstd = 1 / sqrt(variance + EPS)."""
    return (
        Mistake("eps-forgotten", "without eps in rstd", {"row_rstd": lambda v: 1 / np.sqrt(v.variance)}),
        Mistake("eps-outside-root", "with eps added outside the root, rstd = 1 / (sqrt(variance) + eps)",
                {"row_rstd": lambda v: 1 / (np.sqrt(v.variance) + EPS)}),
        Mistake("eps-twice", "with eps added twice in rstd",
                {"row_rstd": lambda v: 1 / np.sqrt(v.variance + 2 * EPS)}),
        Mistake("eps-too-small", "with eps = 1e-6", {"row_rstd": lambda v: 1 / np.sqrt(v.variance + 1e-6)}),
        *(
            Mistake(f"eps-{eps:.0e}", f"with eps = {eps:.0e}", {"row_rstd": lambda v, eps=eps: 1 / np.sqrt(v.variance + eps)})
            for eps in WRONG_EPS_VALUES
        ),
        Mistake("eps-after-division", "with eps added after the division, rstd = 1 / sqrt(variance) + eps",
                {"row_rstd": lambda v: 1 / np.sqrt(v.variance) + EPS}),
        Mistake("eps-before-division", "with eps added to the sum of squares, before the division by H",
                {"row_rstd": lambda v: 1 / np.sqrt(v.variance + EPS / v.input.shape[-1])}),
        Mistake("variance-not-divided", "with the sum of squares not divided by H",
                {"variance": lambda v: ((v.input - v.row_mean) ** 2).sum(-1, keepdims=True)}),
        Mistake("variance-around-zero", "with E[x^2] as the variance, without the mean subtracted",
                {"variance": lambda v: (v.input**2).mean(-1, keepdims=True)}),
        Mistake("unbiased-variance", "with the variance divided by H - 1, not H",
                {"variance": lambda v: v.input.var(-1, keepdims=True, ddof=1) if v.input.shape[-1] > 1 else np.inf * v.row_mean}),
        Mistake("variance-for-rstd", "with 1 / (variance + eps), without the root",
                {"row_rstd": lambda v: 1 / (v.variance + EPS)}),
        Mistake("std-for-rstd", "multiplied by the standard deviation instead of divided",
                {"row_rstd": lambda v: np.sqrt(v.variance + EPS)}),
    )  # fmt: skip


def list_dx_mistakes(dy: str, gamma: str) -> tuple[Mistake, ...]:
    """Return mistakes in the terms, factors and signs of row_rstd * (g - c2 - x_hat * c1), g = dy * gamma."""

    def dx(v: Derivation, g: np.ndarray, c2_scale: float = 1, c1_scale: float = 1) -> np.ndarray:
        return v.row_rstd * (g - c2_scale * v.c2 - c1_scale * v.x_hat * v.c1)

    def get_dy(v: Derivation) -> np.ndarray:
        return getattr(v, dy)

    return (
        Mistake("mean-term-dropped", "without the mean term c2", {"c2": lambda v: np.zeros(())}),
        Mistake("variance-term-dropped", "without the variance term x_hat * c1", {"c1": lambda v: np.zeros(())}),
        Mistake("both-terms-dropped", "without both correction terms, c2 and x_hat * c1", {"grad_input": lambda v: v.row_rstd * v.g}),
        Mistake("mean-term-doubled", "with the mean term c2 subtracted twice", {"grad_input": lambda v: dx(v, v.g, c2_scale=2)}),
        Mistake("mean-term-added", "with the mean term c2 added, not subtracted", {"grad_input": lambda v: dx(v, v.g, c2_scale=-1)}),
        Mistake("variance-term-added", "with the variance term x_hat * c1 added, not subtracted", {"grad_input": lambda v: dx(v, v.g, c1_scale=-1)}),
        Mistake("x-hat-forgotten", "with c1 not multiplied by x_hat", {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - v.c1)}),
        Mistake("x-hat-forgotten-in-c1", "without x_hat in c1, the mean of g * x_hat", {"c1": lambda v: mean(v.g)}),
        Mistake("terms-exchanged", "with c1 and c2 swapped", {"grad_input": lambda v: v.row_rstd * (v.g - v.c1 - v.x_hat * v.c2)}),
        Mistake("rstd-factor-forgotten", "without the factor rstd", {"grad_input": lambda v: v.g - v.c2 - v.x_hat * v.c1}),
        Mistake("rstd-factor-twice", "with the factor rstd twice", {"grad_input": lambda v: v.row_rstd * dx(v, v.g)}),
        Mistake("rstd-on-g-only", "with rstd on g only, not on the correction terms", {"grad_input": lambda v: v.row_rstd * v.g - v.c2 - v.x_hat * v.c1}),
        Mistake("gamma-forgotten-in-g", "with gamma in c1 and c2 but not in g", {"grad_input": lambda v: dx(v, get_dy(v))}),
        Mistake("gamma-forgotten-in-sums", "with gamma in g but not in c1 and c2", {"c1": lambda v: mean(get_dy(v) * v.x_hat), "c2": lambda v: mean(get_dy(v))}),
        Mistake("gamma-outside", "with gamma applied to the whole of dx, not to g",
                {"grad_input": lambda v: v.row_rstd * getattr(v, gamma) * (get_dy(v) - mean(get_dy(v)) - v.x_hat * mean(get_dy(v) * v.x_hat))}),
        Mistake("diagonal-jacobian", "with the diagonal of the Jacobian alone",
                {"grad_input": lambda v: v.row_rstd * v.g * (1 - (1 + v.x_hat**2) / v.x_hat.shape[-1])}, 1),
    )  # fmt: skip


def list_mean_mistakes(threads: int) -> tuple[Mistake, ...]:
    """Return mistakes in the range or divisor of the two means in row_rstd * (g - c2 - x_hat * c1)."""

    def scale_means(v: Derivation, c1_scale: float, c2_scale: float) -> np.ndarray:
        return v.row_rstd * (v.g - c2_scale * v.c2 - c1_scale * v.x_hat * v.c1)

    def width(v: Derivation) -> int:
        return v.input.shape[-1]

    def wrong_divisor(v: Derivation) -> float:
        return width(v) / max(width(v) - 1, 1)

    def replace_sums(v: Derivation, add_up: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return v.row_rstd * (v.g - add_up(v.g) / width(v) - v.x_hat * add_up(v.g * v.x_hat) / width(v))

    return (
        Mistake("c2-not-divided", "with c2 a sum, not a mean: divide c2 by the number of columns too", {"grad_input": lambda v: scale_means(v, 1, width(v))}),
        Mistake("c1-not-divided", "with c1 a sum, not a mean: divide c1 by the number of columns too", {"grad_input": lambda v: scale_means(v, width(v), 1)}),
        Mistake("divided-by-threads", f"with c1 and c2 divided by the {threads} threads of a row, not by its columns",
                {"grad_input": lambda v: scale_means(v, width(v) / threads, width(v) / threads)}),
        Mistake("c1-by-one-less", "with c1 divided by the number of columns minus one", {"grad_input": lambda v: scale_means(v, wrong_divisor(v), 1)}),
        Mistake("means-by-one-less", "with c1 and c2 divided by the number of columns minus one", {"grad_input": lambda v: scale_means(v, wrong_divisor(v), wrong_divisor(v))}),
        Mistake("means-of-own-share", "with every thread's own share in c1 and c2: block.sum is missing", {"grad_input": lambda v: replace_sums(v, lambda t: sum_per_thread(t, threads))}, 3),
        Mistake("means-over-everything", "with c1 and c2 taken over the whole tensor, not over each row", {"grad_input": lambda v: v.row_rstd * (v.g - v.g.mean() - v.x_hat * (v.g * v.x_hat).mean())}),
    )  # fmt: skip


def list_x_hat_mistakes() -> tuple[Mistake, ...]:
    """Return mistakes in x_hat = (input - row_mean) * row_rstd, and in its uses in c1 and grad_input."""

    def make_mistakes(id: str, description: str, x_hat: Terms) -> tuple[Mistake, ...]:
        return (
            Mistake(id, f"{description} in x_hat", {"x_hat": x_hat}),
            Mistake(f"{id}-in-c1", f"{description} in the x_hat inside c1", {"c1": lambda v: (v.g * x_hat(v)).mean(-1, keepdims=True)}),
            Mistake(f"{id}-beside-c1", f"{description} in the x_hat that multiplies c1", {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - x_hat(v) * v.c1)}),
        )  # fmt: skip

    return (
        *make_mistakes("mean-not-subtracted", "with the mean not subtracted", lambda v: v.input * v.row_rstd),
        *make_mistakes("x-hat-is-input", "with the raw input, without mean and rstd,", lambda v: v.input),
        *make_mistakes("rstd-left-out", "with rstd left out", lambda v: v.input - v.row_mean),
        Mistake("mean-over-everything", "with the mean of the whole tensor, not of each row", {"row_mean": lambda v: v.input.mean() + 0 * v.input[..., :1]}),
        Mistake("statistics-over-everything", "with mean and variance of the whole tensor, not of each row",
                {"row_mean": lambda v: v.input.mean() + 0 * v.input[..., :1],
                 "row_rstd": lambda v: 1 / np.sqrt(v.input.var() + EPS) + 0 * v.input[..., :1]}),
    )  # fmt: skip


def explain_cancellation(quantity: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain errors as cancellation if all wrong rows have a mean far larger than their deviation."""
    x = arrays["input"]
    if got.shape[:-1] != x.shape[:-1] or not np.isfinite(x).all():
        return None
    ratio = np.abs(x.mean(-1)) / (x.std(-1) + 1e-30)
    scale = np.abs(truth).max(-1)
    error = np.abs(got - truth).max(-1) / np.where(scale > 0, scale, 1)
    large_mean = ratio > 10
    if not large_mean.any() or large_mean.all() or not np.isfinite(error).all():
        return None
    if error[large_mean].max() > 20 * error[~large_mean].max() and error[large_mean].max() < 0.1:
        return Symptom(
            "cancellation",
            "is wrong only in rows whose mean is large compared to their standard deviation: digits cancel, as in "
            "E[x^2] - mean^2",
        )
    return None


def set_hints(mistakes: Iterable[Mistake], hints: Mapping[str, int] | None) -> tuple[Mistake, ...]:
    return tuple(replace(mistake, hint=(hints or {}).get(mistake.id, mistake.hint)) for mistake in mistakes)
