"""Going on with a benchmark that was stopped: which sizes a CSV file holds whole, so that they are not measured again."""

import csv
from dataclasses import astuple
from pathlib import Path

from harness.bench.benchmark import Sizes
from harness.bench.report import Row
from harness.bench.runner import LEFT_OUT, Options
from harness.errors import BadUse


def rows_of_whole_sizes(path: Path, options: Options) -> tuple[list[Row], list[Sizes]]:
    """The rows of a file that can stay, and the sizes that are still to be measured.

    A size is whole where no row says that time had run out, and each column that is asked for has a row: for each pass,
    the memory's but once. Raises BadUse where the file cannot be read or is not of such a run.
    """
    if not path.exists():
        return [], options.sizes
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows: list[Row] = [dict(row) for row in reader]
            names = tuple(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadUse(f"--resume: cannot read {path}: {error}") from error
    if names != options.fields:
        raise BadUse(
            f"--resume: {path} is no CSV of this benchmark; give another --csv or leave --resume out"
        )
    if any(row["dtype"] != options.dtype for row in rows):
        raise BadUse(f"--resume: {path} has rows of another --dtype than {options.dtype}")
    by_size: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_size.setdefault(tuple(str(row[name]) for name in options.benchmark.size_names), []).append(row)
    whole = {size for size, of_size in by_size.items() if is_whole(of_size, options)}
    left = [size for size in options.sizes if tuple(map(str, astuple(size))) not in whole]
    return [row for size in by_size if size in whole for row in by_size[size]], left


def is_whole(rows: list[Row], options: Options) -> bool:
    """Whether the rows of a size are all that this run would measure of it."""
    measured = {(row["column"], row["pass"]) for row in rows if row["median_us"] or row["saved_bytes"]}
    asked = {
        (column, "both" if column == "memory" else direction)
        for column in options.columns
        if column != "host"
        for direction in options.passes
    }
    return asked <= measured and not any(str(row["note"]).startswith(LEFT_OUT) for row in rows)
