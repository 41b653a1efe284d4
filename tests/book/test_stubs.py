"""The task above a hint ladder quotes the learner's file, and no page has hints without a task."""

import re
from html import unescape

import pytest
from book_paths import BOOK

from book.build import stubs

LADDERS = sorted({(page, *ladder) for page in (BOOK / "src").rglob("*.md")
                  for ladder in re.findall(r"\{\{#(?:hints|step) (\w+):([\w-]+)\}\}", page.read_text())})  # fmt: skip
FILE = '''from x import y


def one(
    a,
    b,
):
    """Adds."""
    # BLANK-START first: a + b
    # FILL IN (about 1 line)
    # BLANK-END first


# BLANK-START second: anything
# BLANK-END second
'''


def test_definition_is_shown_from_name_to_end():
    assert (
        stubs.get_definition(FILE, "first")
        == FILE[FILE.index("def one") : FILE.index("\n\n\n# BLANK-START second")]
    )
    assert stubs.get_definition(FILE, "second") == "# BLANK-START second: anything\n# BLANK-END second"


def test_long_definition_shows_head_and_blank():
    lines = [f"    line{number}()" for number in range(60)]
    lines[30:30] = ["    # BLANK-START deep: think", "    # FILL IN (about 1 line)", "    # BLANK-END deep"]
    text = "\n".join(["def long(x) -> int:", '    """Long."""', *lines, "", "", "def next(): ..."])
    assert stubs.get_definition(text, "deep").split("\n") == [
        "def long(x) -> int:",
        '    """Long."""',
        "    ...",
        *lines[27:36],
        "    ...",
    ]


def test_each_hint_ladder_has_its_task(site):
    """The task precedes the first hint, even if the page includes the blank itself; in a step, the
    hints' fold contains the blank's name."""
    for page in sorted({page for page, _, _ in LADDERS}):
        html = (site / page.relative_to(BOOK / "src").with_suffix(".html")).read_text()
        for other, puzzle, ladder in LADDERS:
            code = stubs.stub(puzzle, ladder)
            if other == page and f"{{{{#step {puzzle}:{ladder}}}}}" in page.read_text():
                assert f"blank <code>{ladder}</code>" in html.partition(f"Hint {ladder}-1")[0]
                continue
            if other != page or code is None or f"hint {puzzle} {ladder}</code> has its hints" in html:
                continue
            (blank,) = re.findall(rf"BLANK-START {ladder.split('-', 1)[-1]}\b|BLANK-START {ladder}\b", code)[
                :1
            ]
            above = html.partition(f"Hint {ladder}-1")[0]
            assert above != html and blank in above and code.split("\n")[0] in unescape(above), (
                page.name,
                ladder,
            )


@pytest.mark.parametrize("ladder", ["unknown", "derive-edges"])
def test_unknown_blank_has_no_task(ladder):
    assert stubs.stub("p20", ladder) is None
