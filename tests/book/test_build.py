"""The strict build: errors are reported with file and line, and documented markup builds."""

import html
import re
import textwrap
from xml.etree import ElementTree

import pytest
from book_paths import BOOK, ROOT
from typed import unwrap

from book.build import preprocess

FAULTS = {
    "bad TeX": ("# P\n\ntext\n\n$$\\frac{1$$\n", r"src/page\.md:5: bad TeX: .*end of input"),
    "bad inline TeX": ("# P\n\nan $\\undefinedcommand$ here\n",
        r"src/page\.md:3: bad TeX: Undefined control"),
    "formula over an empty line": ("# P\n\n$$a\n\nb$$\n",
        r"src/page\.md:3: a formula runs over an empty line"),
    "missing file": ("# P\n\n{{#include ../../no.mojo:body}}\n",
        r"src/page\.md:3: cannot include \.\./\.\./no"),
    "missing anchor": ("# P\n\n\n{{#include ../../code.mojo:bdy}}\n",
        r"src/page\.md:4: .*0 lines `ANCHOR: bdy`"),
    "open anchor": ("# P\n\n{{#include ../../code.mojo:open}}\n",
        r"src/page\.md:3: .*0 lines `ANCHOR_END: open`"),
    "unknown command in a run fence": ("# P\n\n```run\nfind p22\n```\n",
        r"src/page\.md:3: `workbook find`: no such command"),
    "unknown puzzle in prose": ("# P\n\nSay `pixi run p77`.\n",
        r"src/page\.md:3: `workbook p77`: no such command"),
    "unrecorded output": ("# P\n\n```output nothing\n```\n", r"src/page\.md:3: no recorded output nothing"),
    "dead link": ("# P\n\n[x](gone.md)\n", r"src/page\.md:3: dead link: gone\."),
    "dead anchor": ("# P\n\n\n[x](#gone)\n", r"src/page\.md:4: dead link: #gone: no such heading"),
    "network image": ("# P\n\n![x](https://example.org/x.png)\n",
        r"src/page\.md:3: loads https://example\.org/x"),
    "network script": ('# P\n\n<script src="//example.org/x.js"></script>\n',
        r"page\.md:3: loads //example\.org/"),
    "fixed colour": ('# P\n\n<svg viewBox="0 0 1 1"><path fill="#ff0000" d="M0 0h1v1z"/></svg>\n',
        r"src/page\.md:3: an SVG has the fixed colour #ff0000"),
    "fixed colour in a style": (
        '# P\n\n<svg viewBox="0 0 1 1"><path style="stroke:red" d="M0 0h1v1z"/></svg>\n',
        r"src/page\.md:3: an SVG has the fixed colour red",
    ),
    "fixed colour in a style sheet": (
        "# P\n\n<svg viewBox='0 0 1 1'><style>path { stop-color: teal }</style><path d='M0 0h1v1z'/></svg>\n",
        r"src/page\.md:3: an SVG has the fixed colour teal",
    ),
    "unknown blank of hints": ("# P\n\n{{#hints p22:dZ}}\n",
        r"src/page\.md:3: no hints for 'dZ'; there is ln, "),
    "step without given code": ("# P\n\n{{#step p22:dW}}\n",
        r"src/page\.md:3: no blank dW of p22 is given with code"),
    "unknown puzzle of hints": ("# P\n\n{{#hints p99:dx}}\n", r"src/page\.md:3: no hints for p99: "),
    "missing snippet": ("# P\n\n{{#include ../_includes/gone.md}}\n",
        r"src/page\.md:3: cannot include \.\./_includes/gone\.md: no such file"),
    "same id twice": ('# P\n\n<a id="x"></a>\n\n<a id="x"></a>\n', r"src/page\.md:3: the id x occurs twice"),
    "big page": ("# P\n\n" + "word " * 220_000, r"src/page\.md:1: the page has \d+ bytes, limit 1048576"),
    "other directive": ("# P\n\n\\{{#include x}}\n",
        r"src/page\.md:3: an mdBook directive was left as it is"),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults_of_book(faults_of_pages) -> list[str]:
    """Errors reported for a book with a page for each of FAULTS."""
    return faults_of_pages({name_page(fault): text for fault, (text, _) in FAULTS.items()})


def name_page(fault: str) -> str:
    """Return the file name of a page with an error."""
    return fault.replace(" ", "_")


@pytest.mark.parametrize("fault", FAULTS)
def test_error_is_reported_with_file_and_line(faults_of_book, fault):
    message = FAULTS[fault][1].replace("page", name_page(fault), 1)
    assert any(re.search(message, line) for line in faults_of_book), faults_of_book


def test_valid_page_is_not_reported(faults_of_book):
    named = {line.split(":")[0] for line in faults_of_book if line.startswith("src/")}
    assert named == {f"src/{name_page(fault)}.md" for fault in FAULTS}


def write_source(book, name: str, text: str) -> None:
    """Write a file under the small book's src/."""
    file = book / "src" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_color_in_a_figure_is_reported_for_its_page(small_book):
    red = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><path fill="{}" d="M0 0h1v1z"/></svg>'
    write_source(small_book.book, "red.svg", red.format("#f00"))
    write_source(small_book.book, "current.svg", red.format("currentColor"))
    assert small_book("# P\n\ntext\n\n{{#include red.svg}}\n")[0] == (
        "src/page.md:5: an SVG has the fixed colour #f00"
    )
    assert small_book("# P\n\n{{#include current.svg}}\n") == []
    assert small_book("# P\n\n![x](red.svg)\n")[0] == "src/page.md:3: an SVG has the fixed colour #f00"
    (fault, *_) = small_book("# P\n\n![x](current.svg)\n")
    assert fault.startswith("src/page.md:3: an SVG has the fixed colour black: an image does not see")


@pytest.mark.parametrize(
    ("snippet", "fault"),
    [
        ("fine\n\n$\\oops$\n", "src/_includes/part.md:3: bad TeX"),
        ("```mojo\n{{#include ../../../code.mojo:gone}}\n```\n", "src/_includes/part.md:2: "),
        ("{{#include part.md}}\n", "src/_includes/part.md:1: part.md includes itself"),
    ],
)
def test_snippet_errors_have_the_snippets_line_numbers(small_book, snippet, fault):
    write_source(small_book.book, "_includes/part.md", snippet)
    faults = small_book("# P\n\n{{#include _includes/part.md}}\n")
    assert any(line.startswith(fault) for line in faults), faults


def test_all_errors_of_a_page_are_reported(small_book):
    faults = small_book("# P\n\n$\\oops$\n\n```run\np77\n```\n")
    assert sum("src/page.md:" in line for line in faults) == 2, faults


def test_page_outside_the_summary_fails(small_book):
    (small_book.book / "src" / "forgotten.md").write_text("# F\n")
    assert "src/forgotten.md:1: not in SUMMARY.md" in small_book("# P\n")


def test_missing_chapter_fails(small_book):
    (small_book.book / "src" / "SUMMARY.md").write_text("# Summary\n\n- [P](page.md)\n- [G](gone.md)\n")
    assert any("gone.md" in line for line in small_book("# P\n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-m book.build.preprocess", "broken.py"),
        ("-m book.build.preprocess", "missing.py"),
        ("[output.html.fold]\n", "[output.html.search]\nno-such-key = 1\n\n[output.html.fold]\n"),
    ],
)
def test_invalid_book_toml_fails_the_build(small_book, old, new):
    (small_book.book / "broken.py").write_text("raise SystemExit('broken')\n")
    settings = (small_book.book / "book.toml").read_text()
    assert settings.count(old) == 1
    (small_book.book / "book.toml").write_text(settings.replace(old, new))
    assert small_book("# P\n") != []


