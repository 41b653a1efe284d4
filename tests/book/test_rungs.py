"""Puzzle pages must follow the template, or the build fails."""

import re

import pytest
from book_paths import BOOK
from typed import unwrap

from book.build import preprocess, reading, rungs
from harness.check import zoo

SRC = BOOK / "src"
PAGES = {page.relative_to(SRC).as_posix(): page.read_text() for page in SRC.rglob("puzzle_*/*.md")}  # fmt: skip
WITH_TASKS = [
    name for name, text in PAGES.items() if rungs.LADDER.search(text) or reading.ALL_GATES.search(text)
]
COMPLETE_PAGE = """# P

{{#hints p20:edges}}

```run
p20
```

## What goes wrong

{{#wrong p20}}

## Measured: something

```output first_graph
```

## A question

What?

<details class="reveal">
<summary>Reveal</summary>

That.

</details>
"""


def test_puzzle_pages_have_tasks_and_all_sections():
    assert {name.split("/")[0] for name in WITH_TASKS} == {f"puzzle_{number}" for number in range(19, 29)}
    assert [fault for name in WITH_TASKS for fault in rungs.missing(name, PAGES[name])] == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("```run", "command"),
        ("## What goes wrong", '"What goes wrong"'),
        ("{{#wrong p20}}", '"What goes wrong" holds nothing'),
        ("## Measured: something", '"Measured"'),
        ("```output first_graph", '"Measured" holds nothing'),
        ("## A question", '"A question"'),
        ('<details class="reveal">', '"A question" holds nothing'),
    ],
)
def test_missing_section_is_reported(section, message):
    assert list(rungs.missing("puzzle_20/graph.md", COMPLETE_PAGE)) == []
    (fault,) = rungs.missing("puzzle_20/graph.md", COMPLETE_PAGE.replace(section, ""))
    assert message in fault


def expand_wrong_list(text: str) -> str:
    """Expand `{{#wrong p20}}` on a page."""
    chapter = preprocess.Chapter("puzzle_20/page.md", text, [])
    shown = preprocess.wrong_solutions(chapter, unwrap(preprocess.TOKEN.search(text, text.index("{{#wrong"))))
    assert chapter.faults == []
    return shown


def test_page_counts_the_wrong_solutions_of_its_gates():
    solutions = [
        wrong for wrong in zoo.load_wrong_solutions("p20") if (wrong.rung, wrong.gate) == ("derive", "edges")
    ]
    assert len(
        solutions
    ) == 1 and "rejects one wrong solution, which is in [the museum](./museum.md#all)" in expand_wrong_list(
        COMPLETE_PAGE
    )


def test_page_does_not_count_provided_wrong_code():
    solutions = [
        wrong for wrong in zoo.load_wrong_solutions("p20") if (wrong.rung, wrong.gate) == ("", "softmax")
    ]
    provided = [wrong.name for wrong in solutions if not wrong.is_in_blank]
    assert "softmax_largest_from_zero" in provided, "the provided code of softmax's largest"
    shown = expand_wrong_list("# P\n\n{{#hints p20:softmax}}\n\n{{#wrong p20}}\n")
    assert f"rejects {len(solutions) - len(provided)} wrong solutions" in shown


def test_wrong_list_without_a_gate_is_reported():
    chapter = preprocess.Chapter("src/page.md", "# P\n\n{{#wrong p20}}\n", [])
    assert preprocess.wrong_solutions(chapter, unwrap(preprocess.TOKEN.search(chapter.text))) == ""
    assert chapter.faults == ["src/page.md:3: no wrong solution of p20 belongs to a hint ladder of this page"]


def test_deep_dive_begins_with_a_link_to_its_puzzle(tmp_path):
    src = tmp_path / "src"
    (src / "puzzle_22").mkdir(parents=True)
    (src / "SUMMARY.md").write_text(
        "[Intro](introduction.md)\n- [P <22>](puzzle_22/puzzle_22.md)\n- [D](puzzle_22/d.md)\n- [E](e.md)\n"
    )
    for name in ("introduction", "puzzle_22/puzzle_22", "puzzle_22/d", "e"):
        (src / f"{name}.md").write_text(
            f"# T\n\n{reading.SKIP if name in ('puzzle_22/d', 'e') else 'Text.'}\n"
        )
    assert reading.path(src) == ["introduction.md", "puzzle_22/puzzle_22.md"]
    assert '<a href="puzzle_22.html">P &lt;22&gt;</a>' in reading.skip_note(src, "puzzle_22/d.md")
    assert '<a href="introduction.html">Intro</a>' in reading.skip_note(src, "e.md")


def test_reading_time_follows_from_words_code_and_gates():
    prose, code = "word " * 400, "```python\n" + "x = 1\n" * 30 + "```\n"
    assert reading.length([prose]) == "2 minutes"
    assert reading.length([prose + "\n\n" + code]) == "4 minutes"
    assert reading.length([prose + "\n\n{{#hints p22:dx}}\n<!-- no words -->"]) == "2 minutes, 1 gate"
    assert reading.length([prose + " {{#gates p21}}", "{{#step p28:rows}}"]) == "2 minutes, 19 gates"
    assert reading.length([prose] * 60) == "2 hours"
    assert reading.length(["A word."]) == "1 minute"


def test_repository_address_is_printed_only_if_configured():
    assert "git clone https://example.org/x\n" in preprocess.clone_note("https://example.org/x")
    assert "git clone" not in preprocess.clone_note("")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# P\n\nText.\n\n{{#skip}}\n", "src/page.md:5: {{#skip}} stands below the heading of a page, or nowhere"),
        ("# P\n\n{{#skip}}\n", "src/page.md:3: no page that page.md belongs to"),
    ],
)  # fmt: skip
def test_misplaced_skip_is_reported(tmp_path, text, message):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "SUMMARY.md").write_text("- [P](page.md)\n")
    (tmp_path / "src" / "page.md").write_text(text)
    chapter = preprocess.Chapter("src/page.md", text, [])
    preprocess.skip_note(chapter, unwrap(re.search(r"\{\{#skip\}\}", text)), tmp_path)
    assert chapter.faults == [message]


def test_reading_time_of_missing_page_is_reported(tmp_path):
    chapter = preprocess.Chapter("src/page.md", "# P\n\n{{#time gone.md}}\n", [])
    place = unwrap(re.search(r"\{\{#time (?P<timed>[^}]+)\}\}", chapter.text))
    preprocess.time_of(chapter, place, tmp_path)
    assert chapter.faults == ["src/page.md:3: no page gone.md"]
