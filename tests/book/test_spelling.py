"""The spelling of the prose and of the sources' comments."""

import pytest
from book_paths import BOOK

from book.build import spelling

pytestmark = pytest.mark.skipif(
    not spelling.installed(), reason="codespell is not installed (a dev dependency)"
)


def test_spelling():
    assert spelling.check() == []


def test_mistakes_and_american_forms_are_found(tmp_path):
    page, planted = tmp_path / "page.md", "het"[::-1]  # backwards, so that this file is not found too
    page.write_text(f"It is {planted} color of `color` and $color$ in *A Paper on Color*.\n")
    (line,) = spelling.mistakes([str(page)], "--builtin", "clear,rare")
    assert line == f"{page}:1: {planted} ==> the"
    british = ("--dictionary", str(BOOK / "british.txt"), "--ignore-regex", spelling.CODE)
    (line,) = spelling.mistakes([str(page)], *british)
    assert line == f"{page}:1: color ==> colour"


def test_the_prose_is_found():
    names = spelling.files(spelling.PROSE)
    assert {"README.md", "book/STYLE.md", "book/src/autograd.md", "solutions/p22/hints.toml"} <= set(names)
    assert "book/src/puzzle_22/backward_pass.md" in names and "harness/cli.py" in spelling.files(
        spelling.SOURCES
    )
