"""Derivation of puzzle 20, and its known mistakes.

Shapes: input, logits, grad_output and elementwise results [rows, columns]; row_mean, row_rstd, dot, c1, c2
[rows, 1]; weight and bias [columns]; mask [words], with 32 elements per word.
"""

import numpy as np

from harness.puzzles import formulas
from harness.spec.derivation import Mistake, make_derive

WORD_BITS = 32
"""Elements per word of the mask."""
ROW_THREADS = 128
"""Threads that share a row."""


def split_into_words(bits: np.ndarray) -> np.ndarray:
    """Reshape bools of any shape to one row per word, padded with False."""
    return np.pad(bits.ravel(), (0, -bits.size % WORD_BITS)).reshape(-1, WORD_BITS)


def pack(bits: np.ndarray) -> np.ndarray:
    """Pack bools of any shape into int32 words, the first element in the lowest bit of the first word."""
    weights = np.uint32(1) << np.arange(WORD_BITS, dtype=np.uint32)
    return (split_into_words(bits) * weights).sum(1, dtype=np.uint32).view(np.int32)


def pack_reversed(bits: np.ndarray) -> np.ndarray:
    return pack(split_into_words(bits)[:, ::-1])


def unpack(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Unpack words into bools, the lowest bit of the first word first."""
    unpacked = (words.view(np.uint32)[:, None] >> np.arange(WORD_BITS, dtype=np.uint32)) & 1
    return unpacked.ravel()[: np.prod(shape)].reshape(shape).astype(bool)


def get_next_bits(bits: np.ndarray) -> np.ndarray:
    """Return, for each element, the bit of the next element in its word, cyclically."""
    return np.roll(split_into_words(bits), -1, 1).ravel()[: bits.size].reshape(bits.shape)


def mask_without_shift(bits: np.ndarray) -> np.ndarray:
    """Return, for each element, the lowest bit of `word & place`, where `place` is its index in the word."""
    lowest_bits = split_into_words(bits)[:, :1] & (np.arange(WORD_BITS) % 2 == 1)
    return lowest_bits.ravel()[: bits.size].reshape(bits.shape)


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
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
derive = make_derive(STEPS)


def keep_first_rows(array: np.ndarray, count: int) -> np.ndarray:
    result = array.copy()
    result[count:] = 0
    return result


MISTAKES = (
    # ReLU.
    Mistake("mask-ignored", "with every gradient passed through", {"grad_relu": lambda v: v.grad_output}),
    Mistake("multiplied-by-the-bit",
            "with the gradient multiplied by its bit instead of selected by it: infinity times 0 is NaN",
            {"grad_relu": lambda v: v.grad_output * v.passes}),
    Mistake("mask-inverted", "with the mask inverted",
            {"grad_relu": lambda v: np.where(v.passes, 0.0, v.grad_output), "mask": lambda v: pack(~v.passes)}),
    Mistake("grad-output-ignored", "with 1 instead of grad_output",
            {"grad_output": lambda v: np.ones_like(v.get_original("grad_output"))}, 1),
    Mistake("bits-reversed", "with the first element in the highest bit, not the lowest",
            {"mask": lambda v: pack_reversed(v.passes),
             "grad_relu": lambda v: np.where(unpack(pack_reversed(v.passes), v.passes.shape), v.grad_output, 0.0)},
            3),
    Mistake("neighbours-bit", "with the bit of the next element in its word",
            {"grad_relu": lambda v: np.where(get_next_bits(v.passes), v.grad_output, 0.0)}, 3),
    Mistake("place-not-shifted-by",
            "with the lowest bit of `word & place`: shift the word by the element's index in it, `word >> place`",
            {"grad_relu": lambda v: np.where(mask_without_shift(v.passes), v.grad_output, 0.0)}, 3),
    Mistake("relu-not-applied", "with nothing set to 0", {"relu": lambda v: v.input}, 1),
    # Softmax.
    *formulas.list_softmax_backward_mistakes("grad_softmax", "softmax", "grad_output", "dot", ROW_THREADS),
    Mistake("wrong-axis", "down the columns, not along the rows", {"softmax": lambda v: softmax(v.logits, 0)}),
    *formulas.list_softmax_mistakes("weights", "total", "softmax", "logits", ROW_THREADS),
    # LayerNorm.
    *formulas.list_dx_mistakes("grad_output", "weight"),
    Mistake("sums-not-means", "with sums in c1 and c2, not means",
            {"grad_input": lambda v: v.row_rstd * (v.g - v.input.shape[-1] * (v.c2 + v.x_hat * v.c1))}),
    *formulas.list_mean_mistakes(ROW_THREADS),
    *formulas.list_x_hat_mistakes(),
    *formulas.list_statistics_mistakes(),
    Mistake("gamma-twice",
            "with the weight multiplied in: the weight's gradient uses dy, not dy * weight",
            {"grad_weight": lambda v: (v.g * v.x_hat).sum(0), "grad_bias": lambda v: v.g.sum(0)}),
    Mistake("weight-forgotten-forward", "without the weight", {"layernorm": lambda v: v.x_hat + v.bias}),
    Mistake("bias-forgotten-forward", "without the bias", {"layernorm": lambda v: v.x_hat * v.weight}),
    Mistake("weight-forgotten", "without the weight in g", {"g": lambda v: v.grad_output}),
    Mistake("x-hat-forgotten", "without x_hat in the sum", {"grad_weight": lambda v: v.grad_output.sum(0)}),
    Mistake("x-hat-squared", "with x_hat squared in the sum",
            {"grad_weight": lambda v: (v.grad_output * v.x_hat**2).sum(0)}),
    Mistake("from-layernorm", "computed from LayerNorm's output, not from x_hat",
            {"grad_weight": lambda v: (v.grad_output * v.layernorm).sum(0)}),
    Mistake("first-row-only", "from the first row only",
            {"grad_weight": lambda v: keep_first_rows(v.grad_output * v.x_hat, 1).sum(0),
             "grad_bias": lambda v: keep_first_rows(v.grad_output, 1).sum(0)}),
    Mistake("last-row-missing", "without the last row",
            {"grad_weight": lambda v: keep_first_rows(v.grad_output * v.x_hat, -1).sum(0),
             "grad_bias": lambda v: keep_first_rows(v.grad_output, -1).sum(0)}),
    Mistake("exchanged", "with the gradients of weight and bias swapped",
            {"grad_weight": lambda v: v.grad_output.sum(0),
             "grad_bias": lambda v: (v.grad_output * v.x_hat).sum(0)}, 3, needs_all_wrong=True),
    Mistake("x-hat-in-bias", "with x_hat in the sum, which belongs only in the weight's gradient",
            {"grad_bias": lambda v: (v.grad_output * v.x_hat).sum(0)}),
)  # fmt: skip
