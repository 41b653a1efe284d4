"""Known mistakes in formulas that several puzzles share: row sums, softmax and LayerNorm, and their
gradients.

Each function takes the names of the formula's steps in the puzzle's derivation, and returns mistakes that
change them. Matrices are [..., columns], a row is the last axis; a value per row is [..., 1].
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.puzzles.rows import or_0
from harness.spec.derivation import Derivation, Mistake, Step
from harness.spec.puzzle import Symptom
from harness.spec.rounding import round_to_dtype

EPS = 1e-5
"""Added to LayerNorm's variance."""
LARGEST_EXPONENT = 80
"""The exponential of no number up to this overflows in float32."""
SIXTEEN_BITS = ("bfloat16", "float16")
Terms = Callable[[Derivation], np.ndarray]
"""The terms of a sum, [..., columns]."""


def total(terms: np.ndarray) -> np.ndarray:
    return terms.sum(-1, keepdims=True)


def share(terms: np.ndarray, threads: int, first: int = 0) -> np.ndarray:
    """Return the partial sum of one of a row's threads: the columns `first`, `first` + threads, ..., [...,
    1]."""
    return total(terms[..., first::threads])


def own_share(terms: np.ndarray, threads: int) -> np.ndarray:
    """Return for every column the partial sum of its own thread, [..., columns]."""
    sums = np.zeros_like(terms)
    for first in range(min(threads, terms.shape[-1])):
        sums[..., first::threads] = share(terms, threads, first)
    return sums


def own_warp(terms: np.ndarray, threads: int) -> np.ndarray:
    """Return for every column the sum over the 32 threads of its own thread's warp, [..., columns]."""
    warp = np.arange(terms.shape[-1]) % threads // 32
    return terms @ (warp[:, None] == warp).astype(terms.dtype)


def sums(
    terms: Terms, threads: int, steps: Mapping[str, Callable[[Terms], Step]], name: str = ""
) -> tuple[Mistake, ...]:
    """Return mistakes that make a row sum incomplete.

    Args:
        terms: The terms of the sum.
        threads: The threads that share a row.
        steps: Maps each step to its value for another sum, [..., 1] or [..., columns].
        name: Prefix of the ids, "dot-" for one.
    """

    def mistake_of_sum(id: str, words: str, of: Callable[[np.ndarray], np.ndarray], hint: int = 2) -> Mistake:
        return Mistake(
            f"{name}{id}", words, {step: make(lambda v: of(terms(v))) for step, make in steps.items()}, hint
        )

    return (
        mistake_of_sum("first-thread-only", "of the first thread's columns alone, not summed over the block", lambda t: share(t, threads)),
        mistake_of_sum("own-share-only", "with every thread's own share of the sum: block.sum is missing", lambda t: own_share(t, threads)),
        mistake_of_sum("first-warp-only", "of the first warp alone: warp.sum adds up 32 threads, block.sum the whole block",
                lambda t: total(np.where(np.arange(t.shape[-1]) % threads < 32, t, 0.0))),
        mistake_of_sum("own-warp-only", "with the sum of each thread's own warp: warp.sum, and a block_size of 32, add up 32 threads, not the block",
                lambda t: own_warp(t, threads)),
        mistake_of_sum("first-columns-only", f"of the first {threads} columns alone, one for each thread: a loop is missing",
                lambda t: total(t[..., :threads]), 3),
        mistake_of_sum("last-columns-only", f"of the last {threads} columns alone, one for each thread: each step of the loop overwrites the thread's sum",
                lambda t: total(t[..., -threads:])),
        mistake_of_sum("every-thread-adds-all", f"{threads} times too large: every thread adds up the whole row, and the block adds up its threads",
                lambda t: threads * total(t), 3),
        mistake_of_sum("first-term-missing", "without the first column: the loop begins at 1", lambda t: total(t[..., 1:])),
        mistake_of_sum("last-term-missing", "without the last column: the loop ends one too early", lambda t: total(t[..., :-1])),
        mistake_of_sum("first-term-only", "of the first column alone: the loop takes no second step", lambda t: t[..., :1]),
        mistake_of_sum("last-term-only", "of the last column alone: every step of the loop overwrites the total", lambda t: t[..., -1:]),
    )  # fmt: skip


