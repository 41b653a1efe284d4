"""`pNN --bench`: what the workbook computes, timed beside everything a user would take in its place.

Every candidate is checked against float64 before it is timed; one that is wrong is not timed. All candidates of a
size take turns in one process, ratios are ratios of neighbouring turns, and the floor (bare matrix products) and the
ceilings (a large matrix product, a large copy) are measured in the same run. Columns:

- `graph`: a CUDA graph of one call, replayed in short bursts after a pause. This is the time of the kernels.
- `loop`: plain calls one after the other, between CUDA events; on a CPU by the wall clock. This is what a program
  without graphs waits for.
- `host`: how long a call keeps its caller, at sizes where that is all of it.
- `memory`: bytes that autograd keeps, bytes in use after the forward pass, and the peak of forward and backward.
- `waited`, on request: each call waited for, so that small sizes show the cost of a call; also through MAX alone.
"""

import argparse
import csv
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import torch

from harness.bench.benchmark import COLUMNS, DTYPES, ON_REQUEST, PASSES, Benchmark, Sizes, find_benchmark
from harness.bench.machine import machine
from harness.bench.report import Row, Show
from harness.bench.runner import LEFT_OUT, Bench, Options
from harness.check.options import LARGEST
from harness.console import Parser, make_console, write_json
from harness.errors import BadUse
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.toolchain.disk import check_target

# ---- Flags --------------------------------------------------------------------------------------------------


def make_parser(puzzle: str, benchmark: Benchmark) -> Parser:
    """The flags of `pNN --bench`."""
    flags = Parser(prog=f"{puzzle} --bench", description=benchmark.about)
    flags.add_argument("puzzle", help="which puzzle")
    form = ",".join(benchmark.size_names)
    flags.add_argument(
        "--sizes",
        metavar="LIST",
        help=f'"{form};..." or names: {", ".join(size_words(benchmark))} '
        f"(default: {benchmark.gpu_sizes} on a GPU, {benchmark.cpu_sizes} on a CPU)",
    )
    flags.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    flags.add_argument("--passes", metavar="LIST", default="forward,backward,both", help=", ".join(PASSES))
    flags.add_argument(
        "--columns",
        metavar="LIST",
        default=",".join(column for column in COLUMNS if column not in ON_REQUEST),
        help=f"{', '.join(COLUMNS)}; all (default: all but {', '.join(ON_REQUEST)})",
    )
    for flag, role in (("--variants", "ours"), ("--peers", "peer")):
        flags.add_argument(
            flag, metavar="LIST", default="all", help=f"{', '.join(benchmark.names(role))}; all, none"
        )
    flags.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="turns of every candidate (default: 9)"
    )
    flags.add_argument("--cold-l2", action="store_true", help="empty the L2 cache before every call")
    flags.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start nothing that ends later"
    )
    flags.add_argument("--csv", type=Path, metavar="FILE", help="write every row here, as it is measured")
    flags.add_argument(
        "--resume",
        action="store_true",
        help="keep the sizes that --csv FILE holds whole, and measure the others",
    )
    flags.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    return flags


def make_options(flags: argparse.Namespace, benchmark: Benchmark) -> Options:
    """The options of a run. Raises BadUse, naming the flag, for a value that makes no sense."""
    if flags.rounds < 1:
        raise BadUse(f"--rounds {flags.rounds}: must be at least 1")
    if not flags.budget > 0:
        raise BadUse(f"--budget {flags.budget:g}: must be more than 0 seconds")
    if flags.resume and flags.csv is None:
        raise BadUse("--resume: needs --csv FILE, the file to go on with")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if flags.cold_l2 and not on_gpu:
        raise BadUse("--cold-l2: needs a GPU, and PyTorch sees none")
    if flags.dtype == "tf32" and not on_gpu:
        raise BadUse("--dtype tf32: needs a GPU, and PyTorch sees none")
    # On a CPU there is no graph, and a call keeps its caller for as long as it takes: the loop says it.
    asked = listed("--columns", flags.columns, COLUMNS)
    columns = tuple(column for column in asked if on_gpu or column not in ("graph", "host"))
    if not columns:
        raise BadUse(f"--columns {flags.columns}: needs a GPU, and PyTorch sees none")
    chosen = {
        benchmark.floor,
        *listed("--variants", flags.variants, benchmark.names("ours")),
        *listed("--peers", flags.peers, benchmark.names("peer")),
    }
    return Options(
        benchmark=benchmark,
        sizes=parse_sizes(benchmark, flags.sizes or (benchmark.gpu_sizes if on_gpu else benchmark.cpu_sizes)),
        dtype=flags.dtype or ("bfloat16" if on_gpu else "float32"),
        passes=listed("--passes", flags.passes, PASSES),
        columns=columns,
        candidates=tuple(candidate for candidate in benchmark.candidates if candidate.name in chosen),
        rounds=flags.rounds,
        cold=flags.cold_l2,
        seconds=flags.budget,
        device=device,
    )


