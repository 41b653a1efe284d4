"""The charts of attention's time and memory: a line for each candidate, and names apart."""

import html
import re
from itertools import pairwise

from book.figures import claims_chart

TEXT = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>')


def row(length, method, who, failed="", **numbers) -> dict[str, str]:
    """A row of the record."""
    cells = {"ms": 0, "peak": 0, "kept": 0} | numbers
    return {"length": str(length), "method": method, "who": who, "failed": failed} | {
        name: str(value) for name, value in cells.items()
    }


def rows() -> list[dict[str, str]]:
    """Every length, times that lie on each other; autograd runs out of memory from 1,024 on."""
    return [
        row(
            length,
            method,
            who,
            failed="OOM" if length > 512 and who == "autograd" else "",
            ms=length / 100,
            peak=length * 2**20,
        )
        for length in (512, 1024, 2048, 4096, 8192)
        for method in ("own", "fair")
        for who in claims_chart.LINES
    ]


def test_a_line_and_a_name_for_each_and_no_two_names_on_each_other():
    svg = claims_chart.chart(
        [one for one in rows() if int(one["length"]) < 2000], "ms", lambda row: float(row["ms"]), "a label"
    )
    places = {html.unescape(words): (float(x), float(y)) for x, y, words in TEXT.findall(svg)}
    names = [name for name, _, _ in claims_chart.LINES.values()]
    assert set(names) <= set(places)
    assert places["autograd"][0] < places["custom backward pass"][0], "its last point is the one before"
    heights = sorted(places[name][1] for name in names[1:])
    assert all(below - above >= claims_chart.LINE - 0.1 for above, below in pairwise(heights))
    markers = len(re.findall(r"<circle|<polygon", svg))
    assert markers == 7, "what ran out of memory, and the other method, are not drawn"


def test_out_of_memory_is_said_and_a_speed_is_the_ratio_of_the_times_beside_it():
    lines = {line.split("|")[1].strip(): line for line in claims_chart.times_table(rows()).splitlines()}
    assert [cell.strip() for cell in lines["512"].split("|")[2:4]] == ["5.12 and 5.12: 1×"] * 2
    assert [cell.strip() for cell in lines["8,192"].split("|")[2:4]] == ["OOM and 81.9"] * 2


def test_the_memory_of_both_methods_in_gib():
    line = next(line for line in claims_chart.memory_table(rows()).splitlines() if line.startswith("| 2,048"))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["OOM and 2", "OOM and 2", "2"]