def softmax(weights: str, whole: str, result: str, scores: str, threads: int) -> tuple[Mistake, ...]:
    """Return mistakes in result = weights / whole, with weights = exp(scores - max) and whole their row sum."""
    v_weights: Terms = lambda v: getattr(v, weights)  # noqa: E731
    unshifted: Terms = lambda v: np.exp(getattr(v, scores).astype(np.float32)).astype(np.float64)  # noqa: E731
    shifted: Terms = lambda v: getattr(v, scores) - or_0(getattr(v, scores).max(-1, keepdims=True))  # noqa: E731
    return (
        Mistake("not-normalised", "not divided by the sum of the row", {result: v_weights}),
        Mistake(
            "divided-by-length",
            "divided by the number of columns, not by the sum of the row",
            {result: lambda v: v_weights(v) / v_weights(v).shape[-1]},
        ),
        Mistake(
            "largest-not-subtracted",
            "without the largest subtracted: exponentials overflow, or are all 0",
            {weights: unshifted},
        ),
        Mistake("largest-in-the-sum-alone", "with the largest subtracted in the sum alone, not where each column is written",
                {result: lambda v: unshifted(v) / getattr(v, whole)}),
        Mistake("largest-in-the-columns-alone", "with the largest subtracted where each column is written, not in the sum",
                {whole: lambda v: total(unshifted(v))}),
        Mistake("exponential-forgotten-in-sum", "divided by a sum of scores, not of their exponentials", {whole: lambda v: total(shifted(v))}),
        Mistake("largest-for-sum", "divided by the largest exponential, not by the sum", {whole: lambda v: v_weights(v).max(-1, keepdims=True)}),
        *sums(v_weights, threads, {whole: lambda change: change}),
    )  # fmt: skip


