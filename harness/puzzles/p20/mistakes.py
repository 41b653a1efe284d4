"""The derivation of puzzle 20, and its known mistakes.

Shapes: input, logits, grad_output and all that follows them elementwise [rows, columns]; row_mean, row_rstd,
dot, c1, c2 [rows, 1]; weight and bias [columns]; mask [words], 32 elements to a word.
"""

import numpy as np

from harness.puzzles import formulas
from harness.spec.derivation import Mistake, derive_by

WORD = 32
"""Elements of a word of the mask."""
ROW_THREADS = 128
"""Threads that share a row."""


def in_words(passes: np.ndarray) -> np.ndarray:
    """Reshape bools of any shape to one row per word, padded with False."""
    return np.pad(passes.ravel(), (0, -passes.size % WORD)).reshape(-1, WORD)


def pack(passes: np.ndarray) -> np.ndarray:
    """Pack bools of any shape into int32 words, the first element in the lowest bit of the first word."""
    weights = np.uint32(1) << np.arange(WORD, dtype=np.uint32)
    return (in_words(passes) * weights).sum(1, dtype=np.uint32).view(np.int32)


def reversed_bits(passes: np.ndarray) -> np.ndarray:
    """Pack with the first element in the highest bit."""
    return pack(in_words(passes)[:, ::-1])


