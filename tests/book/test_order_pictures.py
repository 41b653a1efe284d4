"""The pictures of puzzle 24's orders hold every cell, each jump, and what a window reads."""

from xml.etree import ElementTree

import numpy as np
import pytest

from book.figures import order_figures
from harness.nn import orders


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
