"""Puzzle 25's spec: the reference matches PyTorch, layouts split sequences, and mistakes change results."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.puzzles.p25 import layout
from harness.puzzles.p25.derivation import MISTAKES, derive
from harness.puzzles.p25.spec import PUZZLE, RESULTS, explain_not_finite, reference

CASES = PUZZLE.list_cases(None)


def convert_to_tensors(arrays):
    return {name: torch.tensor(array) for name, array in arrays.items()}


def test_reference_matches_scaled_dot_product_attention():
    arrays = PUZZLE.make_inputs(next(case for case in CASES if case.name == "grouped heads"), "float64", 0)
    tensors = convert_to_tensors(arrays)
    expected = torch.nn.functional.scaled_dot_product_attention(
        tensors["query"], tensors["key"], tensors["value"], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(reference(tensors)["output"], expected)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("size", "length"), [(1, 5), (2, 8), (3, 19), (4, 64), (4, 3), (8, 101)])
def test_each_position_has_one_owner(size, length, balanced):
    positions = np.concatenate([layout.get_positions(rank, size, length, balanced) for rank in range(size)])
    assert sorted(positions.tolist()) == list(range(length))
    counts = [len(layout.get_positions(rank, size, length, balanced)) for rank in range(size)]
    assert max(counts) - min(counts) <= 2
    array = np.random.default_rng(0).standard_normal((2, 3, length, 4))
    assert np.array_equal(layout.join_parts(layout.split_array(array, size, balanced), balanced), array)


def test_zigzag_balances_the_work():
    for size in (2, 4, 8):
        sequential, mirrored = (
            [sum(layout.count_tiles(rank, size, 2048, balanced, 16)) for rank in range(size)]
            for balanced in (False, True)
        )
        assert len(set(mirrored)) == 1 and sum(mirrored) == sum(sequential) == 128 * 129 // 2
        assert sequential == sorted(sequential) and sequential[-1] > 1.4 * mirrored[0]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_each_mistake_changes_a_result(mistake):
    """Use four ranks, with and without balancing."""
    changes = []
    for case in CASES:
        if case.name in ("causal", "balanced", "four ranks"):
            arrays = PUZZLE.make_inputs(case, "float64", 0)
            expected, wrong = derive(arrays), derive(arrays, mistake.changes)
            changes += [not np.allclose(getattr(expected, name), getattr(wrong, name)) for name in RESULTS]
    assert any(changes)


def test_indivisible_head_counts_are_rejected():
    case = replace(CASES[0], dims=(1, 3, 2, 8, 4))
    with pytest.raises(ValueError, match="3 heads of the query cannot share 2 heads of the key"):
        PUZZLE.make_inputs(case, "float32", 0)


EARLY, OVERFLOWS, HIDDEN = "wait for its transfer", "overflows", "no visible key"


@pytest.mark.parametrize(
    ("name", "rows", "value", "quantity", "waits", "mistake", "causes"),
    [
        ("four ranks", slice(None), np.nan, "output", True, "read-too-early", [EARLY]),
        ("four ranks", slice(None), np.inf, "output", True, None, []),
        ("four ranks", slice(None), np.nan, "output", False, None, []),
        ("one rank", slice(None), np.nan, "output", True, None, []),
        ("large scores", slice(None), np.nan, "output", False, "overflows", [OVERFLOWS]),
        ("large scores", slice(None), np.inf, "output", True, "overflows", [OVERFLOWS]),
        ("large scores", slice(None), np.nan, "output", True, "not-finite", [EARLY, OVERFLOWS]),
        ("causal", slice(0, 12), np.nan, "output", False, "nothing-visible", [HIDDEN]),
        ("causal", slice(0, 12), np.nan, "output", True, "not-finite", [EARLY, HIDDEN]),
        ("causal", slice(12, 13), np.nan, "grad_query", True, "read-too-early", [EARLY]),
        ("causal", slice(12, 13), np.nan, "grad_value", True, "not-finite", [EARLY, HIDDEN]),
        ("balanced", slice(13, 14), np.nan, "output", False, "nothing-visible", [HIDDEN]),
        ("balanced", slice(14, 16), np.nan, "output", True, "read-too-early", [EARLY]),
        ("fewer than ranks", slice(2, 3), np.nan, "output", False, "nothing-visible", [HIDDEN]),
    ],
)
def test_causes_of_nan_are_reported(name, rows, value, quantity, waits, mistake, causes):
    case = next(case for case in CASES if case.name == name)
    arrays = PUZZLE.make_inputs(case, "float32", 0)
    truth = np.zeros_like(arrays["value" if quantity == "grad_value" else "query"])
    got = truth.copy()
    got[:, :, rows] = value
    explanation = explain_not_finite(waits, quantity, arrays, got, truth)
    assert (explanation and explanation.mistake) == mistake
    message = explanation.description if explanation else ""
    assert [cause for cause in (EARLY, OVERFLOWS, HIDDEN) if cause in message] == causes


def test_finite_results_have_no_nan_symptom():
    arrays = PUZZLE.make_inputs(CASES[0], "float32", 0)
    assert explain_not_finite(True, "output", arrays, arrays["query"], arrays["query"]) is None