PUBLIC_MARKUP = r"""
# ⛓️ A page in the markup of the public puzzles

> ## A heading in a quotation
>
> With **bold** words, and a [link](../puzzle_21/puzzle_21.md#start).

Scale \\(\gamma\\) and shift (\\(\beta\\)). A wide one breaks its lines: \\[\Large \frac{\partial
L}{\partial x} = \text{inv\_std} \odot \gamma \\] where:

- in a list: \\[\Large \frac{1}{H} \sum_{i=1}^{H} (x_i - \mu)^2
  \\] and after
  - deeper, \\(\gamma = [1.2, 0.8]\\) for example

```mojo
{{#include ../../../problems/p22/op/k.mojo:kernel}}
```

<a href="{{#include ../_includes/repo_url.md}}/blob/main/problems/p22/op/k.mojo" class="filename">View full file: problems/p22/op/k.mojo</a>

<details>
<summary><strong>Tips</strong></summary>

<div class="solution-tips">

1. **One**:
   - with \\(x\\)

</div>
</details>

<div class="code-tabs" data-tab-group="package-manager">
  <div class="tab-buttons">
    <button class="tab-button">pixi NVIDIA (default)</button>
    <button class="tab-button">pixi AMD</button>
    <button class="tab-button">uv</button>
  </div>
  <div class="tab-content">

```bash
pixi run p22 --backward
```

  </div>
  <div class="tab-content">

```bash
pixi run -e amd p22 --backward
```

  </div>
  <div class="tab-content">

```bash
uv run p22 --backward
```

  </div>
</div>

```txt
Your output: grad_bias: 0.00e+00 ✅
```

## Solution

<details class="solution-details">
<summary></summary>

```mojo
{{#include ../../../solutions/p22/op/k.mojo:kernel_solution}}
```

<div class="solution-explanation">

1. **Works**:

   ```mojo
   var hidden_idx = thread_idx.x
   ```

</div>
</details>

### 💡 Notes & more

Back to the [notes](#-notes--more).
"""


