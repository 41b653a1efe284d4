"""Implement `pNN --bench`: time the workbook's kernels and the alternatives.

Each candidate is checked against float64 first; wrong ones are not timed. All candidates of a size are timed
in turns in one process, and ratios compare times of the same round. The floor (only the GEMMs) and the
ceilings (a large GEMM, a large copy) are measured in the same run. Columns:

- `graph`: kernel time, from a CUDA graph of one call, replayed in short bursts after a pause.
- `loop`: back-to-back eager calls, timed by CUDA events; on a CPU by the wall clock.
- `cold`: as `loop`, with the L2 cache flushed before every call.
- `host`: CPU time of a call, at sizes where a call is CPU-bound.
- `memory`: bytes that autograd saves, and the peak of forward and backward.
- `waited`: synchronized calls, which show the launch overhead at small sizes; the only column for MAX graphs.
"""

import csv
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.bench.benchmark import COLUMNS, DTYPES, OPTIONAL_COLUMNS, Benchmark, Sizes, find_benchmark
from harness.bench.machine import describe_machine
from harness.bench.runner import BenchmarkRun, Row
from harness.check.options import MAX_SIZE
from harness.console import Parser, make_console
from harness.errors import UsageError
from harness.spec.catalogue import find_puzzle, list_puzzle_names


def make_parser(puzzle: str, benchmark: Benchmark) -> Parser:
    flags = Parser(prog=f"{puzzle} --bench", description=benchmark.description)
    flags.add_argument("puzzle", help="which puzzle")
    flags.add_argument(
        "--sizes",
        metavar="LIST",
        help=f'"{",".join(benchmark.size_names)};..." or names: {", ".join(benchmark.named_sizes)} '
        f"(default: {benchmark.gpu_sizes} on a GPU, {benchmark.cpu_sizes} on a CPU)",
    )
    flags.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    flags.add_argument(
        "--columns",
        metavar="LIST",
        default=",".join(column for column in COLUMNS if column not in OPTIONAL_COLUMNS),
        help=f"{', '.join(COLUMNS)} (default: all but {', '.join(OPTIONAL_COLUMNS)})",
    )
    flags.add_argument("--csv", type=Path, metavar="FILE", help="write every row here, as it is measured")
    return flags


def parse_columns(text: str, on_gpu: bool) -> tuple[str, ...]:
    """Return the requested columns that this device supports. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COLUMNS:
            raise UsageError(f"--columns: {name!r} is not one of {', '.join(COLUMNS)}")
    # A CPU has no CUDA graphs, and its calls are synchronous: `loop` measures everything.
    columns = tuple(c for c in COLUMNS if c in names and (on_gpu or c not in ("graph", "cold", "host")))
    if not columns:
        raise UsageError(f"--columns {text}: needs a GPU, and PyTorch sees none")
    return columns


def parse_sizes(benchmark: Benchmark, text: str) -> list[Sizes]:
    """Parse sizes such as "M,H,O;name;...". Raises UsageError for a part that is neither sizes nor a name."""
    names = benchmark.size_names
    sizes = []
    for part in (part.strip() for part in text.split(";")):
        numbers = [int(n) for n in part.split(",")] if re.fullmatch(r"\d+(\s*,\s*\d+)*", part) else []
        if part in benchmark.named_sizes:
            sizes += benchmark.named_sizes[part]
        elif any(number > MAX_SIZE for number in numbers):
            raise UsageError(f"--sizes: {part!r}: the kernels count at most {MAX_SIZE:,}")
        elif len(numbers) == len(names) and all(numbers):
            sizes.append(benchmark.sizes(*numbers))
        else:
            raise UsageError(
                f'--sizes: {part!r} is neither "{",".join(names)}" with {", ".join(names)} >= 1 '
                f"nor one of {', '.join(benchmark.named_sizes)}"
            )
    return sizes


def main(arguments: list[str]) -> int:
    """Run `pNN --bench ...` and return its exit code: 1 if a candidate is wrong or the workbook's fails."""
    args = [argument for argument in arguments if argument != "--bench"]
    name = next((argument for argument in args if argument in list_puzzle_names()), args[0] if args else "")
    puzzle = find_puzzle(name)
    if bench_demo := next((demo for demo in puzzle.demos if demo.flag == "bench"), None):
        return puzzle.resolve(bench_demo.run)(make_console(sys.stdout), args)
    benchmark = find_benchmark(puzzle)
    flags = make_parser(name, benchmark).parse_args(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if flags.dtype == "tf32" and not on_gpu:
        raise UsageError("--dtype tf32: needs a GPU, and PyTorch sees none")
    bench = BenchmarkRun(
        benchmark=benchmark,
        sizes=parse_sizes(benchmark, flags.sizes or (benchmark.gpu_sizes if on_gpu else benchmark.cpu_sizes)),
        dtype=flags.dtype or ("bfloat16" if on_gpu else "float32"),
        columns=parse_columns(flags.columns, on_gpu),
        device=device,
        console=make_console(sys.stdout),
    )
    # PyTorch's backward thread emits this harmless warning when it starts.
    harmless = "Attempting to run cuBLAS, but there was no current CUDA context"
    warnings.filterwarnings("ignore", message=harmless)
    torch.set_float32_matmul_precision("high" if bench.dtype == "tf32" else "highest")
    csv_note = f", in {flags.csv}" if flags.csv else ""
    started = time.monotonic()
    with open_csv(flags.csv, bench.fields) as bench.on_row:
        print_machine(bench)
        try:
            bench.run()
        except KeyboardInterrupt:
            bench.print_text(f"interrupted after {len(bench.rows)} rows{csv_note}")
            raise
    bench.print_text(f"took {time.monotonic() - started:.0f} s: {len(bench.rows)} rows{csv_note}")
    if bench.num_failures:
        bench.print_text(f"❌ {bench.num_failures} wrong or failed; see above")
    return int(bench.num_failures > 0)


def print_machine(bench: BenchmarkRun) -> None:
    machine = describe_machine(bench.device)
    parts = [
        machine["device"],
        machine["driver"] and f"driver {machine['driver']}",
        f"torch {machine['torch']}",
    ]
    parts += [f"{name} {machine[name]}" for name in ("triton", "max") if machine[name]]
    bench.print_text(", ".join(part for part in parts if part))
    if not bench.is_cuda:
        bench.print_text(
            "No GPU here: these are times of the CPU paths, and they say nothing about any GPU. "
            "The virtual GPU is never timed."
        )


@contextmanager
def open_csv(path: Path | None, fields: tuple[str, ...]) -> Iterator[Callable[[Row], None]]:
    """Yield a function that writes and flushes a row (no-op without `path`). Raises UsageError."""
    if path is None:
        yield lambda row: None
        return
    try:
        file = path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--csv {path}: {error.strerror}") from error
    with file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()

        def write(row: Row) -> None:
            writer.writerow(row)
            file.flush()

        yield write
