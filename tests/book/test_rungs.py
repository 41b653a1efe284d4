"""Pages with tasks keep the template, and a page that does not stops the build."""

import re

import pytest
from book_paths import BOOK
from typed import present

from book.build import preprocess, reading, rungs
from harness.check import zoo

SRC = BOOK / "src"
PAGES = {page.relative_to(SRC).as_posix(): page.read_text() for page in SRC.rglob("puzzle_*/*.md")}  # fmt: skip
WITH_TASKS = [name for name, text in PAGES.items() if rungs.LADDER.search(text) or name == rungs.HUNT]
WHOLE = """# P

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


def test_every_puzzle_has_pages_with_tasks_and_each_has_its_parts():
    assert {name.split("/")[0] for name in WITH_TASKS} == {f"puzzle_{number}" for number in range(19, 29)}
    assert [fault for name in WITH_TASKS for fault in rungs.missing(name, PAGES[name])] == []


@pytest.mark.parametrize(
    ("left_out", "named"),
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
def test_what_is_left_out_is_named(left_out, named):
    assert list(rungs.missing("puzzle_20/graph.md", WHOLE)) == []
    (fault,) = rungs.missing("puzzle_20/graph.md", WHOLE.replace(left_out, ""))
    assert named in fault


def counted(text: str) -> str:
    """What stands in the place of a page's `{{#wrong p20}}`."""
    chapter = preprocess.Chapter("puzzle_20/page.md", text, [])
    shown = preprocess.wrong_solutions(
        chapter, present(preprocess.TOKEN.search(text, text.index("{{#wrong")))
    )
    assert chapter.faults == []
    return shown


def test_a_page_counts_the_wrong_solutions_of_its_own_gates():
    own = [wrong for wrong in zoo.load("p20") if (wrong.rung, wrong.gate) == ("derive", "edges")]
    assert len(
        own
    ) == 1 and "reject one wrong solution, which is in [the museum](./museum.md#all)" in counted(WHOLE)


def test_a_page_counts_no_mistake_in_code_that_is_given():
    own = [wrong for wrong in zoo.load("p20") if (wrong.rung, wrong.gate) == ("", "softmax")]
    given = [wrong.name for wrong in own if not wrong.in_a_blank]
    assert "softmax_largest_from_zero" in given, "the largest is given"
    shown = counted("# P\n\n{{#hints p20:softmax}}\n\n{{#wrong p20}}\n")
    assert f"reject {len(own) - len(given)} wrong solutions" in shown


def test_a_list_without_a_gate_is_a_fault():
    chapter = preprocess.Chapter("src/page.md", "# P\n\n{{#wrong p20}}\n", [])
    assert preprocess.wrong_solutions(chapter, present(preprocess.TOKEN.search(chapter.text))) == ""
    assert chapter.faults == ["src/page.md:3: no wrong solution of p20 belongs to a hint ladder of this page"]


def test_a_deep_dive_says_so_first_and_links_its_puzzle(tmp_path):
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


def test_how_long_pages_take_follows_from_words_code_and_gates():
    prose, code = "word " * 400, "```python\n" + "x = 1\n" * 30 + "```\n"
    assert reading.length([prose]) == "2 minutes"
    assert reading.length([prose + "\n\n" + code]) == "4 minutes"
    assert reading.length([prose + "\n\n{{#hints p22:dx}}\n<!-- no words -->"]) == "2 minutes, 1 gate"
    assert reading.length([prose] * 60) == "2 hours"
    assert reading.length(["A word."]) == "1 minute"


def test_the_repository_s_address_is_printed_only_where_the_book_has_one():
    assert "git clone https://example.org/x\n" in preprocess.clone_note("https://example.org/x")
    assert "git clone" not in preprocess.clone_note("")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# P\n\nText.\n\n{{#skip}}\n", "src/page.md:5: {{#skip}} stands below the heading of a page, or nowhere"),
        ("# P\n\n{{#skip}}\n", "src/page.md:3: no page that page.md belongs to"),
    ],
)  # fmt: skip
def test_a_misplaced_skip_is_a_fault(tmp_path, text, said):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "SUMMARY.md").write_text("- [P](page.md)\n")
    (tmp_path / "src" / "page.md").write_text(text)
    chapter = preprocess.Chapter("src/page.md", text, [])
    preprocess.skip_note(chapter, present(re.search(r"\{\{#skip\}\}", text)), tmp_path)
    assert chapter.faults == [said]


def test_a_time_of_a_page_that_is_not_there_is_a_fault(tmp_path):
    chapter = preprocess.Chapter("src/page.md", "# P\n\n{{#time gone.md}}\n", [])
    place = present(re.search(r"\{\{#time (?P<timed>[^}]+)\}\}", chapter.text))
    preprocess.time_of(chapter, place, tmp_path)
    assert chapter.faults == ["src/page.md:3: no page gone.md"]
