"""The recorded run of a wrong kernel is current, and its page is written next to the book."""

from pathlib import Path

import pytest

from book.figures import recorded_pictures


@pytest.mark.slow
@pytest.mark.compiles
def test_recorded_bug_matches_the_zoo():
    recorded, fresh = recorded_pictures.load("bug"), recorded_pictures.take()
    words = [
        [(s["kind"], s["text"], s["source"] and s["source"][1]) for s in data["story"]]
        for data in (recorded, fresh)
    ]
    assert words[0] == words[1], "only line numbers may differ"
    assert recorded["tensors"] == fresh["tensors"]
    assert [launch["e"] for launch in recorded["runs"][0]] == [launch["e"] for launch in fresh["runs"][0]]


def test_bug_page_is_written_next_to_the_book(tmp_path):
    recorded_pictures.write_page(tmp_path)
    page = (tmp_path / recorded_pictures.PAGE).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "@DATA@" not in page and str(Path.home()) not in page
    assert "dy[seq * B + Int(block_idx.x), o]" in page
    assert page.index("<body>") < page.index('<a href="index.html">') < page.index("</body>")
