"""What puzzle 24's pages say in words is what was counted."""

import re
from itertools import pairwise

from book_paths import BOOK

from harness.puzzles.p24 import orders


def test_what_is_said_of_small_grids_and_short_rows():
    text = (BOOK / "outputs" / "order_count.txt").read_text()
    first = re.findall(r"^(\S+) +\S+ +(\S+)%", text.split("\n\n")[1], re.M)
    assert dict(first) == {"row-major": "62.5", "z-order": "100.0", "hilbert": "100.0", "tiled": "100.0"}
    lines = (BOOK / "outputs" / "order_sectors.txt").read_text().splitlines()[3:]
    asked = {line.split()[0]: float(line.split()[-1]) for line in lines[1:]}
    assert asked.pop("hilbert") == 6 and set(asked.values()) == {4}


def test_the_sequence_that_looks_like_a_curve_is_none():
    """Steps 1 and 2 of the printed sequence are not beside each other, as all steps of the curve are."""
    from harness.puzzles.p24.mistakes import PRINTED

    def apart(order):
        return [abs(a // 4 - b // 4) + abs(a % 4 - b % 4) for a, b in pairwise(order)]

    assert sorted(PRINTED) == list(range(16)) and apart(PRINTED)[1] == 2
    assert apart(orders.hilbert(4, 4).tolist()) == [1] * 15
