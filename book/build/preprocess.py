"""The book's mdBook preprocessor: formulas, commands and checks, with every mistake named by file and line.

mdBook hands over the book as JSON on standard input and takes it back on standard output. What is added to Markdown:

- `$...$`, `$$...$$`, `\\\\(...\\\\)` and `\\\\[...\\\\]` are TeX and become SVG; `$$...$$ {#name}` names a formula;
- a fence with the language `run` holds command lines of the workbook, without `uv run workbook` in front;
- a fence with the language `output` and a name holds what a command printed, from book/outputs/;
- in a fence, `{{#blank FILE:ID}}` includes the body of a blank, `{{#function FILE:NAME}}` a whole function;
- `{{#solution FILE:NAME,... ...}}`, with files under solutions/, is the fold with the lines that fill these blanks or functions;
- `{{#wrong PUZZLE}}` counts the wrong solutions that the gates of the page's hint ladders reject, and links them;
- `{{#hints PUZZLE:BLANK}}` is the task of a blank, where the page has not shown it, and its hint ladder;
- `{{#step PUZZLE:BLANK}}` is two folds for a blank that is given with code: the diff from this code to the solution, and the hint
  ladder with the command that checks the blank;
- `{{= EXPRESSION | FORMAT }}` is a number of a record, `{{check EXPRESSION}}` a statement that must hold (`references.py`);
- `{{#gates PUZZLE}}` is the number of a puzzle's gates, on a page that has them all without their hint ladders;
- `{{#skip}}` below a page's heading says that it is a deep dive, `{{#time PAGE ...}}` how long pages take (`reading.py`);
- `{{#clone}}` says where the repository is, where book.toml has its address;
- an included Markdown file is treated like the page that it stands in;
- an empty `<summary></summary>` gets a label.

Checked: every included file and anchor exists, every printed command is a task, every formula is valid TeX,
no measured number and no comparison is typed by hand beside a record. A page ends with the records that its numbers are from.
"""

import difflib
import hashlib
import html
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from book.build import reading, references, rungs, stubs
from book.build.maths import BadFormula, PageMaths
from book.measure import outputs, record
from harness.check import options, zoo
from harness.errors import UsageError
from harness.learner import blanks, hints
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import Rung
from harness.toolchain import roots

WITHHELD = "This code appears when the book is built by its task: "
MARKER = "<!-- workbook preprocessor -->"
SUMMARY = "<summary><strong>Reveal the solution</strong></summary>"

# One pass over a chapter. Code and comments come first, so that nothing inside them is taken for a formula.
TOKEN = re.compile(
    r"""
      (?P<comment> <!-- .*? --> )
    | ^(?P<indent>[ \t>]*) (?P<ticks>`{3,}|~{3,}) (?P<info>[^\n]*)\n (?P<body>.*?) ^[ \t>]*(?P=ticks)[ \t]*$
    | (?P<code> (?P<tick>`+) (?!`) .+? (?<!`) (?P=tick) (?!`) )
    | (?P<summary> <summary>\s*</summary> )
    | (?<!\\) \{\{\#include[ ]+(?P<snippet>[^}:\s]+\.md)\}\}
    | \{\{\#(?P<form>hints|step)[ ]+(?P<puzzle>\w+):(?P<ladder>[\w-]+)\}\}
    | \{\{\#wrong[ ]+(?P<zoo>\w+)\}\}
    | \{\{\#solution[ ]+(?P<solution>[^}]+)\}\}
    | \{\{\#gates[ ]+(?P<counted>\w+)\}\}
    | (?P<skip> ^\{\{\#skip\}\}$ )
    | \{\{\#time[ ]+(?P<timed>[^}]+)\}\}
    | (?P<clone> \{\{\#clone\}\} )
    | \$\$ (?P<display>.+?) \$\$ (?:[ ]?\{\#(?P<name>[\w-]+)\})?
    | \\\\\[ (?P<display_public>.+?) \\\\\]
    | \\\\\( (?P<inline_public>.+?) \\\\\)
    | (?<![\\$\w]) \$ (?![\s$]) (?P<inline>[^$]+?) (?<![\s\\]) \$ (?![\w$])
    """,
    re.X | re.S | re.M,
)
INCLUDE = re.compile(r"(?<!\\)\{\{#(include|blank|function) +([^}:\s]+)(?::([^}]*))?\}\}")
LINTER_NOTE = re.compile(r"\s+# noqa.*$")
COMMAND = re.compile(
    r"\b(?:(?:pixi|uv) run (?:workbook )?|workbook )(p\d\d)\b|\b(?:pixi|uv) run workbook ([a-z][\w-]*)"
)


