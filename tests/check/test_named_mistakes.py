"""Wrong lines that people wrote, each as NumPy computes it, and the sentence that is printed for it.

What a wrong kernel or a wrong line of Python gives is written here by itself, from the code that people wrote, and never with
the mistakes that the puzzles know.
"""

import re

import numpy as np
import pytest

from harness.learner.hints import ladder
from harness.puzzles.p19.spec import PUZZLE as P19
from harness.puzzles.p20.spec import PUZZLE as P20
from harness.puzzles.p21.spec import PUZZLE as P21
from harness.puzzles.p22.spec import PUZZLE as P22
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.puzzles.p24.spec import PUZZLE as P24
from harness.puzzles.p27.spec import PUZZLE as P27
from tests.known_mistakes import said

LOWEST = float(np.finfo(np.float32).min)


def row_sum(array):
    """The sum of every row, kept as an axis."""
    return array.sum(-1, keepdims=True)


def by_thread(terms, threads):
    """For each column what its own thread has added up: no block.sum."""
    return np.stack([terms[..., c % threads :: threads].sum(-1) for c in range(terms.shape[-1])], -1)


def by_warp(terms, threads):
    """For each column what the 32 threads of its own thread's warp have added up."""
    own = [terms[..., thread::threads].sum(-1) for thread in range(threads)]
    return np.stack([sum(own[c % threads // 32 * 32 :][:32]) for c in range(terms.shape[-1])], -1)


def last_steps(terms, threads):
    """The sum of what each thread has read last: `=` for `+=`."""
    last = {c % threads: c for c in range(terms.shape[-1])}
    return row_sum(terms[..., sorted(last.values())])


def first_thread_s_lse(v):
    """Puzzle 27's lse where the first thread writes its own largest and total."""
    own = v.logits[..., ::128]
    return np.log(np.exp(own - own.max(-1, keepdims=True)).sum(-1)) + own.max(-1)


def s_of(v, times):
    """1 / (1 + exp(-times * u)) of puzzle 27's GELU; half of 1 + tanh u with 2."""
    return 1 / (1 + np.exp(-times * np.sqrt(2 / np.pi) * (v.x + 0.044715 * v.x**3)))


def gelu_gradient(v, s, two=2.0, first=1.0):
    """GELU's gradient by the product rule, with another s, 2 or factor of the first term."""
    return v.dx * (first * s + two * v.x * s * (1 - s) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v.x**2))


def layernorm_dx(v, x_hat, c1=None, c2=None):
    """LayerNorm's dx with some x_hat, and maybe other means."""
    c1 = (v.g * x_hat).mean(-1, keepdims=True) if c1 is None else c1
    return v.row_rstd * (v.g - (v.c2 if c2 is None else c2) - x_hat * c1)


def square(v):
    """Puzzle 24's window: both distances are at most the radius."""
    return lambda down, right: np.maximum(down, right) <= v.radius


def tiles_of(v, is_near, width=0, queries=None):
    """Puzzle 24's tiles, pair by pair, by another distance, another width of the grid or other cells of the queries."""
    queries, keys = (
        np.divmod(cells, width or int(v.width))
        for cells in (v.order if queries is None else queries, v.order)
    )
    tiles, T = np.zeros((-(-len(v.order) // int(v.tile)),) * 2, bool), int(v.tile)
    for s, (r, c) in enumerate(zip(*queries, strict=True)):
        tiles[s // T, np.flatnonzero(is_near(np.abs(r - keys[0]), np.abs(c - keys[1]))) // T] = True
    return tiles


def scores_to(v, dS):
    """dQ of puzzle 23 from some dS."""
    return v.scale * (dS @ v.key)


def exp32(array):
    """exp in float32, as kernels compute it."""
    return np.exp(array.astype(np.float32)).astype(np.float64)


def softmax_over(scores, axis, guarded=False):
    """Softmax along an axis, with or without a guard for what is -inf throughout."""
    largest = scores.max(axis, keepdims=True)
    weights = np.exp(scores - (np.where(largest == -np.inf, 0, largest) if guarded else largest))
    total = weights.sum(axis, keepdims=True)
    return np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) if guarded else weights / total


def by_own_row_totals(v):
    """The online softmax's output where each thread divides by the total of its own keys."""
    out = v.weights @ v.value
    for c in range(out.shape[-1]):
        total = v.weights[..., c % 16 :: 16].sum(-1)
        out[..., c] /= np.where(total == 0, 1, total)
    return out


def turned_tiles(rows):
    """Matrices whose tiles are each transposed, with zeros outside: element by element."""
    R, C = rows.shape[-2:]
    out = np.zeros_like(rows)
    for r in range(R):
        for c in range(C):
            row, column = r // 16 * 16 + c % 16, c // 16 * 16 + r % 16
            if row < R and column < C:
                out[..., r, c] = rows[..., row, column]
    return out


FACTORS = (
    ("online", "values", "output", lambda v, read: v.probabilities @ read(v.value)),
    ("flash_dQ", "keys", "grad_query", lambda v, read: v.scale * (v.grad_scores @ read(v.key))),
    ("flash_dKdV", "queries", "grad_key", lambda v, read: v.scale * (v.grad_scores.swapaxes(-1, -2) @ read(v.query))),
    ("flash_dKdV", "grads", "grad_value", lambda v, read: v.probabilities.swapaxes(-1, -2) @ read(v.grad_output)),
)  # fmt: skip
"""Puzzle 23: a gate, the tile that it loads, and what it makes of that tile's matrix as it is read."""


def at_the_queries(weights, rows):
    """A product where a tile of rows is read at the place of the result's rows, at s0 + y of an output's."""
    *heads, S, T = weights.shape
    out = np.zeros((*heads, S, rows.shape[-1]))
    for s in range(S):
        for t in range(T):
            row = s // 16 * 16 + t % 16
            if row < T:
                out[..., s, :] += weights[..., s, t, None] * rows[..., row, :]
    return out


def by_turned_weights(v):
    """The online softmax's output where row y of a tile takes column y of the weights; tile by tile, as the kernel goes."""
    *heads, S, T = v.masked.shape
    masked = np.pad(v.masked, ((0, 0), (0, 0), (0, -S % 16), (0, -T % 16)), constant_values=-np.inf)
    value = np.pad(v.value, ((0, 0), (0, 0), (0, -T % 16), (0, 0)))
    out = np.zeros((*heads, masked.shape[-2], v.value.shape[-1]))
    for s0 in range(0, masked.shape[-2], 16):
        largest, total = np.full((*heads, 16, 1), -np.inf), np.zeros((*heads, 16, 1))
        sums = np.zeros((*heads, 16, value.shape[-1]))
        for t0 in range(0, masked.shape[-1], 16):
            score = masked[..., s0 : s0 + 16, t0 : t0 + 16]
            grown = np.maximum(largest, score.max(-1, keepdims=True))
            shift = np.where(np.isneginf(grown), 0, grown)
            rescale, weight = np.exp(largest - shift), np.exp(score - shift)
            total = total * rescale + weight.sum(-1, keepdims=True)
            sums = sums * rescale + weight.swapaxes(-1, -2) @ value[..., t0 : t0 + 16, :]
            largest = grown
        out[..., s0 : s0 + 16, :] = sums / np.where(total == 0, 1, total)
    return out[..., :S, :]


def last_queries(v):
    """dV where each tile of queries overwrites the sums."""
    first = (v.probabilities.shape[-2] - 1) // 16 * 16
    return v.probabilities[..., first:, :].swapaxes(-1, -2) @ v.grad_output[..., first:, :]


def index_by(v, turn):
    """Puzzle 24's index, cell by cell; `turn`(quarter, row, column, size) is the blank."""
    side, cells = int(v.side), []
    for rest in range(side * side):
        row, column, size = 0, 0, 1
        while size < side:
            row, column = turn(rest & 3, row, column, size)
            rest, size = rest >> 2, 2 * size
        cells.append(row * side + column)
    return np.array(cells)


def inverse_by(v, turn):
    """Puzzle 24's inverse, step by step; `turn`(quarter, row, column, size) turns back inside of a quarter."""
    side, steps = int(v.side), []
    for cell in range(side * side):
        (row, column), step, size = divmod(cell, side), 0, side // 2
        while size:
            quarter = 3 * (column // size) ^ (row // size)
            step = 4 * step + quarter
            row, column = turn(quarter, row % size, column % size, size)
            size //= 2
        steps.append(step)
    return np.array(steps)


def index_turn(exchanged=(0, 3), right=(2, 3), end=1):
    """A blank of the index: which quarters are exchanged, which lie right, and from where the last is counted."""

    def turn(quarter, row, column, size):
        if quarter == 3:
            row, column = size - end - row, size - end - column
        if quarter in exchanged:
            row, column = column, row
        return row + size * (quarter in (1, 2)), column + size * (quarter in right)

    return turn


def put_back(v, array):
    """Rows of steps as rows of cells."""
    out = np.empty_like(array)
    out[:, :, v.order] = array
    return out


def reversed_words(bits):
    """Each bit as it is found where the first element has the highest bit of its word."""
    words = np.append(bits.ravel(), np.zeros(-bits.size % 32, bool)).reshape(-1, 32)
    return words[:, ::-1].ravel()[: bits.size].reshape(bits.shape)


def first_word(v):
    """drelu with the bit 31 - i % 32."""
    return np.where(reversed_words(v.passes), v.grad_output, 0.0)


NAMED = {
    # Puzzle 19
    "map: 3 * vector": (P19, "mapped", lambda v: 3 * v.vector, "is exactly 3 * vector, and nothing else"),
    "map: 2 * (v + 1)": (P19, "mapped", lambda v: 2 * (v.vector + 1), "is what it should be + 1 in every element"),
    "stages: range(rows)": (P19, "staged_sums", lambda v: len(v.matrix) * v.matrix.sum(0),
        "is exactly rows times what it should be: 7 times in '31 x 7 x 63', 33 in '32 x 33 x 1'"),
    "cast: range(1, C)": (P19, "products", lambda v: (v.half_matrix * v.half_vector)[:, 1:].sum(-1),
        "equals the reference without the first column: the loop begins at 1"),
    "cast: a step of block_dim.x": (P19, "products", lambda v: v.half_matrix[:, 0] * v.half_vector[0],
        "equals the reference of the first column alone: the loop takes no second step"),
    # Puzzle 20
    "dlayernorm: divided by ROW_THREADS": (P20, "grad_input",
        lambda v: layernorm_dx(v, v.x_hat, row_sum(v.g * v.x_hat) / 128, row_sum(v.g) / 128),
        "equals the reference with c1 and c2 divided by the 128 threads of a row, not by its columns"),
    "dlayernorm: x_hat = x * rstd": (P20, "grad_input", lambda v: layernorm_dx(v, v.input * v.row_rstd),
        "equals the reference with the mean not subtracted in x_hat"),
    "dlayernorm: no block.sum": (P20, "grad_input",
        lambda v: layernorm_dx(
            v, v.x_hat, by_thread(v.g * v.x_hat, 128) / v.input.shape[-1], by_thread(v.g, 128) / v.input.shape[-1]
        ),
        "equals the reference with every thread's own share in c1 and c2: block.sum is missing"),
    **{
        f"{name}: g - c2 - c1": (puzzle, "grad_input", lambda v: v.row_rstd * (v.g - v.c2 - v.c1),
            "equals the reference with c1 not multiplied by x_hat")
        for name, puzzle in (("dlayernorm", P20), ("dx", P22))
    },
    **{
        f"{name}: c1 from g alone": (
            puzzle, "grad_input", lambda v: layernorm_dx(v, v.x_hat, v.g.mean(-1, keepdims=True)),
            "equals the reference with x_hat forgotten in c1, the mean of g * x_hat")
        for name, puzzle in (("dlayernorm", P20), ("dx", P22))
    },
    "dlayernorm: + x_hat * c1": (P20, "grad_input", lambda v: v.row_rstd * (v.g - v.c2 + v.x_hat * v.c1),
        "equals the reference with the variance term x_hat * c1 added, not subtracted"),
    "dlayernorm: dy for g in front": (P20, "grad_input", lambda v: v.row_rstd * (v.grad_output - v.c2 - v.x_hat * v.c1),
        "equals the reference with gamma in c1 and c2 but not in g"),
    "dweight: dy * x": (P20, "grad_weight", lambda v: (v.grad_output * v.input).sum(0),
        "equals the reference with the input itself, without mean and rstd, in x_hat"),
    "dweight: g * x_hat": (P20, "grad_weight", lambda v: (v.g * v.x_hat).sum(0),
        "equals the reference with the weight multiplied in: the gradient of the weight is made of dy, not of dy * weight"),
    "dsoftmax: P * dP - dot": (P20, "grad_softmax", lambda v: v.softmax * v.grad_output - v.dot,
        "equals the reference with the row sum subtracted from P * dP, outside of the bracket: it is P * (dP - sum)"),
    "softmax: no shift": (P20, "softmax", lambda v: exp32(v.logits) / row_sum(exp32(v.logits)),
        "equals the reference without the largest subtracted: exponentials overflow, or are all 0"),
    "drelu: the gradient times its bit": (P20, "grad_relu", lambda v: v.grad_output * v.passes,
        "equals the reference with the gradient multiplied by its bit, where the bit should choose: infinity times 0 is NaN"),
    "drelu: 31 - i % WORD": (P20, "grad_relu", first_word,
        "equals the reference with the first element in the highest bit, not the lowest"),
    # Puzzle 21
    "p21 dsoftmax: no block.sum": (
        P21, "grad_logits", lambda v: v.P * (v.grad_output - by_thread(v.grad_output * v.P, 128)),
        "equals the reference with every thread's own share of the sum: block.sum is missing"),
    "p21 dsoftmax: the dot product of dy and exp": (P21, "grad_logits",
        lambda v: v.P * (v.grad_output - row_sum(v.grad_output * np.exp(v.input - v.input.max(-1, keepdims=True)))),
        "equals the reference with exp(x - largest), not divided by its sum, in the row sum of dy * P"),
    "dstandardise: deviation * mean_products": (
        P21, "grad_input", lambda v: v.rstd * (v.grad_output - v.mean_dy - v.deviation * v.mean_products),
        "equals the reference with rstd left out in the term of the variance"),
    "dstandardise: + through_variance": (
        P21, "grad_input", lambda v: v.rstd * (v.grad_output - v.mean_dy + v.through_variance),
        "equals the reference with the wrong sign in the term of the variance"),
    "dbias: the last position": (P21, "grad_bias", lambda v: v.grad_output[:, -1].sum(0),
        "equals the reference summed over the batch alone, for the last position"),
    "dscale: no x": (P21, "grad_scale", lambda v: v.grad_output.sum((0, 1)), "equals the reference without the factor x"),
    # Puzzle 22
    "dx: c2 not divided": (P22, "grad_input", lambda v: layernorm_dx(v, v.x_hat, None, row_sum(v.g)),
        "equals the reference with c2 a sum, not a mean: c2 is divided by the number of columns too"),
    "dx: c1 not divided": (P22, "grad_input", lambda v: layernorm_dx(v, v.x_hat, row_sum(v.g * v.x_hat)),
        "equals the reference with c1 a sum, not a mean: c1 is divided by the number of columns too"),
    "ln: beta[row]": (P22, "output",
        lambda v: (
            (
                v.x_hat * v.ln_weight
                + np.append(v.ln_bias, np.zeros(v.input.size))[: v.input[..., 0].size].reshape(*v.input.shape[:2], 1)
            )
            @ v.linear_weight.T
            + v.linear_bias
        ),
        "equals the reference with beta read at the index of the row, not of the column"),
    # Puzzle 23
    "softmax: axis=-2": (P23, "probabilities", lambda v: softmax_over(v.masked, -2),
        "equals the reference taken over the queries, not the keys, wherever it is a number; "
        "the rest is 0 / 0, -inf - -inf, 0 * inf or an overflow"),
    "softmax: axis=-2, with guards": (P23, "probabilities", lambda v: softmax_over(v.masked, -2, guarded=True),
        "equals the reference taken over the queries, not the keys"),
    "softmax: S - mask": (P23, "probabilities", lambda v: softmax_over(v.scores - v.mask, -1, guarded=True),
        "equals the reference with the mask subtracted"),
    "dsoftmax: no block.sum": (P23, "grad_scores",
        lambda v: v.probabilities * (v.grad_probabilities - by_thread(v.grad_probabilities * v.probabilities, 128)),
        "equals the reference with every thread's own share of the sum: block.sum is missing"),
    "dsoftmax: block_size=32": (P23, "grad_scores",
        lambda v: v.probabilities * (v.grad_probabilities - by_warp(v.grad_probabilities * v.probabilities, 128)),
        "equals the reference with the sum of each thread's own warp: warp.sum, and a block_size of 32, add up 32 threads, not "
        "the block"),
    "dsoftmax: partial = dP * P": (P23, "grad_scores",
        lambda v: v.probabilities * (v.grad_probabilities - last_steps(v.grad_probabilities * v.probabilities, 128)),
        "equals the reference of the last 128 columns alone, one for each thread: each step of the loop overwrites the thread's sum"),
    "dP: transpose_a": (P23, "grad_probabilities",
        lambda v: (
            v.grad_output.reshape(*v.grad_output.shape[:2], *v.grad_output.shape[:1:-1]).swapaxes(-1, -2)
            @ v.value.reshape(*v.value.shape[:2], *v.value.shape[:1:-1])
        ),
        "equals the reference with transpose_a for transpose_b, or the other way round: the factor that is stored as it is needed "
        "is turned, the other is not"),
    **{
        f"{gate}: {tile}[x, i]": (P23, quantity, lambda v, wrong=wrong: wrong(v, turned_tiles),
            "equals the reference with each tile of the factor read as its transpose: [x, i] for [i, x]")
        for gate, tile, quantity, wrong in FACTORS
    },
    **{
        f"{gate}: x for chunk * TILE + x": (
            P23, quantity, lambda v, wrong=wrong: wrong(v, lambda rows: rows[..., np.arange(rows.shape[-1]) % 16]),
            "equals the reference with the first 16 elements of each row in every chunk: chunk * TILE is missing")
        for gate, tile, quantity, wrong in FACTORS
    },
    **{
        f"{gate}: {tile} at s0 + y": (P23, quantity, lambda v, wrong=wrong: at_the_queries(*wrong(v)),
            "equals the reference with the rows of a tile of keys read at the place of the queries, s0 for t0")
        for gate, tile, quantity, wrong in (
            ("online", "values", "output", lambda v: (v.probabilities, v.value)),
            ("flash_dQ", "keys", "grad_query", lambda v: (v.scale * v.grad_scores, v.key)),
        )
    },
    "flash_dKdV: key_sum += weights[y, i] * ...": (P23, "grad_key", lambda v: v.probabilities.swapaxes(-1, -2) @ v.query,
        "equals the reference with P instead of scale * dS"),
    "online: weights[i, y]": (P23, "output", by_turned_weights,
        "equals the reference with each tile of weights read as its transpose: weights[i, y] for weights[y, i]"),
    "online: largest = grown is missing": (P23, "lse", lambda v: np.full_like(v.lse, -np.inf),
        "is -inf in every row: `largest` is still what it began with, it has to become `grown`"),
    "online: weight for row_total(weight)": (P23, "output", by_own_row_totals,
        "equals the reference divided by what each thread adds up of its own keys: row_total adds up the threads of a row, "
        "wherever it is a number; the rest is 0 / 0, -inf - -inf, 0 * inf or an overflow"),
    "flash_dQ: lse * 1.4426950408889634": (P23, "grad_query",
        lambda v: scores_to(
            v,
            exp32(v.masked - np.where(np.isneginf(v.lse), 0, v.lse)[..., None] * 1.4426950408889634)
            * (v.grad_probabilities - v.dot),
        ),
        "equals the reference with lse divided by ln 2: exp takes natural logarithms"),
    "flash_dQ: scale * (P * dP - row_delta)": (
        P23, "grad_query", lambda v: scores_to(v, v.probabilities * v.grad_probabilities - v.dot),
        "equals the reference with the row sum subtracted from P * dP, outside of the bracket: it is P * (dP - sum)"),
    "flash_dQ: exp(score)": (P23, "grad_query", lambda v: scores_to(v, exp32(v.masked) * (v.grad_probabilities - v.dot)),
        "equals the reference with exp(score) for P, without lse"),
    "flash_dQ: dP - row_lse": (P23, "grad_query",
        lambda v: scores_to(
            v, v.probabilities * (v.grad_probabilities - np.where(np.isneginf(v.lse), LOWEST, v.lse)[..., None])
        ),
        "equals the reference with lse instead of the row sum of dP * P"),
    "flash_dKdV: key_sums[chunk] = key_sum": (P23, "grad_value", last_queries,
        "equals the reference of the last tile of queries alone: what came before is overwritten"),
    "flash_dKdV: dO read at t0 + y": (P23, "grad_value", lambda v: at_the_queries(v.probabilities.swapaxes(-1, -2), v.grad_output),
        "equals the reference with the rows of a tile of queries read at the place of the keys, t0 for s0"),
    "delta: dO * dO": (P23, "delta", lambda v: (v.grad_output**2).sum(-1),
        "equals the reference with the row sum of dO * dO, not of dO * O"),
    "delta: range(d) in every thread": (P23, "delta", lambda v: 128 * (v.grad_output * v.output).sum(-1),
        "equals the reference 128 times too large: every thread adds up the whole row, and the block adds up its threads"),
    "torch: dS.mean((0, 1))": (P23, "grad_mask", lambda v: v.grad_scores.mean((0, 1)),
        "is exactly 1 / (B * N) times what it should be: 0.166667 times in 'many queries', 0.5 in 'hidden'"),
    "scores in bits": (P23, "scores", lambda v: v.scores * np.log2(np.e), "is exactly 1 / ln 2 times what it should be"),
    # Puzzle 24
    "index: quarter 3 reversed but not exchanged": (P24, "index", lambda v: index_by(v, index_turn(exchanged=(0,))),
        "equals the reference with quarter 3 turned round, but its row and column not exchanged"),
    "index: size * (quarter > 2)": (P24, "index", lambda v: index_by(v, index_turn(right=(3,))),
        "equals the reference with quarter 2 in the left half: the right one begins with it"),
    "index: rows of quarter 2 forgotten": (P24, "index",
        lambda v: index_by(v, lambda q, r, c, n: (c + n * (q == 1), r + n * (q > 1))),
        "is no order: cell 2 comes twice, at steps 8 and 12, and cell 5 never"),
    "index: quarter 0 alone in another order": (P24, "index",
        lambda v: np.concatenate([v.index[: len(v.index) // 4][::-1], v.index[len(v.index) // 4 :]]),
        "has the right cells in quarter 0, in another order: it is turned otherwise"),
    "index: a whole square too far": (
        P24, "index", lambda v: v.index + 1, "names cell 16, which is outside of the grid's 16"),
    "inverse: quarter 3 not turned back": (
        P24, "inverse", lambda v: inverse_by(v, lambda q, r, c, n: (c, r) if q == 0 else (r, c)),
        "equals the reference with quarter 3 not turned"),
    "inverse: size - c": (P24, "inverse",
        lambda v: inverse_by(v, lambda q, r, c, n: (n - c, n - r) if q == 3 else (c, r) if q == 0 else (r, c)),
        "equals the reference with quarter 3 counted from size, not from size - 1, the last one"),
    "tiles: s for order[s]": (P24, "tiles", lambda v: tiles_of(v, square(v), queries=np.arange(len(v.order))),
        "equals the reference with the step itself for the cell of the query: both cells are order[s]"),
    "attention: delta from dO * V": (P24, "grad_query",
        lambda v: put_back(v, v.scale * ((v.P * (v.dP - row_sum(v.dO * v.V))) @ v.K)),
        "equals the reference with the row sum of dO * V, not of dO * O"),
    "dx: the bracket ends before x_hat * c1": (P22, "grad_input", lambda v: v.row_rstd * (v.g - v.c2) - v.x_hat * v.c1,
        "equals the reference with rstd not on the variance term x_hat * c1: the bracket ends too early"),
    "dx: gamma in front": (P22, "grad_input", lambda v: v.row_rstd * v.ln_weight * (v.dln - v.c2 - v.x_hat * v.c1),
        "equals the reference with gamma outside of the bracket: c1 and c2 hold it already"),
    # Puzzle 24
    "window: the grid taken for a square": (
        P24, "tiles", lambda v: tiles_of(v, square(v), int(len(v.order) ** 0.5)),
        "equals the reference with the side of a square of as many cells for the width"),
    "window: the straight line": (
        P24, "tiles", lambda v: tiles_of(v, lambda down, right: np.hypot(down, right) <= v.radius),
        "equals the reference with the sum of both distances: the window is a square, and the larger of them counts; "
        "or with the length of the straight line: the window is a square, and the larger of both distances counts, which gives the same "
        "here"),
    # Puzzle 27
    **{
        f"row_loss: neither block.max nor block.sum, {name}": (
            P27, name, wrong, "equals the reference of the first thread's columns alone: block.max and block.sum are missing")
        for name, wrong in (
            ("row_lse", first_thread_s_lse),
            ("row_loss", lambda v: np.where(v.targets == -100, 0, first_thread_s_lse(v) - v.row_target)),
        )
    },
    "row_loss: no block.sum": (P27, "row_lse",
        lambda v: v.row_largest[..., 0] + np.log(exp32(v.logits - v.row_largest)[..., ::128].sum(-1)),
        "equals the reference of the first thread's columns alone, not summed over the block"),
    "row_gradient: the ignored rows hold p": (P27, "grad_rows",
        lambda v: np.where(v.targets[..., None] == -100, v.row_p, (v.row_p - v.onehot) / v.places),
        "equals the reference with p in the places that are ignored: their rows are 0"),
    "row_gradient: if target == IGNORED": (
        P27, "grad_rows", lambda v: np.where(v.targets[..., None] == -100, v.row_p / v.places, 0),
        "equals the reference of the ignored places alone: the condition is the wrong way round"),
    "gelu_forward: exp(-u)": (P27, "gelu", lambda v: v.x * s_of(v, 1),
        "equals the reference with exp(-u) for exp(-2 u): half of 1 + tanh u is 1 / (1 + exp(-2 u))"),
    **{
        f"gelu_backward: exp(-u), {two}": (P27, "grad_gelu", lambda v, two=two: gelu_gradient(v, s_of(v, 1), two),
            "equals the reference with exp(-u) for exp(-2 u): half of 1 + tanh u is 1 / (1 + exp(-2 u))")
        for two in (1, 2)
    },
    "gelu_forward: exp(2 u)": (P27, "gelu", lambda v: v.x * s_of(v, -2),
        "equals the reference with exp(2 u) for exp(-2 u): half of 1 + tanh u is 1 / (1 + exp(-2 u))"),
    "gelu_forward: x * (1 + tanh u)": (
        P27, "gelu", lambda v: v.x * 2 * s_of(v, 2), "equals the reference without the half of 1 + tanh u"),
    "gelu_backward: 1 + tanh u": (P27, "grad_gelu", lambda v: gelu_gradient(v, s_of(v, 2), first=2),
        "equals the reference with 1 + tanh u in the first term, not half of it"),
    "gelu_backward: x * (1 - tanh^2) * u'": (P27, "grad_gelu", lambda v: gelu_gradient(v, s_of(v, 2), 4),
        "equals the reference with the second term twice as large: s' is half of (1 - tanh^2 u) u', or 2 s (1 - s) u'"),
    "gelu_backward: x / 2 * s * (1 - s) * u'": (P27, "grad_gelu", lambda v: gelu_gradient(v, s_of(v, 2), 0.5),
        "equals the reference with s (1 - s) u' / 2 for the derivative of s, which is 2 s (1 - s) u'"),
    # Whatever the puzzle
    "the sign": (P22, "grad_bias", lambda v: -v.grad_bias, "has the opposite sign in every element, and is right otherwise"),
    "nothing": (P22, "grad_bias", lambda v: 0 * v.grad_bias, "is 0 in every element"),
    "upside down": (P22, "grad_bias", lambda v: v.grad_bias[::-1], "is right, but in reverse order along O"),
    "moved": (P22, "grad_weight", lambda v: np.roll(v.grad_weight, 1, -1), "is right, but one place too far along H"),
    "another step": (P22, "grad_input", lambda v: v.g, "is exactly g, and nothing else"),
    "a factor too many": (P22, "grad_input", lambda v: v.grad_input * v.c1, "is exactly c1 times what it should be"),
    "a summand too many": (P22, "grad_input", lambda v: v.grad_input + 2 * v.x_hat, "is exactly what it should be plus 2 * x_hat"),
    "a factor of each row": (
        P22, "grad_input", lambda v: v.grad_input * np.arange(1, 1 + v.input[..., 0].size).reshape(*v.input.shape[:2], 1),
        "is in each row a constant times what it should be, from 1 to 16 in 'chapter': a factor that belongs to a whole row is "
        "wrong or missing"),
    "a summand of each column": (P22, "output", lambda v: v.output + np.arange(v.output.shape[-1]),
        "is in each column a constant away from what it should be, from 0 to 15 in 'chapter': a summand that belongs to a whole "
        "column is wrong or missing"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("puzzle", "gate", "step"),
    [
        (P20, "softmax", "total"),
        (P20, "dsoftmax", "dot"),
        (P23, "softmax", "total"),
        (P23, "dsoftmax", "dot"),
        (P23, "delta", "delta"),
    ],
)
def test_a_missing_block_sum_leads_to_words_about_it_and_not_to_the_code(puzzle, gate, step):
    ids = ("first-thread-only", "own-share-only")
    rungs = {m.hint for m in puzzle.mistakes if step in m.changes and m.id.endswith(ids)}
    (hint,) = (ladder(puzzle.name, gate)[rung - 1] for rung in rungs)
    assert "block.sum" in hint.text and not hint.code


@pytest.mark.parametrize("line", NAMED)
def test_a_wrong_line_is_named(line):
    puzzle, quantity, wrong, words = NAMED[line]
    last = re.sub(r", (?:to \de[-+]\d\d|exactly)", "", said(puzzle, quantity, wrong).sentence)
    assert last.startswith(f"your {quantity} {words}"), last
    rest = last.removeprefix(f"your {quantity} {words}")
    assert rest.startswith(
        (": see hint G-", "; or ", " with", ", wherever it is a number", ", but not where an input")
    ), rest


def test_a_mistake_is_named_that_meets_nan_otherwise():
    """A kernel's maximum, guard or loop may let NaN through where a formula does not; finite numbers tell what is wrong."""
    diagnosis = said(P20, "softmax", lambda v: np.nan_to_num(v.weights))
    assert diagnosis.mistake == "not-normalised"
    assert diagnosis.sentence.startswith(
        "your softmax equals the reference not divided by the sum of the row, to "
    )
    assert diagnosis.sentence.endswith(", but not where an input is NaN or infinite: see hint G-2")
    assert said(P20, "softmax", lambda v: np.nan_to_num(v.softmax)).mistake == "nan-swallowed"


def test_one_number_is_shown_in_the_chapter_s_case_where_that_shows_it_as_plainly():
    lines = said(P27, "norm", lambda v: v.norm**2).lines
    assert "its root is missing" in lines[0] and lines[-1] == "where in 'chapter': every element"


def test_two_mistakes_that_no_case_tells_apart_are_both_named():
    """Without a row longer than a block a thread's own share is the diagonal of the Jacobian."""
    diagnosis = said(
        P20,
        "grad_softmax",
        lambda v: v.softmax * (v.grad_output - by_thread(v.grad_output * v.softmax, 128)),
        cases=("chapter", "hard values", "odd sizes"),
    )
    for words in ("with the diagonal of the Jacobian alone", "every thread's own share of the sum"):
        assert words in diagnosis.sentence


PUZZLES = {puzzle.name: puzzle for puzzle in (P19, P20, P21, P22, P23, P24)}


@pytest.mark.parametrize("name", PUZZLES)
def test_chance_is_no_family_of_any_quantity(name):
    """Values of the right size and of no origin are not explained by anything."""
    puzzle, random = PUZZLES[name], np.random.default_rng(0)
    quantities = {q: a for call in puzzle.calls for q, a in call.op.writes.items()}
    asked = [q for q, argument in quantities.items() if argument.dtype_in("float32") == "float32"]
    assert asked
    for quantity in asked:

        def noise(v, quantity=quantity):
            right = np.asarray(getattr(v, quantity), np.float64)
            return np.where(
                np.isfinite(right), right * (1 + 0.3 * random.standard_normal(right.shape)), right
            )

        diagnosis = said(puzzle, quantity, noise)
        assert diagnosis.mistake is None, (quantity, diagnosis.sentence)


def test_memory_that_was_never_cleared_is_among_the_causes_of_nan():
    diagnosis = said(P20, "grad_weight", lambda v: v.grad_weight * np.nan)
    assert diagnosis.mistake == "not-finite"
    assert diagnosis.sentence == (
        "your grad_weight holds values that are no numbers: a division by 0, an overflow, or a sum added to memory that "
        "nothing has cleared: see hint G-2"
    )


def test_nan_where_only_a_mask_is_infinite_has_several_causes():
    def unguarded(v):
        right = v.probabilities.copy()
        right[..., 1:] = np.where(np.isneginf(v.mask)[..., 1:], np.nan, right[..., 1:] * 1.01)
        return right

    diagnosis = said(P23, "probabilities", unguarded, cases=("hard values", "odd sizes"))
    assert diagnosis.mistake == "nan-at-infinity"
    assert diagnosis.sentence == (
        "your probabilities is NaN or infinite where PyTorch's is finite, and only where an input is -inf: a guard is missing "
        "(-inf - -inf, 0 / 0), a sign or an axis is wrong, or an element is read that is not needed (0 * inf) or that nothing has "
        "written: see hint G-2"
    )


def test_nan_beside_infinite_inputs_has_several_causes():
    diagnosis = said(P20, "grad_relu", lambda v: v.grad_relu + 0 * v.grad_output.sum())
    assert diagnosis.mistake == "nan-spread"
    assert diagnosis.sentence == (
        "your grad_relu is NaN or infinite where PyTorch's is finite: an element is read that is not needed (0 * NaN), a value is "
        "multiplied by 0 that should be left out (0 * inf), or a guard is missing (inf - inf, inf / inf): see hint G-2"
    )


def test_values_beyond_float16_are_no_warning(recwarn):
    """A verdict is words of the workbook's, and none of NumPy's."""
    said(P20, "grad_input", lambda v: v.grad_input * 1e9 + 1e7 * v.input**2)
    assert not list(recwarn)
