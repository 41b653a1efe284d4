"""The formulas of the tape's parts: a part's values as quantities of the puzzle that has its derivation.

So the mistakes of the NumPy and the Mojo rung apply here too: LayerNorm's are puzzle 20's, attention's puzzle
23's, the others puzzle 27's own.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from harness.puzzles.p20.spec import PUZZLE as P20
from harness.puzzles.p23.derivation import STEPS
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.puzzles.p27 import autograd
from harness.puzzles.p27.kernels import sorted_places
from harness.spec.catalogue import find_puzzle
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Arrays, Dims, Puzzle

OUTPUT, OF_INPUT = "the output", "the gradient of what part is given"
"""The checker's names of these values of a part, which is called "part"."""
SPARE = 2
"""Places of the position table beyond every input."""
View = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class Formula:
    """The formula of one part.

    Attributes:
        puzzle: The puzzle with the part's derivation and mistakes.
        dims: B, T, C, V -> that puzzle's sizes.
        arrays: The part's inputs, by their names in `quantities`, and B, T, C, V -> the inputs of the derivation.
        quantities: Quantity -> the value it is, its name in reports, and its view in the derivation's shape.
    """

    puzzle: Puzzle
    dims: Callable[[Dims], Dims]
    arrays: Callable[[Mapping[str, Tensor], Dims], Arrays]
    quantities: Mapping[str, tuple[str, str, View]]


def plain(t: Tensor) -> np.ndarray:
    return t.numpy()


def rows(t: Tensor) -> np.ndarray:
    """Reshape [B, T, C] to [B * T, C]."""
    return t.flatten(0, -2).numpy()


def head_of(which: int) -> View:
    """Return a view of q, k or v of [B, T, 3 C], each [B, HEADS, T, d]."""
    return lambda t: autograd.heads(t)[which].numpy()


def split(t: Tensor) -> np.ndarray:
    """Reshape [B, T, C] to [B, HEADS, T, d]."""
    return t.unflatten(-1, (autograd.HEADS, -1)).transpose(1, 2).numpy()


def causal(T: int) -> np.ndarray:
    """Return a mask that is -inf for later places."""
    return np.where(np.tri(T, dtype=bool), 0.0, -np.inf)


def exchange(one: str, other: str) -> Mistake:
    """Return the mistake of two exchanged gradients."""
    letters = [f"d{name.removeprefix('grad_')[0]}" for name in (one, other)]
    words = f"with {' and '.join(letters)} in each other's place"
    return Mistake(
        f"{'-'.join(letters)}-exchanged", words, {one: STEPS[other], other: STEPS[one]}, 3, together=True
    )


OF_ATTENTION = (
    Mistake("other-triangle", "with the other triangle of the mask: a place sees what comes after it, and not what is before",
            {"masked": lambda v: v.scores + v.mask.T}),
    Mistake("own-place-hidden", "with a place's own key hidden too: what is hidden begins beside the diagonal, at triu(1)",
            {"masked": lambda v: v.scores + causal(len(v.mask) + 1)[:-1, 1:]}),
    Mistake("one-later-seen", "with one later place seen: what is hidden begins beside the diagonal, at triu(1)",
            {"masked": lambda v: v.scores + causal(len(v.mask) + 1)[1:, :-1]}),
    Mistake("scale-of-all-channels", "with 1 / sqrt(C) for the scale: a head has d = C / HEADS channels",
            {"scale": lambda v: 1 / np.sqrt(v.query.shape[1] * v.query.shape[-1])}),
    Mistake("query-for-key", "with q instead of k: dq is dS k", {"grad_query": lambda v: v.scale * (v.grad_scores @ v.query)}),
    Mistake("key-for-query", "with k instead of q: dk is dS^T q", {"grad_key": lambda v: v.scale * (v.grad_scores.swapaxes(-1, -2) @ v.key)}),
    Mistake("grad-scores-not-transposed", "with dS not transposed: dk is dS^T q", {"grad_key": lambda v: v.scale * (v.grad_scores @ v.query)}),
    Mistake("probabilities-not-transposed", "with P not transposed: dv is P^T dO", {"grad_value": lambda v: v.probabilities @ v.grad_output}),
    exchange("grad_query", "grad_key"), exchange("grad_key", "grad_value"), exchange("grad_query", "grad_value"),
)  # fmt: skip
"""Mistakes that puzzle 23 has no cases for: its query and key differ in length, and its masks are not causal."""


