"""Shared by the tests of the book: the built book, in a browser, and a small book to plant faults in."""

import shutil
from pathlib import Path

import pytest
from book_paths import BOOK
from browser import DESKTOP, Browser


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built book."""
    import build
    import generate

    folder = tmp_path_factory.mktemp("site") / "html"
    generate.main()
    assert build.build(BOOK, folder) == []
    return folder


@pytest.fixture
def browser(started, site) -> Browser:
    """The browser with nothing remembered from another test, and its lists empty."""
    started.resize(DESKTOP)
    started.open(site / "index.html")
    started.run("localStorage.clear()")
    started.errors.clear()
    started.requests.clear()
    return started


@pytest.fixture
def small_book(tmp_path):
    """A book of one page in a project of its own: call it with the page's text and get the faults of a strict build.

    The project has the task p22 in both task tables, a Mojo file with an anchor, and nothing else.
    """
    import build

    book = tmp_path / "book"
    for name in ("theme", "tools"):
        shutil.copytree(BOOK / name, book / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(BOOK / "book.toml", book)
    (book / ".cache").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.poe.tasks]\np22 = "x"\nonly_uv = "x"\n')
    (tmp_path / "pixi.toml").write_text('[tasks]\np22 = "x"\n')
    (tmp_path / "code.mojo").write_text(
        "# ANCHOR: body\ndef f():\n    pass  # costs $5 and $6\n# ANCHOR_END: body\n# ANCHOR: open\n"
    )
    src = book / "src"
    src.mkdir()
    (src / "SUMMARY.md").write_text("# Summary\n\n- [Page](page.md)\n")

    def make(text: str) -> list[str]:
        (src / "page.md").write_text(text)
        return build.build(book, book / "html")

    make.html = book / "html"
    make.book = book
    return make
