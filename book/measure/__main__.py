"""The runner of every record: `python -m book.measure NAME ...` measures and writes book/records/NAME.csv.

`--output FOLDER` writes elsewhere, `--list` says what there is and which records are older than their kernels. What is measured
stands in `measurements.toml`.
"""

import argparse
import csv
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from book.measure import record
from book.measure.record import FACTS, Record, Row

TABLE = Path(__file__).absolute().parent / "measurements.toml"
MACHINE = ("machine", "device")
VERSIONS = ("torch", "triton", "max", "transformers")


def table() -> dict[str, dict]:
    """Name of a record -> how it is measured."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def as_record(name: str, entry: dict, rows: list[Row], facts: Row) -> Record:
    """The record of some rows: what all of them share stands above the table.

    Args:
        facts: What is known of this machine, where the rows do not say it.
    """
    shared = {
        each: rows[0][each] for each in FACTS if len({row.get(each) for row in rows}) == 1 and each in rows[0]
    }
    known = {**facts, **shared}
    machine = next(known[each] for each in MACHINE if known.get(each))
    return Record(
        name,
        entry["question"],
        machine,
        known["date"],
        f"python -m book.measure {name}",
        known.get("driver", ""),
        shared.get("protocol", ""),
        {each: known[each] for each in VERSIONS if known.get(each)},
        {name: record.kernels_of(name) for name in entry.get("kernels", ())},
        entry.get("units", {}),
        tuple(dict.fromkeys(FACTS, "") | row for row in rows),
    )


def rows_of(command: str, seconds: float) -> list[Row]:
    """The rows that a command writes within some seconds; it says where it was stopped or failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        words = [str(file) if word == "FILE" else word for word in shlex.split(command)]
        try:
            code = subprocess.run([sys.executable, *words], cwd=record.ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            print(f"exit code {code}: {command}", file=sys.stderr, flush=True)
        if not file.is_file():
            return []
        with file.open(newline="", encoding="utf-8") as lines:
            return [row for row in csv.DictReader(lines) if None not in row.values()]


def measure(name: str, entry: dict) -> list[Row]:
    """The rows of a record. Raises RuntimeError where there are none."""
    commands = [entry[each] for each in ("command", "also") if each in entry]
    rows = [row for command in commands for row in rows_of(command, entry["seconds"])]
    if not rows:
        raise RuntimeError(f"{name}: no rows")
    return rows


def facts() -> Row:
    """Machine, driver, versions and date."""
    import torch

    from harness.bench.machine import describe_machine

    return describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def state(name: str) -> str:
    """One line on a record: when it was measured, and whether its kernels are other ones now."""
    if name not in record.names():
        return f"{name}: not measured yet"
    known = record.read(name)
    changed = f"; kernels have changed: {', '.join(known.changed)}" if known.changed else ""
    return f"{name}: {known.machine}, {known.date}{changed}"


def main(arguments: list[str] | None = None) -> int:
    """Measures the named records; exit 1 where one of them came to nothing."""
    entries = table()
    parser = argparse.ArgumentParser(prog="python -m book.measure", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(entries)}")
    parser.add_argument("--output", type=Path, default=record.FOLDER, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="say what there is, measure nothing")
    flags = parser.parse_args(arguments)
    unknown = set(flags.names) - set(entries)
    if unknown:
        parser.error(f"no such record: {', '.join(sorted(unknown))}")
    if flags.list or not flags.names:
        print(*(state(name) for name in sorted({*record.names(), *entries})), sep="\n")
        return 0
    failed = 0
    for name in flags.names:
        begun = time.monotonic()
        try:
            path = record.write(
                as_record(name, entries[name], measure(name, entries[name]), facts()), flags.output
            )
            print(f"{path}, {time.monotonic() - begun:.0f} s", flush=True)
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
