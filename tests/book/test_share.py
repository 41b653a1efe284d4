"""What a page looks like when somebody passes it on: its own words, and an image that the build has drawn."""

import re
import struct
import zlib

import numpy as np
import pytest
from book_paths import BOOK

from book.build import reading, share


def tags(page) -> dict[str, str]:
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r'<meta (?:property|name)="([\w:]+)" content="([^"]*)">', text))


def pixels(file) -> np.ndarray:
    """A greyscale PNG with unfiltered rows, read by the standard's own words."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        parts[kind] = body
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert (depth, colour) == (8, 0)
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_every_page_has_its_own_description_and_an_image_that_is_there(site):
    pages, described = reading.pages(BOOK / "src"), {}
    for source in pages:
        page = (site / source).with_suffix(".html")
        told = tags(page)
        assert len(told["og:description"]) > 20 and told["description"] == told["og:description"], page
        image = (page.parent / told["og:image"]).resolve()
        assert image.is_file() and image.stat().st_size < 100_000, page
        described[told["og:description"]] = page
    assert len(described) == len(pages) > 70, "no description twice"


def test_the_essays_say_what_they_are_about(site):
    told = tags(site / "essays" / "layernorm_backward.html")
    assert (
        told["og:title"].startswith("One row of eight numbers")
        and "a public tutorial" in told["og:description"]
    )
    assert told["twitter:card"] == "summary_large_image"
    image = pixels(site / "essays" / told["og:image"])
    assert image.shape == (630, 1200) == (int(told["og:image:height"]), int(told["og:image:width"]))
    assert image[:40].std() == 0 < image[100:300].std(), "a margin, and a title below it"
    assert not np.array_equal(image, pixels(site / "share" / "essays-flash_attention_backward.png"))


def test_an_o_has_a_hole_and_an_i_is_narrow():
    o, across = share.letter("o", 40)
    rows, columns = np.nonzero(o > 0.5)
    middle = o[(rows.min() + rows.max()) // 2]
    inside = middle[columns.min() : columns.max() + 1]
    assert inside[0] > 0.4 and inside[-1] > 0.4 and inside[len(inside) // 2] == 0
    assert share.letter("i", 40)[1] < across / 1.5
    assert abs(o.sum() / share.letter("o", 80)[0].sum() - 0.25) < 0.02, (
        "twice as large, four times as much ink"
    )


def test_a_title_is_broken_and_cut_to_its_lines():
    lines = share.broken("when to customise and when to leave it to Inductor", 58, 500, 2)
    assert len(lines) == 2 and lines[-1].endswith(" …")
    assert share.broken("short", 58, 500, 2) == ["short"]


def test_a_description_is_whole_sentences_or_cut_at_a_word():
    assert share.shortened("One thing. " + "Another " * 40) == "One thing."
    long = share.shortened("word " * 100)
    assert long.endswith("word …") and len(long) <= share.LONGEST


@pytest.mark.parametrize("address", ["https://example.org/book/", ""])
def test_an_image_has_a_whole_address_where_the_book_has_one(monkeypatch, tmp_path, address):
    monkeypatch.setenv("BOOK_URL", address)
    (tmp_path / "part").mkdir()
    page = tmp_path / "part" / "page.html"
    page.write_text(
        '<title>P - Book</title><meta name="description" content="x"><main><h1>P &amp; Q</h1><p>It is <em>about</em> this.</p></main>'
    )
    share.write_cards(tmp_path, tmp_path / "cache", [1.0, -1.0])
    told = tags(page)
    base = address.rstrip("/") if address else ".."
    assert told["og:image"] == f"{base}/share/part-page.png"
    assert (told["og:title"], told["og:description"]) == ("P &amp; Q", "It is about this.")