@dataclass
class Chapter:
    """One page, or a snippet of one, while it is worked on: its path, its text, and what is wrong with it."""

    path: str
    text: str
    faults: list[str]
    solution: bool = False  # all of it stands inside a folded solution
    stubs: dict[str, list[str]] = field(
        default_factory=dict
    )  # by rung, the tasks that are on the page already

    def fault(self, position: int, message: str) -> None:
        """Notes a fault at a place of the original text."""
        line = self.text.count("\n", 0, position) + 1
        self.faults.append(f"{self.path}:{line}: {message}")


@dataclass(frozen=True)
class Setting:
    """What the chapters of a build have in common, and the formulas of the page at hand."""

    book: Path
    maths: PageMaths
    known: dict[str, Any] = field(default_factory=dict)  # what a reference to a record may use
    made_from: dict[str, list[str]] = field(default_factory=dict)  # generated file -> its records
    records: set[str] = field(default_factory=set)  # those that the page at hand shows
    repository: str = ""  # its address, where book.toml has one


def check_merge(chapter: Chapter) -> None:
    """Nothing on the page is left over from two versions of it."""
    for mark in re.finditer(r"^(?:<{7}|>{7}) .*", chapter.text, re.M):
        chapter.fault(mark.start(), f"the mark of a merge, {mark[0]}")


def commands() -> set[str]:
    """What may follow `workbook`: the puzzles and the sub-commands."""
    return {*list_puzzle_names(), *options.COMMANDS, "vgpu"}


def unknown_commands(text: str) -> Iterator[tuple[int, str]]:
    """Place and message of every printed command that does not exist. Used for the README too."""
    for command in COMMAND.finditer(text):
        if (name := command[1] or command[2]) not in commands():
            yield command.start(), f"`workbook {name}`: no such command"


def read_source(file: Path) -> str:
    """The text of an included file. A problem file is shown as it was before anybody worked on it."""
    parts = list(file.resolve().parts)
    if "problems" in parts:
        parts[parts.index("problems")] = "solutions"
        solution = Path(*parts)
        if solution.is_file():
            return blanks.make_skeleton(solution.read_text(encoding="utf-8"), str(solution))
    return file.read_text(encoding="utf-8")


def check_includes(chapter: Chapter, folder: Path) -> None:
    """Every included file, blank and function exists, and an anchor is opened and closed once."""
    for include in INCLUDE.finditer(chapter.text):
        kind, path, name = include.groups()
        file = folder / path
        if kind != "include":
            if find_code(kind, file, name) is None:
                chapter.fault(include.start(), f"cannot include {kind} {name} of {path}")
        elif not file.is_file():
            chapter.fault(include.start(), f"cannot include {path}: no such file")
        elif not re.fullmatch(r"[\d:]*", name or ""):
            for keyword in ("ANCHOR", "ANCHOR_END"):
                count = len(re.findall(rf"{keyword}:\s*{re.escape(name)}\s*$", read_source(file), re.M))
                if count != 1:
                    chapter.fault(include.start(), f"{path} has {count} lines `{keyword}: {name}`, not one")


def paste(code: str, folder: Path) -> str:
    """A code fence with its includes replaced by the code, without empty lines around it.

    mdBook would include the same lines, but keep the empty ones that a formatter puts before an ANCHOR_END. What is
    not found is left alone: `check_includes` has named it.
    """

    def found(include: re.Match) -> str:
        text = find_code(include[1], folder / include[2], include[3] or "")
        return include[0] if text is None else text

    return INCLUDE.sub(found, code)


