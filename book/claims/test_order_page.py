"""What puzzle 24's pages say in words is what was counted and measured."""

import csv
import re
from xml.etree import ElementTree

import pytest
from book_paths import BOOK

from book.figures import order_figures
from harness.nn import GridWindow, orders
from harness.puzzles.p24.counting import count

PAGES = BOOK / "src" / "puzzle_24"
TIMES = order_figures.measured()


def page(name: str) -> str:
    """A page's text in one line."""
    return " ".join((PAGES / f"{name}.md").read_text(encoding="utf-8").split())


def pairs(name: str, side: int, radius: int, tile: int) -> int:
    """Counted pairs of tiles."""
    return count(orders.ORDERS[name](side, side), side, radius, tile).pairs


def took(name: str, side: int, radius: int, tile: int | None = None) -> float:
    """Milliseconds, forward and backward, of the kernels with windows: at a tile, or at the best."""
    if tile is None:
        return order_figures.own(TIMES, side, radius, name)[0]
    return TIMES[side, radius, f"Mojo, {name}, {tile}", "both"]


def shares(taken, tile: int) -> list[float]:
    """How much of the counted ratio of row-major over Hilbert order the time keeps, by size."""
    return [
        taken("row-major", *size) / taken("hilbert", *size) / order_figures.ratio(*size, tile)
        for size in order_figures.SIZES
    ]


def test_the_time_follows_the_count():
    def theirs(name, side, radius):
        return TIMES[side, radius, f"Flex, {name}, 128", "both"]

    ours, flex = min(shares(took, 64)), min(shares(theirs, 128))
    assert f"at least {ours:.2f} of the counted one, and at least {flex:.2f} with FlexAttention" in page(
        "measured"
    )
    assert ours > 0.8, "the puzzle's goal"
    fastest = min(orders.ORDERS, key=lambda name: order_figures.flex(TIMES, 64, 4, name))
    assert fastest == "row-major" and took("hilbert", 64, 4) < took("row-major", 64, 4)


def test_blocks_of_one_tile_are_the_best():
    longer = {name: [] for name in orders.ORDERS}
    for side, radius in order_figures.SIZES:
        for name in orders.ORDERS:
            longer[name].append(took(name, side, radius, 128) / took(name, side, radius, 64))
            assert order_figures.own(TIMES, side, radius, name)[1] == 64
    text = page("measured")
    assert f"take up to {max(longer['row-major']) - 1:.0%} longer in row-major order" in text
    low, high = (round(100 * (of(longer["hilbert"]) - 1)) for of in (min, max))
    assert f"{low} to {high}% longer in Hilbert order" in text
    tiles = orders.window_tiles(orders.hilbert(128, 128), 128, 4, 64)
    both = tiles.reshape(-1, 2, len(tiles)).any(axis=1)
    assert 2 * both.sum() / tiles.sum() == pytest.approx(1.3, abs=0.01) and "up to 30% more pairs" in text


def test_what_it_is_beside_flexattention():
    ratios = {
        (name, *size): order_figures.flex(TIMES, *size, name) / took(name, *size)
        for size in order_figures.SIZES
        for name in orders.ORDERS
    }
    assert min(ratios.values()) > 1.3, "faster in each order"
    more = [4 * pairs("hilbert", *size, 128) / pairs("hilbert", *size, 64) for size in order_figures.SIZES]
    text = page("measured")
    assert f"computes {min(more):.1f} to {max(more):.1f} times as many pairs" in text
    for radius in (4, 8):
        assert 4 * pairs("row-major", 128, radius, 128) == pairs("row-major", 128, radius, 64)
        assert f"it takes {ratios['row-major', 128, radius]:.1f} times as long" in text
    assert all(
        took("row-major", *size) < TIMES[(*size, "SDPA, every key", "both")] for size in order_figures.SIZES
    )


