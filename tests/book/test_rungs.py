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


def test_a_page_that_may_wait_says_so_first_and_links_the_next_of_the_path(tmp_path):
    (tmp_path / "src").mkdir()
    contents = "".join(f"- [Page <{name}>]({name}.md)\n" for name in "abcd")
    (tmp_path / "src" / "SUMMARY.md").write_text(contents)
    for name, wait in zip("abcd", (False, True, True, False), strict=True):
        text = f"# {name}\n\n{reading.SKIP if wait else 'Text.'}\n\nMore.\n"
        (tmp_path / "src" / f"{name}.md").write_text(text)
    assert reading.path(tmp_path / "src") == ["a.md", "d.md"]
    note = reading.skip_note(tmp_path / "src", "b.md")
    assert '<a href="d.html">Page &lt;d&gt;</a>' in note and "Skip on a first reading" in note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# P\n\nText.\n\n{{#skip}}\n", "src/page.md:5: {{#skip}} stands below the heading of a page, or nowhere"),
        ("# P\n\n{{#skip}}\n", "src/page.md:3: no page of the path comes after page.md"),
    ],
)  # fmt: skip
def test_a_misplaced_skip_is_a_fault(tmp_path, text, said):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "SUMMARY.md").write_text("- [P](page.md)\n")
    (tmp_path / "src" / "page.md").write_text(text)
    chapter = preprocess.Chapter("src/page.md", text, [])
    preprocess.skip_note(chapter, present(re.search(r"\{\{#skip\}\}", text)), tmp_path)
    assert chapter.faults == [said]