def test_standard_markup_builds_unchanged(small_book):
    """The page uses the public puzzles' include paths and a file with the repository's URL."""
    root, src = small_book.book.parent, small_book.book / "src"
    for name, suffix in (("problems", ""), ("solutions", "_solution")):
        folder = root / name / "p22" / "op"
        folder.mkdir(parents=True)
        body = "# BLANK-START ln: go\n    var zebra_stripe = 1\n    # BLANK-END ln"
        (folder / "k.mojo").write_text(
            f"# ANCHOR: kernel{suffix}\ndef kernel():\n    {body}\n# ANCHOR_END: kernel{suffix}\n"
        )
    write_source(small_book.book, "_includes/repo_url.md", "<https://example.org/puzzles>\n")
    write_source(small_book.book, "puzzle_21/puzzle_21.md", "# 21\n\n## Start\n")
    write_source(small_book.book, "puzzle_22/puzzle_22.md", PUBLIC_MARKUP)
    (src / "SUMMARY.md").write_text(
        "# Summary\n\n- [P](page.md)\n- [21](puzzle_21/puzzle_21.md)\n- [22](puzzle_22/puzzle_22.md)\n"
    )
    assert small_book("# P\n") == []
    html = (small_book.html / "puzzle_22" / "puzzle_22.html").read_text()
    assert html.count('class="math math-display"') == 2 and html.count('class="math"') == 4
    assert r"\Large" not in html and "\\\\(" not in html
    assert 'href="https://example.org/puzzles/blob/main/problems/p22/op/k.mojo"' in html
    assert "Reveal the solution" in html and "ANCHOR" not in html
    before, after = html.split("Reveal the solution")
    assert 'mojo">var hidden_idx = thread_idx.x\n</code>' in after
    assert "FILL IN" in before and "zebra_stripe" not in before and "zebra_stripe" in after
    (index,) = small_book.html.glob("searchindex*.js")
    assert "zebra_stripe" not in index.read_text() and "A heading in a quotation" in index.read_text()
    assert "zebra_stripe" in (small_book.html / "print.html").read_text()


def test_each_blank_has_the_hints_of_the_command_line(small_book):
    from harness.learner import hints

    assert small_book("# P\n\n{{#hints p22:dW}}\n\n{{#hints p22:numpy-dW}}\n") == []
    page = (small_book.html / "page.html").read_text()
    words = " ".join(re.sub(r"<[^>]+>", "", page).split())
    (index,) = small_book.html.glob("searchindex*.js")
    for rung in hints.load_ladder("p22", "dW") + hints.load_ladder("p22", "numpy-dW"):
        assert f"<summary>Hint {rung.id}</summary>" in page
        assert rung.text.split("`")[0].strip() in words
        for line in rung.code.splitlines():
            assert html.escape(line) in page, line
    assert page.count('<details class="hint">') == 6 and "<details open" not in page
    assert page.count("BLANK-START dW") == 2
    assert "atomic_add(grad_weight, o * H + h" in page
    assert "grad_weight, o" not in index.read_text()


def test_step_diff_leads_from_provided_code_to_solution(small_book):
    assert small_book("# P\n\n{{#step p28:rows}}\n") == []
    page = (small_book.html / "page.html").read_text()
    diff = html.unescape(unwrap(re.search(r'<code class="language-diff">(.*?)\n</code>', page, re.S))[1])
    blank = unwrap(preprocess.find_blank(ROOT / "solutions" / "p28" / "op" / "fast.mojo", "rows"))
    for lines, sign in ((blank.provided, "+"), (blank.body, "-")):
        remaining = [line[2:] for line in diff.split("\n") if not line.startswith(sign)]
        assert "\n".join(remaining) == textwrap.dedent("\n".join(lines))
    assert "<summary>Hint rows-1</summary>" in page and "uv run workbook p28 --gate rows" in page
    assert "BLANK-START" not in page
    (index,) = small_book.html.glob("searchindex*.js")
    assert "This code appears" not in index.read_text()