def bits_of(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Unpack words to bools of a shape, the lowest bit of the first word first."""
    bits = (words.view(np.uint32)[:, None] >> np.arange(WORD, dtype=np.uint32)) & 1
    return bits.ravel()[: np.prod(shape)].reshape(shape).astype(bool)


def next_in_word(passes: np.ndarray) -> np.ndarray:
    """Return for every element the bit of the next element of its word, cyclically."""
    return np.roll(in_words(passes), -1, 1).ravel()[: passes.size].reshape(passes.shape)


def place_and_word(passes: np.ndarray) -> np.ndarray:
    """Return for every element whether the lowest bit of its word and its own bit are both set."""
    both = in_words(passes)[:, :1] & (np.arange(WORD) % 2 == 1)
    return both.ravel()[: passes.size].reshape(passes.shape)


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return exp(scores) over its sum, shifted by the maximum."""
    with np.errstate(invalid="ignore", over="ignore"):
        exps = np.exp(scores - scores.max(axis, keepdims=True))
        return exps / exps.sum(axis, keepdims=True)


STEPS = {
    # ReLU. NaN passes, as in PyTorch.
    "passes": lambda v: ~(v.input <= 0),
    "relu": lambda v: np.where(v.passes, v.input, 0.0),
    "mask": lambda v: pack(v.passes),
    "grad_relu": lambda v: np.where(v.passes, v.grad_output, 0.0),
    # Softmax.
    "weights": lambda v: np.exp(v.logits - v.logits.max(-1, keepdims=True)),
    "total": lambda v: v.weights.sum(-1, keepdims=True),
    "softmax": lambda v: v.weights / v.total,
    "dot": lambda v: (v.grad_output * v.softmax).sum(-1, keepdims=True),
    "grad_softmax": lambda v: v.softmax * (v.grad_output - v.dot),
    # LayerNorm.
    **formulas.LAYERNORM,
    "layernorm": lambda v: v.x_hat * v.weight + v.bias,
    "g": lambda v: v.grad_output * v.weight,
    "grad_weight": lambda v: (v.grad_output * v.x_hat).sum(0),
    "grad_bias": lambda v: v.grad_output.sum(0),
}
derive = derive_by(STEPS)


def first_rows(array: np.ndarray, count: int) -> np.ndarray:
    kept = array.copy()
    kept[count:] = 0
    return kept


MISTAKES = (
    # ReLU.
    Mistake("mask-ignored", "with every gradient let through", {"grad_relu": lambda v: v.grad_output}),
    Mistake("multiplied-by-the-bit",
            "with the gradient multiplied by its bit, where the bit should choose: infinity times 0 is NaN",
            {"grad_relu": lambda v: v.grad_output * v.passes}),
    Mistake("mask-inverted", "with the mask the wrong way round",
            {"grad_relu": lambda v: np.where(v.passes, 0.0, v.grad_output), "mask": lambda v: pack(~v.passes)}),
    Mistake("grad-output-ignored", "with grad_output taken to be 1",
            {"grad_output": lambda v: np.ones_like(v.original("grad_output"))}, 1),
    Mistake("bits-reversed", "with the first element in the highest bit, not the lowest",
            {"mask": lambda v: reversed_bits(v.passes),
             "grad_relu": lambda v: np.where(bits_of(reversed_bits(v.passes), v.passes.shape), v.grad_output, 0.0)},
            3),
    Mistake("neighbours-bit", "with the bit of the next element of its word",
            {"grad_relu": lambda v: np.where(next_in_word(v.passes), v.grad_output, 0.0)}, 3),
    Mistake("place-not-shifted-by",
            "with the lowest bit of `word & place`: the word must be shifted by the element's place in it, `word >> place`",
            {"grad_relu": lambda v: np.where(place_and_word(v.passes), v.grad_output, 0.0)}, 3),
    Mistake("relu-not-applied", "with nothing set to 0", {"relu": lambda v: v.input}, 1),
    # Softmax.
    *formulas.softmax_backward("grad_softmax", "softmax", "grad_output", "dot", ROW_THREADS),
    Mistake("wrong-axis", "along the columns, not along the rows", {"softmax": lambda v: softmax(v.logits, 0)}),
    *formulas.softmax("weights", "total", "softmax", "logits", ROW_THREADS),
    # LayerNorm.
    *formulas.layernorm_dx("grad_output", "weight"),
    Mistake("sums-not-means", "with sums in c1 and c2, not means",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.input.shape[-1] * (v.c2 + v.x_hat * v.c1))}),
    *formulas.layernorm_means(ROW_THREADS),
    *formulas.layernorm_x_hat(),
    *formulas.layernorm_statistics(),
    Mistake("gamma-twice",
            "with the weight multiplied in: the gradient of the weight is made of dy, not of dy * weight",
            {"grad_weight": lambda v: (v.g * v.x_hat).sum(0), "grad_bias": lambda v: v.g.sum(0)}),
    Mistake("weight-forgotten-forward", "without the weight", {"layernorm": lambda v: v.x_hat + v.bias}),
    Mistake("bias-forgotten-forward", "without the bias", {"layernorm": lambda v: v.x_hat * v.weight}),
    Mistake("weight-forgotten", "without the weight in g", {"g": lambda v: v.grad_output}),
    Mistake("x-hat-forgotten", "without x_hat in the sum", {"grad_weight": lambda v: v.grad_output.sum(0)}),
    Mistake("x-hat-squared", "with x_hat multiplied twice in the sum",
            {"grad_weight": lambda v: (v.grad_output * v.x_hat**2).sum(0)}),
    Mistake("from-layernorm", "from LayerNorm's output, not from x_hat",
            {"grad_weight": lambda v: (v.grad_output * v.layernorm).sum(0)}),
    Mistake("first-row-only", "from the first row alone",
            {"grad_weight": lambda v: first_rows(v.grad_output * v.x_hat, 1).sum(0),
             "grad_bias": lambda v: first_rows(v.grad_output, 1).sum(0)}),
    Mistake("last-row-missing", "without the last row",
            {"grad_weight": lambda v: first_rows(v.grad_output * v.x_hat, -1).sum(0),
             "grad_bias": lambda v: first_rows(v.grad_output, -1).sum(0)}),
    Mistake("exchanged", "with the gradients of weight and bias exchanged",
            {"grad_weight": lambda v: v.grad_output.sum(0),
             "grad_bias": lambda v: (v.grad_output * v.x_hat).sum(0)}, 3, together=True),
    Mistake("x-hat-in-bias", "with x_hat in the sum, which belongs to the weight's alone",
            {"grad_bias": lambda v: (v.grad_output * v.x_hat).sum(0)}),
)  # fmt: skip
