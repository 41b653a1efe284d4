"""The book's mdBook preprocessor: formulas, command tabs and checks, with every mistake named by file and line.

mdBook hands over the book as JSON on standard input and takes it back on standard output. What is added to Markdown:

- `$...$`, `$$...$$`, `\\\\(...\\\\)` and `\\\\[...\\\\]` are TeX and become SVG; `$$...$$ {#name}` names a formula;
- a fence with the language `run` holds command lines of the workbook and becomes tabs for uv and pixi;
- a fence with the language `output` and a name holds what a command printed, from book/outputs/;
- an empty `<summary></summary>` gets a label.

Checked: every included file and anchor exists, every printed command is a task, every formula is valid TeX.
"""

import html
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import outputs
from maths import BadFormula, PageMaths

MARKER = "<!-- workbook preprocessor -->"
RUNNERS = {"uv": "uv run poe", "pixi": "pixi run"}
SUMMARY = "<summary><strong>Reveal the solution</strong></summary>"

# One pass over a chapter. Code and comments come first, so that nothing inside them is taken for a formula.
TOKEN = re.compile(
    r"""
      (?P<comment> <!-- .*? --> )
    | ^(?P<indent>[ \t>]*) (?P<ticks>`{3,}|~{3,}) (?P<info>[^\n]*)\n (?P<body>.*?) ^[ \t>]*(?P=ticks)[ \t]*$
    | (?P<code> (?P<tick>`+) (?!`) .+? (?<!`) (?P=tick) (?!`) )
    | (?P<summary> <summary>\s*</summary> )
    | \$\$ (?P<display>.+?) \$\$ (?:[ ]?\{\#(?P<name>[\w-]+)\})?
    | \\\\\[ (?P<display_public>.+?) \\\\\]
    | \\\\\( (?P<inline_public>.+?) \\\\\)
    | (?<![\\$\w]) \$ (?![\s$]) (?P<inline>[^$]+?) (?<![\s\\]) \$ (?![\w$])
    """,
    re.X | re.S | re.M,
)
INCLUDE = re.compile(r"(?<!\\)\{\{#(?:include|rustdoc_include) +([^}:\s]+)(?::([^}]*))?\}\}")
COMMAND = re.compile(r"(?:pixi run|uv run poe)((?: +-e +\S+| +--?[\w-]+)*) +([\w-]+)")


@dataclass
class Chapter:
    """One page while it is worked on: its path under src/, its text, and what is wrong with it."""

    path: str
    text: str
    faults: list[str]

    def fault(self, position: int, message: str) -> None:
        """Notes a fault at a place of the original text."""
        line = self.text.count("\n", 0, position) + 1
        self.faults.append(f"{self.path}:{line}: {message}")


def task_names(root: Path) -> dict[str, set[str]]:
    """The tasks that each runner knows, by the name of the runner."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    pixi_file = root / "pixi.toml"
    pixi = tomllib.loads(pixi_file.read_text(encoding="utf-8")) if pixi_file.is_file() else {}
    poe_tasks = pyproject.get("tool", {}).get("poe", {}).get("tasks", {})
    return {"uv": set(poe_tasks), "pixi": set(pixi.get("tasks", {}))}


def unknown_commands(text: str, tasks: dict[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Place and message of every printed command whose task does not exist. Used for the README too."""
    for command in COMMAND.finditer(text):
        runner = "pixi" if command[0].startswith("pixi") else "uv"
        if command[2] not in tasks[runner]:
            yield command.start(), f"`{RUNNERS[runner]} {command[2]}`: no such task"


def check_includes(chapter: Chapter, folder: Path) -> None:
    """Every included file exists, and an anchor in it is opened and closed once."""
    for include in INCLUDE.finditer(chapter.text):
        path, anchor = include[1], include[2]
        file = folder / path
        if not file.is_file():
            chapter.fault(include.start(), f"cannot include {path}: no such file")
            continue
        if not anchor or re.fullmatch(r"[\d:]*", anchor):
            continue
        text = file.read_text(encoding="utf-8")
        for keyword in ("ANCHOR", "ANCHOR_END"):
            count = len(re.findall(rf"{keyword}:\s*{re.escape(anchor)}\s*$", text, re.M))
            if count != 1:
                chapter.fault(include.start(), f"{path} has {count} lines `{keyword}: {anchor}`, not one")


