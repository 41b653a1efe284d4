"""The one form of a measured table: a CSV below lines that say what was asked, where, when, how and of which kernels.

A record is `book/records/NAME.csv`. Its first lines are `# field: value`, with the fields of `Record`; then come the columns
and the rows. The runner (`python -m book.measure NAME`) writes it, `read` reads it, and nothing else does either. A column
that holds numbers has a unit, by the end of its name or in the field `units`. `kernels` names the puzzles whose kernels
were timed, each with a hash of their code, comments left out: where it is no longer theirs, the record is older than what it
speaks of, and its page says so.
"""

import csv
import datetime
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from harness.toolchain.mojo_items import Items

ROOT = Path(__file__).absolute().parents[2]
FOLDER = ROOT / "book" / "records"
FIELDS = ("question", "machine", "driver", "versions", "date", "protocol", "command", "kernels", "units")
REQUIRED = ("question", "machine", "date", "command")
FACTS = (
    "device", "machine", "driver", "torch", "triton", "max", "transformers", "date", "command", "protocol",
)  # fmt: skip
"""Columns of a script's own table that belong above the table where every row says the same."""
UNITS = {
    "us": "µs",
    "ms": "ms",
    "s": "s",
    "bytes": "bytes",
    "mib": "MiB",
    "peak": "bytes",
    "kept": "bytes",
    "tflops": "TFLOP/s",
    "gbs": "GB/s",
    "percent": "%",
    "error": "1",
    "ratio": "1",
    "loss": "nats",
}
"""End of a column's name -> the unit of its numbers."""
BEGINNINGS = {"of": "1", "ratio": "1", "percent": "%"}
"""The same for how its name begins."""
Row = dict[str, str]


@dataclass(frozen=True)
class Record:
    """A measured table, and what is known of it.

    Attributes:
        versions: Package -> version, of those that the times depend on.
        kernels: Puzzle or layer -> hash of its kernels when they were timed.
        units: Column -> unit, where the column's name does not end in it.
        rows: Column -> text, a dict for each row; the facts that all share are in each.
    """

    name: str
    question: str
    machine: str
    date: str
    command: str
    driver: str = ""
    protocol: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    @property
    def changed(self) -> list[str]:
        """Return the puzzles and layers whose kernels have changed since they were timed."""
        return [name for name, digest in self.kernels.items() if digest != kernels_of(name)]

    @property
    def source(self) -> str:
        """One sentence about machine, versions and date."""
        driver = [f"driver {self.driver}"] if self.driver else []
        versions = [f"{name} {version}" for name, version in self.versions.items()]
        return f"{', '.join([self.machine, *driver, *versions, self.date])}."

    def unit(self, column: str) -> str:
        """The unit of a column. Raises KeyError for one that has none."""
        if column in self.units:
            return self.units[column]
        first, _, last = column.lower().partition("_")
        return BEGINNINGS.get(first) or UNITS[last.rpartition("_")[2] or first]


# ---- Reading and writing ------------------------------------------------------------------------------------


def pairs(text: str) -> dict[str, str]:
    """`name value, name value` as a dict."""
    split = (each.strip().rpartition(" ") for each in text.split(",") if each.strip())
    return {name: value for name, _, value in split}


def parse(name: str, lines: Iterable[str]) -> Record:
    """The record that some lines hold. Raises ValueError, with the line, for what is no record."""
    texts, header, known = [], True, {}
    for number, line in enumerate(lines, 1):
        matched = re.fullmatch(r"# (\w+): (.*)\n?", line) if header else None
        header = matched is not None
        if matched is None:
            texts.append(line)
        elif matched[1] not in FIELDS or matched[1] in known:
            raise ValueError(f"{name}.csv:{number}: no field `{matched[1]}`, or there twice")
        else:
            known[matched[1]] = matched[2].strip()
    missing = [each for each in REQUIRED if not known.get(each)]
    if missing:
        raise ValueError(f"{name}.csv:1: without {', '.join(missing)}")
    versions, kernels, units = (pairs(known.pop(each, "")) for each in ("versions", "kernels", "units"))
    shared = {each: known[each] for each in ("driver", "date", "protocol", "command") if each in known}
    shared |= {"device": known["machine"], "machine": known["machine"], **versions}
    rows = tuple(shared | row for row in csv.DictReader(texts))
    if not rows or any(None in row or None in row.values() for row in rows):
        raise ValueError(f"{name}.csv: no rows, or rows of other lengths than the head")
    return Record(name, **known, versions=versions, kernels=kernels, units=units, rows=rows)


@cache
def _load(path: Path, changed_at: int) -> Record:
    with path.open(newline="", encoding="utf-8") as file:
        return parse(path.stem, file)


used: set[str] = set()
"""The names of the records that were read since somebody cleared it: what a page was made from."""


def read(name: str, folder: Path = FOLDER) -> Record:
    """A record by its name. Raises ValueError where it is none, FileNotFoundError where there is none."""
    used.add(name)
    path = folder / f"{name}.csv"
    return _load(path, path.stat().st_mtime_ns)