def test_every_candidate_of_the_same_function_was_right():
    with order_figures.MEASURED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors = [float(row["error"]) for row in rows if row["error"]]
    assert f"none is further off than {max(errors)} of a tensor's norm" in page("measured")
    checked = {row["candidate"] for row in rows if row["error"]}
    timed = {row["candidate"] for row in rows if row["pass"] == "both"}
    assert timed - checked == {"SDPA, every key", *(name for name in timed if "NATTEN" in name)}
    assert not [row for row in rows if row["note"]]


def test_arithmetic_beside_a_table():
    def over(name, side, radius):
        return (
            TIMES[side, radius, f"Flex, {name} by arithmetic, 128", "both"]
            / TIMES[side, radius, f"Flex, {name}, 128", "both"]
        )

    for size in order_figures.SIZES:
        assert over("row-major", *size) < 0.9 and over("tiled", *size) > 1.1
        assert over("z-order", *size) == pytest.approx(1, abs=0.03)


def test_what_reordering_costs():
    text = page("measured")
    moved = {
        side: 2
        * sum(
            TIMES[side, 4, f"{what}, hilbert", "forward"] for what in ("gather of Q, K and V", "scatter of O")
        )
        for side in (64, 128)
    }
    saved = {size: took("row-major", *size) - took("hilbert", *size) for size in order_figures.SIZES}
    assert (
        f"On 128 x 128 cells that is {moved[128]:.1f} ms" in text
        and f"On 64 x 64 it is {moved[64]:.1f} ms" in text
    )
    assert f"saves {saved[128, 4]:.1f} ms with a radius of 4 and {saved[128, 8]:.1f} ms with one of 8" in text
    assert f"{saved[64, 8]:.1f}" == f"{moved[64]:.1f}" and saved[64, 4] < 0.2


def test_other_compact_orders_are_as_good():
    for side, radius in order_figures.SIZES:
        for name in ("z-order", "tiled"):
            assert took(name, side, radius) == pytest.approx(took("hilbert", side, radius), rel=0.02)
            saved = 1 - pairs("hilbert", side, radius, 128) / pairs(name, side, radius, 128)
            assert 0.04 < saved < 0.05
            assert pairs(name, side, radius, 64) == pairs("hilbert", side, radius, 64)
    assert "as fast as the curve, to 2%" in page("measured") and "saves 4 to 5%" in page("block_sparsity")


def test_the_patterns_of_a_grid():
    """Of 128 x 128 cells and a radius of 4."""
    found = {}
    for name in ("hilbert", "tiled", "row-major"):
        numbers, patterns = GridWindow(orders.ORDERS[name](128, 128), 128, 4).patterns
        found[name] = ((numbers >= 0).sum(), len(patterns))
    assert [count for _, count in found.values()] == [25, 9, 3]
    text = page("block_sparsity")
    assert f"the {found['hilbert'][0]:,} pairs of tiles in Hilbert order have 25 patterns" in text
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
    assert len(rows) == 7
    assert all(re.search(r"\d", counted) and verdict.startswith("**") for _, counted, verdict in rows)


@pytest.mark.parametrize("name", [name for name in order_figures.FILES if name.endswith(".svg")])
def test_a_picture_is_a_line_of_svg_with_a_label(name):
    text = order_figures.FILES[name]()
    assert text.count("\n") == 1 and ElementTree.fromstring(text).attrib["aria-label"]
    assert f"generated/{name}" in "".join(path.read_text() for path in PAGES.glob("*.md"))


def test_what_texts_print_is_no_curve():
    """Steps 1 and 2 of the printed sequence are not beside each other, nor are most of the picture of eight cells."""
    from harness.puzzles.p24.mistakes import PRINTED

    assert sorted(PRINTED) == list(range(16)) and order_figures.neighbours(PRINTED, 4) < 15
    assert order_figures.neighbours(PRINTED[1:3], 4) == 0
    assert order_figures.neighbours(orders.hilbert(4, 4).tolist(), 4) == 15
