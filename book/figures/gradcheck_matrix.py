"""The matrix of the page "What gradcheck misses": which checks find which wrong backward pass, and six edits of most to choose from.

The table can be read without scripts; `book/theme/players.js` opens a wrong backward pass on a click, from the JSON beside the table.
"""

import ast
import difflib
import html
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from book.figures.figures import LEGIBLE, Drawing
from book.figures.markdown_table import table
from book.measure import record
from book.measure.hunt_versions import Version, versions
from book.measure.record import Row, Rows
from harness.check import zoo
from harness.toolchain import roots

USUAL = (
    "gradcheck float64", "gradcheck float32", "allclose on ones", "square shapes", "opcheck", "random directions", "repeat runs",
)  # fmt: skip
"""Columns of the record: what people run."""
CALLS = "gradcheck, more calls"
CHECKS = (*USUAL, CALLS, "check_backward")
EDITS = 6
CELLS = {
    "1": '<td class="found" aria-label="finds it"></td>',
    "0": '<td class="missed" aria-label="misses it"></td>',
}
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS, REPORTS, OPERATIONS = (WORDS[name] for name in ("kinds", "reports", "operations"))
"""What the page calls things: see the TOML file."""


def found_in_calls(version: str) -> str:
    """The calls in which gradcheck rejects a wrong backward pass."""
    (row,) = Rows("gradcheck_calls").select(version=version)
    return row["calls"]


def reports() -> list[Row]:
    """The reconstructed reports: those that gradcheck accepts first."""
    tries = {row["wrong"]: row for row in record.rows("check_backward")}
    rows = [
        row | {"check_backward": str(int(bool(tries[row["version"]]["check_backward"]))),
               "try": tries[row["version"]]["check_backward"], "said": tries[row["version"]]["named"]}
        for row in record.rows("gradcheck_calls") if row["version"] in REPORTS
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["gradcheck float64"], -found(row)))


def rows(kind: str) -> dict[tuple[str, str], Row]:
    """The record's rows of one kind, by gate and version."""
    return {(row["gate"], row["version"]): row for row in Rows("gradient_edits").select(kind=kind)}


def kind_of(row: Row) -> str:
    """Return the kind of mistake of a wrong backward pass."""
    return next(kind for kind, (_, tries) in KINDS.items() if row["try"] in tries)


def ordered() -> list[Row]:
    """The wrong backward passes by kind, the most frequent kind first; in a kind, those that most checks find first."""
    bugs = rows("bug").values()
    count = Counter(map(kind_of, bugs))
    return sorted(
        bugs,
        key=lambda row: (
            -count[kind_of(row)],
            kind_of(row),
            row["gradcheck float64"] != "1",
            -found(row),
            row["version"],
        ),
    )


def title(version: str) -> str:
    """The operation of a wrong backward pass and its mistake, in words."""
    operation, _, mistake = version.partition("_")
    return f"{OPERATIONS.get(operation, operation)}: {mistake.replace('_', ' ').replace('none', 'None')}"


def finds(row: Row, check: str) -> bool:
    """Whether a check finds it; the other calls come after the friendly one."""
    if check == CALLS:
        return finds(row, USUAL[0]) or bool(found_in_calls(row["version"]))
    return row[check] == "1"


def found(row: Row) -> int:
    """How many checks find it."""
    return sum(finds(row, name) for name in CHECKS)


def code_of_report(name: str) -> str:
    """The functions of `tests/testing/faults.py` that reconstruct a report."""
    text = (roots.CHECKOUT / "tests" / "testing" / "faults.py").read_text(encoding="utf-8")
    functions, row = {}, ""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = ast.get_source_segment(text, node) or ""
        elif (
            isinstance(node, ast.Tuple)
            and isinstance(node.elts[0], ast.Constant)
            and node.elts[0].value == name
        ):
            row = " ".join(ast.get_source_segment(text, each) or "" for each in node.elts[1:3])
    needed: list[str] = []
    words = re.findall(r"\w+", row)
    while words:
        word = words.pop(0)
        if word in functions and word not in (*needed, "keep"):
            needed.append(word)
            words += re.findall(r"\w+", functions[word])
    return "\n\n".join(functions[word] for word in needed)


def diff(before: str, after: str) -> list[list[str]]:
    """The lines that an edit takes away and adds, each with its sign, without their common indentation."""
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")][2:]
    changed = [(line[0], line[1:]) for line in lines if line[0] != "@" and line[1:].strip()]
    bare = textwrap.dedent("\n".join(line for _, line in changed)).splitlines()
    return [[sign, text] for (sign, _), text in zip(changed, bare, strict=True)]


def choices(bug: Version, others: Sequence[Version]) -> list[Version]:
    """The solution and the five versions that differ least from a wrong one, in an order that gives nothing away."""
    solution = next(version for version in others if version.kind == "solution")
    rest = [version for version in others if version.kind != "solution" and version.code != bug.code]
    rest.sort(key=lambda version: (sum(len(text) for _, text in diff(bug.code, version.code)), version.name))
    return sorted(
        [solution, *rest[: EDITS - 1]], key=lambda version: crc32((bug.name + version.name).encode())
    )


