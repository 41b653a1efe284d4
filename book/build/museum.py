"""The museum of wrong solutions: a room for each puzzle, made from `solutions/pNN/wrong/*.toml` and the code that they edit.

A page has a chart of all by the size of their errors, ten whole, and a table of all; the rest of an exhibit is in the page's JSON, which
workbook.js shows on a click. Whatever no longer applies stops the build.
"""

import ast
import difflib
import functools
import html
import json
import math
import re
import textwrap
from collections.abc import Callable
from functools import partial

import numpy as np

from book.figures import gradcheck_matrix, museum_chart
from book.figures.markdown_table import table
from harness.check import zoo
from harness.check.diagnose import CAUSES
from harness.learner import blanks
from harness.puzzles.p26.mistakes import FIXES
from harness.spec import catalogue
from harness.spec.catalogue import list_puzzle_names
from harness.spec.derivation import Derivation, Mistake
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

CONTEXT = 1
"""Lines around an edit."""
THREAD = re.compile(r"https://(?:github\.com/([^/]+/[^/]+)(?:/(issues|pull)/(\d+))?|([^/]+))[^,\s]*")

SEEN = 4 * float(np.finfo(np.float32).eps)
"""A relative error above this is more than a float32 kernel may have in sums of a few terms."""
RACES = {"missing-atomic", "overwritten", "several-writers", "zeroed-in-the-kernel"}
"""Mistakes that `find_cause` names by the races that the virtual GPU reports."""
LARGEST = 2**14
"""Multiply-adds of the largest case that a mistake's formula is tried on."""
ASKED = {
    "p19": (
        "gives correct numbers for a matrix of 10 rows and 20 columns",
        "chapter",
        ("reduce_warp_sum", "reduce_every_thread_adds_all", "reduce_one_thread"),
    ),
    "p20": (
        "still gives a gradient of LayerNorm whose rows sum to 0, as the correct rows do",
        "hard values",
        ("dlayernorm_variance_term_dropped", "dlayernorm_mean_term_dropped", "dlayernorm_sums_not_means"),
    ),
    "p21": (
        "is found by gradcheck in float64",
        "",
        ("rmsnorm_one_row_for_all", "dropout_mask_from_result", "silu_strided_input"),
    ),
    "p22": (
        "gives correct numbers in a new layer, where γ is 1 and β is 0",
        "chapter",
        ("dgamma_from_ln_out", "dgamma_first_position_only", "dx_variance_term_dropped"),
    ),
    "p23": (
        "gives correct numbers with a causal mask",
        "causal",
        ("numpy_mask_hides_alone", "softmax_mask_after", "softmax_mask_of_first_query"),
    ),
}
"""Of a page's question: what is asked, a case in which it is checked, a mistake for which it is true, and two for which it is not."""
TOLD = ("standardise_constant_statistics", "lowrank_none_for_all")
"""Exhibits that come before others without a public example: puzzle 21 has no case that hides a mistake."""
FIRST = {
    "p19": "a matrix of 10 rows and 20 columns",
    "p20": "4 rows of 8 columns",
    "p22": "γ = 1, β = 0 and a gradient of ones",
    "p23": "no mask and a gradient of ones",
}
"""The first test case of a puzzle, for the chart's caption."""
BEST = 10
"""Exhibits that a page shows whole."""

Wrong = zoo.WrongSolution
find_puzzle = functools.cache(catalogue.find_puzzle)


def by_gate(puzzle: str) -> dict[str, list[Wrong]]:
    """The wrong solutions of each gate, both in their order."""
    mistakes: dict[str, list[Wrong]] = {gate.id: [] for gate in find_puzzle(puzzle).gates}
    for wrong in zoo.load_wrong_solutions(puzzle):
        mistakes[wrong.gate].append(wrong)
    return mistakes


def in_html(words: str) -> str:
    """Return words of a file as HTML; what stands between two backquotes is code. A dollar sign would begin a formula."""
    parts = html.escape(words, quote=False).replace("$", "&#36;").split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def seen_in(source: str) -> str:
    """Link the reports of similar mistakes, or code with the very mistake; a source in words stays as it is."""
    links = [f'<a href="{thread[0]}">{thread_name(thread)}</a>' for thread in THREAD.finditer(source)]
    label = "Similar to" if links and "/blob/" not in source else "Seen in"
    return f"<p><em>{label}</em> {', '.join(links) or in_html(source)}.</p>" if source else ""


def thread_name(thread: re.Match) -> str:
    """A thread as its project calls it, "owner/name issue 12", or the name of the site."""
    repository, kind, number, site = thread.groups()
    if not repository:
        return site
    return f"{repository} {'pull request' if kind == 'pull' else 'issue'} {number}" if kind else repository


