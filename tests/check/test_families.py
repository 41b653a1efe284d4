"""Wrong values that no known mistake explains are described by what they are beside the right ones: a factor, a shift, another step."""

import re

import numpy as np
import pytest
from known_mistakes import diagnose_values

from harness.learner.hints import ladder
from harness.puzzles.p19.spec import PUZZLE as P19
from harness.puzzles.p20.spec import PUZZLE as P20
from harness.puzzles.p21.spec import PUZZLE as P21
from harness.puzzles.p22.spec import PUZZLE as P22
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.puzzles.p24.spec import PUZZLE as P24
from harness.puzzles.p27.spec import PUZZLE as P27
from harness.spec.rounding import round_to_dtype


def by_thread(terms, threads):
    """For each column what its own thread has added up: no block.sum."""
    return np.stack([terms[..., c % threads :: threads].sum(-1) for c in range(terms.shape[-1])], -1)


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


NAMED = {
    "map: 3 * vector": (P19, "mapped", lambda v: 3 * v.vector, "is exactly 3 * vector, and nothing else"),
    "map: 2 * (v + 1)": (P19, "mapped", lambda v: 2 * (v.vector + 1), "is what it should be + 1 in every element"),
    "stages: range(rows)": (P19, "staged_sums", lambda v: len(v.matrix) * v.matrix.sum(0),
        "is exactly rows times what it should be: 7 times in '31 x 7 x 63', 33 in '32 x 33 x 1'"),
    "online: largest = grown is missing": (P23, "lse", lambda v: np.full_like(v.lse, -np.inf),
        "is -inf in every row: `largest` is still what it began with, it has to become `grown`"),
    "torch: dS.mean((0, 1))": (P23, "grad_mask", lambda v: v.grad_scores.mean((0, 1)),
        "is exactly 1 / (B * N) times what it should be: 0.166667 times in 'many queries', 0.5 in 'hidden'"),
    "scores in bits": (P23, "scores", lambda v: v.scores * np.log2(np.e), "is exactly 1 / ln 2 times what it should be"),
    "index: rows of quarter 2 forgotten": (P24, "index",
        lambda v: index_by(v, lambda q, r, c, n: (c + n * (q == 1), r + n * (q > 1))),
        "is no order: cell 2 comes twice, at steps 8 and 12, and cell 5 never"),
    "index: quarter 0 alone in another order": (P24, "index",
        lambda v: np.concatenate([v.index[: len(v.index) // 4][::-1], v.index[len(v.index) // 4 :]]),
        "has the right cells in quarter 0, in another order: it is turned otherwise"),
    "index: a whole square too far": (
        P24, "index", lambda v: v.index + 1, "names cell 16, which is outside of the grid's 16"),
    "the sign": (P22, "grad_bias", lambda v: -v.grad_bias, "has the opposite sign in every element, and is right otherwise"),
    "nothing": (P22, "grad_bias", lambda v: 0 * v.grad_bias, "is 0 in every element"),
    "upside down": (P22, "grad_bias", lambda v: v.grad_bias[::-1], "is right, but in reverse order along O"),
    "moved": (P22, "grad_weight", lambda v: np.roll(v.grad_weight, 1, -1), "is right, but one place too far along H"),
    "another step": (P22, "grad_input", lambda v: v.g, "is exactly g, and nothing else"),
    "a factor too many": (P22, "grad_input", lambda v: v.grad_input * v.c1, "is exactly c1 times what it should be"),
    "a summand too many": (P22, "grad_input", lambda v: v.grad_input + 2 * v.x_hat, "is exactly what it should be plus 2 * x_hat"),
    "any part of a step added": (
        P22, "grad_input", lambda v: v.grad_input - v.x_hat / 16, "is exactly what it should be minus 0.0625 * x_hat"),
    "a sum that is not set back": (P22, "grad_weight", lambda v: np.cumsum(v.grad_weight, -1),
        "has in each element the one before along H added: its sum is not set back to 0"),
    "an input read in 16 bits": (
        P27, "grad_W", lambda v: np.tensordot(round_to_dtype(v.dy, "bfloat16"), v.x, ((0, 1), (0, 1))),
        "is right but for dy, which is rounded to bfloat16 on the way"),
    "a step in 16 bits": (P22, "grad_ln_weight", lambda v: (v.dln * round_to_dtype(v.x_hat, "float16")).sum((0, 1)),
        "is right but for x_hat, which is rounded to float16 on the way"),
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
    last = re.sub(r", (?:to \de[-+]\d\d|exactly)", "", diagnose_values(puzzle, quantity, wrong).sentence)
    assert last.startswith(f"your {quantity} {words}"), last
    rest = last.removeprefix(f"your {quantity} {words}")
    assert rest.startswith(
        (": see hint G-", "; or ", " with", ", wherever it is a number", ", but not where an input")
    ), rest


def test_a_mistake_is_named_that_meets_nan_otherwise():
    """A kernel's maximum, guard or loop may let NaN through where a formula does not; finite numbers tell what is wrong."""
    diagnosis = diagnose_values(P20, "softmax", lambda v: np.nan_to_num(v.weights))
    assert diagnosis.mistake == "not-normalised"
    assert diagnosis.sentence.startswith(
        "your softmax equals the reference not divided by the sum of the row, to "
    )
    assert diagnosis.sentence.endswith(", but not where an input is NaN or infinite: see hint G-2")
    assert diagnose_values(P20, "softmax", lambda v: np.nan_to_num(v.softmax)).mistake == "nan-swallowed"


def test_one_number_is_shown_in_the_chapter_s_case_where_that_shows_it_as_plainly():
    lines = diagnose_values(P27, "norm", lambda v: v.norm**2).lines
    assert "its root is missing" in lines[0] and lines[-1] == "where in 'chapter': every element"


def test_two_mistakes_that_no_case_tells_apart_are_both_named():
    """Without a row longer than a block a thread's own share is the diagonal of the Jacobian."""
    diagnosis = diagnose_values(
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

        diagnosis = diagnose_values(puzzle, quantity, noise)
        assert diagnosis.mistake is None, (quantity, diagnosis.sentence)


def test_memory_that_was_never_cleared_is_among_the_causes_of_nan():
    diagnosis = diagnose_values(P20, "grad_weight", lambda v: v.grad_weight * np.nan)
    assert diagnosis.mistake == "not-finite"
    assert diagnosis.sentence == (
        "your grad_weight holds values that are no numbers: a division by 0, a logarithm of 0, an overflow, a row that "
        "is all -inf, or, in a kernel, a sum added to memory that nothing has cleared: see hint G-2"
    )


def test_nan_where_only_a_mask_is_infinite_has_several_causes():
    def unguarded(v):
        right = v.probabilities.copy()
        right[..., 1:] = np.where(np.isneginf(v.mask)[..., 1:], np.nan, right[..., 1:] * 1.01)
        return right

    diagnosis = diagnose_values(P23, "probabilities", unguarded, cases=("hard values", "odd sizes"))
    assert diagnosis.mistake == "nan-at-infinity"
    assert diagnosis.sentence == (
        "your probabilities is NaN or infinite where PyTorch's is finite, and only where an input is -inf: a guard is missing "
        "(-inf - -inf, 0 / 0), a sign or an axis is wrong, or an element is read that is not needed (0 * inf) or that nothing has "
        "written: see hint G-2"
    )


def test_nan_beside_infinite_inputs_has_several_causes():
    diagnosis = diagnose_values(P20, "grad_relu", lambda v: v.grad_relu + 0 * v.grad_output.sum())
    assert diagnosis.mistake == "nan-spread"
    assert diagnosis.sentence == (
        "your grad_relu is NaN or infinite where PyTorch's is finite: an element is read that is not needed (0 * NaN), a value is "
        "multiplied by 0 that should be left out (0 * inf), or a guard is missing (inf - inf, inf / inf): see hint G-2"
    )


def test_values_beyond_float16_are_no_warning(recwarn):
    """A verdict is words of the workbook's, and none of NumPy's."""
    diagnose_values(P20, "grad_input", lambda v: v.grad_input * 1e9 + 1e7 * v.input**2)
    assert not list(recwarn)