def find_code(kind: str, file: Path, name: str) -> str | None:
    """What an include stands for: the body of a blank, a function, or the region of an anchor; None where there is no such."""
    if kind == "blank":
        blank = find_blank(file, name)
        return textwrap.dedent("\n".join(blank.body)) if blank else None
    if kind == "function":
        code = find_function(file, name)
    elif file.is_file() and re.fullmatch(r"[A-Za-z_][\w-]*", name):
        region = rf"^[^\n]*ANCHOR:\s*{name}\s*\n(.*?)^[^\n]*ANCHOR_END:\s*{name}\s*$"
        matched = re.search(region, read_source(file), re.M | re.S)
        lines = [LINTER_NOTE.sub("", line) for line in (matched[1] if matched else "").splitlines()]
        code = "\n".join(line for line in lines if "ANCHOR" not in line).strip("\n") if matched else None
    else:
        code = None
    return None if code is None else filled(code, file)


def filled(code: str, file: Path) -> str:
    """Of code of a solution the lines that fill its blanks, where it has some: the page shows the rest as the task."""
    if "solutions" not in file.resolve().parts or "# BLANK-START" not in code:
        return code
    return "\n\n".join(
        textwrap.dedent("\n".join(blank.body)) for blank in blanks.find_blanks(code, str(file)).values()
    )


def find_function(file: Path, name: str) -> str | None:
    """The text of a top-level function, decorators left out, or None."""
    if not file.is_file():
        return None
    next_definition = r"(?=^(?:def|struct|trait|comptime|@|#|\"\"\")|\Z)"
    matched = re.search(rf"^def {name}\b.*?{next_definition}", read_source(file), re.M | re.S)
    return matched[0].rstrip() if matched else None


def find_blank(file: Path, name: str) -> blanks.Blank | None:
    """A blank of a problem or solution file, or None."""
    return (
        blanks.find_blanks(file.read_text(encoding="utf-8"), str(file)).get(name) if file.is_file() else None
    )


def solution(chapter: Chapter, place: re.Match, book: Path) -> str:
    """The fold with the solution of some blanks, each below its name where there are several."""
    solved: list[tuple[str, str]] = []
    sources = place["solution"].split()
    for source in sources:
        path, _, names = source.rpartition(":")
        file = book.parent / "solutions" / path
        for name in names.split(","):
            code = find_code("blank", file, name) or find_code("function", file, name)
            if code is None:
                chapter.fault(place.start(), f"no solution {name} in {path}")
                continue
            label = f"`{name}`" if len(sources) == 1 else f"`{name}` in `{file.name}`"
            language = "mojo" if file.suffix == ".mojo" else "python"
            fence = f"```{language}\n{filled(code, file)}\n```"
            solved.append((label, withhold(fence, withheld_folder(book))))
    shown = [f"{label}:\n\n{fence}" if len(solved) > 1 else fence for label, fence in solved]
    return "\n\n".join(['<details class="solution-details">\n' + SUMMARY, *shown, "</details>\n"])


def in_solution(chapter: Chapter, position: int) -> bool:
    """Whether a place of a chapter lies inside a folded solution."""
    opened = chapter.text.rfind('<details class="solution-details"', 0, position)
    return chapter.solution or (opened >= 0 and "</details>" not in chapter.text[opened:position])


def withhold(fence: str, cache: Path) -> str:
    """A fence whose code is put aside, so that the search index never sees it; `restore` brings it back."""
    opening, *lines, closing = fence.split("\n")
    indent = opening[: len(opening) - len(opening.lstrip(" \t>"))]  # that of a list or a quotation
    code = "\n".join(line.removeprefix(indent) for line in lines)
    key = hashlib.sha256(code.encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    (cache / key).write_text(code, encoding="utf-8")
    return f"{opening}\n{indent}{WITHHELD}{key}\n{closing}"


def restore(page: str, cache: Path) -> str:
    """A built page with the withheld solutions back in their places."""
    return re.sub(
        rf"{WITHHELD}(\w+)", lambda key: html.escape((cache / key[1]).read_text(encoding="utf-8")), page
    )


def run_fence(token: re.Match) -> str:
    """The block for a `run` fence: its commands as they are typed in a clone."""
    indent, ticks = token["indent"], token["ticks"]
    lines = [f"uv run workbook {line.strip()}" for line in token["body"].splitlines() if line.strip()]
    return "\n".join(f"{indent}{line}" for line in (f"{ticks}bash", *lines, ticks))


def printed_output(chapter: Chapter, fence: re.Match, name: str) -> str:
    """The block for a recorded output, with a line that says which command printed it, where and when.

    `NAME 2-4` takes the lines 2 to 4 alone, counted from 1, and `NAME 2-4 launch,bank` of a table these columns alone.
    """
    name, lines, columns = [*name.split(" ", 2), "", ""][:3]
    try:
        output = outputs.load(name)
    except FileNotFoundError:
        chapter.fault(fence.start(), f"no recorded output {name}: run book/measure/outputs.py")
        return fence[0]
    ticks = fence["ticks"]
    source = html.escape(output.source()).replace(output.command, f"<code>{output.command}</code>")
    text = output.text
    if lines:
        first, last = map(int, lines.split("-"))
        text = "".join(text.splitlines(keepends=True)[first - 1 : last])
        text = picked(text, columns.split(",")) if columns else text
        where = f"Lines {first} to {last}" if first < last else f"Line {first}"
        shown_above = f"```output {name} " in fence.string[: fence.start()]
        source = f"{where} of the same run." if shown_above else f"{where}, {source[0].lower()}{source[1:]}"
    kind = "text" if columns_width(text) > PHONE else "text,wraps"
    return f'{ticks}{kind}\n{folded(text)}{ticks}\n\n<p class="output-source">{source}</p>'


def picked(table: str, names: list[str]) -> str:
    """Some columns of a printed table, whose first line has their names: the first to the left, numbers to the right."""
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    columns = [[row[rows[0].index(name)] for row in rows] for name in names]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in zip(*columns, strict=True)
    )
    return "".join(f"{line}\n" for line in lines)