def paste(code: str, folder: Path) -> str:
    """The body of a code fence with its includes replaced by the code, without empty lines around it.

    mdBook would include the same lines, but keep the empty ones that a formatter puts before an ANCHOR_END.
    """

    def lines(include: re.Match) -> str:
        file, anchor = folder / include[1], include[2]
        if not file.is_file() or not re.fullmatch(r"[A-Za-z_][\w-]*", anchor or ""):
            return include[0]
        region = re.search(
            rf"^[^\n]*ANCHOR:\s*{anchor}\s*\n(.*?)^[^\n]*ANCHOR_END:\s*{anchor}\s*$",
            file.read_text(encoding="utf-8"),
            re.M | re.S,
        )
        if not region:
            return include[0]
        return "\n".join(line for line in region[1].splitlines() if "ANCHOR" not in line).strip("\n")

    return INCLUDE.sub(lines, code)


def command_tabs(body: str, tasks: dict[str, set[str]], indent: str) -> tuple[str, list[str]]:
    """The tabs for a `run` fence, and the tasks in it that are unknown."""
    commands = [line.strip() for line in body.splitlines() if line.strip()]
    unknown = [c for c in commands if any(c.split()[0] not in known for known in tasks.values())]
    buttons = "".join(f'<button type="button" class="tab-button">{runner}</button>' for runner in RUNNERS)
    panes = []
    for runner, prefix in RUNNERS.items():
        lines = "\n".join(f"{prefix} {command}" for command in commands)
        panes.append(f'<div class="tab-content" data-label="{runner}">\n\n```bash\n{lines}\n```\n\n</div>')
    opening = (
        f'<div class="code-tabs" data-tab-group="package-manager">\n<div class="tab-buttons">{buttons}</div>'
    )
    tabs = "\n".join([opening, *panes, "</div>"])
    return "\n".join((indent + line).rstrip() for line in tabs.splitlines()), unknown


def printed_output(chapter: Chapter, fence: re.Match, name: str) -> str:
    """The block for a recorded output, with a line that says which command printed it, where and when."""
    try:
        record = outputs.load(name)
    except FileNotFoundError:
        chapter.fault(fence.start(), f"no recorded output {name}: run book/tools/outputs.py")
        return fence[0]
    ticks = fence["ticks"]
    source = html.escape(record.source()).replace(record.command, f"<code>{record.command}</code>")
    return f'{ticks}text\n{record.text}{ticks}\n\n<p class="output-source">{source}</p>'


def transform(chapter: Chapter, folder: Path, maths: PageMaths, tasks: dict[str, set[str]]) -> str:
    """The chapter with formulas drawn, tabs made, code pasted and empty summaries labelled."""

    def replace(token: re.Match) -> str:
        if token["summary"]:
            return SUMMARY
        if token["ticks"] and token["info"].strip() == "run":
            tabs, unknown = command_tabs(token["body"], tasks, token["indent"])
            for command in unknown:
                chapter.fault(
                    token.start(), f"`{command}`: no such task in both pyproject.toml and pixi.toml"
                )
            return tabs
        if token["ticks"] and token["info"].startswith("output "):
            return printed_output(chapter, token, token["info"].removeprefix("output ").strip())
        if token["ticks"]:
            return paste(token[0], folder)
        tex = token["display"] or token["display_public"] or token["inline"] or token["inline_public"]
        if tex is None:
            return token[0]
        if "\n\n" in tex:
            chapter.fault(
                token.start(), "a formula runs over an empty line: is a dollar sign missing its twin?"
            )
            return token[0]
        display = bool(token["display"] or token["display_public"])
        try:
            return maths.render(re.sub(r"\n[ >]*", " ", tex), display, token["name"])
        except BadFormula as error:
            chapter.fault(token.start(), f"bad TeX: {error}")
            return token[0]

    return TOKEN.sub(replace, chapter.text)


def process(chapter: Chapter, book_folder: Path, tasks: dict[str, set[str]]) -> str:
    """Checks and transforms one chapter; faults are collected in it."""
    folder = (book_folder / chapter.path).parent
    check_includes(chapter, folder)
    for position, message in unknown_commands(chapter.text, tasks):
        chapter.fault(position, message)
    maths = PageMaths(book_folder / ".cache" / "maths")
    text = transform(chapter, folder, maths, tasks)
    return f"{text}\n\n{maths.sprite()}\n{MARKER}\n"


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
    tasks = task_names(book_folder.parent)
    faults: list[str] = []
    for entry in chapters(book["items"]):
        chapter = Chapter(f"{src}/{entry['path']}", entry["content"], faults)
        entry["content"] = process(chapter, book_folder, tasks)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    json.dump(book, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
