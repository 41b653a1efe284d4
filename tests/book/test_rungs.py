"""Pages with tasks keep the template, and a page that does not stops the build."""

import re
from itertools import pairwise

import pytest
from book_paths import BOOK
from typed import present

from book.build import preprocess, rungs
from harness.check import zoo

PAGES = {page.relative_to(BOOK / "src").as_posix(): page.read_text() for page in (BOOK / "src").rglob("puzzle_*/*.md")}  # fmt: skip
WITH_TASKS = [name for name, text in PAGES.items() if rungs.LADDER.search(text) or name == rungs.HUNT]
WHOLE = """# P

<figure>x</figure>

{{#hints p20:edges}}

```run
p20
```

## What goes wrong

{{#wrong p20}}

## Measured: something

```output first_graph
```

## Predict, then reveal

What?

<details class="reveal">
<summary>Reveal</summary>

That.

</details>
"""


def test_every_puzzle_has_pages_with_tasks_and_each_has_its_parts():
    assert {name.split("/")[0] for name in WITH_TASKS} == {f"puzzle_{number}" for number in range(19, 28)}
    assert [fault for name in WITH_TASKS for fault in rungs.missing(name, PAGES[name])] == []


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("<figure>x</figure>", "picture"),
        ("```run", "command"),
        ("## What goes wrong", '"What goes wrong"'),
        ("{{#wrong p20}}", '"What goes wrong" holds nothing'),
        ("## Measured: something", '"Measured"'),
        ("```output first_graph", '"Measured" holds nothing'),
        ("## Predict, then reveal", '"Predict, then reveal"'),
        ('<details class="reveal">', '"Predict, then reveal" holds nothing'),
    ],
)
def test_what_is_left_out_is_named(left_out, named):
    assert list(rungs.missing("puzzle_20/graph.md", WHOLE)) == []
    (fault,) = rungs.missing("puzzle_20/graph.md", WHOLE.replace(left_out, ""))
    assert named in fault


def test_sections_have_an_order_and_pages_without_tasks_none():
    parts = re.split(r"(?=## )", WHOLE)
    swapped = "".join([parts[0], parts[2], parts[1], parts[3]])
    assert any('"Measured"' in fault for fault in rungs.missing("puzzle_20/graph.md", swapped))
    assert list(rungs.missing("puzzle_20/graph.md", "# P\n\nNo task.\n")) == []
    assert list(rungs.missing("page.md", "# P\n\n{{#hints p20:edges}}\n")) == []


def test_a_page_lists_the_wrong_solutions_of_its_own_gates():
    chapter = preprocess.Chapter("puzzle_20/graph.md", WHOLE, [])
    place = present(preprocess.TOKEN.search(WHOLE, WHOLE.index("{{#wrong")))
    shown = preprocess.wrong_solutions(chapter, place)
    own = {wrong.name for wrong in zoo.load("p20") if (wrong.rung, wrong.gate) == ("derive", "edges")}
    assert own and set(re.findall(r"museum\.md#(\w+)", shown)) == own and chapter.faults == []


def test_a_list_without_a_gate_is_a_fault():
    chapter = preprocess.Chapter("src/page.md", "# P\n\n{{#wrong p20}}\n", [])
    assert preprocess.wrong_solutions(chapter, present(preprocess.TOKEN.search(chapter.text))) == ""
    assert chapter.faults == ["src/page.md:3: no wrong solution of p20 belongs to a hint ladder of this page"]


def test_every_page_of_the_path_leads_on_to_the_next():
    """From the first chapter to the last page of the capstone, by its last "Next:"."""
    contents = re.findall(r"\]\(([^)]+)\)", (BOOK / "src" / "SUMMARY.md").read_text())
    path = contents[contents.index("autograd.md") : contents.index("puzzle_27/kernels.md") + 1]
    for page, following in pairwise(path):
        last = (BOOK / "src" / page).read_text().rpartition("\nNext: ")[2]
        target = present(re.search(r"\]\(([^)#]+)", last))[1]
        assert (BOOK / "src" / page).parent.joinpath(target).resolve() == BOOK / "src" / following, page
