"""The matrix of the page "What gradcheck misses": which checks find which wrong backward pass, and edits to choose from.

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
from book.measure import hunt_versions, record
from book.measure.hunt_versions import Version
from book.measure.record import Row, Rows
from harness.check import zoo

USUAL = (
    "gradcheck float64", "gradcheck float32", "allclose on ones", "square shapes", "opcheck", "random directions", "repeat runs",
)  # fmt: skip
"""Columns of the record: what people run."""
EDITS = 6
STATES = {
    "found": "finds it",
    "missed": "misses it",
    "unfit": "rejects the correct version too",
    "untried": "was not tried on it",
}
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS, GROUPS, OPERATIONS, LAYOUTS = (WORDS[name] for name in ("kinds", "calls", "operations", "layouts"))
"""What the page calls things: see the TOML file."""
CHECKS = (*USUAL, *GROUPS, "check_backward")
"""Columns of the table."""


def calls_of(version: str) -> Row:
    """What the checks said of a function, right or wrong, and the calls in which gradcheck rejects it."""
    (row,) = Rows("gradcheck_calls").select(version=version)
    return row


def reports() -> list[Row]:
    """The reconstructed reports."""
    tries = {row["wrong"]: row for row in record.rows("check_backward")}
    found = []
    for name, report in hunt_versions.reports().items():
        seen, tried = calls_of(name), tries[name]
        right, said = f"{report['operation']} corrected", tried["named"]
        rejected = str(int(bool(tried["check_backward"])))
        found.append(
            seen | {"right": right, "try": tried["check_backward"], "said": said, "check_backward": rejected}
        )
    return found


def rows(kind: str) -> dict[tuple[str, str], Row]:
    """The record's rows of one kind, by gate and version."""
    return {(row["gate"], row["version"]): row for row in Rows("gradient_edits").select(kind=kind)}


def kind_of(row: Row) -> str:
    """Return the kind of mistake of a wrong backward pass."""
    return next(kind for kind, (_, tries) in KINDS.items() if row["try"] in tries)


def own() -> list[Row]:
    """The book's own wrong backward passes."""
    return [row | {"right": f"p21 {row['gate']}"} for row in rows("bug").values()]


def every() -> list[Row]:
    """The reports and the book's own by kind; in a kind, those that gradcheck accepts first, by the call that finds them."""
    return sorted([*reports(), *own()], key=place)


def place(row: Row) -> tuple:
    """What the table is sorted by."""
    first = next((number for number, name in enumerate(GROUPS) if finds(row, name)), len(GROUPS))
    return [*KINDS].index(kind_of(row)), finds(row, USUAL[0]), first, "gate" not in row, row["version"]


def title(version: str) -> str:
    """The operation of a wrong backward pass and its mistake, in words."""
    operation, _, mistake = version.partition("_")
    return f"{OPERATIONS.get(operation, operation)}: {mistake.replace('_', ' ').replace('none', 'None')}"


def state(row: Row, check: str) -> str:
    """Whether a check finds it, misses it, rejects the correct version too, or, as further calls, was not needed."""
    calls = calls_of(row["version"])["calls"]
    if check in GROUPS:
        found = any(name in calls for name in GROUPS[check])
        return "found" if found else "missed" if state(row, USUAL[0]) == "missed" else "untried"
    if row[check] == "0":
        return "missed"
    right = calls_of(row["right"])
    return "unfit" if right.get(check) == "1" else "found"


def finds(row: Row, check: str) -> bool:
    """Whether a check finds it."""
    return state(row, check) == "found"


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
    return {**verdict(row), "seen": seen, "unfit": unfit, "calls": calls}


def bugs() -> list[dict]:
    """Every wrong backward pass of the table with its code, its story and its edits; `hidden` is a name that does not tell the mistake."""
    by_gate: dict[str, list[Version]] = {}
    for version in hunt_versions.versions():
        by_gate.setdefault(version.gate, []).append(version)
    known = {(row["gate"], row["version"]): row for row in record.rows("gradient_edits")}
    stories = {wrong.name: wrong for wrong in zoo.load_wrong_solutions("p21")}
    entries, reported, seen = [], hunt_versions.reports(), Counter()
    for row in every():
        name = row["version"]
        if report := reported.get(name):
            operation = report["title"].partition(":")[0]
            entries.append({
                "name": report["title"], "hidden": f"{operation} ({name.partition('/')[2]})", "code": "\n\n".join([report["wrong"], *report["called"]]),
                "story": report["story"], "effect": "", "edits": [], "lines": wrong_lines(report["wrong"], [report["right"]]),
                "report": f"{name} ({report['year']})", "correction": diff(report["wrong"], report["right"]),
                "source": f"https://github.com/{name.replace('#', '/issues/')}", **verdict_of_bug(row),
            })  # fmt: skip
            continue
        others, story, operation = by_gate[row["gate"]], stories[name], title(name).partition(":")[0]
        bug = next(version for version in others if version.name == name)
        chosen = choices(bug, others)
        edits = [
            {"diff": diff(bug.code, version.code), **verdict(known[version.gate, version.name])}
            for version in chosen
        ]
        corrected = [version.code for version, edit in zip(chosen, edits, strict=True) if edit["right"]]
        seen[operation] += 1
        entries.append({
            "name": title(name), "hidden": f"{operation} {seen[operation]}", "code": textwrap.dedent(bug.code), "story": story.story,
            "effect": story.effect, "source": story.source, "edits": edits, "lines": wrong_lines(bug.code, corrected), **verdict_of_bug(row),
        })  # fmt: skip
    return entries


