"""What puzzle 24's pages say in words is what was counted."""

import re
from itertools import pairwise

from book_paths import BOOK

from book.figures import order_figures
from harness.nn import GridWindow
from harness.puzzles.p24 import orders

PAGES = BOOK / "src" / "puzzle_24"


def page(name: str) -> str:
    """A page's text in one line."""
    return " ".join((PAGES / f"{name}.md").read_text(encoding="utf-8").split())


def test_the_patterns_of_a_grid():
    """Of 128 x 128 cells and a radius of 4."""
    patterns_of = {}
    for name in ("hilbert", "tiled", "row-major"):
        numbers, patterns = GridWindow(orders.ORDERS[name](128, 128), 128, 4).patterns
        patterns_of[name] = ((numbers >= 0).sum(), len(patterns))
    assert [count for _, count in patterns_of.values()] == [25, 9, 3]
    text = page("block_sparsity")
    assert f"the {patterns_of['hilbert'][0]:,} pairs of tiles in Hilbert order have 25 patterns" in text
    assert "Squares of 8 x 8 have 9, rows 3." in text


def test_what_is_said_of_small_grids_and_short_rows():
    text = (BOOK / "outputs" / "order_count.txt").read_text()
    first = re.findall(r"^(\S+) +\S+ +(\S+)%", text.split("\n\n")[1], re.M)
    assert dict(first) == {"row-major": "62.5", "z-order": "100.0", "hilbert": "100.0", "tiled": "100.0"}
    lines = (BOOK / "outputs" / "order_sectors.txt").read_text().splitlines()[3:]
    asked = {line.split()[0]: float(line.split()[-1]) for line in lines[1:]}
    assert asked.pop("hilbert") == 6 and set(asked.values()) == {4}


def test_the_claims_have_a_number_and_a_verdict_each():
    rows = [line.split(" | ") for line in order_figures.claims().splitlines()[2:]]
    assert len(rows) == 6
    assert all(re.search(r"\d", counted) and verdict.startswith("**") for _, counted, verdict in rows)


def test_what_texts_print_is_no_curve():
    """Steps 1 and 2 of the printed sequence are not beside each other, as all steps of the curve are."""
    from harness.puzzles.p24.mistakes import PRINTED

    def apart(order):
        return [abs(a // 4 - b // 4) + abs(a % 4 - b % 4) for a, b in pairwise(order)]

    assert sorted(PRINTED) == list(range(16)) and apart(PRINTED)[1] == 2
    assert apart(orders.hilbert(4, 4).tolist()) == [1] * 15
