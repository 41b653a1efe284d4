"""Fixtures for the book's tests: the built book, a browser, and small books with errors."""

import shutil
from pathlib import Path

import pytest
from book_paths import BOOK
from browser import DESKTOP, Browser


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built book."""
    from book.build import generate
    from book.build import site as build

    folder = tmp_path_factory.mktemp("site") / "html"
    generate.main()
    assert build.build(BOOK, folder) == []
    return folder


@pytest.fixture
def browser(browser_process, site) -> Browser:
    """The browser with empty storage, and no recorded errors or requests."""
    browser_process.resize(DESKTOP)
    browser_process.open(site / "index.html")
    browser_process.run("localStorage.clear()")
    browser_process.errors.clear()
    browser_process.requests.clear()
    return browser_process


def write_small_book(folder: Path) -> Path:
    """Write a project with a book without pages and a Mojo file with anchors; return its folder."""
    book = folder / "book"
    shutil.copytree(BOOK / "theme", book / "theme")
    shutil.copy(BOOK / "book.toml", book)
    (book / ".cache").mkdir()
    (folder / "code.mojo").write_text(
        "# ANCHOR: body\ndef f():\n    pass  # costs $5 and $6\n# ANCHOR_END: body\n# ANCHOR: open\n"
    )
    (book / "src").mkdir()
    return book


@pytest.fixture
def small_book(tmp_path):
    """Return a function that builds a one-page book in strict mode: text -> reported errors."""
    from book.build import site as build

    book = write_small_book(tmp_path)
    (book / "src" / "SUMMARY.md").write_text("# Summary\n\n- [Page](page.md)\n")

    def make(text: str) -> list[str]:
        (book / "src" / "page.md").write_text(text)
        return build.build(book, book / "html")

    make.html = book / "html"
    make.book = book
    return make


@pytest.fixture(scope="session")
def faults_of_pages(tmp_path_factory):
    """Return a function that builds a book in strict mode: page name -> text -> reported errors.

    Faults detected before mdBook runs hide those of built pages, so the pages without such faults are built a
    second time.
    """
    from book.build import site as build

    book = write_small_book(tmp_path_factory.mktemp("faults"))

    def build_pages(pages: dict[str, str]) -> list[str]:
        for file in (book / "src").glob("*.md"):
            file.unlink()
        for name, text in pages.items():
            (book / "src" / f"{name}.md").write_text(text)
        lines = "".join(f"- [{name}]({name}.md)\n" for name in pages)
        (book / "src" / "SUMMARY.md").write_text(f"# Summary\n\n{lines}")
        return build.build(book, book / "html")

    def make(pages: dict[str, str]) -> list[str]:
        first = build_pages(pages)
        rest = {
            name: text for name, text in pages.items() if not any(f"/{name}.md:" in fault for fault in first)
        }
        return first + build_pages(rest)

    return make
