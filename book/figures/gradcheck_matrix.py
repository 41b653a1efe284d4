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
CELLS = {
    "1": '<td class="found" aria-label="finds it"></td>',
    "0": '<td class="missed" aria-label="misses it"></td>',
}
KINDS = {
    "formula": ("nearly any call, or another number of axes", ("plain", "outputs with a gradient")),
    "layout": ("inputs or gradients that are not contiguous", ("layout of inputs", "layout of the gradient")),
    "values": ("zeros, ties, infinities or large numbers", ("far", "infinite gradient", "ties")),
    "state": (
        "two calls, two backward passes, or a write in between",
        ("two calls", "graph used twice", "written between", "written to"),
    ),
    "flags": ("some inputs frozen", ("frozen inputs",)),
    "size and dtype": ("thousands of rows, or 16-bit numbers", ("thousands of rows", "bfloat16")),
    "second derivative": ("a second derivative", ("second derivative",)),
}
"""Kind of mistake -> the calls that show it, and the tries of `check_backward` that make such a call."""


OPERATIONS = {
    "addbias": "add bias", "crossentropy": "cross-entropy", "logsoftmax": "log-softmax", "lowrank": "low-rank",
    "rmsnorm": "RMSNorm", "scale": "scale rows", "silu": "SiLU",
}  # fmt: skip
"""Operation in the name of a version -> what the page calls it, where that differs."""


def rows(kind: str) -> dict[tuple[str, str], Row]:
    """The record's rows of one kind, by gate and version."""
    return {
        (row["gate"], row["version"]): row for row in record.rows("gradient_edits") if row["kind"] == kind
    }


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
            [-int(row["gradcheck float64"]), -found(row)],
            row["version"],
        ),
    )


def title(version: str) -> str:
    """The operation of a wrong backward pass and its mistake, in words."""
    operation, _, mistake = version.partition("_")
    return f"{OPERATIONS.get(operation, operation)}: {mistake.replace('_', ' ').replace('none', 'None')}"


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
    stories = {wrong.name: wrong for wrong in zoo.load_wrong_kernels("p21")}
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
            "name": title(bug.name), "code": textwrap.dedent(bug.code), "story": story.story,
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
    sources = {wrong.name: wrong.source for wrong in zoo.load_wrong_kernels("p21")}
    kind = ""
    for row in ordered():
        if kind_of(row) != kind:
            kind = kind_of(row)
            title_of_kind = html.escape(f"{kind}: {KINDS[kind][0]}")
            lines.append(
                f'<tr class="kind"><th scope="rowgroup" colspan="{len(CHECKS) + 1}">{title_of_kind}</th></tr>'
            )
        cells = "".join(CELLS[row[name]] for name in CHECKS)
        name = html.escape(title(row["version"])) + (" ⚑" if sources[row["version"]] else "")
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    totals = "".join(f"<td>{found_by[name]}</td>" for name in CHECKS)
    lines.append(
        f'</tbody><tfoot><tr><th scope="row">finds, of {len(ordered())}</th>{totals}</tr></tfoot></table>'
    )
    data = json.dumps({"checks": CHECKS, "bugs": bugs()}, ensure_ascii=False).replace("</", "<\\/")
    return "\n".join(lines) + f'\n<script type="application/json" class="catches-data">{data}</script>'


def kinds_table() -> str:
    """Return the kinds of mistake, the calls that show them, and how many there are and gradcheck finds, as a table."""
    count, seen = Counter[str](), Counter[str]()
    for row in ordered():
        count[kind_of(row)] += 1
        seen[kind_of(row)] += int(row["gradcheck float64"])
    lines = [[kind, KINDS[kind][0], str(count[kind]), str(seen[kind])] for kind in count]
    return table(["kind", "a call that shows it", "bugs", "found by gradcheck"], lines, "llrr")


FILES = {"gradcheck_matrix.html": matrix, "gradcheck_kinds.md": kinds_table}
