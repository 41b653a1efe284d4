"""Shared by the tests of the book: a small book to plant faults in."""

import shutil

import pytest
from book_paths import BOOK


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