def test_code_is_not_parsed_for_formulas(small_book):
    page = "# P\n\n`$x$` costs $5 or $6.\n\n```text\n$$y$$\n```\n\n```mojo\n{{#include ../../code.mojo:body}}\n```\n"
    assert small_book(page) == []
    html = (small_book.html / "page.html").read_text()
    assert 'class="math' not in html
    assert "<code>$x$</code>" in html and "$$y$$" in html and "costs $5 and $6" in html


def test_formula_is_mathml_in_the_text_colour(small_book):
    assert (
        small_book("# P\n\n| a | b |\n|---|---|\n| $\\hat x | y$ | $a_b*c*$ |\n\n$$x < y$$ {#named}\n") == []
    )
    html = (small_book.html / "page.html").read_text()
    formulas = [ElementTree.fromstring(formula) for formula in re.findall(r"<math .*?</math>", html)]
    assert ["".join(maths.itertext()) for maths in formulas] == ["x\u0302∣y", "ab∗c∗", "x<y"]
    assert 'id="formula-named"' in html and 'href="#formula-named"' in html
    assert (
        'fill="currentColor"' in html and "black" not in unwrap(re.search(r"<main>.*</main>", html, re.S))[0]
    )


def test_equal_formulas_share_their_glyphs(small_book):
    assert small_book("# P\n\n" + "$x$ and " * 40) == []
    html = (small_book.html / "page.html").read_text()
    assert html.count("<mi>x</mi>") == 40
    assert html.count("<symbol") == 1


def test_run_fence_is_expanded(small_book):
    assert small_book("# P\n\n1. item\n\n   ```run\n   p22 --fused\n   ```\n") == []
    assert "uv run workbook p22 --fused" in (small_book.html / "page.html").read_text()


def test_book_builds(site):
    """The fixture asserts that the build reports no errors."""
    assert (site / "index.html").is_file()


def test_book_shows_code_only_from_files():
    """Mojo and Python code in the book is included from files that are compiled or run."""
    for page in sorted((BOOK / "src").rglob("*.md")):
        for body in re.findall(r"^```(?:mojo|python)\n(.*?)^```", page.read_text(), re.M | re.S):
            where = f"{page.relative_to(ROOT)}: {body[:60]!r}"
            assert re.fullmatch(r"\{\{#(?:include|blank|function) [^}:]+:\w+\}\}\n", body), where


def test_reference_has_the_options_of_the_command_line():
    from book.build import generate

    lines = generate.options_table().splitlines()
    assert "| `--dims B S H O` |" in "\n".join(lines)
    assert any(line.startswith("| `--dtype") and "`bfloat16`" in line for line in lines)
    assert any(line.startswith("| `--backward` | check all 5 gradients") for line in lines)
    assert "generated/options.md" in (BOOK / "src" / "reference.md").read_text()


def test_readme_commands_exist():
    from book.build import preprocess

    text = (ROOT / "README.md").read_text()
    assert preprocess.COMMAND.search(text), "the README prints no command"
    assert list(preprocess.unknown_commands(text)) == []


def test_printed_commands_have_existing_flags(capsys):
    """Flags must exist for the puzzle, or in the --help of the demonstration or of --bench."""
    from harness import cli
    from harness.check import options
    from harness.spec.catalogue import find_puzzle

    help_texts: dict[tuple[str, str], str] = {}
    for page in (ROOT / "README.md", *sorted((BOOK / "src").rglob("*.md"))):
        for command in re.finditer(r"\b(p(?:19|2\d))((?: +--?[\w-]+| +[\w.-]+)*)", page.read_text()):
            puzzle, words = find_puzzle(command[1]), re.findall(r"--[\w-]+", command[2])
            known = options.list_flags(options.make_parser(puzzle))
            demo_flags = {f"--{demo.flag}" for demo in puzzle.demos if demo.options} | {"--bench"}
            if len(words) > 1 and words[0] in demo_flags:
                demonstration = puzzle.name, words[0]
                if demonstration not in help_texts:
                    with pytest.raises(SystemExit):
                        cli.main([*demonstration, "--help"])
                    help_texts[demonstration] = capsys.readouterr().out
                known = [words[0], *re.findall(r"--[\w-]+", help_texts[demonstration])]
            assert set(words) <= set(known), (page.name, command[0])
    assert len(help_texts) > 2


