"""The museum of wrong solutions: a room for each puzzle, made from `solutions/pNN/wrong/*.toml` and the code that they edit.

An exhibit has its story, what that does to the numbers, the public thread where one is named, the gate and the check that catch it, by how much it is
off, the loss of a training run where there is one, and its lines. Whatever no longer applies stops the build.
"""

import ast
import difflib
import functools
import html
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from book.figures import curve_chart, museum_chart
from book.figures.markdown_table import table
from book.measure import record
from harness.check import zoo
from harness.check.diagnose import FOUND
from harness.learner import blanks
from harness.puzzles.p26.mistakes import FIXES
from harness.spec import catalogue
from harness.spec.catalogue import puzzle_names
from harness.spec.derivation import Derivation, Mistake
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

SEEN = 4 * float(np.finfo(np.float32).eps)
"""A relative error above this is more than a float32 kernel may have in sums of a few terms."""
CONTEXT = 1
"""Lines around an edit."""
LARGEST = 2**14
"""Multiply-adds of the largest case that a mistake's formula is tried on."""
THREAD = re.compile(r"https://(?:github\.com/([^/]+/[^/]+)(?:/(issues|pull)/(\d+))?|([^/]+))[^,\s]*")

LANGUAGES = {"numpy": "NumPy", "torch": "PyTorch", "mojo": "Mojo"}
"""Rung that a puzzle's gates have in common with others -> the language of its file."""

Wrong = zoo.WrongKernel
find_puzzle = functools.cache(catalogue.find_puzzle)


def room(puzzle: str, keep: Callable[[Wrong], bool] = lambda wrong: True) -> str:
    """The exhibits of a puzzle that `keep` takes, below a heading for each gate."""
    groups = {gate: [wrong for wrong in group if keep(wrong)] for gate, group in by_gate(puzzle).items()}
    return "\n".join(
        f"### `{gate}`: {about(puzzle, gate)}\n\n{riddle(group)}" + "\n".join(exhibits(group))
        for gate, group in groups.items()
        if group
    )


FEW = 3
"""A gate with fewer exhibits asks nothing: there is no choice. Nor does it ask for more than so many."""
APART = 3
"""Errors whose ratio is below this are a tie."""


def riddle(group: list[Wrong]) -> str:
    """What to guess before the exhibits of a gate are opened: which are hidden by easy inputs, which is furthest off, or which does what
    one of them does; its answer is folded. `site.py` leaves it out of the search index, which has the exhibits."""
    if len(group) < FEW:
        return ""
    hidden = [wrong for wrong in group if mark(wrong).quiet]
    sized = sorted((size, wrong.name) for wrong in group if (size := mark(wrong).size) and size < np.inf)
    named = {wrong.name: wrong for wrong in group}
    if 0 < len(hidden) <= FEW < len(group):
        these = (
            f"{len(hidden)} of these {len(group)} mistakes leave"
            if len(hidden) > 1
            else "One of these mistakes leaves"
        )
        question = f"{these} the puzzle's easiest inputs right. Which?"
        answer = "\n".join(f"- {titled(wrong)}" for wrong in hidden)
    elif len(sized) >= FEW and sized[-1][0] > APART * sized[0][0]:
        question = "On the hardest inputs, which of these mistakes is furthest off, and which least?"
        ends = [(sized[-1], "Furthest"), (sized[0], "Least")]
        answer = "\n".join(f"- {word}, {digits(size)}: {titled(named[name])}" for (size, name), word in ends)
    else:
        told = max(group, key=lambda wrong: (len(wrong.effect), wrong.name))
        question = f"One of these mistakes does this: “{marked(told.effect)}” Which?"
        answer = f"- {titled(told)}"
    return (
        f'<div class="riddle">\n\n**Guess first.** {question}\n\n<details class="reveal">\n<summary>Reveal</summary>\n\n'
        f"{answer}\n\n</details>\n</div>\n\n"
    )


def in_other_languages(same: list[Wrong]) -> str:
    """Links to the exhibits of one story in further files, as " (and in PyTorch)"."""
    links = [f"[{LANGUAGES[wrong.of_rung.id]}](./museum.md#{wrong.name})" for wrong in same]
    return f" (and in {' and '.join(links)})" if links else ""


