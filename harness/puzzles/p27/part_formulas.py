"""The formulas of the tape's parts, mapped to the puzzles with their derivations and mistakes."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from harness.puzzles.p20.spec import PUZZLE as P20
from harness.puzzles.p23.derivation import STEPS
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.puzzles.p27 import autograd
from harness.puzzles.p27.kernels import sort_positions
from harness.spec.catalogue import find_puzzle
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Arrays, Dims, Puzzle

OUTPUT, INPUT_GRADIENT = "the output", "the gradient of what part is given"
"""The checker's names of two values of a single part, which it calls "part"."""
UNUSED_POSITIONS = 2
"""Rows of the position table beyond an input's length."""
View = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class Formula:
    """The formula of one part.

    Attributes:
        puzzle: The puzzle with the part's derivation and mistakes.
        convert_dims: B, T, C, V -> that puzzle's sizes.
        make_arrays: The part's inputs by name, and B, T, C, V -> the derivation's inputs.
        quantities: Quantity -> the checker's name, the name in reports, a view in the derivation's shape.
    """

    puzzle: Puzzle
    convert_dims: Callable[[Dims], Dims]
    make_arrays: Callable[[Mapping[str, Tensor], Dims], Arrays]
    quantities: Mapping[str, tuple[str, str, View]]


def to_numpy(t: Tensor) -> np.ndarray:
    return t.numpy()


def flatten_rows(t: Tensor) -> np.ndarray:
    return t.flatten(0, -2).numpy()


def make_head_view(index: int) -> View:
    return lambda t: autograd.split_heads(t)[index].numpy()


def split_output_heads(t: Tensor) -> np.ndarray:
    return t.unflatten(-1, (autograd.HEADS, -1)).transpose(1, 2).numpy()


def make_causal_mask(T: int) -> np.ndarray:
    return np.where(np.tri(T, dtype=bool), 0.0, -np.inf)


def make_swap_mistake(first: str, second: str) -> Mistake:
    letters = [f"d{name.removeprefix('grad_')[0]}" for name in (first, second)]
    text = f"with {' and '.join(letters)} exchanged"
    changes = {first: STEPS[second], second: STEPS[first]}
    return Mistake(f"{'-'.join(letters)}-exchanged", text, changes, 3, needs_all_wrong=True)


ATTENTION_MISTAKES = (
    Mistake("other-triangle", "with the other triangle of the mask: a place sees the places after it, not those before",
            {"masked": lambda v: v.scores + v.mask.T}),
    Mistake("own-place-hidden", "with a place's own key hidden too: the mask begins above the diagonal, at triu(1)",
            {"masked": lambda v: v.scores + make_causal_mask(len(v.mask) + 1)[:-1, 1:]}),
    Mistake("one-later-seen", "with one later place visible: the mask begins above the diagonal, at triu(1)",
            {"masked": lambda v: v.scores + make_causal_mask(len(v.mask) + 1)[1:, :-1]}),
    Mistake("scale-of-all-channels", "with scale 1 / sqrt(C): a head has d = C / HEADS channels",
            {"scale": lambda v: 1 / np.sqrt(v.query.shape[1] * v.query.shape[-1])}),
    Mistake("query-for-key", "with q instead of k: dq is dS k", {"grad_query": lambda v: v.scale * (v.grad_scores @ v.query)}),
    Mistake("key-for-query", "with k instead of q: dk is dS^T q", {"grad_key": lambda v: v.scale * (v.grad_scores.swapaxes(-1, -2) @ v.key)}),
    Mistake("grad-scores-not-transposed", "with dS not transposed: dk is dS^T q", {"grad_key": lambda v: v.scale * (v.grad_scores @ v.query)}),
    Mistake("probabilities-not-transposed", "with P not transposed: dv is P^T dO", {"grad_value": lambda v: v.probabilities @ v.grad_output}),
    make_swap_mistake("grad_query", "grad_key"), make_swap_mistake("grad_key", "grad_value"), make_swap_mistake("grad_query", "grad_value"),
)  # fmt: skip
"""Mistakes that puzzle 23 cannot detect: its query and key differ in length, and its masks are not causal."""