def rejected_by(wrong: Wrong) -> str:
    """Name the gate that rejects it, the cases that show it, the message, and the gates that fail with it."""
    words = meaning(wrong)
    only = f", with {wrong.dtype} tensors" if wrong.dtype != "float32" else ""
    only += f", only in {listed(wrong.cases)}" if wrong.cases else ""
    said = f": “{words}”" if words else f", as `{wrong.mistake}`" if wrong.mistake else ", by its values"
    also = (
        f" {', '.join(f'`{gate}`' for gate in wrong.also)} fail{'s' * (len(wrong.also) == 1)} too."
        if wrong.also
        else ""
    )
    return f"<p><em>Rejected by</em> {in_html(f'`{wrong.gate}`{only}{said}.{also}')}</p>"


def listed(cases: tuple[str, ...]) -> str:
    """ "a", "a" and "b"."""
    quoted = [f"“{case}”" for case in cases]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def facts(wrong: Wrong) -> str:
    """Say what a mistake does to the numbers, where one like it was seen and what rejects it, as HTML."""
    return f"<p>{in_html(wrong.effect)}</p>{seen_in(wrong.source)}{rejected_by(wrong)}"


def exhibit(wrong: Wrong) -> str:
    """Tell one mistake; its row in the table has the rest, and its lines, which belong to the solution."""
    told = f"{in_html(wrong.effect)}</p>{seen_in(wrong.source)}"
    return f'<div class="exhibit"><p><a href="#{wrong.name}">{in_html(wrong.story)}</a><br>{told}</div>\n'


def best(puzzle: str) -> list[Wrong]:
    """Choose ten mistakes, at most two of a gate and one of a source: those with a public example, then those that easy inputs hide."""
    ranked = sorted(
        zoo.load_wrong_solutions(puzzle),
        key=lambda wrong: (
            not THREAD.search(wrong.source),
            wrong.name not in TOLD,
            not mark(wrong).hidden,
            -len(wrong.effect),
        ),
    )
    chosen: dict[str, Wrong] = {}
    for most in (2, BEST):
        for wrong in ranked:
            told = bool(wrong.source) and any(other.source == wrong.source for other in chosen.values())
            few = sum(other.gate == wrong.gate for other in chosen.values()) < most
            if few and not told and len(chosen) < BEST:
                chosen.setdefault(wrong.story, wrong)
    return list(chosen.values())


def all_of_them(puzzle: str) -> str:
    """List every wrong solution in a table; a click on one loads what it does and its changed lines, as workbook.js does it."""
    rows, kept = [], {}
    for gate, group in by_gate(puzzle).items():
        for wrong in group:
            size = mark(wrong).size
            error = "" if size is None else f"{size:.1g}" if size < 10 else f"{min(size, 1e6):,.0f}"
            path = f"solutions/{puzzle}/wrong/{wrong.name}.toml"
            fold = f'<details data-exhibit="{wrong.name}"><summary>{in_html(wrong.story)}</summary><code>{path}</code></details>'
            diff = f'<pre><code class="language-diff">{html.escape(lines(wrong), quote=False)}</code></pre>'
            kept[wrong.name] = facts(wrong) + diff
            rows.append(
                f'<tr id="{wrong.name}"><td>{fold}</td><td><code>{gate}</code></td><td>{error}</td></tr>'
            )
    head = "<tr><th>what was changed</th><th>gate</th><th>error</th></tr>"
    return (
        f'<div class="table-wrapper"><table class="exhibits"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>\n'
        f'<script type="application/json" id="exhibits">{in_script(kept)}</script>\n'
    )


