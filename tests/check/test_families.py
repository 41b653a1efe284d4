"""Descriptions of wrong values without a known mistake: a factor, a shift, another step of the derivation."""

import re

import numpy as np
import pytest
from known_mistakes import diagnose_values

from harness.learner.hints import load_ladder
from harness.puzzles.p19.spec import PUZZLE as P19
from harness.puzzles.p20.spec import PUZZLE as P20
from harness.puzzles.p21.spec import PUZZLE as P21
from harness.puzzles.p22.spec import PUZZLE as P22
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.puzzles.p24.spec import PUZZLE as P24
from harness.puzzles.p27.spec import PUZZLE as P27
from harness.spec.rounding import round_to_dtype


def sum_by_thread(terms, threads):
    """Return each thread's partial sum in its column, as without block.sum."""
    return np.stack([terms[..., c % threads :: threads].sum(-1) for c in range(terms.shape[-1])], -1)


def compute_index(v, turn):
    """Compute puzzle 24's index; `turn(quarter, row, column, size)` is the blank's code."""
    side, cells = int(v.side), []
    for rest in range(side * side):
        row, column, size = 0, 0, 1
        while size < side:
            row, column = turn(rest & 3, row, column, size)
            rest, size = rest >> 2, 2 * size
        cells.append(row * side + column)
    return np.array(cells)


