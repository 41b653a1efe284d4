"""The recorded run of a wrong kernel is that of the kernel as it is, and its page stands beside the book."""

from pathlib import Path

import pytest

from book.figures import recorded_pictures
from book.measure import access_pictures


@pytest.mark.compiles
def test_the_bug_is_that_of_the_zoo():
    kept, fresh = recorded_pictures.load("bug"), access_pictures.bug()
    words = [
        [(s["kind"], s["text"], s["source"] and s["source"][1]) for s in data["story"]]
        for data in (kept, fresh)
    ]
    assert words[0] == words[1], "lines may move, what is said may not"
    assert kept["tensors"] == fresh["tensors"]
    assert [launch["e"] for launch in kept["runs"][0]] == [launch["e"] for launch in fresh["runs"][0]]


def test_the_page_is_written_beside_the_book(tmp_path):
    recorded_pictures.write_page(tmp_path)
    page = (tmp_path / recorded_pictures.PAGE).read_text()
    assert page.startswith("<!doctype html>") and "@DATA@" not in page and str(Path.home()) not in page
    assert "dy[seq * B + Int(block_idx.x), o]" in page


def test_the_page_of_the_wrong_kernel_leads_back_to_the_book(tmp_path):
    recorded_pictures.write_page(tmp_path)
    page = (tmp_path / recorded_pictures.PAGE).read_text(encoding="utf-8")
    assert page.index("<body>") < page.index('<a href="index.html">') < page.index("</body>")
