"""References from pages to records: numbers, conditions, verbal shares, errors, and unreferenced numbers."""

import html

import pytest
from book_paths import BOOK

from book.build import references
from book.figures import said
from book.measure import record
from book.measure.record import Record

ROWS = (
    {"M": "4", "pass": "both", "who": "fast", "median_us": "10.0"},
    {"M": "4", "pass": "both", "who": "eager", "median_us": "30.0"},
    {"M": "8", "pass": "both", "who": "fast", "median_us": ""},
)
SOURCES = {"table.md": ["taken"], "chart.svg": ["taken"], "other.md": []}


@pytest.fixture
def known(monkeypatch):
    """A record `taken` with three rows, one of them without a number."""
    monkeypatch.setattr(record, "rows", lambda name: list(ROWS))
    return {"taken": said.Rows("taken")}


def resolve(text, known):
    """Resolve a text's references; return the new text and the errors."""
    faults = []
    return references.resolve(text, known, lambda source, message: faults.append((source, message))), faults


def test_reference_is_replaced_by_the_recorded_number(known):
    text = (
        "It took {{= taken('median_us', M=4, pass_='both', who='fast') | .1f }} µs, {{= taken('median_us', who='fast') | us }}, "
        "{{= taken('median_us', who='fast') / taken('median_us', who='eager') | words }}, {{= 1/4 | .0% }}."
        "{{check taken('median_us', who='fast') < 11}}"
    )
    assert resolve(text, known) == ("It took 10.0 µs, 10.0 µs, a third, 25%.", [])
    assert read_all_taken(known) == [10.0, 30.0]


def read_all_taken(known):
    return known["taken"].all("median_us", pass_="both")


@pytest.mark.parametrize(("device", "word"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100")])
def test_page_mentions_the_gpu_of_a_record(known, monkeypatch, device, word):
    monkeypatch.setattr(record, "rows", lambda name: [{"device": device}])
    assert resolve("On one {{= taken.gpu }}.", known) == (f"On one {word}.", [])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{{= taken('median_us', M=5) }}", "LookupError: taken: no row with M = 5"),
        ("{{= taken('median_us', M=4) }}", "LookupError: taken: 2 rows with these values, not one"),
        ("{{= taken('ms') }}", "LookupError: taken has no column ms"),
        ("{{= taken('median_us', how=1) }}", "LookupError: taken has no column how"),
        ("{{= gone }}", "NameError: name 'gone' is not defined"),
        ("{{= 0.45 | words }}", "ValueError: 0.450 is near no share with a name"),
        ("{{check 2 < 1}}", "is not so: 2 < 1"),
    ],
)
def test_false_check_or_missing_record_is_reported(known, reference, message):
    _, ((source, description),) = resolve(f"It is {reference} here.", known)
    assert source == reference and message in description


PAGE = "# A page\n\n{{#include ../.cache/generated/table.md}}\n\n%s\n"


@pytest.mark.parametrize(
    "number", ["12.5 µs", "3 ms", "85 %", "15&nbsp;%", "1.4 times", "0.93", "4.8 TB/s", "1,024 MiB", "270 ns"]
)
def test_typed_measurement_is_reported(number):
    ((position, message),) = references.typed_numbers(PAGE % f"It is {number} here.", SOURCES)
    assert f"`{number}` is typed beside a record" in message
    assert (PAGE % f"It is {number} here.")[position:].startswith(number)


@pytest.mark.parametrize(
    "text",
    [
        "It is 12.5 µs here. <!-- typed: the data sheet -->",
        "It is 12.5 µs here.\n<!-- typed: the data sheet -->",
        "It is {{= taken('median_us', M=4) | .1f }} µs here.",
        "```text\n12.5 µs\n```",
        "| 12.5 µs | a table |",
        "`12.5 µs` and $0.25$ and [a link](https://example.org/0.25)",
        "Sizes 4,096: 768 → 3,072, 64 lanes, 2026, version 2.11.0, 16 x 16.",
    ],
)
def test_marked_and_unmeasured_numbers_pass(text):
    assert list(references.typed_numbers(PAGE % text, SOURCES)) == []


