"""The charts of attention's time and memory: a line for each candidate, and names apart."""

import html
import re
from itertools import pairwise

from book.figures import claims_chart
from harness.puzzles.p23 import claim_rows

TEXT = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>')


def rows() -> list[claim_rows.Row]:
    """Two lengths, times that lie on each other; autograd runs out of memory at the second."""
    measured = [
        claim_rows.Row(length, claim_rows.FAIR, who, ms=length / 100, peak=length * 2**20)
        for length in (512, 1024)
        for who in claims_chart.LINES
    ]
    measured = [row for row in measured if (row.length, row.who) != (1024, claim_rows.AUTOGRAD)]
    return [
        *measured,
        claim_rows.Row(1024, claim_rows.FAIR, claim_rows.AUTOGRAD, failed="OOM"),
        claim_rows.Row(512, claim_rows.OWN, claim_rows.AUTOGRAD, ms=1e6),
    ]


def test_a_line_and_a_name_for_each_and_no_two_names_on_each_other():
    svg = claims_chart.chart(rows(), "ms", lambda row: row.ms, "a label")
    places = {html.unescape(words): (float(x), float(y)) for x, y, words in TEXT.findall(svg)}
    names = [name for name, _, _ in claims_chart.LINES.values()]
    assert set(names) <= set(places)
    assert places["autograd"][0] < places["custom backward pass"][0], "its last point is the one before"
    heights = sorted(places[name][1] for name in names[1:])
    assert all(below - above >= claims_chart.LINE - 0.1 for above, below in pairwise(heights))
    markers = len(re.findall(r"<circle|<polygon", svg))
    assert markers == 7, "what ran out of memory, and the other method, are not drawn"
