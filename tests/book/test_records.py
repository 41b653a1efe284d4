"""Records: reading, writing, errors with line numbers, and detection of changed kernels."""

import dataclasses
import html
from types import SimpleNamespace

import pytest

from book.measure import __main__ as runner
from book.measure import record, shared
from book.measure.record import Record

MEASURED = Record(
    "r",
    "How long?",
    "A machine",
    "2026-11-24",
    "python -m x",
    driver="1.2",
    versions={"torch": "2.11.0+cu130", "max": "26.7.0"},
    kernels={"p22": "0" * 12},
    units={"apart": "1"},
    rows=({"M": "4", "median_us": "1.5", "apart": "2.0e-03"}, {"M": "8", "median_us": "2.5", "apart": ""}),
)


def test_record_round_trip(tmp_path):
    record.write(MEASURED, tmp_path)
    loaded = record.read("r", tmp_path)
    assert dataclasses.replace(loaded, rows=()) == dataclasses.replace(MEASURED, rows=())
    assert [{column: row[column] for column in ("M", "median_us", "apart")} for row in loaded.rows] == [
        *MEASURED.rows
    ]
    assert loaded.rows[0]["torch"] == "2.11.0+cu130" and loaded.rows[1]["device"] == "A machine"
    assert (loaded.unit("median_us"), loaded.unit("apart")) == ("µs", "1")
    assert record.names(tmp_path) == ["r"]


def test_number_without_a_unit_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="r: the column apart has no unit"):
        record.write(dataclasses.replace(MEASURED, units={}), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "without question, machine, date, command"),
        ("# question: q\n# nothing: x\na\n1\n", "r.csv:2: no field `nothing`"),
        ("# question: q\n# question: q\na\n1\n", "r.csv:2: no field `question`, or there twice"),
        ("# question: q\n# machine: m\n# date: d\n# command: c\na,b\n1\n", "rows of other lengths"),
        ("# question: q\n# machine: m\n# date: d\n# command: c\na,b\n", "no rows"),
    ],
)
def test_malformed_record_is_rejected(tmp_path, text, message):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        record.read("r", tmp_path)


def test_only_a_changed_kernel_outdates_a_record(tmp_path):
    folder = tmp_path / "solutions" / "p1" / "op"
    folder.mkdir(parents=True)
    file = folder / "kernel.mojo"
    file.write_text('def f(x: Int,):\n    """Says."""\n    g()  # why\n')
    first = record.kernels_of("p1", tmp_path)
    file.write_text('def f(x: Int):\n    """Says more."""\n\n    # other\n    g()\n')
    record.kernels_of.cache_clear()
    assert record.kernels_of("p1", tmp_path) == first
    file.rename(folder / "moved.mojo")
    record.kernels_of.cache_clear()
    assert record.kernels_of("p1", tmp_path) == first
    (folder / "empty.mojo").write_text('"""Says."""\n\nfrom .moved import f\n\n\n# ---- A heading\n\n')
    record.kernels_of.cache_clear()
    assert record.kernels_of("p1", tmp_path) == first
    (folder / "moved.mojo").unlink()
    file.write_text("def f(x: Int):\n    h()\n")
    record.kernels_of.cache_clear()
    assert record.kernels_of("p1", tmp_path) != first
    assert MEASURED.changed == ["p22"]
    assert dataclasses.replace(MEASURED, kernels={"p22": record.kernels_of("p22")}).changed == []


def test_layer_hash_includes_needed_common_code(tmp_path):
    layers = tmp_path / "harness" / "nn" / "kernels"
    for name, text in (("layer", "from common.rows import total\n\ndef f():\n    total()\n"), ("common", "")):
        (layers / name).mkdir(parents=True)
        (layers / name / "rows.mojo").write_text(text)
    hashes = []
    for text in (
        "def total():\n    a()\n",
        "def total():\n    b()\n",
        "def total():\n    b()\ndef g():\n    c()\n",
    ):
        (layers / "common" / "rows.mojo").write_text(text)
        record.kernels_of.cache_clear()
        hashes.append(record.kernels_of("layer", tmp_path))
    assert hashes[0] != hashes[1] == hashes[2]


