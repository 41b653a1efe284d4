"""The museum of wrong solutions: a room for each puzzle, made from `solutions/pNN/wrong/*.toml` and the code that they edit.

An exhibit has its story, what that does to the numbers, the public thread where one is named, the gate and the check that catch it, and
its lines. Whatever no longer applies stops the build.
"""

import ast
import difflib
import functools
import html
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

from book.figures.markdown_table import table
from harness.check import zoo
from harness.check.diagnose import FOUND
from harness.learner import blanks
from harness.puzzles.p26.mistakes import FIXES
from harness.spec import catalogue
from harness.spec.catalogue import puzzle_names
from harness.spec.derivation import Mistake
from harness.toolchain import roots

CONTEXT = 1
"""Lines around an edit."""
THREAD = re.compile(r"https://(?:github\.com/([^/]+/[^/]+)(?:/(issues|pull)/(\d+))?|([^/]+))[^,\s]*")

LANGUAGES = {"numpy": "NumPy", "torch": "PyTorch", "mojo": "Mojo"}
"""Rung that a puzzle's gates have in common with others -> the language of its file."""

Wrong = zoo.WrongKernel
find_puzzle = functools.cache(catalogue.find_puzzle)


def room(puzzle: str, keep: Callable[[Wrong], bool] = lambda wrong: True) -> str:
    """The exhibits of a puzzle that `keep` takes, below a heading for each gate."""
    groups = {gate: [wrong for wrong in group if keep(wrong)] for gate, group in by_gate(puzzle).items()}
    return "\n".join(
        f"### `{gate}`: {about(puzzle, gate)}\n\n" + "\n".join(exhibits(group))
        for gate, group in groups.items()
        if group
    )


def in_other_languages(same: list[Wrong]) -> str:
    """Links to the exhibits of one story in further files, as " (and in PyTorch)"."""
    links = [f"[{LANGUAGES[wrong.of_rung.id]}](./museum.md#{wrong.name})" for wrong in same]
    return f" (and in {' and '.join(links)})" if links else ""


def exhibits(group: list[Wrong]) -> Iterator[str]:
    """The exhibits of a gate, those of one story in one fold; where the gate has several files, with their languages after the title."""
    several = len(set(map(written_in, group))) > 1
    order = ["", *LANGUAGES.values()]
    stories: dict[str, list[Wrong]] = {}
    for wrong in sorted(group, key=lambda wrong: order.index(written_in(wrong))):
        stories.setdefault(wrong.story, []).append(wrong)
    for story, same in stories.items():
        label = f" ({', '.join(map(written_in, same))})" if several and written_in(same[0]) else ""
        yield "\n".join(
            [
                '<details class="exhibit-fold">',
                f"<summary>{in_html(story)}{label}</summary>",
                *map(exhibit, same),
                "</details>\n",
            ]
        )


def written_in(wrong: Wrong) -> str:
    """The language of a wrong solution, where its gate may have several."""
    return LANGUAGES.get(wrong.of_rung.id, "")


def by_gate(puzzle: str) -> dict[str, list[Wrong]]:
    """The wrong solutions of each gate, both in their order."""
    mistakes: dict[str, list[Wrong]] = {gate.id: [] for gate in find_puzzle(puzzle).gates}
    for wrong in zoo.load(puzzle):
        mistakes[wrong.gate].append(wrong)
    return mistakes


def about(puzzle: str, gate: str) -> str:
    """What a gate checks, in the words of its spec."""
    return plain(next(known.about for known in find_puzzle(puzzle).gates if known.id == gate) or gate)


def exhibit(wrong: Wrong) -> str:
    """Return what is folded to a wrong solution's story: what it does to the numbers, where it was seen, what rejects it, its lines.

    The address is inside of the fold, so that a browser opens the fold for whoever follows a link to it.
    """
    return "\n".join(
        [
            f'<div class="exhibit" id="{wrong.name}">',
            "",
            f"{marked(wrong.effect)}\n",
            *(f"{where}\n" for where in seen_in(wrong.source)),
            f"{rejected_by(wrong)}\n",
            '<details class="solution-details">',
            f"<summary>The lines of {wrong.name.replace('_', ' ')}</summary>",
            "",
            f"```diff\n{lines(wrong)}\n```",
            "",
            "</details>",
            "</div>",
        ]
    )


def in_html(words: str) -> str:
    """Words of a file inside of a tag, where nothing is Markdown but a dollar sign would still begin a formula."""
    return re.sub(r"[`$]", lambda sign: f"&#{ord(sign[0])};", html.escape(words))


def plain(words: str) -> str:
    """Words of a file in which Markdown and TeX have no signs, as a sentence of a page."""
    return re.sub(r"([\\`*_\[\]<>|$])", r"\\\1", words)


def marked(words: str) -> str:
    """`plain`, but what stands between two backquotes is code."""
    parts = words.split("`")
    return "`".join(part if number % 2 else plain(part) for number, part in enumerate(parts))


def seen_in(source: str) -> Iterator[str]:
    """Links to the threads in which a mistake was reported; a source in words stays as it is."""
    links = [f"[{thread_name(thread)}]({thread[0]})" for thread in THREAD.finditer(source)]
    if source:
        yield f"*Seen in* {', '.join(links) or plain(source)}."


