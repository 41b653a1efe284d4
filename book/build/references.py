"""What a page says of measurements, by reference: `{{= EXPRESSION | FORMAT }}` stands for a number of a record, and
`{{check EXPRESSION}}` for a statement that must hold.

An expression is Python. Each record is a function by its name: `fusion("median_us", M=16, candidate="fused")` is the one
number that has these values in these columns (`pass_` for the column `pass`), `fusion.all(...)` the list of all; what
several pages derive stands in `book/figures/said.py`. FORMAT is Python's (`.1f`, `.0%`), `us` for a time in microseconds, or
`words` for a share in words. On a page that shows a record, by a table, a picture or a reference, a number with a unit or a ratio
must come from a reference, and words that compare, such as "a third of the time", from one too, or a check of their paragraph
holds them. A paragraph that ends in `<!-- typed: WHY -->` may have its own; so may a page that begins, below its heading, with
`<!-- typed throughout: WHY -->`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from book.figures import bench_results, said
from book.measure import record
from book.measure.record import Record

REFERENCE = re.compile(
    r"\{\{(?P<kind>=|check )\s*(?P<expression>.+?)\s*(?:\|\s*(?P<format>[^|{}]+?)\s*)?\}\}", re.S
)
GENERATED = re.compile(r"\{\{#include [^}]*?generated/([\w.]+)\}\}")
TYPED = re.compile(r"<!-- typed: \S.*?-->", re.S)
TYPED_PAGE = re.compile(r"# .*\n\n<!-- typed throughout: \S.*?-->")
NO_PROSE = re.compile(
    r"^[ >]*(?P<ticks>`{3,})[^\n]*\n.*?^[ >]*(?P=ticks)[ ]*$|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)]*\)",
    re.S | re.M,
)
MEASURED = re.compile(
    r"(?<![\w.,])\d(?:[\d.,]*\d)?(?:&nbsp;|\s)?(?:µs|ms|ns|s|MiB|GiB|[KMGT]B|[KMGT]B/s|TFLOP/s|%|times)(?![\w/])"
    r"|(?<![\w.,])\d+\.\d\d(?![\w.])"
)
"""A number with a unit of what is measured, or a ratio with two decimals."""
FRACTION = r"(?:an?|one|two|three|four) (?:tenth|ninth|eighth|seventh|sixth|fifth|quarter|third)s?"
TAKEN = r"(?:[\w'’-]+ ){0,4}?(?:time|rate|memory|bytes|peak|step|pass|passes|launch)"
COMPARED = re.compile(
    (
        rf"\b(?:{FRACTION}|half|twice|(?:two|three|four|five|six|seven|eight|nine|ten|twenty|a hundred) times) as (?:long|fast|slow|much|many|often|far)\b"
        rf"|\b(?:{FRACTION}|half) (?:of {TAKEN}|faster|slower|longer|shorter|less|more|lower|higher)\b"
        rf"|\b(?:half|twice) (?:the|its|their|that) {TAKEN}\b"
        rf"|\b(?:up to|about|some|nearly|(?:less|more|fewer) than|at most|at least|within|only) (?:{FRACTION}|half|twice)\b"
    ).replace(" ", r"\s+"),  # a line may end anywhere
    re.I,
)
"""A comparison in words: twice as long, a third of the time, up to a fifth."""
SHARES = {
    1 / 10: "a tenth", 1 / 8: "an eighth", 1 / 7: "a seventh", 1 / 6: "a sixth", 1 / 5: "a fifth", 1 / 4: "a quarter",
    1 / 3: "a third", 2 / 5: "two fifths", 1 / 2: "half", 3 / 5: "three fifths", 2 / 3: "two thirds",
    3 / 4: "three quarters", 4 / 5: "four fifths", 1: "all",
}  # fmt: skip
CLOSE = 0.06
"""How far a share may be from the words for it, of it."""


def words(share: float) -> str:
    """A share as one says it: 0.34 is a third. Raises ValueError for one that is near no such words."""
    near = min(SHARES, key=lambda known: abs(share / known - 1))
    if abs(share / near - 1) > CLOSE:
        raise ValueError(f"{share:.3f} is near no share with a name")
    return SHARES[near]


def us(microseconds: float) -> str:
    """A time as the tables write it."""
    return bench_results.time_text(microseconds)


FORMATS: dict[str, Callable[[float], str]] = {"words": words, "us": us}


def names() -> dict[str, Any]:
    """What an expression may use."""
    return {**vars(said), **{name: said.Rows(name) for name in record.names()}}


def resolve(text: str, known: dict[str, Any], fault: Callable[[str, str], None]) -> str:
    """The text with its references replaced; `fault` takes a reference and what is wrong with it."""

    def value(reference: re.Match) -> str:
        try:
            result = eval(reference["expression"], dict(known))  # an expression of the book's own page
            if reference["kind"] != "=":
                if not result:
                    fault(reference[0], f"is not so: {reference['expression']}")
                return ""
            form = reference["format"] or ""
            return FORMATS[form](result) if form in FORMATS else format(result, form)
        except Exception as error:  # whatever a page's expression raises is a fault of the page
            fault(reference[0], f"{reference['expression']}: {type(error).__name__}: {error}")
            return reference[0]

    return REFERENCE.sub(value, text)


def sources(generated: Path) -> dict[str, list[str]]:
    """Generated file -> the records that it was made from."""
    file = generated / "records.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def records_of(text: str, made_from: dict[str, list[str]]) -> set[str]:
    """The records whose numbers a page shows by its tables and pictures."""
    return {name for include in GENERATED.findall(text) for name in made_from.get(include, ())}


def typed_numbers(text: str, made_from: dict[str, list[str]]) -> Iterator[tuple[int, str]]:
    """Place and message of what somebody typed in the prose of a page that shows a record: each measured number, and each comparison
    in words that no check of its paragraph holds."""
    if TYPED_PAGE.match(text) or not (records_of(text, made_from) or REFERENCE.search(text)):
        return
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    prose = REFERENCE.sub(blank, NO_PROSE.sub(blank, text))
    for paragraph in re.finditer(r"(?:^(?![|#]|<(?!!--)).+\n?)+", prose, re.M):
        if TYPED.search(paragraph[0]):
            continue
        if number := MEASURED.search(paragraph[0]):
            yield (
                paragraph.start() + number.start(),
                f"`{number[0]}` is typed beside a record: take it from the record, {{{{= ... }}}}, or end the "
                "paragraph with <!-- typed: why -->",
            )
        words = COMPARED.search(paragraph[0])
        if words and "{{check " not in text[paragraph.start() : paragraph.end()]:
            yield (
                paragraph.start() + words.start(),
                f"`{' '.join(words[0].split())}` compares what was measured: take it from the record, {{{{= ... | words }}}}, "
                "hold it by {{check ...}}, or end the paragraph with <!-- typed: why -->",
            )


def note(names: Iterable[str]) -> str:
    """Where the numbers of a page are from, folded; what is older than its kernels is named in the open."""
    records = [record.read(name) for name in names]
    if not records:
        return ""
    old = [each.question for each in records if each.changed]
    said = f"Measured: {len(records)} record{'s' * (len(records) != 1)}"
    said += f", {f'{len(old)} ' * (len(old) < len(records))}older than today's kernels" if old else ""
    items = "".join(f"<li>{line(each)}</li>" for each in records)
    return f'<details class="records">\n<summary>{said}</summary>\n<ul>{items}</ul>\n</details>'


def line(one: Record) -> str:
    """One record: its question, where and when, how, and whether its kernels are other ones now."""
    changed = (
        f" <strong>The kernels of {', '.join(one.changed)} have changed since.</strong>"
        if one.changed
        else ""
    )
    return f"{one.question} {one.source} <code>{one.command}</code>.{changed}"
