"""The matrix of the page "What gradcheck misses": which checks find which wrong backward pass, and six edits of most to choose from.

The table can be read without scripts; `book/theme/players.js` opens a wrong backward pass on a click, from the JSON beside the table.
"""

import difflib
import html
import json
import textwrap
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from book.figures import charts
from book.figures.figures import Drawing
from book.figures.markdown_table import table
from book.measure import hunt_versions, record
from book.measure.hunt_versions import Version
from book.measure.record import Row, Rows
from harness.check import zoo

USUAL = (
    "gradcheck float64", "gradcheck float32", "allclose on ones", "square shapes", "opcheck", "random directions", "repeat runs",
)  # fmt: skip
"""Columns of the record: what people run."""
CALLS = "gradcheck in more calls"
CHECKS = (*USUAL, CALLS, "check_backward")
EDITS = 6
STATES = {"found": "finds it", "missed": "misses it", "unfit": "rejects the correct version too"}
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS, OPERATIONS, LAYOUTS = (WORDS[name] for name in ("kinds", "operations", "layouts"))
"""What the page calls things: see the TOML file."""


def calls_of(version: str) -> Row:
    """What the checks said of a function, right or wrong, and the calls in which gradcheck rejects it."""
    (row,) = Rows("gradcheck_calls").select(version=version)
    return row


def reports() -> list[Row]:
    """The reconstructed reports: those that gradcheck accepts first."""
    tries = {row["wrong"]: row for row in record.rows("check_backward")}
    found = []
    for name, report in hunt_versions.reports().items():
        seen, tried = calls_of(name), tries[name]
        right, said = f"{report['operation']} corrected", tried["named"]
        rejected = str(int(bool(tried["check_backward"])))
        found.append(
            seen | {"right": right, "try": tried["check_backward"], "said": said, "check_backward": rejected}
        )
    return sorted(found, key=lambda row: (state(row, USUAL[0]) == "found", -count_found(row)))


def rows(kind: str) -> dict[tuple[str, str], Row]:
    """The record's rows of one kind, by gate and version."""
    return {(row["gate"], row["version"]): row for row in Rows("gradient_edits").select(kind=kind)}


def kind_of(row: Row) -> str:
    """Return the kind of mistake of a wrong backward pass."""
    return next(kind for kind, (_, tries) in KINDS.items() if row["try"] in tries)


def ordered() -> list[Row]:
    """The wrong backward passes by kind, the most frequent kind first; in a kind, those that most checks find first."""
    bugs = [row | {"right": f"p21 {row['gate']}"} for row in rows("bug").values()]
    count = Counter(map(kind_of, bugs))
    return sorted(
        bugs,
        key=lambda row: (
            -count[kind_of(row)],
            kind_of(row),
            row["gradcheck float64"] != "1",
            -count_found(row),
            row["version"],
        ),
    )


def title(version: str) -> str:
    """The operation of a wrong backward pass and its mistake, in words."""
    operation, _, mistake = version.partition("_")
    return f"{OPERATIONS.get(operation, operation)}: {mistake.replace('_', ' ').replace('none', 'None')}"


def state(row: Row, check: str) -> str:
    """Whether a check finds it, misses it, or rejects the correct version too; the other calls come after the friendly one."""
    if check == CALLS:
        return "found" if calls_of(row["version"])["calls"] else state(row, USUAL[0])
    if row[check] == "0":
        return "missed"
    right = calls_of(row["right"])
    return "unfit" if right.get(check) == "1" else "found"


def finds(row: Row, check: str) -> bool:
    """Whether a check finds it."""
    return state(row, check) == "found"


def count_found(row: Row) -> int:
    """How many checks find it."""
    return sum(finds(row, name) for name in CHECKS)


def every() -> list[Row]:
    """The reports and the book's own, in the order of the table."""
    return [*reports(), *ordered()]


def diff(before: str, after: str) -> list[list[str]]:
    """The lines that an edit takes away and adds, each with its sign, without their common indentation."""
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")][2:]
    changed = [(line[0], line[1:]) for line in lines if line[0] != "@" and line[1:].strip()]
    bare = textwrap.dedent("\n".join(line for _, line in changed)).splitlines()
    return [[sign, text] for (sign, _), text in zip(changed, bare, strict=True)]


def changed_size(before: str, after: str) -> int:
    """How many characters the lines have that an edit takes away and adds."""
    return sum(len(text) for _, text in diff(before, after))


