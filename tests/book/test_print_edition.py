"""The print edition: every chapter in it, folds open, and what is said where it cannot be made."""

import re
import stat

import pytest
from book_paths import BOOK
from typed import present

from book.build import pdf, reading

needs_browser = pytest.mark.skipif(
    pdf.find_browser() is None,
    reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)",
)


def outline(file) -> list[str]:
    """The headings in a PDF's outline."""
    texts = re.findall(rb"/Title <([0-9A-Fa-f]+)>|/Title \((.*?)(?<!\\)\)[\s/>]", file.read_bytes(), re.S)
    return [
        bytes.fromhex(code.decode()).decode("utf-16")
        if code
        else re.sub(rb"\\(.)", rb"\1", text).decode("latin-1")
        for code, text in texts
    ]


def pages(file) -> int:
    return len(re.findall(rb"/Type /Page\b", file.read_bytes()))


@needs_browser
def test_every_chapter_is_in_the_outline(site, tmp_path):
    assert pdf.print_book(site, tmp_path / "book.pdf") == []
    printed = {
        "".join(title.split()) for title in outline(tmp_path / "book.pdf")
    }  # a wrapped one loses a space
    sources = [(BOOK / "src" / page).read_text() for page in reading.pages(BOOK / "src")]
    titles = {
        present(re.search(r"^# (.+)$", text, re.M))[1].replace("`", "").replace(" ", "") for text in sources
    }
    assert len(titles) > 60 and titles <= printed


@pytest.mark.long
@needs_browser
def test_what_is_folded_is_printed(tmp_path):
    """A fold of three metres makes the paper pages longer."""
    (tmp_path / "css").mkdir()
    style = (BOOK / "theme" / "workbook.css").read_text()
    fold = '<details><summary>x</summary><div style="height: 300cm">a long solution</div></details>'
    lengths = []
    for inside in ("", fold):
        (tmp_path / "print.html").write_text(f'<style>{style}</style><main class="content">{inside}</main>')
        assert pdf.print_book(tmp_path, tmp_path / "out.pdf") == []
        lengths.append(pages(tmp_path / "out.pdf"))
    assert lengths[0] == 1 < lengths[1]


def test_without_a_browser_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(pdf, "find_browser", lambda: None)
    assert "apt-get install chromium" in pdf.print_book(tmp_path, tmp_path / "book.pdf")[0]


def test_a_browser_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(pdf, "find_browser", lambda: str(broken))
    assert pdf.print_book(tmp_path, tmp_path / "book.pdf") == [
        "chromium did not print the book: no display here"
    ]
