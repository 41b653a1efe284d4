"""The pictures of puzzle 24's orders hold every cell, each jump, and what a window reads."""

from xml.etree import ElementTree

import numpy as np
import pytest

from book.figures import order_figures
from harness.puzzles.p24 import orders


def elements(parts, tag):
    return ElementTree.fromstring(f"<g>{''.join(parts)}</g>").iter(tag)


@pytest.mark.parametrize(
    ("order", "lines", "jumps"), [("hilbert", 1, 0), ("row-major", 5, 4), ("z-order", 4, 3)]
)
def test_a_curve_has_a_line_for_each_run_and_one_for_each_jump(order, lines, jumps):
    height, width = (5, 7) if order != "z-order" else (4, 8)
    drawn = [*elements(order_figures.curve(orders.ORDERS[order](height, width), width), "polyline")]
    assert sum("stroke-dasharray" in each.attrib for each in drawn) == jumps
    assert len(drawn) == lines + jumps
    ends = {tuple(map(int, point.split(","))) for each in drawn for point in each.attrib["points"].split()}
    assert len(ends) == height * width


def test_what_a_window_reads_is_drawn_as_it_is_counted():
    reads = order_figures.accesses(orders.ORDERS["row-major"](16, 16), 16, 2, 16, 5)
    cells = [
        float(each.attrib["fill-opacity"])
        for each in elements(reads, "rect")
        for _ in range(int(each.attrib["width"]) // order_figures.PITCH)
    ]
    # A tile is the row 5; its window reaches the rows 3 to 7, and nothing else is loaded.
    queries, keys = order_figures.SHADES["query"], order_figures.SHADES["seen"]
    rows = np.array(cells).reshape(16, 16)
    assert (rows[5] == queries).all() and (rows[[3, 4, 6, 7]] == keys).all()
    assert (np.delete(rows, range(3, 8), 0) == order_figures.SHADES["other"]).all()


def test_of_six_walks_the_fifth_alone_is_right_and_only_the_second_of_the_others_never_jumps():
    walks = [order_figures.walk_of(name) for name in order_figures.SIX_WALKS]
    assert all(sorted(walk.tolist()) == list(range(64)) for walk in walks)
    exact = orders.hilbert(8, 8)
    assert [np.array_equal(walk, exact) for walk in walks] == [False, False, False, False, True, False]
    places = [np.stack(np.divmod(walk, 8)) for walk in walks]
    jumps = [int((np.abs(np.diff(place)).max(0) > 1).sum()) for place in places]
    assert [count == 0 for count in jumps] == [False, True, False, False, True, False]
    assert places[4][:, -1].tolist() == [0, 7] and places[1][:, -1].tolist() == [7, 0]