def wrong_lines(code: str, corrected: Sequence[str]) -> list[int]:
    """The lines of a wrong version that its smallest correction changes; none where that only adds lines."""
    lines, right = code.splitlines(), min(corrected, key=lambda other: changed_size(code, other))
    changes = difflib.SequenceMatcher(None, lines, right.splitlines()).get_opcodes()
    places = [place for kind, begin, end, *_ in changes if kind != "equal" for place in range(begin, end)]
    return [place for place in places if lines[place].strip()]


def choices(bug: Version, others: Sequence[Version]) -> list[Version]:
    """The solution and the five versions that differ least from a wrong one, in an order that gives nothing away."""
    solution = next(version for version in others if version.kind == "solution")
    rest = [version for version in others if version.kind != "solution" and version.code != bug.code]
    rest.sort(key=lambda version: (changed_size(bug.code, version.code), version.name))
    return sorted(
        [solution, *rest[: EDITS - 1]], key=lambda version: crc32((bug.name + version.name).encode())
    )


def verdict(row: Row) -> dict:
    """What the page says of an edit."""
    seen = [name for name in USUAL if row[name] == "1"]
    said = row["said"].rstrip(".") + "." * bool(row["said"])
    right, stricter = row["check_backward"] == "0", row["try"] == "infinite gradient"
    return {"right": right, "stricter": stricter, "seen": seen, "try": row["try"], "said": said}


def verdict_of_bug(row: Row) -> dict:
    """The same for a bug: also the calls in which gradcheck rejects it, and the checks that reject the correct version too."""
    seen, unfit = ([name for name in USUAL if state(row, name) == kind] for kind in ("found", "unfit"))
    calls = calls_of(row["version"])["calls"]
    return {"raises": "raises " in row["said"], **verdict(row), "seen": seen, "unfit": unfit, "calls": calls}


def bugs() -> list[dict]:
    """Every wrong backward pass with its code, its story and its edits."""
    by_gate: dict[str, list[Version]] = {}
    for version in hunt_versions.versions():
        by_gate.setdefault(version.gate, []).append(version)
    known = {(row["gate"], row["version"]): row for row in record.rows("gradient_edits")}
    stories = {wrong.name: wrong for wrong in zoo.load_wrong_solutions("p21")}
    entries, reported = [], hunt_versions.reports()
    for row in reports():
        name, report = row["version"], reported[row["version"]]
        entries.append({
            "name": report["title"], "code": "\n\n".join([report["wrong"], *report["called"]]), "story": report["story"],
            "effect": "", "edits": [], "lines": [], "report": f"{name} ({report['year']})", "correction": diff(report["wrong"], report["right"]),
            "source": f"https://github.com/{name.replace('#', '/issues/')}", **verdict_of_bug(row),
            "raises": report.get("raises", False),
        })  # fmt: skip
    for row in ordered():
        others = by_gate[row["gate"]]
        bug = next(version for version in others if version.name == row["version"])
        story = stories[bug.name]
        chosen = choices(bug, others)
        edits = [
            {"diff": diff(bug.code, version.code), **verdict(known[version.gate, version.name])}
            for version in chosen
        ]
        corrected = [version.code for version, edit in zip(chosen, edits, strict=True) if edit["right"]]
        entries.append({
            "name": title(bug.name), "code": textwrap.dedent(bug.code), "story": story.story,
            "effect": story.effect, "source": story.source, "edits": edits, "lines": wrong_lines(bug.code, corrected), **verdict_of_bug(row),
        })  # fmt: skip
    return entries


def matrix() -> str:
    """The table, and the data behind it."""
    entries, sources = bugs(), {wrong.name: wrong.source for wrong in zoo.load_wrong_solutions("p21")}
    totals = "".join(f"<td>{sum(finds(row, name) for row in every())}</td>" for name in CHECKS)
    total = f'<tr class="total"><th scope="row">finds, of {len(every())}</th>{totals}</tr>'
    heads = "".join(f'<th scope="col"><span>{html.escape(name)}</span></th>' for name in CHECKS)
    lines = [
        '<p class="catches-key"><i class="found"></i> finds it <i class="found raises"></i> finds it, and the bug raises an error '
        '<i class="missed"></i> misses it <i class="unfit"></i> rejects the correct version too</p>',
        '<table class="catches"><thead><tr class="groups"><td></td><th scope="colgroup" colspan="7">one friendly call</th>'
        f'<th scope="colgroup" colspan="2">others</th></tr><tr><th scope="col">wrong backward pass</th>{heads}</tr>{total}</thead><tbody>',
    ]
    kind = ""
    for row, bug in zip(every(), entries, strict=True):
        own = "kind" in row
        group = f"{kind_of(row)}: {KINDS[kind_of(row)][0]}" if own else "public reports, reconstructed"
        if group != kind:
            kind = group
            lines.append(
                f'<tr class="kind"><th scope="rowgroup" colspan="{len(CHECKS) + 1}">{html.escape(kind)}</th></tr>'
            )
        states = [state(row, name) for name in CHECKS]
        cells = "".join(f'<td class="{each}" aria-label="{STATES[each]}"></td>' for each in states)
        name = html.escape(bug["name"]) + " ⚑" * bool(sources.get(row["version"]))
        raises = ' class="raises"' * bug["raises"]
        lines.append(f'<tr{raises}><th scope="row">{name}</th>{cells}</tr>')
    whole = f'<tr class="total whole"><th scope="row">of all {len(every())}</th>{totals}</tr>'
    lines.append(f"</tbody><tfoot>{total}{whole}</tfoot></table>")
    data = json.dumps(
        {"checks": CHECKS, "compared": CALLS, "states": STATES, "bugs": entries}, ensure_ascii=False
    )
    data = data.replace("</", "<\\/")
    return "\n".join(lines) + f'\n<script type="application/json" class="catches-data">{data}</script>'