def matrix() -> str:
    """The table, and the data behind it. Columns that find nothing among the rows that gradcheck accepts are marked."""
    rows, entries = every(), bugs()
    accepted = [row for row in rows if not finds(row, USUAL[0])]
    classes = {name: " settled" * (not any(finds(row, name) for row in accepted)) for name in CHECKS}
    for name in (next(iter(GROUPS)), CHECKS[-1]):
        classes[name] += " begins"
    totals = "".join(
        f'<td class="{classes[name].strip()}">{sum(finds(row, name) for row in rows)}</td>' for name in CHECKS
    )
    total = f'<tr class="total"><th scope="row">finds, of {len(rows)}</th>{totals}</tr>'
    heads = "".join(
        f'<th scope="col" class="{classes[name].strip()}"><span>{html.escape(name)}</span></th>'
        for name in CHECKS
    )
    lines = [
        '<p class="catches-key"><span><i class="found"></i> finds it</span> <span><i class="missed"></i> misses it</span> <span><i class="unfit"></i> rejects the correct version too</span> '
        "<span>blank: not tried, because one call gives the verdict</span></p>",
        f'<table class="catches"><thead><tr class="groups"><td></td><th scope="colgroup" colspan="{len(USUAL)}">usual tests</th>'
        f'<th scope="colgroup" colspan="{len(GROUPS)}" class="begins">more calls of gradcheck</th><td class="begins"></td></tr>'
        f'<tr><th scope="col">wrong backward pass</th>{heads}</tr>{total}</thead><tbody>',
    ]
    kind = ""
    for row, bug in zip(rows, entries, strict=True):
        if kind_of(row) != kind:
            kind = kind_of(row)
            lines.append(
                f'<tr class="kind"><th scope="rowgroup" colspan="{len(CHECKS) + 1}">{html.escape(f"{kind}: {KINDS[kind][0]}")}</th></tr>'
            )
        states = [(state(row, name), classes[name]) for name in CHECKS]
        cells = "".join(
            f'<td class="{each}{more}" aria-label="{STATES[each]}"></td>' for each, more in states
        )
        flag = " ⚑" * bool(bug["source"] and "report" not in bug)
        lines.append(f'<tr><th scope="row"><span>{html.escape(bug["name"])}</span>{flag}</th>{cells}</tr>')
    lines.append(f"</tbody><tfoot>{total}</tfoot></table>")
    data = json.dumps(
        {"checks": CHECKS, "usual": len(USUAL), "states": STATES, "bugs": entries}, ensure_ascii=False
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
        f"Each light bar shows how many of {len(bugs)} mistakes in PyTorch a common check finds; {missed} pass all seven checks. gradcheck and "
        "“random directions” compare gradients with finite differences. “allclose on ones” (with inputs of ones) and “square shapes” (with random "
        "inputs) compare them with autograd. opcheck tests the registration as an operator, and “repeat runs” expects bit-equal results in ten runs."
    )
    picture = charts.bars(words, {"": [*lengths, ("none of the seven", float(missed), str(missed), True)]})
    return f"<figure>{picture.strip()}<figcaption>{html.escape(words)}</figcaption></figure>\n"


def layout() -> str:
    """Three gradients of shape [3, 4] in memory that are not contiguous, one of which is shown, and what a kernel reads."""
    radios, pictures = [], []
    for name, (columns, elements, words) in LAYOUTS.items():
        radios.append(
            f'<label><input type="radio" name="layout"{" checked" * (not pictures)}> {name}</label>'
        )
        right = sum(element == place for place, element in enumerate(elements, 1))
        words = f"{words} The kernel reads {right} of the 12 elements correctly."
        drawing = Drawing(28 + 40 * (len(elements) // columns), words, 340)
        drawing.text(3, 14, "memory, row by row →", anchor="start")
        for place, element in enumerate(elements, 1):
            x, y = 3 + 46 * ((place - 1) % columns), 26 + 40 * ((place - 1) // columns)
            drawing.box(x, y, 42, 36, shade=0.12 if element else 0)
            if not element:
                for shift in (0, 12, 24):
                    drawing.segment(x, y + 12 + shift, x + 12 + shift, y, opacity=0.4)
            drawing.text(
                x + 3, y + 12, ("1–12" if elements[1] == 0 else str(element)) * bool(element), anchor="start"
            )
            drawing.parts.append(f'<g class="{"right" if element == place else "wrong"}">')
            drawing.text(x + 25, y + 30, str(place) * (place <= 12), size=18)
            drawing.parts.append("</g>")
        pictures.append(f"<div>{drawing.svg().strip()}<p>{words}</p></div>")
    return (
        f'<figure class="layouts"><div class="player-buttons">{"".join(radios)}</div>{"".join(pictures)}<figcaption>The shaded squares hold a '
        "[3, 4] gradient, and the hatched squares do not belong to it. Small number: the element that is stored in the square. Large number: the "
        "element that a kernel, given only an address and the count 12, takes it for. It is orange where the two differ.</figcaption></figure>"
    )


FILES = {"gradcheck_layout.html": layout, "gradcheck_matrix.html": matrix}
