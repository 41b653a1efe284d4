"""What the chapter on measuring says is what was measured."""

import pytest
from book_paths import BOOK

PAGE = " ".join((BOOK / "src" / "fast" / "measuring.md").read_text().split())


def test_what_the_chapter_on_measuring_says_is_what_was_measured():
    from book.figures import timing_pages

    ways = timing_pages.ways()
    product, rested = "product, ", ways["large product, rested"]
    kernel = ways[product + "events around 100 calls"]
    assert ways["large product, after 4 s of it"] / rested == pytest.approx(1.15, abs=0.005)
    assert "15&nbsp;% longer after four seconds" in PAGE
    assert ways["large product of zeros, after 4 s of it"] < rested < ways["large product, after 4 s of it"]
    assert (
        1500 < ways[product + "the first call of the process"] / kernel < 2500
        and "two thousand times" in PAGE
    )
    assert ways[product + "a graph of 100"] < kernel < ways[product + "L2 flushed before each"]
    assert ways[product + "events around one call"] > 5 * kernel, "one call is nearly all host"
    names = [row["kernel"] for row in timing_pages.rows("h200_profiler")]
    assert (
        sum(name.startswith("nvjet") for name in names) == 3 and sum("_bias_" in name for name in names) == 1
    )


def test_a_gpu_loses_at_the_chapters_sizes_and_wins_at_a_models():
    from book.figures import timing_pages

    small, large = timing_pages.both_devices()[:2], timing_pages.both_devices()[2:]
    assert {dims for dims, *_ in small} == {(4, 4, 8, 16)} and {dims for dims, *_ in large} == {
        (8, 1024, 768, 3072)
    }
    assert all(cpu < gpu for _, _, cpu, gpu in small) and all(cpu > 100 * gpu for _, _, cpu, gpu in large)
    assert timing_pages.devices_table().count("\n| ") == 5
