"""What `p23 --claims` measures, row by row: the candidates' and methods' names, the sizes, and rows kept in a CSV file."""

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.errors import BadUse

LARGE = {"lengths": (512, 1024, 2048, 4096, 8192), "batch": 8, "heads": 12, "dim": 64}
SMALL = {"lengths": (32, 64, 128), "batch": 1, "heads": 2, "dim": 16}
"""Sizes on a GPU, those that the published memory follows from, and on a CPU."""
SDPA, LAYER, TWO_PASSES, ONE_PASS = "SDPA", "p23", "two passes", "one pass"
AUTOGRAD, CUSTOM = "autograd", "custom"
OWN, FAIR = "own", "fair"


@dataclass(frozen=True)
class Row:
    """One candidate at one length, by one method; `failed` says why where it came to nothing.

    Attributes:
        length: Queries, and keys.
        method: OWN or FAIR.
        who: AUTOGRAD, CUSTOM, SDPA, LAYER, TWO_PASSES or ONE_PASS.
        ms: Milliseconds of a forward and a backward pass.
        peak: Bytes at the peak; 0 where the device does not say.
        kept: Bytes that autograd keeps for the backward pass, the inputs among them.
        same_bits: Whether two runs gave the same gradients, "" where not asked.
    """

    length: int
    method: str
    who: str
    ms: float = 0.0
    peak: int = 0
    kept: int = 0
    same_bits: str = ""
    failed: str = ""
    batch: int = 0
    heads: int = 0
    dim: int = 0
    device: str = ""
    torch: str = ""
    max: str = ""
    date: str = ""


def on(row: Row, facts: dict[str, str], sizes: dict[str, int]) -> Row:
    """The row with its machine and sizes."""
    own = {name: facts[name] for name in ("device", "torch", "max", "date")}
    return replace(row, **own, **sizes)


def candidate_row(rows: Iterable[Row], length: int, method: str, who: str) -> Row | None:
    """The row of a candidate, or None."""
    chosen = (r for r in rows if (r.length, r.method, r.who) == (length, method, who))
    return next(chosen, None)


def kept_as_measured(rows: Iterable[Row], path: Path | None) -> list[Row]:
    """The rows, each written to a CSV as soon as it is there. Raises BadUse where the file cannot be written."""
    if path is None:
        return list(rows)
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            done = []
            for row in rows:
                writer.writerow(asdict(row))
                file.flush()
                done.append(row)
            return done
    except OSError as error:
        raise BadUse(f"--csv {path}: {error.strerror}") from error


def read(path: Path) -> list[Row]:
    """The rows of a CSV, or of a record of the book with its lines of facts. Raises BadUse where it is none of these."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = file.read().splitlines()
        facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        shared = {"device": facts["machine"], "date": facts["date"]} if facts else {}
        table = csv.DictReader(line for line in lines if not line.startswith("# "))
        return [row_of(shared | texts) for texts in table]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise BadUse(f"--read {path}: no rows of p23 --claims ({error})") from error


def row_of(texts: dict[str, str]) -> Row:
    """A row from the texts of a CSV; columns that are no field are left out."""
    numbers: dict[str, Any] = {"ms": float(texts["ms"])}
    for name in ("length", "peak", "kept", "batch", "heads", "dim"):
        numbers[name] = int(texts[name])
    names = {field.name for field in fields(Row)} - numbers.keys()
    rest: dict[str, Any] = {name: text for name, text in texts.items() if name in names}
    return Row(**numbers, **rest)