DESCRIPTIONS = {
    "map: factor 3 without + 1": (P19, "mapped", lambda v: 3 * v.vector, "is exactly 3 * vector, and nothing else"),
    "map: 2 * (v + 1)": (P19, "mapped", lambda v: 2 * (v.vector + 1), "is what it should be + 1 in every element"),
    "stages: sum repeated for every row": (P19, "staged_sums", lambda v: len(v.matrix) * v.matrix.sum(0),
        "is exactly rows times what it should be: 7 times in '31 x 7 x 63', 33 in '32 x 33 x 1'"),
    "online: largest is not updated": (P23, "lse", lambda v: np.full_like(v.lse, -np.inf),
        "is -inf in every row: `largest` still has its initial value, it must become `new_largest`"),
    "torch: mean over (0, 1) for sum": (P23, "grad_mask", lambda v: v.grad_scores.mean((0, 1)),
        "is exactly 1 / (B * N) times what it should be: 0.166667 times in 'many queries', 0.5 in 'hidden'"),
    "scores to base 2": (P23, "scores", lambda v: v.scores * np.log2(np.e), "is exactly 1 / ln 2 times what it should be"),
    "index: row offset missing in quarter 2": (P24, "index",
        lambda v: compute_index(v, lambda q, r, c, n: (c + n * (q == 1), r + n * (q > 1))),
        "is not a permutation: it contains cell 2 twice, at steps 8 and 12, but not cell 5"),
    "index: quarter 0 reversed": (P24, "index",
        lambda v: np.concatenate([v.index[: len(v.index) // 4][::-1], v.index[len(v.index) // 4 :]]),
        "has the correct cells in quarter 0, but in the wrong order: the quarter is turned wrongly"),
    "index: off by one": (
        P24, "index", lambda v: v.index + 1, "contains cell 16, outside the grid's 16"),
    "negated": (P22, "grad_bias", lambda v: -v.grad_bias, "has the opposite sign in every element, and is right otherwise"),
    "zeros": (P22, "grad_bias", lambda v: 0 * v.grad_bias, "is 0 in every element"),
    "reversed": (P22, "grad_bias", lambda v: v.grad_bias[::-1], "is right, but in reverse order along O"),
    "shifted": (P22, "grad_weight", lambda v: np.roll(v.grad_weight, 1, -1), "is right, but one place too far along H"),
    "another step": (P22, "grad_input", lambda v: v.g, "is exactly g, and nothing else"),
    "extra factor": (P22, "grad_input", lambda v: v.grad_input * v.c1, "is exactly c1 times what it should be"),
    "extra summand": (P22, "grad_input", lambda v: v.grad_input + 2 * v.x_hat, "is exactly what it should be plus 2 * x_hat"),
    "extra fraction of a step": (
        P22, "grad_input", lambda v: v.grad_input - v.x_hat / 16, "is exactly what it should be minus 0.0625 * x_hat"),
    "sum not reset": (P22, "grad_weight", lambda v: np.cumsum(v.grad_weight, -1),
        "has in each element the one before along H added: its sum is not set back to 0"),
    "input rounded to 16 bits": (
        P27, "grad_W", lambda v: np.tensordot(round_to_dtype(v.dy, "bfloat16"), v.x, ((0, 1), (0, 1))),
        "is right but for dy, which is rounded to bfloat16 on the way"),
    "step rounded to 16 bits": (P22, "grad_ln_weight", lambda v: (v.dln * round_to_dtype(v.x_hat, "float16")).sum((0, 1)),
        "is right but for x_hat, which is rounded to float16 on the way"),
    "factor per row": (
        P22, "grad_input", lambda v: v.grad_input * np.arange(1, 1 + v.input[..., 0].size).reshape(*v.input.shape[:2], 1),
        "is in each row a constant times what it should be, from 1 to 16 in 'chapter': a factor that belongs to a whole row is "
        "wrong or missing"),
    "summand per column": (P22, "output", lambda v: v.output + np.arange(v.output.shape[-1]),
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
def test_hint_for_missing_block_sum_has_no_code(puzzle, gate, step):
    ids = ("first-thread-only", "own-share-only")
    rungs = {m.hint for m in puzzle.mistakes if step in m.changes and m.id.endswith(ids)}
    (hint,) = (load_ladder(puzzle.name, gate)[rung - 1] for rung in rungs)
    assert "block.sum" in hint.text and not hint.code


@pytest.mark.parametrize("mistake", DESCRIPTIONS)
def test_wrong_values_are_described(mistake):
    puzzle, quantity, compute_wrong, description = DESCRIPTIONS[mistake]
    sentence = re.sub(
        r", (?:to \de[-+]\d\d|exactly)", "", diagnose_values(puzzle, quantity, compute_wrong).sentence
    )
    assert sentence.startswith(f"your {quantity} {description}"), sentence
    rest = sentence.removeprefix(f"your {quantity} {description}")
    assert rest.startswith(
        (": see hint G-", "; or ", " with", ", wherever it is a number", ", but not where an input")
    ), rest


def test_mistake_is_identified_despite_different_nan():
    """A kernel's maximum, guard or loop may treat NaN unlike the formula; finite values identify the mistake."""
    diagnosis = diagnose_values(P20, "softmax", lambda v: np.nan_to_num(v.weights))
    assert diagnosis.mistake == "not-normalised"
    assert diagnosis.sentence.startswith(
        "your softmax equals the reference not divided by the sum of the row, to "
    )
    assert diagnosis.sentence.endswith(", but not where an input is NaN or infinite: see hint G-2")
    assert diagnose_values(P20, "softmax", lambda v: np.nan_to_num(v.softmax)).mistake == "nan-swallowed"


def test_scalar_is_shown_in_the_default_case():
    lines = diagnose_values(P27, "norm", lambda v: v.norm**2).lines
    assert "its root is missing" in lines[0] and lines[-1] == "where in 'chapter': every element"


def test_indistinguishable_mistakes_are_both_identified():
    """If no row is longer than a block, a thread's partial sum is the diagonal of the Jacobian."""
    diagnosis = diagnose_values(
        P20,
        "grad_softmax",
        lambda v: v.softmax * (v.grad_output - sum_by_thread(v.grad_output * v.softmax, 128)),
        cases=("chapter", "hard values", "odd sizes"),
    )
    for description in ("with the diagonal of the Jacobian alone", "every thread's own share of the sum"):
        assert description in diagnosis.sentence


PUZZLES = {puzzle.name: puzzle for puzzle in (P19, P20, P21, P22, P23, P24)}


@pytest.mark.parametrize("name", PUZZLES)
def test_noise_has_no_description(name):
    """Correct values with random errors match no mistake."""
    puzzle, rng = PUZZLES[name], np.random.default_rng(0)
    quantities = {q: a for call in puzzle.calls for q, a in call.op.writes.items()}
    float32_quantities = [
        q for q, argument in quantities.items() if argument.resolve_dtype("float32") == "float32"
    ]
    assert float32_quantities
    for quantity in float32_quantities:

        def add_noise(v, quantity=quantity):
            expected = np.asarray(getattr(v, quantity), np.float64)
            return np.where(
                np.isfinite(expected), expected * (1 + 0.3 * rng.standard_normal(expected.shape)), expected
            )

        diagnosis = diagnose_values(puzzle, quantity, add_noise)
        assert diagnosis.mistake is None and diagnosis.hint == "G-1", quantity
        assert diagnosis.sentence == "no known mistake gives these values: see hint G-1"


def spread_nan(v):
    expected = v.probabilities.copy()
    expected[..., 1:] = np.where(np.isneginf(v.mask)[..., 1:], np.nan, expected[..., 1:] * 1.01)
    return expected


@pytest.mark.parametrize(
    ("puzzle", "quantity", "compute_wrong", "cases", "mistake", "cause"),
    [
        (P20, "grad_weight", lambda v: v.grad_weight * np.nan, (), "not-finite", "memory that nothing has cleared"),
        (P20, "grad_relu", lambda v: v.grad_relu + 0 * v.grad_output.sum(), (), "nan-spread", "(inf - inf, inf / inf)"),
        (P23, "probabilities", spread_nan, ("hard values", "odd sizes"), "nan-at-infinity", "(-inf - -inf, 0 / 0)"),
    ],
)  # fmt: skip
def test_causes_of_nan_are_listed(puzzle, quantity, compute_wrong, cases, mistake, cause):
    diagnosis = diagnose_values(puzzle, quantity, compute_wrong, cases)
    assert diagnosis.mistake == mistake and cause in diagnosis.sentence
    assert diagnosis.sentence.endswith(": see hint G-2")


def test_values_beyond_float16_raise_no_warning(recwarn):
    """NumPy's overflow warnings do not reach the learner."""
    diagnose_values(P20, "grad_input", lambda v: v.grad_input * 1e9 + 1e7 * v.input**2)
    assert not list(recwarn)