def rows(name: str) -> list[Row]:
    """The rows of a record by its name."""
    return list(read(name).rows)


def sizes(*names: str) -> list[tuple[int, int, int]]:
    """Return M, H and O of the rows of some records, each size once, so that a record is measured again at its sizes."""
    found = (row for name in names for row in rows(name) if row["M"])
    return list(dict.fromkeys((int(row["M"]), int(row["H"]), int(row["O"])) for row in found))


class Rows:
    """A record in an expression: its numbers by column and by the values of other columns (`pass_` for the column `pass`)."""

    def __init__(self, name: str):
        self.name = name

    @property
    def gpu(self) -> str:
        """What measured it, in a word: H200."""
        return rows(self.name)[0]["device"].removeprefix("NVIDIA ").split()[0]

    @property
    def day(self) -> str:
        """When it was measured, in words: 29 November 2026."""
        return f"{datetime.date.fromisoformat(read(self.name).date):%-d %B %Y}"

    def select(self, *columns: str, **where: object) -> list[Row]:
        """The rows with these values. Raises LookupError where the record lacks a column."""
        wanted = {key.rstrip("_"): str(value) for key, value in where.items()}
        every = rows(self.name)
        if unknown := {*columns, *wanted} - every[0].keys():
            raise LookupError(f"{self.name} has no column {', '.join(sorted(unknown))}")
        return [row for row in every if all(row[key] == value for key, value in wanted.items())]

    def all(self, number: str, /, **where: object) -> list[float]:
        """The numbers of every row with these values, rows without a number left out. Raises LookupError where none is."""
        matching = [float(row[number]) for row in self.select(number, **where) if row[number]]
        if not matching:
            said = ", ".join(f"{key.rstrip('_')} = {value}" for key, value in where.items())
            raise LookupError(f"{self.name}: no row with {said}")
        return matching

    def __call__(self, number: str, /, **where: object) -> float:
        """The one number with these values. Raises LookupError where there is none or more than one."""
        matching = self.all(number, **where)
        if len(matching) > 1:
            raise LookupError(f"{self.name}: {len(matching)} rows with these values, not one")
        return matching[0]


def by(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by what they say in some columns, in the order in which that first comes."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[column] for column in columns), []).append(row)
    return grouped


def names(folder: Path = FOLDER) -> list[str]:
    """Every record that there is."""
    return sorted(path.stem for path in folder.glob("*.csv"))


def write(record: Record, folder: Path = FOLDER) -> Path:
    """Writes a record. Raises ValueError where a column of numbers with a decimal point has no unit."""
    shared = {name for name in FACTS if len({row.get(name) for row in record.rows}) == 1}
    columns = [name for name in record.rows[0] if name not in shared]
    for column in columns:
        if any(re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", row[column] or "") for row in record.rows):
            try:
                record.unit(column)
            except KeyError:
                raise ValueError(f"{record.name}: the column {column} has no unit") from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        for name in FIELDS:
            value = getattr(record, name)
            text = (
                ", ".join(f"{key} {each}" for key, each in value.items())
                if isinstance(value, dict)
                else value
            )
            if text:
                file.write(f"# {name}: {text}\n")
        table = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        table.writeheader()
        table.writerows(record.rows)
    return path


# ---- Which kernels ------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Mojo code without documentation, comments, empty lines and commas before a closing bracket."""
    text = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    lines = (re.sub(r"\s*#.*", "", line).rstrip() for line in text.splitlines())
    return re.sub(r",(\s*[)\]])", r"\1", "\n".join(line for line in lines if line))


@cache
def kernels_of(name: str, root: Path = ROOT) -> str:
    """Return a hash of the kernels of a puzzle or a layer, and of the shared code that they need, in whatever files."""
    layers = root / "harness" / "nn" / "kernels"
    if (layers / name).is_dir():
        folders, libraries = [layers / name], [layers / "common", root / "solutions" / "shared"]
    else:
        folder = root / "solutions" / name
        folders, libraries = [folder, folder / "op"], [root / "solutions" / "shared"]
    own = Items({path.name: text for path, text in texts(folders).items() if path.stem != "record"})
    shared = Items({str(path): text for path, text in texts(libraries).items()})
    modules = {folder.name for folder in libraries}
    imports = [each for source in own.sources.values() for each in source.imports]
    names = [name for each in imports if modules & {*each.module.split(".")} for name, _ in each.names]
    items = [item for source in own.sources.values() for item in source.items] + shared.find_dependencies(
        names
    )
    digest = hashlib.sha256()
    for text in sorted(f"{item.name}\n{body}\n" for item in items if (body := code(item.text))):
        digest.update(text.encode())
    return digest.hexdigest()[:12]


def texts(folders: list[Path]) -> dict[Path, str]:
    """Return the Mojo files of some folders."""
    return {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.mojo")}