def make_layernorm_formula() -> Formula:
    """Return puzzle 20's formula, with one row per token."""
    quantities = {
        "layernorm": (OUTPUT, "output", flatten_rows),
        "grad_bias": ("the gradient of part.bias", "gradient of bias", to_numpy),
        "grad_weight": ("the gradient of part.weight", "gradient of weight", to_numpy),
        "grad_input": (INPUT_GRADIENT, "gradient of x", flatten_rows),
    }
    return Formula(
        replace(P20, mistakes=select_python_mistakes(P20.mistakes)),
        lambda dims: (dims[0] * dims[1], dims[2]),
        lambda t, dims: {
            "input": flatten_rows(t["x"]), "weight": to_numpy(t["part.weight"]), "bias": to_numpy(t["part.bias"]), "grad_output": flatten_rows(t["dy"]),
        },
        quantities,
    )  # fmt: skip


def make_attention_formula() -> Formula:
    """Return puzzle 23's formula, with a causal mask."""
    names = ("query", "key", "value")
    quantities: dict[str, tuple[str, str, View]] = {"output": (OUTPUT, "output", split_output_heads)}
    for n, name in enumerate(names):
        quantities[f"grad_{name}"] = (INPUT_GRADIENT, f"gradient of {name[0]}", make_head_view(n))
    return Formula(
        replace(P23, mistakes=(*ATTENTION_MISTAKES, *select_python_mistakes(P23.mistakes))),
        lambda dims: (dims[0], autograd.HEADS, dims[1], dims[1], dims[2] // autograd.HEADS),
        lambda t, dims: {
            **{name: make_head_view(n)(t["x"]) for n, name in enumerate(names)},
            "mask": make_causal_mask(dims[1]), "grad_output": split_output_heads(t["dy"]),
        },
        quantities,
    )  # fmt: skip


def select_python_mistakes(mistakes: Iterable[Mistake]) -> tuple[Mistake, ...]:
    """Return the mistakes that are possible in code without threads."""
    return tuple(m for m in mistakes if not re.search("thread|warp|tile|block|launch", m.description))


def make_p27_formula(
    make_arrays: Callable[[Mapping[str, Tensor], Dims], Arrays],
    quantities: Mapping[str, tuple[str, str, View]],
) -> Formula:
    puzzle = find_puzzle("p27")
    puzzle = replace(puzzle, mistakes=select_python_mistakes(puzzle.mistakes))
    return Formula(puzzle, lambda dims: dims, make_arrays, quantities)


def make_gelu_formula() -> Formula:
    return make_p27_formula(
        lambda t, dims: {"x": to_numpy(t["x"]), "dx": to_numpy(t["dy"])},
        {"gelu": (OUTPUT, "output", to_numpy), "grad_gelu": (INPUT_GRADIENT, "gradient of x", to_numpy)},
    )


def make_cross_entropy_formula() -> Formula:
    """Return the loss and the gradient of the logits, without smoothing."""
    return make_p27_formula(
        lambda t, dims: {
            "logits": to_numpy(t["x"]), "targets": to_numpy(t["targets"]), "smoothing": np.zeros(()), "V": np.asarray(dims[3]),
        },
        {"loss": (OUTPUT, "loss", to_numpy), "grad_logits": (INPUT_GRADIENT, "gradient of the logits", to_numpy)},
    )  # fmt: skip


def make_embedding_formula() -> Formula:
    """Return the gradients of both tables, for the position table only at used positions."""
    return make_p27_formula(
        lambda t, dims: {
            "tokens": to_numpy(t["x"]), "dx": to_numpy(t["dy"]), "V": np.asarray(dims[3]), **sort_positions(to_numpy(t["x"]), dims[3]),
        },
        {
            "grad_token": ("the gradient of token", "gradient of token", to_numpy),
            "grad_position": ("the gradient of position", "gradient of position", lambda t: t[:-UNUSED_POSITIONS].numpy()),
        },
    )  # fmt: skip


FORMULAS: Mapping[str, Callable[[], Formula]] = {
    "layernorm": make_layernorm_formula,
    "attention": make_attention_formula,
    "gelu": make_gelu_formula,
    "cross_entropy": make_cross_entropy_formula,
    "embedding": make_embedding_formula,
}