def test_blank_is_included_by_its_id(small_book):
    (small_book.book.parent / "p.mojo").write_text(
        "    # BLANK-START db: sum\n    add(1)\n    # BLANK-END db\n"
    )
    assert small_book("# P\n\n```mojo\n{{#blank ../../p.mojo:db}}\n```\n") == []
    assert ">add(1)\n</code>" in (small_book.html / "page.html").read_text()
    faults = small_book("# P\n\n```mojo\n{{#blank ../../p.mojo:dx}}\n```\n")
    assert "src/page.md:4: cannot include blank dx of ../../p.mojo" in faults


def test_solutions_are_named_folded_and_not_indexed(small_book):
    folder = small_book.book.parent / "solutions" / "p1"
    folder.mkdir(parents=True)
    (folder / "a.mojo").write_text(
        "def f():\n    # BLANK-START db: sum\n    zebra(1)\n    # BLANK-END db\n\n\ndef g():\n    two()\n"
    )
    (folder / "b.py").write_text("def f():\n    return 3\n")
    assert small_book("# P\n\n{{#solution p1/a.mojo:db,g p1/b.py:f}}\n") == []
    html = (small_book.html / "page.html").read_text()
    assert ">zebra(1)\n</code>" in html and ">def g():\n    two()\n</code>" in html
    assert "<code>g</code> in <code>a.mojo</code>" in html and "<code>f</code> in <code>b.py</code>" in html
    (index,) = small_book.html.glob("searchindex*.js")
    assert "zebra" not in index.read_text() and html.count("<details") == 1
    assert small_book("# P\n\n{{#solution p1/a.mojo:db}}\n") == []
    assert "<code>db</code>" not in (small_book.html / "page.html").read_text()
    assert "src/page.md:3: no solution dx in p1/a.mojo" in small_book("# P\n\n{{#solution p1/a.mojo:dx}}\n")


def test_problem_code_is_shown_without_learner_edits(small_book):
    text = (
        "# ANCHOR: k{}\ndef k():\n    # BLANK-START db: sum\n    {}\n    # BLANK-END db\n# ANCHOR_END: k{}\n"
    )
    for root, suffix, body in (("solutions", "_solution", "answer()"), ("problems", "", "mine()")):
        folder = small_book.book.parent / root
        folder.mkdir()
        (folder / "k.mojo").write_text(text.format(suffix, body, suffix))
    assert small_book("# P\n\n```mojo\n{{#include ../../problems/k.mojo:k}}\n```\n") == []
    html = (small_book.html / "page.html").read_text()
    assert "FILL IN" in html and "mine()" not in html and "answer()" not in html
    assert small_book("# P\n\n```mojo\n{{#include ../../solutions/k.mojo:k_solution}}\n```\n") == []
    html = (small_book.html / "page.html").read_text()
    assert ">answer()\n</code>" in html and "def k" not in html, "only the lines in the blanks"


def test_function_is_included_by_its_name(small_book):
    (small_book.book.parent / "f.mojo").write_text(
        "def fine[\n    n: Int\n](a: Int):\n    one()\n\n    two()\n\n\n@always_inline\ndef finer():\n    pass\n"
    )
    assert small_book("# P\n\n```mojo\n{{#function ../../f.mojo:fine}}\n```\n") == []
    html = (small_book.html / "page.html").read_text()
    assert "def fine[\n    n: Int\n](a: Int):\n    one()\n\n    two()\n</code>" in html
    faults = small_book("# P\n\n```mojo\n{{#function ../../f.mojo:gone}}\n```\n")
    assert "src/page.md:4: cannot include function gone of ../../f.mojo" in faults


def test_readme_numbers_must_match_the_records(monkeypatch, tmp_path, capsys):
    from book.build import site as build

    assert build.old_readme() == []
    readme = tmp_path / "README.md"
    readme.write_text("<!-- speed -->\n| 1 |\n<!-- /speed -->\n")
    monkeypatch.setattr(build.speed_table, "README", readme)
    monkeypatch.setattr(build.generate, "main", lambda: None)
    monkeypatch.setattr(build, "build", lambda book, site: [])
    assert build.main(["--no-open"]) == 1
    assert "README.md:1: its table of speed is not that of the records" in capsys.readouterr().err


def test_merge_conflict_markers_are_reported(tmp_path):
    chapter = preprocess.Chapter(
        "src/page.md", "# Page\n\n<<<<<<< HEAD\none\n=======\ntwo\n>>>>>>> branch\n", []
    )
    preprocess.check_merge(chapter)
    assert chapter.faults == [
        "src/page.md:3: the mark of a merge, <<<<<<< HEAD",
        "src/page.md:7: the mark of a merge, >>>>>>> branch",
    ]