def listed(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The members of a list on the command line, in the order of `known`. Raises BadUse for an unknown one."""
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BadUse(f"{flag}: {name!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def size_words(benchmark: Benchmark) -> list[str]:
    """What `--sizes` takes beside numbers."""
    return [*benchmark.named, *(["drawn:SEED (at random)"] if benchmark.drawn else [])]


def parse_sizes(benchmark: Benchmark, text: str) -> list[Sizes]:
    """Sizes from "M,H,O;name;drawn:SEED;...". Raises BadUse for one that is neither positive numbers nor such a word."""
    names = benchmark.size_names
    sizes = []
    for part in (part.strip() for part in text.split(";")):
        numbers = (
            [int(number) for number in part.split(",")] if re.fullmatch(r"\d+(\s*,\s*\d+)*", part) else []
        )
        if part in benchmark.named:
            sizes += benchmark.named[part]
        elif benchmark.drawn and (seed := re.fullmatch(r"drawn:(\d+)", part)):
            sizes += benchmark.drawn(int(seed[1]))
        elif any(number > LARGEST for number in numbers):
            raise BadUse(f"--sizes: {part!r}: the kernels count at most {LARGEST:,}")
        elif len(numbers) == len(names) and all(numbers):
            sizes.append(benchmark.sizes(*numbers))
        else:
            raise BadUse(
                f'--sizes: {part!r} is neither "{",".join(names)}" with {", ".join(names)} >= 1 '
                f"nor one of {', '.join(size_words(benchmark))}"
            )
    return sizes


# ---- Going on with a run that was stopped -------------------------------------------------------------------


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


# ---- The command --------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Runs `pNN --bench ...` and returns its exit code: 1 where a candidate is wrong or one of ours fails."""
    rest = [argument for argument in arguments if argument != "--bench"]
    name = next((argument for argument in rest if argument in puzzle_names()), rest[0] if rest else "")
    benchmark = find_benchmark(find_puzzle(name))
    flags = make_parser(name, benchmark).parse_args(rest)
    options = make_options(flags, benchmark)
    if flags.json not in (None, "-"):
        check_target("--json", flags.json)
    console = make_console(sys.stderr if flags.json == "-" else sys.stdout)
    # torch says so when its thread for backward passes starts; the products are right, and timed later.
    warnings.filterwarnings(
        "ignore", message="Attempting to run cuBLAS, but there was no current CUDA context"
    )
    torch.set_float32_matmul_precision("high" if options.dtype == "tf32" else "highest")
    kept_rows: list[Row] = []
    if flags.resume:
        kept_rows, left = rows_of_whole_sizes(flags.csv, options)
        options = replace(options, sizes=left)
    with csv_file(flags.csv, options, kept_rows) as write_row:
        bench = Bench(options, Show(console), on_row=write_row)
        introduce(bench)
        if flags.resume:
            bench.show.line(
                f"{flags.csv} holds {len(kept_rows)} rows; {len(options.sizes)} sizes are measured"
            )
        try:
            bench.run()
        except KeyboardInterrupt:
            bench.show.line(f"interrupted: {len(bench.rows)} rows were measured{kept(flags, ' and')}")
            raise
        finally:
            if flags.json:
                write_json(as_json(name, bench), flags.json)
    bench.show.line(f"took {time.monotonic() - bench.started:.0f} s{kept(flags, ', the rows')}")
    if bench.faults:
        bench.show.line(f"❌ {bench.faults} wrong or failed; see above")
    return int(bench.faults > 0)


def introduce(bench: Bench) -> None:
    """Says what is measured, on what, and what is not."""
    facts = machine(bench.options.device)
    words = [facts["device"], facts["driver"] and f"driver {facts['driver']}", f"torch {facts['torch']}"]
    words += [f"{name} {facts[name]}" for name in ("triton", "max") if facts[name]]
    bench.show.line(", ".join(word for word in words if word))
    if not bench.cuda:
        bench.show.line(
            "No GPU here: these are times of the CPU paths, and they say nothing about any GPU. "
            "The virtual GPU is never timed."
        )


def kept(flags: argparse.Namespace, who: str) -> str:
    """Where the rows are."""
    return f"{who} are in {flags.csv}" if flags.csv else ""


@contextmanager
def csv_file(path: Path | None, options: Options, kept_rows: list[Row]) -> Iterator:
    """Yields what writes a row at once, after the rows that are kept, or None without a path. Raises BadUse where the file
    cannot be written."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadUse(f"--csv {path}: {error.strerror}") from error
    with file:
        writer = csv.DictWriter(file, options.fields)
        writer.writeheader()
        writer.writerows(kept_rows)

        def write(row: Row) -> None:
            writer.writerow(row)
            file.flush()

        yield write


def as_json(puzzle: str, bench: Bench) -> dict:
    """The run as plain data: the rows of the CSV under the machine that they share."""
    shared = machine(bench.options.device)
    return {
        "puzzle": puzzle,
        **shared,
        "dtype": bench.options.dtype,
        "exit_code": int(bench.faults > 0),
        "rows": [
            {key: value for key, value in row.items() if key not in shared and value != ""}
            for row in bench.rows
        ],
    }