def usual_checks() -> str:
    """Draw how many wrong backward passes in PyTorch each common check finds, and how many no check finds."""
    bugs = rows("bug").values()
    found = {name: sum(row[name] == "1" for row in bugs) for name in USUAL}
    found = dict(sorted(found.items(), key=lambda item: -item[1]))
    missed = sum(all(row[name] == "0" for name in USUAL) for row in bugs)
    lengths = [(name, float(count), str(count), False) for name, count in found.items()]
    words = (
        f"Each light bar counts the mistakes, of {len(bugs)} in PyTorch, that a common check finds; {missed} pass all seven. gradcheck and "
        "“random directions” compare gradients with finite differences. “allclose on ones” (inputs of ones) and “square shapes” (random "
        "inputs) compare them with autograd. opcheck tests the registration as an operator; “repeat runs” expects equal bits in ten runs."
    )
    picture = charts.bars(words, {"": [*lengths, ("none of the seven", float(missed), str(missed), True)]})
    return f"<figure>{picture.strip()}<figcaption>{html.escape(words)}</figcaption></figure>\n"


def kinds_table() -> str:
    """Return the kinds of mistake, the calls that show them, how many there are and what gradcheck finds, as a table."""
    lines = []
    for kind, rows in record.by([row | {"kind": kind_of(row)} for row in ordered()], "kind").items():
        seen = [str(sum(finds(row, check) for row in rows)) for check in (USUAL[0], CALLS)]
        lines.append([kind[0], KINDS[kind[0]][0], str(len(rows)), *seen])
    return table(
        ["kind", "a call that shows it", "bugs", "found by one call of gradcheck", "by one or more calls"],
        lines,
        "llrrr",
    )


def layout() -> str:
    """Three gradients of shape [3, 4] in memory that are not contiguous, one of which is shown, and what a kernel reads."""
    radios, pictures = [], []
    for name, (columns, elements, words) in LAYOUTS.items():
        radios.append(
            f'<label><input type="radio" name="layout"{" checked" * (not pictures)}> {name}</label>'
        )
        right = sum(element == place for place, element in enumerate(elements, 1))
        words = f"{words} {right} of 12 {'is' if right == 1 else 'are'} right."
        drawing = Drawing(28 + 40 * (len(elements) // columns), words, 340)
        drawing.text(3, 14, "memory, row after row →", anchor="start")
        for place, element in enumerate(elements, 1):
            x, y = 3 + 46 * ((place - 1) % columns), 26 + 40 * ((place - 1) // columns)
            drawing.box(x, y, 42, 36, shade=0.12 if element else 0)
            drawing.text(
                x + 3, y + 12, ("1–12" if elements[1] == 0 else str(element)) * bool(element), anchor="start"
            )
            drawing.parts.append(f'<g class="{"right" if element == place else "wrong"}">')
            drawing.text(x + 25, y + 30, str(place) * (place <= 12), size=18)
            drawing.parts.append("</g>")
        pictures.append(f"<div>{drawing.svg().strip()}<p>{words}</p></div>")
    return (
        f'<figure class="layouts"><div class="player-buttons">{"".join(radios)}</div>{"".join(pictures)}<figcaption>The shaded squares are a [3, 4] '
        "gradient in memory. Small: the element that is stored in the square. Large: the element that a kernel, given an address and the count "
        "12, reads there. Orange: the two differ.</figcaption></figure>"
    )


FILES = {"gradcheck_layout.html": layout, "gradcheck_matrix.html": matrix, "gradcheck_kinds.md": kinds_table}