COLUMNS = re.compile(r"\S {2,}\S")
"""What stands in columns, and must not be wrapped."""

PHONE = 42
"""Characters of a line that a phone shows: columns that are no wider stay whole wherever the page wraps."""


def columns_width(text: str) -> int:
    """The length of the longest line in columns; 0 where there is none."""
    return max((len(line) for line in text.splitlines() if COLUMNS.search(line)), default=0)


def folded(text: str) -> str:
    """An output whose sentences, where they stand beside wide columns, are no wider than these."""
    width = columns_width(text)
    return "".join(
        textwrap.fill(line, width, subsequent_indent="   ", break_long_words=False) + "\n"
        if width > PHONE and len(line) > width
        else line + "\n"
        for line in text.splitlines()
    )


def snippet(
    chapter: Chapter, place: re.Match, folder: Path, setting: Setting, within: tuple[Path, ...]
) -> str:
    """An included Markdown file, checked and transformed like a page; its faults are named by its own lines."""
    file = (folder / place["snippet"]).resolve()
    if not file.is_file():
        return place[0]  # `check_includes` has named it
    if file in within:
        chapter.fault(place.start(), f"{place['snippet']} includes itself")
        return ""
    name = os.path.relpath(file, setting.book.resolve())
    text = file.read_text(encoding="utf-8").rstrip("\n")
    if chapter.text[: place.start()].endswith('"'):
        # An address: in the text it needs the brackets, in an attribute it must not have them.
        text = text.strip("<>")
    part = Chapter(name, text, chapter.faults, in_solution(chapter, place.start()))
    return transform(part, file.parent, setting, (*within, file))


def task_fence(chapter: Chapter, puzzle: str, ladder: str, folder: Path, language: str) -> str:
    """The task of a blank as a fence; nothing where the page itself includes it."""
    code = stubs.stub(puzzle, ladder)
    hole = re.search(r"# BLANK-START .*", code or "")
    own = [
        paste(include[0], folder) for include in INCLUDE.finditer(chapter.text) if "/problems/" in include[2]
    ]
    if code is None or hole is None:
        return ""
    shown = chapter.stubs.setdefault(
        ladder.rpartition("-")[0], []
    )  # of this rung: another has a task of its own
    if any(hole[0] in text for text in own + shown):
        return ""
    shown.append(code)
    return f"```{language}\n{code}\n```\n\n"


def rung_of(puzzle: str, ladder: str) -> Rung:
    """Whose blank a hint ladder is for: the NumPy rung of "numpy-dx"."""
    spec = find_puzzle(puzzle)
    named = {spec.get_ladder_name(rung, gate): rung for rung in spec.rungs for gate in rung.gates}
    return named.get(ladder, spec.main_rung)