def thread_name(thread: re.Match) -> str:
    """A thread as its project calls it, "owner/name issue 12", or the name of the site."""
    repository, kind, number, site = thread.groups()
    if not repository:
        return site
    return f"{repository} {'pull request' if kind == 'pull' else 'issue'} {number}" if kind else repository


def rejected_by(wrong: Wrong) -> str:
    """The gate that rejects it, the cases that it needs, what the gate says and calls it, and the gates that fail with it."""
    words, name = plain(meaning(wrong)), f"`{wrong.mistake}`"
    said = f"which says “{words}” and calls it {name}" if words else f"which calls it {name}"
    said = f"by its check {name}: {words}" if wrong.mistake in checks() else said
    only = f"with {wrong.dtype} tensors, " if wrong.dtype != "float32" else ""
    only += f"in the case{'s' * (len(wrong.cases) > 1)} {listed(wrong.cases)} alone, " if wrong.cases else ""
    also = f" {', '.join(f'`{gate}`' for gate in wrong.also)} cannot be right either." if wrong.also else ""
    return (
        f"*Rejected by* the gate `{wrong.gate}`, {only}{said if wrong.mistake else 'for its values'}.{also}"
    )


def listed(cases: tuple[str, ...]) -> str:
    """ "a", "a" and "b"."""
    quoted = [f"“{plain(case)}”" for case in cases]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def meaning(wrong: Wrong) -> str:
    """What the workbook says for the name of a mistake, or nothing."""
    known = formula(wrong)
    words = f"equal to the reference {known.words}" if known else ""
    words = words or next((words for name, words in FOUND.values() if name == wrong.mistake), "")
    words = words or (FIXES.get(wrong.mistake, "") if wrong.puzzle == "p26" else "")
    return words or checks().get(wrong.mistake, "")


@functools.cache
def checks() -> dict[str, str]:
    """Check of a gradient -> what it holds, from the first line of its docstring; nothing is imported, torch least of all."""
    source = roots.CHECKOUT / "harness" / "check" / "gradient_checks.py"
    functions = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    docs = {function.name: (ast.get_docstring(function) or "").split("\n")[0] for function in functions}
    return {name: doc[:1].lower() + doc[1:].rstrip(".") for name, doc in docs.items() if doc}


def formula(wrong: Wrong) -> Mistake | None:
    """The mistake as the diagnosis knows it in NumPy, or None."""
    known = {mistake.id: mistake for mistake in reversed(find_puzzle(wrong.puzzle).mistakes)}
    return known.get(wrong.mistake)


def lines(wrong: Wrong) -> str:
    """The edit as changed lines, with a line around them and the file and line before. Raises DamagedFile."""
    path = wrong.solution
    before, after = (without_markers(text) for text in (path.read_text(encoding="utf-8"), wrong.edited(path)))
    changed: list[str] = []
    for line in list(difflib.unified_diff(before, after, n=CONTEXT, lineterm=""))[2:]:
        if line.startswith("@@"):
            changed += ["..."] * bool(changed)
        else:
            changed.append(line)
    while changed and not changed[-1].strip():
        changed.pop()
    return f"# {wrong.file}\n{dedented(changed)}"


def without_markers(text: str) -> list[str]:
    """The lines of a solution without the markers of blanks and anchors, and without the wrong code that a blank is given."""
    kept: list[str] = []
    given = False
    for line in text.splitlines():
        given = bool(blanks.GIVEN.match(line)) or (given and not blanks.END.match(line))
        if not given and not blanks.MARKER.match(line) and "ANCHOR" not in line:
            kept.append(line)
    return kept


def dedented(changed: list[str]) -> str:
    """The lines of a difference without the indent that all have in common."""
    signs = [line[:1] if line != "..." else "" for line in changed]
    bodies = textwrap.dedent("\n".join(line[1:] if line != "..." else "" for line in changed)).split("\n")
    return "\n".join(
        f"{sign} {body}".rstrip() if sign else "..." for sign, body in zip(signs, bodies, strict=True)
    )


def overview() -> str:
    """The rooms: how many wrong solutions each puzzle has, for how many gates, and how many were seen in public."""
    rows = []
    for puzzle in puzzle_names():
        mistakes = zoo.load(puzzle)
        if mistakes:
            threads = sum(bool(THREAD.search(wrong.source)) for wrong in mistakes)
            folder = f"puzzle_{puzzle.removeprefix('p')}"
            title = html.escape(find_puzzle(puzzle).title)
            link = f"[Puzzle {puzzle.removeprefix('p')}: {title}]({folder}/museum.md)"
            rows.append([link, *map(str, (len(mistakes), len({wrong.gate for wrong in mistakes}), threads))])
    return table(["room", "wrong solutions", "gates", "seen in public"], rows, "lrrr")


def pages() -> dict[str, Callable[[], str]]:
    """Return what makes the files of all rooms, and the overview."""
    rooms = {f"museum_{puzzle}.md": partial(room, puzzle) for puzzle in puzzle_names() if puzzle != "p21"}
    hunt = {
        "museum_given.md": partial(room, "p21", lambda wrong: wrong.rung != "catch" and not wrong.old),
        "museum_held_back.md": partial(room, "p21", lambda wrong: wrong.rung != "catch" and bool(wrong.old)),
        "museum_catch.md": partial(room, "p21", lambda wrong: wrong.rung == "catch"),
    }
    return {**rooms, **hunt, "museum.md": overview}
