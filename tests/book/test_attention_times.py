"""The tables of the page on attention by tensor cores say what was measured, and no kernel beats the arithmetic."""

import re

import pytest
from book_paths import BOOK

from book.figures import attention_times
from book.figures.attention_times import CUDNN, OURS, Times
from book.measure import record

PAGE = (BOOK / "src" / "puzzle_23" / "tensor_cores.md").read_text()


def row(candidate: str, microseconds: float, **other) -> dict[str, str]:
    """A row as `p23 --bench` writes it."""
    size = {
        "B": "8",
        "N": "12",
        "S": "2048",
        "d": "64",
        "part": "1",
        "dtype": "bfloat16",
        "pass": "both",
        "column": "graph",
        "peak_bytes": "",
    }
    cells = {**size, "candidate": candidate, "median_us": str(microseconds), "tflops": "", **other}
    return {name: str(value) for name, value in cells.items()}


def test_the_page_includes_every_table_and_no_other():
    included = set(re.findall(r"generated/(attention_\w+\.\w+)", PAGE))
    assert included == set(attention_times.pages())


def test_a_table_has_the_ratio_of_what_was_measured():
    times = Times([row(OURS, 900), row(CUDNN, 1000), row("portable", 1500), row("flash", 2000)])
    (line,) = attention_times.times_table(times, 64, False).splitlines()[2:]
    assert line == "| 2,048 | 0.9 | 1.5 | 2 | 1 | 0.90 | 0.75 |"
    assert not attention_times.times_table(times, 64, True).splitlines()[2:]


def test_the_prediction_counts_products_and_exponentials():
    """96 heads at S = 1024: 2 * 96 * 1024**2 * 64 operations a product, at 100 TFLOP/s 128.8 us; nine of them."""
    ceiling = row("matmul ceiling", 1, column="ceiling", B="", S="", tflops=100)
    prediction = attention_times.predicted(Times([ceiling]), (1024, 64, False, "bfloat16"))
    assert prediction["done"] == pytest.approx(9 * 128.85, rel=1e-3) and prediction[
        "needed"
    ] == pytest.approx(prediction["done"] * 7 / 9)
    assert prediction["exponentials"] == pytest.approx(3 * 96 * 1024**2 / (132 * 16 * 1.98e9) * 1e6)


def test_the_bars_of_the_options_are_those_of_the_record():
    rows = [r for r in record.rows("attention_options") if (r["dtype"], r["d"]) == ("bfloat16", "64")]
    unit = next(float(r["peer_ms"]) for r in rows if r["option"] == "none")
    shown = re.findall(r">(\d\.\d\d) · (\d+) µs<", attention_times.option_costs())
    times = [float(r[who]) for r in rows for who in ("ours_ms", "peer_ms")]
    assert shown == [(f"{ms / unit:.2f}", f"{1e3 * ms:.0f}") for ms in times] and len(shown) == 14