def verdict(row: Row) -> dict:
    """What the page says of an edit."""
    seen = [name for name in USUAL if row[name] == "1"]
    said = row["said"].rstrip(".") + "." * bool(row["said"])
    return {"right": row["check_backward"] == "0", "seen": seen, "try": row["try"], "said": said}


def bugs() -> list[dict]:
    """Every wrong backward pass with its code, its story and its edits."""
    by_gate: dict[str, list[Version]] = {}
    for version in versions():
        by_gate.setdefault(version.gate, []).append(version)
    known = {(row["gate"], row["version"]): row for row in record.rows("gradient_edits")}
    stories = {wrong.name: wrong for wrong in zoo.load_wrong_solutions("p21")}
    entries = [
        {"name": REPORTS[row["version"]], "code": code_of_report(row["version"]), "story": "", "effect": "", "edits": [],
         "source": f"https://github.com/{row['version'].replace('#', '/issues/')}", "calls": found_in_calls(row["version"]), **verdict(row)}
        for row in reports()
    ]  # fmt: skip
    for row in ordered():
        others = by_gate[row["gate"]]
        bug = next(version for version in others if version.name == row["version"])
        story = stories[bug.name]
        edits = [
            {"diff": diff(bug.code, version.code), **verdict(known[version.gate, version.name])}
            for version in choices(bug, others)
        ]
        entries.append({
            "name": title(bug.name), "code": textwrap.dedent(bug.code), "story": story.story,
            "effect": story.effect, "source": story.source, "edits": edits, "calls": found_in_calls(bug.name), **verdict(row),
        })  # fmt: skip
    return entries


def matrix() -> str:
    """The table, and the data behind it."""
    every = [*reports(), *ordered()]
    heads = "".join(f'<th scope="col"><span>{html.escape(name)}</span></th>' for name in CHECKS)
    lines: list[str] = []
    sources = {wrong.name: wrong.source for wrong in zoo.load_wrong_solutions("p21")}
    kind = ""
    for row in every:
        version = row["version"]
        group = (
            "public reports, reconstructed"
            if version in REPORTS
            else f"{kind_of(row)}: {KINDS[kind_of(row)][0]}"
        )
        if group != kind:
            kind = group
            lines.append(
                f'<tr class="kind"><th scope="rowgroup" colspan="{len(CHECKS) + 1}">{html.escape(kind)}</th></tr>'
            )
        cells = "".join(CELLS[str(int(finds(row, name)))] for name in CHECKS)
        name = html.escape(REPORTS.get(version) or title(version)) + (" ⚑" if sources.get(version) else "")
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    totals = "".join(f"<td>{sum(finds(row, name) for row in every)}</td>" for name in CHECKS)
    data = json.dumps({"checks": CHECKS, "bugs": bugs()}, ensure_ascii=False).replace("</", "<\\/")
    return f"""<table class="catches"><thead><tr><th scope="col">wrong backward pass</th>{heads}</tr></thead><tbody>
{chr(10).join(lines)}
</tbody><tfoot><tr><th scope="row">finds, of {len(every)}</th>{totals}</tr></tfoot></table>
<script type="application/json" class="catches-data">{data}</script>"""


def kinds_table() -> str:
    """Return the kinds of mistake, the calls that show them, how many there are and what gradcheck finds, as a table."""
    lines = []
    for kind, rows in record.by([row | {"kind": kind_of(row)} for row in ordered()], "kind").items():
        seen = [str(sum(finds(row, check) for row in rows)) for check in (USUAL[0], CALLS)]
        lines.append([kind[0], KINDS[kind[0]][0], str(len(rows)), *seen])
    return table(
        ["kind", "a call that shows it", "bugs", "found by gradcheck", "in more calls"], lines, "llrrr"
    )


def layout() -> str:
    """A slice of a wider gradient in memory, and the elements that a kernel reads from its address."""
    drawing = Drawing(
        120,
        "Three rows of six numbers. The gradient is the first four of each row; a kernel reads the first twelve numbers.",
        340,
    )
    drawing.text(3, 14, "[3, 6] in memory: row after row →", anchor="start")
    for place, (row, column) in enumerate(np.ndindex(3, 6), 1):
        words = [str(place)] if place <= 12 else []
        drawing.labelled(3 + 46 * column, 26 + 30 * row, 42, 26, *words, shade=LEGIBLE if column < 4 else 0)
    return (
        f"<figure>{drawing.svg().strip()}<figcaption>The shaded squares are a [3, 4] gradient, a slice of a [3, 6] one. The numbers say what a "
        "kernel reads that gets its address and 12: from the fifth on, all in the wrong place.</figcaption></figure>"
    )


FILES = {"gradcheck_layout.html": layout, "gradcheck_matrix.html": matrix, "gradcheck_kinds.md": kinds_table}