def hint_ladder(chapter: Chapter, place: re.Match, folder: Path, setting: Setting) -> str:
    """The task of a blank, and its rung's hints, folded one by one; nearly-code stays out of the search index."""
    puzzle, ladder = place["puzzle"], place["ladder"]
    try:
        ladder_of_hints = hints.load_ladder(puzzle, ladder)
    except UsageError as error:
        chapter.fault(place.start(), str(error))
        return place[0]
    rung = rung_of(puzzle, ladder)
    language = rung.language.lower()
    folds = []
    for hint in ladder_of_hints:
        fence = f"```{language}\n{hint.code}\n```"
        code = f"{withhold(fence, withheld_folder(setting.book))}\n\n" if hint.code else ""
        folds.append(
            f'<details class="hint">\n<summary>Hint {hint.id}</summary>\n\n{hint.text}\n\n{code}</details>\n'
        )
    shown = f'<div class="hint-ladder">\n{"".join(folds)}</div>\n'
    if place["form"] == "step":
        return step(chapter, place, roots.get_solutions() / puzzle / rung.file, shown, setting.book)
    return task_fence(chapter, puzzle, ladder, folder, language) + shown


def step(chapter: Chapter, place: re.Match, file: Path, folded_hints: str, book: Path) -> str:
    """The two folds of a blank that is given with code: the hints with the command of its gate, and the diff to its solution."""
    puzzle, ladder = place["puzzle"], place["ladder"]
    blank = find_blank(file, ladder)
    if not (blank and blank.provided):
        chapter.fault(place.start(), f"no blank {ladder} of {puzzle} is given with code")
        return place[0]
    before, after = (textwrap.dedent("\n".join(lines)).split("\n") for lines in (blank.provided, blank.body))
    lines = [line.rstrip() for line in difflib.ndiff(before, after) if not line.startswith("?")]
    diff = withhold("\n".join(["```diff", *lines, "```"]), withheld_folder(book))
    return f"""<details>
<summary>Write it yourself: blank <code>{ladder}</code></summary>

{folded_hints}

```bash
uv run workbook {puzzle} --gate {ladder}
```

</details>

<details class="solution-details">
<summary>The solution, as a diff</summary>

{diff}

</details>
"""


def wrong_solutions(chapter: Chapter, place: re.Match) -> str:
    """How many wrong solutions this page's gates reject, with a link to them; those in given code are left out."""
    spec = find_puzzle(place["zoo"])
    ladders = re.findall(rf"\{{\{{#(?:hints|step) {spec.name}:([\w-]+)\}}\}}", chapter.text)
    count = sum(
        spec.get_ladder_name(wrong.target_rung, wrong.gate) in ladders and wrong.is_in_blank
        for wrong in zoo.load_wrong_solutions(spec.name)
    )
    if not count:
        chapter.fault(
            place.start(), f"no wrong solution of {spec.name} belongs to a hint ladder of this page"
        )
        return ""
    solutions = "one wrong solution, which is" if count == 1 else f"{count} wrong solutions, which are"
    gates = "gate on this page rejects" if len(set(ladders)) == 1 else "gates on this page reject"
    return f"The {gates} {solutions} in [the museum](./museum.md#all)."


def skip_note(chapter: Chapter, token: re.Match, book: Path) -> str:
    """The first line of a page that may wait; a fault where it stands elsewhere, or where no page comes after."""
    if not re.fullmatch(r"# .*\n\n", chapter.text[: token.start()]):
        chapter.fault(token.start(), f"{reading.SKIP} stands below the heading of a page, or nowhere")
        return ""
    try:
        return reading.skip_note(book / "src", chapter.path.removeprefix("src/"))
    except LookupError as error:
        chapter.fault(token.start(), str(error.args[0]))
        return ""


def time_of(chapter: Chapter, place: re.Match, folder: Path) -> str:
    """How long some pages take together."""
    files = [folder / name for name in place["timed"].split()]
    if missing := [file for file in files if not file.is_file()]:
        chapter.fault(place.start(), f"no page {', '.join(file.name for file in missing)}")
        return ""
    return reading.length(file.read_text(encoding="utf-8") for file in files)


def clone_note(repository: str) -> str:
    """How to get the repository."""
    if repository:
        return f"```bash\ngit clone {repository}\n```"
    return "Clone the repository that this book belongs to, or unpack an archive of it."