def in_script(data: dict[str, str]) -> str:
    """JSON inside a page's script: without the signs that end the script, begin a formula or code, or include something."""
    text = json.dumps(data, ensure_ascii=False).replace("\\\\", "\\u005c").replace("{{", "\\u007b{")
    return re.sub("[<$`]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


# ---- How far off ----------------------------------------------------------------------------------------------


@functools.cache
def errors(wrong: Wrong) -> tuple[float, float] | None:
    """The relative error of the mistake's formula in the first case, and the largest finite one in any.

    None where no error is to be seen, or where only an infinite or NaN result shows the mistake.
    """
    puzzle, known = find_puzzle(wrong.puzzle), formula(wrong)
    gate = next(gate for gate in puzzle.gates if gate.id == wrong.gate)
    if not (known and gate.quantities and puzzle.list_cases(None)):
        return None
    small = [case for case in puzzle.list_cases(None) if puzzle.count_multiply_adds(case.dims) <= LARGEST]
    found = [error for case in small if (error := off(puzzle, known, gate.quantities, case)) is not None]
    finite = [error for error in found if error < math.inf]
    if not finite or max(finite) <= (SEEN if finite == found else museum_chart.TOLERATED):
        return None
    return found[0], max(finite)


@functools.cache
def right_steps(puzzle: str, name: str) -> tuple[Arrays, Derivation]:
    """The inputs of a puzzle's case, and the derivation without a mistake."""
    spec = find_puzzle(puzzle)
    arrays = spec.make_inputs(next(case for case in spec.list_cases(None) if case.name == name), "float32", 0)
    return arrays, spec.derive(arrays, {})


def off(puzzle: Puzzle, known: Mistake, quantities: tuple[str, ...], case: Case) -> float | None:
    """The largest relative error of the mistake's formula in a case, or None; infinite if only an infinite or NaN result shows it."""
    arrays, right = right_steps(puzzle.name, case.name)
    wrong = puzzle.derive(arrays, known.changes)
    worst, infinite = None, False
    with np.errstate(all="ignore"):
        for quantity in quantities:
            try:
                truth, got = (np.asarray(getattr(values, quantity), np.float64) for values in (right, wrong))
            except (AttributeError, KeyError):
                continue  # the derivation does not name it, or its mistake needs what this case has not
            scale = np.abs(truth).max(initial=0.0)
            apart = np.abs(got - truth).max(initial=0.0)
            if not (np.isfinite(scale) and scale > 0):
                continue
            if np.isfinite(apart):
                worst = max(worst or 0.0, float(apart / scale))
            else:
                infinite = True
    return math.inf if infinite and (worst or 0.0) < museum_chart.TOLERATED else worst


def mark(wrong: Wrong, page: str = "") -> museum_chart.Mark:
    """A wrong solution as the chart shows it; `page` is its page, where that is another one."""
    sizes = errors(wrong)
    in_mojo = isinstance(wrong.target_rung, MojoRung)
    of_machine = wrong.mistake in {name for name, _ in CAUSES.values()} or (
        in_mojo and wrong.mistake in RACES
    )
    check = "formula" if sizes else "machine" if of_machine else "values" if in_mojo else "rule"
    return museum_chart.Mark(
        f"{page}#{wrong.name}",
        wrong.story,
        check,
        sizes[1] if sizes else None,
        bool(sizes and sizes[0] <= SEEN),
    )


def chart(puzzle: str) -> str:
    """Draw the wrong solutions of a puzzle by the size of their errors and by gate; gates without sizes share their rung's row.

    A row of rules alone is only counted. Puzzle 21's have no sizes: its chart shows how many of them the usual checks find.
    """
    if puzzle == "p21":
        return gradcheck_matrix.usual_checks()
    rows: dict[str, list[museum_chart.Mark]] = {}
    for gate, group in by_gate(puzzle).items():
        for wrong in group:
            sized = any(errors(other) for other in group)
            rows.setdefault(gate if sized else wrong.target_rung.id, []).append(mark(wrong))
    ruled = [name for name, marks in rows.items() if all(each.check == "rule" for each in marks)]
    return museum_chart.figure(rows, first=FIRST.get(puzzle, ""), left_out=ruled)


def question(puzzle: str) -> str:
    """Ask which of three mistakes passes a test: the first of those in ASKED."""
    if puzzle not in ASKED:
        return ""
    wrong = {each.name: each for each in zoo.load_wrong_solutions(puzzle)}
    asked, case, names = ASKED[puzzle]
    found = {name: seen(wrong[name], case) for name in names}
    assert found[names[0]] <= SEEN < min(found[name] for name in names[1:]), f"{puzzle}: {found}"
    answers = "\n".join(
        f"<li>{in_html(wrong[name].story)} <span>{'Yes' if name == names[0] else 'No'}. {in_html(wrong[name].effect)}</span></li>"
        for name in sorted(names, key=lambda name: len(wrong[name].story))
    )
    return f'<div class="choice"><p>One of these three mistakes {asked}. Which one?</p><ul>\n{answers}\n</ul></div>\n'


def seen(wrong: Wrong, name: str) -> float:
    """Return what the question's test sees of a mistake in a case: in puzzle 20 the sums of dx's rows, elsewhere the error.

    In puzzle 21 the question is about gradcheck: return 0 if it finds the mistake, and infinity if not.
    """
    if wrong.puzzle == "p21":
        finds = gradcheck_matrix.rows("bug")[wrong.gate, wrong.name]["gradcheck float64"] == "1"
        return 0.0 if finds else math.inf
    puzzle, known = find_puzzle(wrong.puzzle), formula(wrong)
    assert known, f"{wrong.name} has no formula"
    if wrong.puzzle == "p20":
        dx = np.asarray(puzzle.derive(right_steps("p20", name)[0], known.changes).grad_input, np.float64)
        return float(np.abs(dx.sum(-1)).max() / np.abs(dx).max())
    (quantities,) = (gate.quantities for gate in puzzle.gates if gate.id == wrong.gate)
    (case,) = (case for case in puzzle.list_cases(None) if case.name == name)
    error = off(puzzle, known, quantities, case)
    return math.nan if error is None else error


def all_rooms() -> str:
    """Draw those of all puzzles, a row for each, in small marks."""
    rooms = {
        f"puzzle {puzzle[1:]}": [
            mark(wrong, f"puzzle_{puzzle[1:]}/museum.html") for wrong in zoo.load_wrong_solutions(puzzle)
        ]
        for puzzle in list_puzzle_names()
    }
    return museum_chart.figure(rooms, cell=6)


def meaning(wrong: Wrong) -> str:
    """What the workbook says for the name of a mistake, or nothing."""
    known = formula(wrong)
    words = f"equal to the reference {known.description}" if known else ""
    words = words or next((words for name, words in CAUSES.values() if name == wrong.mistake), "")
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
    """The mistake as the diagnosis knows it in NumPy, or None: of several with its name, one that changes what its gate checks."""
    puzzle = find_puzzle(wrong.puzzle)
    named = [mistake for mistake in puzzle.mistakes if mistake.id == wrong.mistake]
    (checked,) = (gate.quantities for gate in puzzle.gates if gate.id == wrong.gate)
    return next(
        (mistake for mistake in named if not set(checked or ()).isdisjoint(mistake.changes)),
        (named or [None])[0],
    )


def lines(wrong: Wrong) -> str:
    """The edit as changed lines, with a line around them and the file and line before. Raises DamagedFile."""
    path = wrong.solution
    before, after = (
        without_markers(text) for text in (path.read_text(encoding="utf-8"), wrong.edit_text(path))
    )
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
        given = bool(blanks.PROVIDED_MARKER.match(line)) or (given and not blanks.END_MARKER.match(line))
        if not given and not blanks.ANY_MARKER.match(line) and "ANCHOR" not in line:
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
    """The rooms: how many wrong solutions each puzzle has, for how many gates, and how many have a public example."""
    rows = []
    for puzzle in list_puzzle_names():
        mistakes = zoo.load_wrong_solutions(puzzle)
        if mistakes:
            threads = sum(bool(THREAD.search(wrong.source)) for wrong in mistakes)
            folder = f"puzzle_{puzzle.removeprefix('p')}"
            title = html.escape(find_puzzle(puzzle).title)
            link = f"[Puzzle {puzzle.removeprefix('p')}: {title}]({folder}/museum.md)"
            rows.append([link, *map(str, (len(mistakes), len({wrong.gate for wrong in mistakes}), threads))])
    return table(["room", "wrong solutions", "gates", "with a public report"], rows, "lrrr")


def page(puzzle: str) -> str:
    """The museum page of a puzzle below its introduction: the chart, ten exhibits, and the table of all."""
    mistakes = zoo.load_wrong_solutions(puzzle)
    every = all_of_them(puzzle)
    exhibits = "\n".join(map(exhibit, best(puzzle)))
    sized = any(mark(wrong).size is not None for wrong in mistakes)
    return (
        f"{question(puzzle)}\n{chart(puzzle) if sized else ''}\n## Ten exhibits\n\n{exhibits}\n## All {len(mistakes)} {{#all}}\n\n"
        f"{EXPLAINED}{in_given_code(mistakes)}\n\n{every}"
    )


def in_given_code(mistakes: list[Wrong]) -> str:
    """Say how many mistakes are in code that is given, which the puzzle's pages do not count; nothing where there are none."""
    given = sum(not wrong.is_in_blank for wrong in mistakes)
    if not given:
        return ""
    them = "is in given code, and the puzzle's pages do not count it"
    them = them if given == 1 else "are in given code, and the puzzle's pages do not count them"
    return f" {given} of the {len(mistakes)} {them}."


EXPLAINED = (
    "Click a mistake to see what it does, what rejects it, and which lines changed. The error is the largest over all test cases, relative "
    "to the largest correct element, and is computed from the mistake's formula. Mistakes without a formula and infinite results have no measurable error."
)


FILES: dict[str, Callable[[], str]] = {
    **{f"museum_{puzzle}.md": partial(page, puzzle) for puzzle in list_puzzle_names()},
    "museum.md": overview,
    "rooms.html": all_rooms,
}