@pytest.mark.parametrize(
    "words",
    [
        "a third of the time", "three quarters of PyTorch's own memory", "half of the peak", "twice its time", "twice as long",
        "ten times as many", "a fifth faster", "up to a fifth", "less than half", "about two\nthirds",
    ],
)  # fmt: skip
def test_unchecked_comparison_in_words_is_reported(words):
    text = f"The kernels take {words} here."
    ((position, message),) = references.typed_numbers(PAGE % text, SOURCES)
    assert f"`{' '.join(words.split())}` compares what was measured" in message
    assert (PAGE % text)[position:].startswith(words)
    for marker in ("{{check 1 < 2}}", "<!-- typed: arithmetic -->"):
        assert list(references.typed_numbers(PAGE % f"{text}{marker}", SOURCES)) == []


@pytest.mark.parametrize(
    "text",
    [
        "It takes {{= taken('median_us', M=4) | words }} of the time.",
        "Half of the rows, the second half, twice a step, a third branch, half a unit in the last place, four times in all.",
    ],
)
def test_references_and_counts_are_not_typed_comparisons(text):
    assert list(references.typed_numbers(PAGE % text, SOURCES)) == []


def test_numbers_pass_on_pages_without_records_or_with_a_reason():
    reference_text = "{{= taken('median_us') }}"
    for included in ("generated/chart.svg}}", "generated/table.md}}"):
        page = f"# A page\n\n{{{{#include ../.cache/{included}\n\nIt is 12.5 µs here.\n"
        assert len(list(references.typed_numbers(page, SOURCES))) == 1
        why = page.replace("\n\n", "\n\n<!-- typed throughout: no record -->\n\n", 1)
        assert list(references.typed_numbers(why, SOURCES)) == []
    assert (
        len(list(references.typed_numbers(f"It is {reference_text}.\n\nIt is 12.5 µs here.\n", SOURCES))) == 1
    )
    for include in ("other.md", "gone.md"):
        page = f"{{{{#include ../.cache/generated/{include}}}}}\n\nIt is 12.5 µs here.\n"
        assert list(references.typed_numbers(page, SOURCES)) == []


def test_each_page_with_a_record_reports_unchecked_comparisons(site):
    sources = references.sources(BOOK / ".cache" / "generated")
    texts = {str(page.relative_to(BOOK / "src")): page.read_text() for page in (BOOK / "src").rglob("*.md")}
    pages_with_errors = {
        name: text for name, text in texts.items() if "{{= " in text or references.records_of(text, sources)
    }
    wrong = "\n\nIt takes about a third of the time.\n"
    silent = {
        name
        for name, text in pages_with_errors.items()
        if not list(references.typed_numbers(text + wrong, sources))
    }
    assert silent == {"notebook.md"} and len(pages_with_errors) > 20


def test_page_mentions_the_record_of_a_derived_number(site):
    """The essay has no table or picture of attention's times, only a ratio of two times."""
    page = (site / "essays" / "flash_attention_backward.html").read_text(encoding="utf-8")
    assert record.read("attention").command in html.unescape(page.split('<details class="records">')[1])


def test_page_ends_with_its_records_and_marks_outdated_ones(monkeypatch):
    used = references.records_of("{{#include ../.cache/generated/chart.svg}}", SOURCES)
    assert used == {"taken"}
    records = {
        name: Record(
            name, f"What of {name}?", "A GPU", "2026-01-02", f"python -m book.measure {name}", kernels=kernels
        )
        for name, kernels in (("other", {}), ("taken", {"p22": "0" * 12}))
    }
    monkeypatch.setattr(record, "read", records.__getitem__)
    note = references.note(["other", *used])
    assert "Measured: 2 records, 1 older than today's kernels" in note
    assert note.count("The kernels of p22 have changed since.") == 1
    assert "What of other? A GPU, 2026-01-02. <code>python -m book.measure other</code>." in note
    assert references.note([]) == ""