def titled(wrong: Wrong) -> str:
    """The story of an exhibit, as a link to it."""
    return f"[{plain(wrong.story)}](#{wrong.name})"


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
    """What is folded to a wrong solution's story: what it does to the numbers, where it was seen, what rejects it, its loss, its lines.

    The address is inside of the fold, so that a browser opens the fold for whoever follows a link to it.
    """
    curve, words = curve_chart.of(wrong)
    facts = [rejected_by(wrong), *error(wrong), *([f"*The loss:* {plain(words)}"] if words else [])]
    return "\n".join(
        [
            f'<div class="exhibit" id="{wrong.name}">',
            "",
            f"{marked(wrong.effect)}\n",
            *(f"{where}\n" for where in seen_in(wrong.source)),
            *(f"- {fact}" for fact in facts),
            "",
            *([curve, ""] if curve else []),
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


def error(wrong: Wrong) -> Iterator[str]:
    """How far the mistake's formula is from what is right, on the chapter's own inputs and on the hardest ones; or its verdict's size."""
    if sizes := errors(wrong):
        name, first, worst = sizes
        own, most = (digits(error) if error > SEEN else "none" for error in (first, worst))
        yield f"*How far off*, by its formula, as a share of the largest element: {own} in the case “{name}”, up to {most} in all."
    elif 0 <= (size := verdicts().get((wrong.puzzle, wrong.name), -1)) < np.inf:
        yield f"*How far off*, as a share of what is right: {digits(size)} in the verdict of its gate."


@functools.cache
def errors(wrong: Wrong) -> tuple[str, float, float] | None:
    """The first case's name, the error of the mistake's formula in it, and the largest of all cases; None where none is to be seen."""
    puzzle, known = find_puzzle(wrong.puzzle), formula(wrong)
    gate = next(gate for gate in puzzle.gates if gate.id == wrong.gate)
    if not (known and gate.quantities and puzzle.cases(None)):
        return None
    small = [case for case in puzzle.cases(None) if puzzle.multiply_adds(case.dims) <= LARGEST]
    by_case = {case.name: off(puzzle, known, gate.quantities, case) for case in small}
    by_case = {name: error for name, error in by_case.items() if error is not None}
    if not by_case or max(by_case.values()) <= SEEN:
        return None
    name, first = next(iter(by_case.items()))
    return name, first, max(by_case.values())


@functools.cache
def verdicts() -> dict[tuple[str, str], float]:
    """Puzzle and name of a wrong solution in Python -> the recorded size of its error, -1 where it has none."""
    return {(row["puzzle"], row["wrong"]): float(row["error"]) for row in record.rows("zoo_verdicts")}


def mark(wrong: Wrong, room: str = "") -> museum_chart.Mark:
    """A wrong solution as the chart shows it; `room` is its page, where that is another one."""
    sizes, recorded = errors(wrong), verdicts().get((wrong.puzzle, wrong.name), -1.0)
    size = sizes[2] if sizes else recorded if recorded >= 0 else None
    of_machine = wrong.mistake in {name for name, _ in FOUND.values()}
    ruled = size is None and not isinstance(wrong.of_rung, MojoRung)
    check = "formula" if sizes else "machine" if of_machine else "rule" if ruled else "values"
    return museum_chart.Mark(
        f"{room}#{wrong.name}", wrong.story, check, size, bool(sizes and sizes[1] <= SEEN)
    )


def chart(puzzle: str) -> str:
    """The exhibits of a room by gate and by the size of their errors."""
    return museum_chart.figure(
        {gate: list(map(mark, group)) for gate, group in by_gate(puzzle).items() if group}
    )


def all_rooms() -> str:
    """The same of all rooms, a row for each puzzle, in small marks."""
    return museum_chart.figure(
        {
            f"puzzle {puzzle[1:]}": [
                mark(wrong, f"puzzle_{puzzle[1:]}/museum.html") for wrong in zoo.load(puzzle)
            ]
            for puzzle in puzzle_names()
        },
        cell=6,
    )


def digits(number: float) -> str:
    """Two digits of a number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


@functools.cache
def right_steps(puzzle: str, name: str) -> tuple[Arrays, Derivation]:
    """The inputs of a puzzle's case, and the derivation without a mistake, which all of its mistakes are compared with."""
    puzzle_spec = find_puzzle(puzzle)
    arrays = puzzle_spec.inputs(
        next(case for case in puzzle_spec.cases(None) if case.name == name), "float32", 0
    )
    return arrays, puzzle_spec.derive(arrays, {})


def off(puzzle: Puzzle, known: Mistake, quantities: tuple[str, ...], case: Case) -> float | None:
    """The largest relative error of the mistake's formula in a case, None where there is none to be computed."""
    arrays, right = right_steps(puzzle.name, case.name)
    wrong = puzzle.derive(arrays, known.changes)
    worst = None
    with np.errstate(all="ignore"):
        for quantity in quantities:
            try:
                truth, got = (np.asarray(getattr(values, quantity), np.float64) for values in (right, wrong))
            except (AttributeError, KeyError):
                continue  # the derivation does not name it, or its mistake needs what this case has not
            scale = np.abs(truth).max(initial=0.0)
            apart = np.abs(got - truth).max(initial=0.0)
            if np.isfinite(scale) and np.isfinite(apart) and scale > 0:
                worst = max(worst or 0.0, float(apart / scale))
    return worst


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


GUESSED = {
    "p19": "map_source_within_the_block", "p20": "dsoftmax_sum_times_p", "p21": "dbias_one_leading_axis",
    "p22": "dx_variance_term_dropped", "p23": "matmul_a_tile_not_turned", "p24": "numpy_tiles_rows_added",
    "p25": "numpy_one_step_too_far", "p26": "show_tensor_for_tuple", "p27": "attention_no_mask",
}  # fmt: skip
"""The exhibit of each room whose gate a visitor is asked to guess, from what it does to the numbers."""


def guess(puzzle: str) -> str:
    """A question at the door of a room: what one mistake does; folded, its gate and its story."""
    (wrong,) = [each for each in zoo.load(puzzle) if each.name == GUESSED[puzzle]]
    gates = ", ".join(f"`{gate}`" for gate in by_gate(puzzle))
    return "\n".join(
        [
            "## Guess the gate\n",
            "One of the exhibits does this to the numbers:\n",
            f"> {marked(wrong.effect)}\n",
            f"The gates are {gates}. Which one rejects it, and what was changed? Decide before you open the answer.\n",
            '<details class="reveal">\n<summary>Reveal</summary>\n',
            f"{plain(wrong.story)} {rejected_by(wrong)} [Its exhibit](#{wrong.name}) has the lines.\n",
            "</details>\n",
        ]
    )


def losses() -> str:
    """How many of the trained wrong solutions of puzzle 22 end where the right one does, in a sentence."""
    runs = curve_chart.runs("p22").values()
    ends = [own[-1][1] / right[-1][1] for right, own in runs]
    near, twice = sum(ratio < 1.1 for ratio in ends), sum(ratio > 2 for ratio in ends)
    return (
        f"Of the {len(ends)} wrong kernels that a small model was trained with, {near} end with a loss that is less than "
        f"10% above the right one's, and {twice} with more than twice it. A look at the loss alone lets those pass.\n"
    )


def pages() -> dict[str, Callable[[], str]]:
    """What makes the files of all rooms, and the overview."""
    rooms = {f"museum_{puzzle}.md": partial(room, puzzle) for puzzle in puzzle_names() if puzzle != "p21"}
    hunt = {
        "museum_given.md": partial(room, "p21", lambda wrong: wrong.rung != "catch" and not wrong.old),
        "museum_held_back.md": partial(room, "p21", lambda wrong: wrong.rung != "catch" and bool(wrong.old)),
        "museum_catch.md": partial(room, "p21", lambda wrong: wrong.rung == "catch"),
    }
    charts = {f"room_{puzzle}.html": partial(chart, puzzle) for puzzle in puzzle_names()}
    guesses = {f"guess_{puzzle}.md": partial(guess, puzzle) for puzzle in puzzle_names()}
    return {
        **rooms,
        **hunt,
        **guesses,
        **charts,
        "museum.md": overview,
        "museum_losses.md": losses,
        "rooms.html": all_rooms,
    }
