"""The task above a hint ladder is what the learner's file asks, and no page has hints without it."""

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


def test_a_definition_is_shown_from_its_name_to_its_end():
    assert (
        stubs.around(FILE, "first") == FILE[FILE.index("def one") : FILE.index("\n\n\n# BLANK-START second")]
    )
    assert stubs.around(FILE, "second") == "# BLANK-START second: anything\n# BLANK-END second"


def test_of_a_long_definition_head_and_hole_are_shown():
    lines = [f"    line{number}()" for number in range(60)]
    lines[30:30] = ["    # BLANK-START deep: think", "    # FILL IN (about 1 line)", "    # BLANK-END deep"]
    text = "\n".join(["def long(x) -> int:", '    """Long."""', *lines, "", "", "def next(): ..."])
    assert stubs.around(text, "deep").split("\n") == [
        "def long(x) -> int:",
        '    """Long."""',
        "    ...",
        *lines[27:36],
        "    ...",
    ]


def test_every_ladder_of_the_book_has_its_task(site):
    """On the page, above the first hint; a hole that the page includes by itself counts. In a step
    the fold of the hints names it. A further rung names its file."""
    for page in sorted({page for page, _, _ in LADDERS}):
        html = (site / page.relative_to(BOOK / "src").with_suffix(".html")).read_text()
        for other, puzzle, ladder in LADDERS:
            code = stubs.stub(puzzle, ladder)
            if other == page and f"{{{{#step {puzzle}:{ladder}}}}}" in page.read_text():
                assert f"blank <code>{ladder}</code>" in html.partition(f"Hint {ladder}-1")[0]
                continue
            if other != page or code is None or f"hint {puzzle} {ladder}</code> has its hints" in html:
                continue
            (hole,) = re.findall(rf"BLANK-START {ladder.split('-', 1)[-1]}\b|BLANK-START {ladder}\b", code)[
                :1
            ]
            above = html.partition(f"Hint {ladder}-1")[0]
            assert above != html and hole in above and code.split("\n")[0] in unescape(above), (
                page.name,
                ladder,
            )


@pytest.mark.parametrize("ladder", ["unknown", "derive-edges"])
def test_no_task_where_no_hole_has_the_name(ladder):
    assert stubs.stub("p20", ladder) is None