def test_puzzle_hash_includes_only_needed_shared_code(tmp_path):
    op, shared = tmp_path / "solutions" / "p1" / "op", tmp_path / "solutions" / "shared"
    op.mkdir(parents=True)
    shared.mkdir()
    (op / "kernel.mojo").write_text("from .shared.rows import total\n\ndef f():\n    total()\n")
    (shared / "words.mojo").write_text("def word():\n    a()\n")
    rows = "from .words import word\n\ndef total():\n    word()\n\n\ndef other():\n    b()\n"
    hashes = []
    for name, text in (
        ("rows", rows),
        ("rows", rows.replace("b()", "c()")),
        ("words", "def word():\n    b()\n"),
    ):
        (shared / f"{name}.mojo").write_text(text)
        record.kernels_of.cache_clear()
        hashes.append(record.kernels_of("p1", tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


SCRIPT = """
import sys
with open(sys.argv[1], "w") as file:
    file.write("device,date,way,taken_ms\\nA GPU,2026-01-01,one,1.5\\nA GPU,2026-01-01,two,2.5\\n")
"""


def test_common_fields_are_written_above_the_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    entry = {"question": "q?", "command": f"{tmp_path}/script.py FILE", "seconds": 60}
    monkeypatch.setattr(runner, "table", lambda: {"new": entry, "none": entry | {"command": "-c pass"}})
    assert runner.main(["new", "none", "--output", str(tmp_path)]) == 1
    assert "none: no rows" in capsys.readouterr().err
    written = record.read("new", tmp_path)
    assert (written.machine, written.date, written.command) == (
        "A GPU",
        "2026-01-01",
        "python -m book.measure new",
    )
    assert [row["taken_ms"] for row in written.rows] == ["1.5", "2.5"]
    assert "way,taken_ms\n" in (tmp_path / "new.csv").read_text()


def test_script_machine_overrides_the_runners():
    rows = [{"machine": "A CPU, one core", "taken_ms": "1.5"}]
    facts = {"device": "A CPU, 2 threads", "date": "2026-01-01"}
    written = runner.as_record("new", {"question": "q?"}, rows, facts)
    assert (written.machine, written.date) == ("A CPU, one core", "2026-01-01")


def test_stopped_script_keeps_its_rows(tmp_path, monkeypatch):
    def rows():
        yield {"way": "one", "us": "1.5"}
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "rows.csv")])
    with pytest.raises(KeyboardInterrupt):
        shared.write(rows(), ("way", "us", "note"))
    assert (tmp_path / "rows.csv").read_text() == "way,us,note\none,1.5,\n"


def test_graphs_are_replayed_alternately(monkeypatch):
    """The fake clock adds 4 µs to each replay of "slow": two warmup replays, then 10, 14 and 18."""
    taken = {"slow": iter(range(2, 1000, 4)), "fast": iter([1] * 1000)}
    replays = {name: lambda times=times: next(times) for name, times in taken.items()}
    clock = SimpleNamespace(synchronize=lambda: None, measure=lambda call, repeats: float(call()))
    monkeypatch.setattr(shared, "CudaClock", lambda: clock)
    assert shared.medians(replays, 3, burst=5, pause=0.001) == {"slow": 14.0, "fast": 1.0}


def test_slow_or_failing_command_is_reported(capfd):
    assert runner.rows_of("-c import_time", 60) == [] and "exit code 1" in capfd.readouterr().err
    assert runner.rows_of("-c while(1):pass", 1) == [] and "exit code 124" in capfd.readouterr().err


def test_unknown_record_is_a_usage_error():
    with pytest.raises(SystemExit, match="2"):
        runner.main(["nothing"])


def test_runner_lists_records(capsys):
    assert runner.main(["--list"]) == 0
    assert {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()} >= {*runner.table()}


def test_each_record_has_a_command_and_a_page(site):
    assert {*record.names()} == {*runner.table()}
    pages = "".join(
        page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "print.html"
    )
    assert [
        name for name in record.names() if html.escape(record.read(name).question, quote=False) not in pages
    ] == []