@dataclass(frozen=True)
class Online:
    """Rows of scores as an online softmax processes them; arrays are [..., threads, steps, width], -inf after
    a row's end.

    In each step the first thread takes the next `width` columns, the second those after them, and so on.

    Attributes:
        scores: The scores.
        before, after: The thread's running maximum before and after a step, -inf at first, [..., threads, steps, 1].
        last: Its final maximum, [..., threads, 1, 1].
        columns: The columns of a row.
    """

    scores: np.ndarray
    before: np.ndarray
    after: np.ndarray
    last: np.ndarray
    columns: int

    @staticmethod
    def of(scores: np.ndarray, threads: int, width: int) -> "Online":
        """Split rows [..., columns] into steps."""
        *rows, columns = scores.shape
        step = threads * width
        whole = np.full((*rows, -(-columns // step) * step), -np.inf)
        whole[..., :columns] = scores
        steps = whole.reshape(*rows, -1, threads, width).swapaxes(-3, -2)
        after = np.maximum.accumulate(steps.max(-1, keepdims=True), -2)
        before = np.concatenate([np.full_like(after[..., :1, :], -np.inf), after[..., :-1, :]], -2)
        return Online(steps, before, or_0(after), or_0(after[..., -1:, :]), columns)

    def rows(self, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the exponentials as rows [..., columns]."""
        return weights.swapaxes(-3, -2).reshape(*weights.shape[:-3], -1)[..., : self.columns]


def later(factors: np.ndarray) -> np.ndarray:
    """Return for each step the product of the factors of later steps, [..., steps, 1]."""
    shifted = np.concatenate([factors[..., 1:, :], np.ones_like(factors[..., :1, :])], -2)
    return np.flip(np.cumprod(np.flip(shifted, -2), -2), -2)


def online(
    what: str,
    score: str,
    changes: Callable[[Callable[[Online], np.ndarray]], Mapping[str, Step]],
    name: str = "",
) -> tuple[Mistake, ...]:
    """Return mistakes in rescaling the sums of an online softmax to a new maximum.

    Args:
        what: The running sum, "the total".
        score: What the row holds, "score".
        changes: Maps a weight of each exponential to the steps that it changes.
        name: Prefix of the ids, "total-" for one.
    """

    def wrong(id: str, words: str, weights: Callable[[Online], np.ndarray]) -> Mistake:
        return Mistake(f"{name}{id}", f"with {what} {words}", changes(weights))

    return (
        wrong("not-rescaled", f"so far not made smaller when a larger {score} comes", lambda o: np.exp(o.scores - o.after)),
        wrong(
            "old-largest",
            f"of exponentials that subtract the largest {score} before this step: subtract the new one, and rescale what is there to it",
            lambda o: np.exp(o.scores - or_0(o.before)),
        ),
        wrong(
            "old-largest-rescaled",
            f"rescaled to the new largest {score}, but of exponentials that subtract the one before",
            lambda o: np.exp(o.scores - or_0(o.before)) * np.exp(o.after - o.last),
        ),
        wrong(
            "step-rescaled-too",
            "rescaled together with what this step adds, which has the new largest subtracted already",
            lambda o: np.exp(o.scores - o.after) * np.exp(o.before - o.last),
        ),
        wrong(
            "step-rescaled-instead",
            "left as it is and what this step adds rescaled: it is the other way round",
            lambda o: np.exp(o.scores - o.after) * np.exp(o.before - o.after),
        ),
        wrong(
            "rescaled-by-old-alone",
            f"so far multiplied by exp(largest), without the new largest {score} subtracted",
            lambda o: np.exp(o.scores - o.after) * later(np.exp(o.before)),
        ),
        *(
            wrong(f"of-{kind}", f"of exponentials that are rounded to {kind}: add up in float32",
                  lambda o, kind=kind: round_to_dtype(np.exp(o.scores - o.after), kind) * np.exp(o.after - o.last))
            for kind in SIXTEEN_BITS
        ),
    )  # fmt: skip


def infinite_at_first(scores: np.ndarray, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain an lse that is infinite although no exponential of the scores is near an overflow."""
    finite = np.isfinite(truth) & (truth != 0)
    if not finite.any() or not np.isposinf(got[finite]).all() or scores.max() > LARGEST_EXPONENT:
        return None
    return Symptom(
        "infinite-at-first",
        "is infinite, and no score is so large: the exponentials subtract the largest before this step, and before the first "
        "that is the lowest number there is; subtract the new largest",
    )


def softmax_backward(
    result: str, P: str, dP: str, dot: str, threads: int, hints: Mapping[str, int] | None = None
) -> tuple[Mistake, ...]:
    """Return mistakes in result = P * (dP - dot), with dot the row sum of dP * P; `hints` overrides hints by
    id."""

    def p(v: Derivation) -> np.ndarray:
        return getattr(v, P)

    def dp(v: Derivation) -> np.ndarray:
        return getattr(v, dP)

    def row(v: Derivation) -> np.ndarray:
        return getattr(v, dot)

    mistakes = (
        Mistake("row-sum-forgotten", "without the row sum of dP * P", {dot: lambda v: 0 * p(v)[..., :1]}, 1),
        Mistake("diagonal-jacobian", "with the diagonal of the Jacobian alone, P * (1 - P)", {result: lambda v: p(v) * (1 - p(v)) * dp(v)}, 1),
        *sums(lambda v: dp(v) * p(v), threads, {dot: lambda change: change}),
        Mistake("sum-over-columns", "with the sum of dP * P taken along the columns, not along the row", {dot: lambda v: (dp(v) * p(v)).sum(-2, keepdims=True)}, 1),
        Mistake("sum-over-both", "with the sum of dP * P taken over rows and columns together, not along each row", {dot: lambda v: 0 * p(v)[..., :1] + (dp(v) * p(v)).sum((-2, -1), keepdims=True)}, 1),
        Mistake("probabilities-twice", "with P multiplied twice", {result: lambda v: p(v) ** 2 * (dp(v) - row(v))}),
        Mistake("probabilities-inside", "with P multiplied twice: P * (dP * P - sum(dP * P))", {result: lambda v: p(v) * (dp(v) * p(v) - row(v))}),
        Mistake("probabilities-forgotten", "without the factor P", {result: lambda v: dp(v) - row(v)}),
        Mistake("row-sum-times-p", "with the row sum multiplied by P inside of the bracket too", {result: lambda v: p(v) * (dp(v) - p(v) * row(v))}),
        Mistake("diagonal-beside-row-sum", "with P * (1 - P) for P: the row sum has the diagonal's share already", {result: lambda v: p(v) * (1 - p(v)) * (dp(v) - row(v))}),
        Mistake("row-sum-outside", "with the row sum subtracted from P * dP, outside of the bracket: it is P * (dP - sum)", {result: lambda v: p(v) * dp(v) - row(v)}),
        Mistake("probabilities-forgotten-in-sum", "with the row sum of dP, not of dP * P", {dot: lambda v: total(dp(v))}),
        Mistake("gradient-forgotten-in-sum", "with the row sum of P, not of dP * P", {dot: lambda v: total(p(v))}),
        Mistake("mean-not-sum", "with the mean of dP * P over the row, not the sum", {dot: lambda v: (dp(v) * p(v)).mean(-1, keepdims=True)}),
        Mistake("row-sum-added", "with the row sum added, not subtracted", {result: lambda v: p(v) * (dp(v) + row(v))}),
        Mistake("exchanged", "with P and dP in each other's place", {result: lambda v: dp(v) * (p(v) - row(v))}),
    )  # fmt: skip
    return with_hints(mistakes, hints)


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
"""LayerNorm's steps and those of its gradient, from `input` and g, the gradient at x_hat."""


EPS_OF_OTHERS = (1e-2, 1e-3, 1e-4, 1e-7, 1e-12)


def layernorm_statistics() -> tuple[Mistake, ...]:
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
            for eps in EPS_OF_OTHERS
        ),
        Mistake("eps-after-division", "with eps added after the division, rstd = 1 / sqrt(variance) + eps",
                {"row_rstd": lambda v: 1 / np.sqrt(v.variance) + EPS}),
        Mistake("eps-before-division", "with eps added to the sum of squares, before it is divided by H",
                {"row_rstd": lambda v: 1 / np.sqrt(v.variance + EPS / v.input.shape[-1])}),
        Mistake("variance-not-divided", "with the sum of squares not divided by H",
                {"variance": lambda v: ((v.input - v.row_mean) ** 2).sum(-1, keepdims=True)}),
        Mistake("variance-around-zero", "with E[x^2] for the variance, the mean not subtracted",
                {"variance": lambda v: (v.input**2).mean(-1, keepdims=True)}),
        Mistake("unbiased-variance", "with the variance divided by H - 1, not H",
                {"variance": lambda v: v.input.var(-1, keepdims=True, ddof=1) if v.input.shape[-1] > 1 else np.inf * v.row_mean}),
        Mistake("variance-for-rstd", "with 1 / (variance + eps), the root forgotten",
                {"row_rstd": lambda v: 1 / (v.variance + EPS)}),
        Mistake("std-for-rstd", "multiplied by the deviation instead of divided",
                {"row_rstd": lambda v: np.sqrt(v.variance + EPS)}),
    )  # fmt: skip


def layernorm_dx(dy: str, gamma: str) -> tuple[Mistake, ...]:
    """Return mistakes in a term, factor or sign of grad_input = row_rstd * (g - c2 - x_hat * c1), with g = dy
    * gamma."""

    def dx(v: Derivation, g: np.ndarray, times2: float = 1, times1: float = 1) -> np.ndarray:
        return v.row_rstd * (g - times2 * v.c2 - times1 * v.x_hat * v.c1)

    def of_dy(v: Derivation) -> np.ndarray:
        return getattr(v, dy)

    def mean(terms: np.ndarray) -> np.ndarray:
        return terms.mean(-1, keepdims=True)

    return (
        Mistake("mean-term-dropped", "without the mean term c2", {"c2": lambda v: np.zeros(())}),
        Mistake("variance-term-dropped", "without the variance term x_hat * c1", {"c1": lambda v: np.zeros(())}),
        Mistake("both-terms-dropped", "without both correction terms, c2 and x_hat * c1", {"grad_input": lambda v: v.row_rstd * v.g}),
        Mistake("mean-term-doubled", "with the mean term c2 subtracted twice", {"grad_input": lambda v: dx(v, v.g, times2=2)}),
        Mistake("mean-term-added", "with the mean term c2 added, not subtracted", {"grad_input": lambda v: dx(v, v.g, times2=-1)}),
        Mistake("variance-term-added", "with the variance term x_hat * c1 added, not subtracted", {"grad_input": lambda v: dx(v, v.g, times1=-1)}),
        Mistake("x-hat-forgotten", "with c1 not multiplied by x_hat", {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - v.c1)}),
        Mistake("x-hat-forgotten-in-c1", "with x_hat forgotten in c1, the mean of g * x_hat", {"c1": lambda v: mean(v.g)}),
        Mistake("terms-exchanged", "with c1 and c2 exchanged", {"grad_input": lambda v: v.row_rstd * (v.g - v.c1 - v.x_hat * v.c2)}),
        Mistake("rstd-factor-forgotten", "without the factor rstd", {"grad_input": lambda v: v.g - v.c2 - v.x_hat * v.c1}),
        Mistake("rstd-factor-twice", "with the factor rstd twice", {"grad_input": lambda v: v.row_rstd * dx(v, v.g)}),
        Mistake("rstd-on-g-only", "with rstd on g alone, not on the correction terms", {"grad_input": lambda v: v.row_rstd * v.g - v.c2 - v.x_hat * v.c1}),
        Mistake("gamma-forgotten-in-g", "with gamma in c1 and c2 but not in g", {"grad_input": lambda v: dx(v, of_dy(v))}),
        Mistake("gamma-forgotten-in-sums", "with gamma in g but not in c1 and c2", {"c1": lambda v: mean(of_dy(v) * v.x_hat), "c2": lambda v: mean(of_dy(v))}),
        Mistake("gamma-outside", "with gamma applied to the whole of dx, not to g",
                {"grad_input": lambda v: v.row_rstd * getattr(v, gamma) * (of_dy(v) - mean(of_dy(v)) - v.x_hat * mean(of_dy(v) * v.x_hat))}),
        Mistake("diagonal-jacobian", "with the diagonal of the Jacobian alone",
                {"grad_input": lambda v: v.row_rstd * v.g * (1 - (1 + v.x_hat**2) / v.x_hat.shape[-1])}, 1),
    )  # fmt: skip


def layernorm_means(threads: int) -> tuple[Mistake, ...]:
    """Return mistakes in what the two means of grad_input = row_rstd * (g - c2 - x_hat * c1) are taken over."""

    def scale_means(v: Derivation, times1: float, times2: float) -> np.ndarray:
        return v.row_rstd * (v.g - times2 * v.c2 - times1 * v.x_hat * v.c1)

    def width(v: Derivation) -> int:
        return v.input.shape[-1]

    def one_less(v: Derivation) -> float:
        return width(v) / max(width(v) - 1, 1)

    def of_threads(v: Derivation, of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return v.row_rstd * (v.g - of(v.g) / width(v) - v.x_hat * of(v.g * v.x_hat) / width(v))

    return (
        Mistake("c2-not-divided", "with c2 a sum, not a mean: c2 is divided by the number of columns too", {"grad_input": lambda v: scale_means(v, 1, width(v))}),
        Mistake("c1-not-divided", "with c1 a sum, not a mean: c1 is divided by the number of columns too", {"grad_input": lambda v: scale_means(v, width(v), 1)}),
        Mistake(
            "divided-by-threads",
            f"with c1 and c2 divided by the {threads} threads of a row, not by its columns",
            {"grad_input": lambda v: scale_means(v, width(v) / threads, width(v) / threads)},
        ),
        Mistake("c1-by-one-less", "with c1 divided by the number of columns less one", {"grad_input": lambda v: scale_means(v, one_less(v), 1)}),
        Mistake("means-by-one-less", "with c1 and c2 divided by the number of columns less one", {"grad_input": lambda v: scale_means(v, one_less(v), one_less(v))}),
        Mistake("means-of-own-share", "with every thread's own share in c1 and c2: block.sum is missing", {"grad_input": lambda v: of_threads(v, lambda t: own_share(t, threads))}, 3),
        Mistake("means-over-everything", "with c1 and c2 taken over the whole tensor, not over each row", {"grad_input": lambda v: v.row_rstd * (v.g - v.g.mean() - v.x_hat * (v.g * v.x_hat).mean())}),
    )  # fmt: skip


def layernorm_x_hat() -> tuple[Mistake, ...]:
    """Return mistakes in x_hat = (input - row_mean) * row_rstd, and in the uses of it in c1 and grad_input."""

    def wrong(id: str, words: str, x_hat: Terms) -> tuple[Mistake, ...]:
        return (
            Mistake(id, f"{words} in x_hat", {"x_hat": x_hat}),
            Mistake(f"{id}-in-c1", f"{words} in the x_hat that c1 is made of", {"c1": lambda v: (v.g * x_hat(v)).mean(-1, keepdims=True)}),
            Mistake(f"{id}-beside-c1", f"{words} in the x_hat that c1 is multiplied with", {"grad_input": lambda v: v.row_rstd * (v.g - v.c2 - x_hat(v) * v.c1)}),
        )  # fmt: skip

    return (
        *wrong("mean-not-subtracted", "with the mean not subtracted", lambda v: v.input * v.row_rstd),
        *wrong("x-hat-is-input", "with the input itself, without mean and rstd,", lambda v: v.input),
        *wrong("rstd-left-out", "with rstd left out", lambda v: v.input - v.row_mean),
        Mistake("mean-over-everything", "with the mean of the whole tensor, not of each row", {"row_mean": lambda v: v.input.mean() + 0 * v.input[..., :1]}),
        Mistake(
            "statistics-over-everything",
            "with mean and variance of the whole tensor, not of each row",
            {
                "row_mean": lambda v: v.input.mean() + 0 * v.input[..., :1],
                "row_rstd": lambda v: 1 / np.sqrt(v.input.var() + EPS) + 0 * v.input[..., :1],
            },
        ),
    )  # fmt: skip


def with_hints(mistakes: Iterable[Mistake], hints: Mapping[str, int] | None) -> tuple[Mistake, ...]:
    """Return the mistakes with other hints, by id."""
    return tuple(replace(each, hint=(hints or {}).get(each.id, each.hint)) for each in mistakes)
