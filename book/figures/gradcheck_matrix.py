"""The matrix of the page "What gradcheck misses": which checks find which wrong backward pass, and six edits of each to choose from.

The table can be read without scripts; `book/theme/pieces.js` opens a wrong backward pass on a click, from the JSON beside the table.
"""

import difflib
import html
import json
import textwrap
from collections import Counter
from collections.abc import Sequence

from book.figures.markdown_table import table
from book.measure import record
from book.measure.hunt_versions import Version, versions
from book.measure.record import Row
from harness.check import zoo

USUAL = (
    "gradcheck float64", "gradcheck float32", "allclose on ones", "square shapes", "opcheck", "random directions", "repeat runs",
)  # fmt: skip
"""Columns of the record: what people run."""
CHECKS = (*USUAL, "check_backward")
EDITS = 6
KINDS = {
    "the formula, at any size and number of axes": ("plain", "outputs with a gradient"),
    "memory layouts of inputs and gradients": ("layout of inputs", "layout of the gradient"),
    "zeros, ties, infinities and large numbers": ("far", "infinite gradient", "ties"),
    "two calls, two backward passes, or a write in between": (
        "two calls", "graph used twice", "written between", "written to"),
    "some inputs frozen": ("frozen inputs",),
    "thousands of rows, or 16-bit numbers": ("thousands of rows", "bfloat16"),
    "a second derivative": ("second derivative",),
}  # fmt: skip
"""What a call must have before the result is wrong -> the tries of `check_backward` that have it."""


def rows(kind: str) -> dict[tuple[str, str], Row]:
    """The record's rows of one kind, by gate and version."""
    return {
        (row["gate"], row["version"]): row for row in record.rows("gradient_edits") if row["kind"] == kind
    }


def ordered() -> list[Row]:
    """The wrong backward passes: those that most checks find come first."""
    return sorted(
        rows("bug").values(), key=lambda row: ([-int(row["gradcheck float64"]), -found(row)], row["version"])
    )


def found(row: Row) -> int:
    """How many checks find it."""
    return sum(int(row[name]) for name in CHECKS)


def diff(before: str, after: str) -> list[list[str]]:
    """The lines that an edit takes away and adds, each with its sign, without their common indentation."""
    a, b = before.splitlines(), after.splitlines()
    changed = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(
        None, a, b, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            changed += [("-", line) for line in a[start:end]] + [("+", line) for line in b[new_start:new_end]]
    changed = [(sign, line) for sign, line in changed if line.strip()]
    bare = textwrap.dedent("\n".join(line for _, line in changed)).splitlines()
    return [[sign, text] for (sign, _), text in zip(changed, bare, strict=True)]


def choices(bug: Version, others: Sequence[Version]) -> list[Version]:
    """The solution and the five versions that differ least from a wrong one, in an order that gives nothing away."""
    solution = next(version for version in others if version.kind == "solution")
    rest = [version for version in others if version.kind != "solution" and version.code != bug.code]
    rest.sort(
        key=lambda version: (len("".join(text for _, text in diff(bug.code, version.code))), version.name)
    )
    return sorted([solution, *rest[: EDITS - 1]], key=lambda version: hash_of(bug.name + version.name))


def hash_of(text: str) -> int:
    """A number that is the same on every machine."""
    return sum((place + 7) * ord(letter) for place, letter in enumerate(text)) % 97


def verdict(row: Row) -> dict:
    """What the page says of an edit."""
    seen = [name for name in USUAL if row[name] == "1"]
    return {"right": row["check_backward"] == "0", "seen": seen, "try": row["try"], "said": row["said"]}


def bugs() -> list[dict]:
    """Every wrong backward pass with its code, its story and its edits."""
    by_gate: dict[str, list[Version]] = {}
    for version in versions():
        by_gate.setdefault(version.gate, []).append(version)
    known = {(row["gate"], row["version"]): row for row in record.rows("gradient_edits")}
    stories = {wrong.name: wrong for wrong in zoo.load("p21")}
    entries = []
    for row in ordered():
        others = by_gate[row["gate"]]
        bug = next(version for version in others if version.name == row["version"])
        story = stories[bug.name]
        edits = [
            {"diff": diff(bug.code, version.code), **verdict(known[version.gate, version.name])}
            for version in choices(bug, others)
        ]
        entries.append({
            "name": bug.name.replace("_", " "), "code": textwrap.dedent(bug.code), "story": story.story,
            "effect": story.effect, "source": story.source, "edits": edits, **verdict(row),
        })  # fmt: skip
    return entries


def matrix() -> str:
    """The table, and the data behind it."""
    found_by = {name: sum(int(row[name]) for row in ordered()) for name in CHECKS}
    heads = "".join(f'<th scope="col"><span>{html.escape(name)}</span></th>' for name in CHECKS)
    lines = [
        f'<table class="catches"><thead><tr><th scope="col">wrong backward pass</th>{heads}</tr></thead><tbody>'
    ]
    for row in ordered():
        cells = "".join(
            f'<td class="{"found" if row[name] == "1" else "missed"}">{"●" if row[name] == "1" else "·"}</td>'
            for name in CHECKS
        )
        lines.append(f'<tr><th scope="row">{html.escape(row["version"].replace("_", " "))}</th>{cells}</tr>')
    totals = "".join(f"<td>{found_by[name]}</td>" for name in CHECKS)
    lines.append(
        f'</tbody><tfoot><tr><th scope="row">finds, of {len(ordered())}</th>{totals}</tr></tfoot></table>'
    )
    data = json.dumps({"checks": CHECKS, "bugs": bugs()}, ensure_ascii=False).replace("</", "<\\/")
    return "\n".join(lines) + f'\n<script type="application/json" class="catches-data">{data}</script>'


def kinds_table() -> str:
    """What a call must have before a result is wrong, how many of the wrong ones need it, and how many of them gradcheck finds."""
    tries = {name: kind for kind, names in KINDS.items() for name in names}
    count, seen = Counter[str](), Counter[str]()
    for row in ordered():
        count[tries[row["try"]]] += 1
        seen[tries[row["try"]]] += int(row["gradcheck float64"])
    lines = [[kind, str(count[kind]), str(seen[kind])] for kind in KINDS]
    return table(["what shows it", "bugs", "gradcheck finds"], lines, "lrr")


FILES = {"gradcheck_matrix.html": matrix, "gradcheck_kinds.md": kinds_table}