def formula_of(gate: str) -> Formula | None:
    """Return the formula of a gate's part; None if it has several."""
    return FORMULAS[gate]() if gate in FORMULAS else None


def of_layernorm() -> Formula:
    """Return puzzle 20's, whose rows are the tokens."""
    quantities = {
        "layernorm": (OUTPUT, "output", rows),
        "grad_bias": ("the gradient of part.bias", "gradient of bias", plain),
        "grad_weight": ("the gradient of part.weight", "gradient of weight", plain),
        "grad_input": (OF_INPUT, "gradient of x", rows),
    }
    return Formula(
        replace(P20, mistakes=in_python(P20.mistakes)),
        lambda dims: (dims[0] * dims[1], dims[2]),
        lambda t, dims: {
            "input": rows(t["x"]), "weight": plain(t["part.weight"]), "bias": plain(t["part.bias"]), "grad_output": rows(t["dy"]),
        },
        quantities,
    )  # fmt: skip


def of_attention() -> Formula:
    """Return puzzle 23's, with a causal mask."""
    names = ("query", "key", "value")
    quantities = {"output": (OUTPUT, "output", split)}
    quantities |= {
        f"grad_{name}": (OF_INPUT, f"gradient of {name[0]}", head_of(n)) for n, name in enumerate(names)
    }
    return Formula(
        replace(P23, mistakes=(*OF_ATTENTION, *in_python(P23.mistakes))),
        lambda dims: (dims[0], autograd.HEADS, dims[1], dims[1], dims[2] // autograd.HEADS),
        lambda t, dims: {
            **{name: head_of(n)(t["x"]) for n, name in enumerate(names)},
            "mask": causal(dims[1]), "grad_output": split(t["dy"]),
        },
        quantities,
    )  # fmt: skip


def in_python(mistakes: Iterable[Mistake]) -> tuple[Mistake, ...]:
    """Return the mistakes that are possible without threads."""
    return tuple(each for each in mistakes if not re.search("thread|warp|tile|block|launch", each.words))


def of_own(
    arrays: Callable[[Mapping[str, Tensor], Dims], Arrays], quantities: Mapping[str, tuple[str, str, View]]
) -> Formula:
    """Return the formula of a part with a derivation in this puzzle."""
    puzzle = find_puzzle("p27")
    return Formula(
        replace(puzzle, mistakes=in_python(puzzle.mistakes)), lambda dims: dims, arrays, quantities
    )


def of_gelu() -> Formula:
    return of_own(
        lambda t, dims: {"x": plain(t["x"]), "dx": plain(t["dy"])},
        {"gelu": (OUTPUT, "output", plain), "grad_gelu": (OF_INPUT, "gradient of x", plain)},
    )


def of_cross_entropy() -> Formula:
    """Return the loss and the gradient of the logits, without smoothing."""
    return of_own(
        lambda t, dims: {
            "logits": plain(t["x"]), "targets": plain(t["targets"]), "smoothing": np.zeros(()), "V": np.asarray(dims[3]),
        },
        {"loss": (OUTPUT, "loss", plain), "grad_logits": (OF_INPUT, "gradient of the logits", plain)},
    )  # fmt: skip


def of_embedding() -> Formula:
    """Return the gradients of both tables; of positions that the tokens have."""
    return of_own(
        lambda t, dims: {
            "tokens": plain(t["x"]), "dx": plain(t["dy"]), "V": np.asarray(dims[3]), **sorted_places(plain(t["x"]), dims[3]),
        },
        {
            "grad_token": ("the gradient of token", "gradient of token", plain),
            "grad_position": ("the gradient of position", "gradient of position", lambda t: t[:-SPARE].numpy()),
        },
    )  # fmt: skip


FORMULAS: Mapping[str, Callable[[], Formula]] = {
    "layernorm": of_layernorm,
    "attention": of_attention,
    "gelu": of_gelu,
    "cross_entropy": of_cross_entropy,
    "embedding": of_embedding,
}
