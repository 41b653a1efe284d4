"""The sequence in puzzle 24's warning is not a Hilbert curve."""

from itertools import pairwise

from harness.puzzles.p24 import orders


def test_lookalike_sequence_is_not_a_curve():
    """Steps 1 and 2 of the printed sequence are not neighbors; consecutive steps of the curve are."""
    from harness.puzzles.p24.mistakes import TEXTBOOK_ORDER

    def compute_distances(order):
        return [abs(a // 4 - b // 4) + abs(a % 4 - b % 4) for a, b in pairwise(order)]

    assert sorted(TEXTBOOK_ORDER) == list(range(16)) and compute_distances(TEXTBOOK_ORDER)[1] == 2
    assert compute_distances(orders.make_hilbert_order(4, 4).tolist()) == [1] * 15
