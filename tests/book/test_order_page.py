"""What puzzle 24's pages say in words is what was counted."""

from itertools import pairwise

from harness.puzzles.p24 import orders


def test_the_sequence_that_looks_like_a_curve_is_none():
    """Steps 1 and 2 of the printed sequence are not beside each other, as all steps of the curve are."""
    from harness.puzzles.p24.mistakes import PRINTED

    def apart(order):
        return [abs(a // 4 - b // 4) + abs(a % 4 - b % 4) for a, b in pairwise(order)]

    assert sorted(PRINTED) == list(range(16)) and apart(PRINTED)[1] == 2
    assert apart(orders.hilbert(4, 4).tolist()) == [1] * 15