def transform(chapter: Chapter, folder: Path, setting: Setting, within: tuple[Path, ...] = ()) -> str:
    """The chapter with its faults noted, formulas drawn, commands spelled out, code pasted and empty summaries labelled."""
    check_includes(chapter, folder)
    check_merge(chapter)
    for position, message in unknown_commands(chapter.text):
        chapter.fault(position, message)
    for position, message in references.typed_numbers(chapter.text, setting.made_from):
        chapter.fault(position, message)
    setting.records.update(references.records_of(chapter.text, setting.made_from))

    def replace(token: re.Match) -> str:
        if token["summary"]:
            return SUMMARY
        if token["snippet"]:
            return snippet(chapter, token, folder, setting, within)
        if token["solution"]:
            return solution(chapter, token, setting.book)
        if token["zoo"]:
            return wrong_solutions(chapter, token)
        if token["ladder"]:
            return hint_ladder(chapter, token, folder, setting)
        if token["counted"]:
            return str(reading.gates(token[0]))
        if token["skip"]:
            return skip_note(chapter, token, setting.book)
        if token["timed"]:
            return time_of(chapter, token, folder)
        if token["clone"]:
            return clone_note(setting.repository)
        if token["ticks"] and token["info"].strip() == "run":
            block = run_fence(token)
            for _, message in unknown_commands(block):
                chapter.fault(token.start(), message)
            return block
        if token["ticks"] and token["info"].startswith("output "):
            return printed_output(chapter, token, token["info"].removeprefix("output ").strip())
        if token["ticks"]:
            fence = paste(token[0], folder)
            hidden = in_solution(chapter, token.start())
            return withhold(fence, withheld_folder(setting.book)) if hidden else fence
        return formula(chapter, token, setting.maths)

    text = TOKEN.sub(replace, chapter.text)
    record.used.clear()
    resolved = references.resolve(
        text, setting.known, lambda source, message: chapter.fault(max(chapter.text.find(source), 0), message)
    )
    setting.records.update(record.used)
    return resolved


def formula(chapter: Chapter, token: re.Match, maths: PageMaths) -> str:
    """A formula as SVG, or the token as it is where there is none in it."""
    tex = token["display"] or token["display_public"] or token["inline"] or token["inline_public"]
    if tex is None:
        return token[0]
    if "\n\n" in tex:
        chapter.fault(token.start(), "a formula runs over an empty line: is a dollar sign missing its twin?")
        return token[0]
    display = bool(token["display"] or token["display_public"])
    try:
        return maths.render(re.sub(r"\n[ >]*", " ", tex), display, token["name"])
    except BadFormula as error:
        chapter.fault(token.start(), f"bad TeX: {error}")
        return token[0]


def withheld_folder(book_folder: Path) -> Path:
    """Where the code of folded solutions waits while mdBook works."""
    return book_folder / ".cache" / "withheld"


def process(chapter: Chapter, book_folder: Path, repository: str = "") -> str:
    """Checks and transforms one page; faults are collected in it."""
    made_from = references.sources(book_folder / ".cache" / "generated")
    known = references.names() if made_from else {}
    maths = PageMaths(book_folder / ".cache" / "maths")
    setting = Setting(book_folder, maths, known, made_from, repository=repository)
    text = transform(chapter, (book_folder / chapter.path).parent, setting)
    text = re.sub(r"\A(# .*\n\n)", rf"\1{reading.length_line(chapter.text)}\n\n", text)
    return f"{text}\n\n{references.note(sorted(setting.records))}\n\n{setting.maths.sprite()}\n{MARKER}\n"


def chapters(items: list) -> Iterator[dict]:
    """Every chapter of mdBook's tree that has a file; separators, part titles and drafts have none."""
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            if item["Chapter"]["path"]:
                yield item["Chapter"]
            yield from chapters(item["Chapter"]["sub_items"])


def main() -> int:
    """Runs as mdBook calls it: book in, book out, exit 1 with the list of faults if there are any."""
    context, book = json.load(sys.stdin)
    book_folder = Path(context["root"])
    src = context["config"]["book"].get("src", "src")
    repository = context["config"]["preprocessor"]["workbook"].get("repository", "")
    faults: list[str] = []
    for entry in chapters(book["items"]):
        chapter = Chapter(f"{src}/{entry['path']}", entry["content"], faults)
        faults += (
            f"{chapter.path}:1: {missing}" for missing in rungs.missing(entry["path"], entry["content"])
        )
        entry["content"] = process(chapter, book_folder, repository)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    json.dump(book, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
