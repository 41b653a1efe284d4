"""`p25 --backward`: run the ring in several gloo processes, compare with one device, and report saved bytes."""

import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from harness.check.python_files import describe_exception, load_module
from harness.check.reference import Reference
from harness.console import Parser, format_path, print_lines
from harness.devices.processes import RankError, run_ranks
from harness.devices.targets import CPU
from harness.errors import EnvironmentProblem, Unsolved, UsageError, WorkbookError
from harness.learner.exercise import Exercise
from harness.nn.ring import agree_on_length
from harness.puzzles.p25 import layout
from harness.puzzles.p25.checker import CAUSED_BY_OUTPUT, INPUT_NAMES, get_ring_arguments
from harness.puzzles.p25.ranks import RankResult, measure_saved_bytes
from harness.puzzles.p25.spec import PUZZLE, RESULTS
from harness.spec.puzzle import Arrays, Case
from harness.toolchain import roots

DIMS = (1, 4, 2, 512, 32)
MAX_RANKS = 16
BYTES_PER_PROCESS = 300 * 2**20
"""Bytes of memory that a process needs, including PyTorch."""
LOST_RANK_MESSAGES = r"\.cc:\d+\]|onnection|imed out|Broken pipe|[Gg]loo"
"""Matches gloo's messages about a lost or late rank, but no message about a mistake in the code."""
FAULTS = ("dies", "late", "shape", "dtype")
TILE = 16


class RankLost(Exception):
    """A rank is lost or tensors do not match, which is not a mistake in the code."""


# ---- In a rank's process ------------------------------------------------------------------------------------


def run_rank(
    path: Path, arrays: Arrays, arguments: tuple, timeout_s: float, fault: tuple[int, str] | None
) -> RankResult:
    """Run a rank's query, key, value and grad_output through the ring; `fault` is (transfer, kind)."""
    module = load_module(path)
    inject_fault(module, fault, timeout_s)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=timeout_s))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if fault and fault[1] == "shape":
        tensors = {name: tensor[:, :, :-1].contiguous() for name, tensor in tensors.items()}
    if fault and fault[1] == "dtype":
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in INPUT_NAMES[:3]]
    try:
        query, key, value = leaves
        agree_on_length(query, key, value, arguments[-1], group, count_positions)
        output, saved_bytes = measure_saved_bytes(
            lambda: module["RingAttention"].apply(*leaves, *arguments, group)
        )
        gradients = torch.autograd.grad(output, leaves, tensors["grad_output"])
    except (RuntimeError, ValueError) as error:
        message = str(error)
        if re.search(LOST_RANK_MESSAGES, message):
            message = describe_lost_rank(message)
        elif not re.match(r"rank \d+", message):
            raise
        dist.destroy_process_group(group)  # so that ranks waiting for this rank fail before their timeout
        raise RankLost(message) from error
    pairs = zip(RESULTS, (output, *gradients), strict=True)
    return RankResult({name: tensor.detach().numpy() for name, tensor in pairs}, saved_bytes=saved_bytes)


def describe_lost_rank(error_text: str) -> str:
    """Rewrite gloo's error message with this rank, its step if known, and its neighbours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    step = re.match(r"rank \d+(, step \d+)", error_text)
    neighbours = " or ".join(map(str, sorted({(rank - 1) % size, (rank + 1) % size})))
    state = "late" if "imed out" in error_text else "gone, or gave up on another"
    return f"rank {rank} of {size}{step[1] if step else ''}: rank {neighbours} is {state}"


def count_positions(rank: int, size: int, length: int, balanced: bool) -> int:
    return len(layout.get_positions(rank, size, length, balanced))


def inject_fault(module: dict[str, Any], fault: tuple[int, str] | None, timeout_s: float) -> None:
    """Make this rank exit or sleep at the transfer selected by `fault`."""
    exchange, count = module["exchange"], 0

    def exchange_or_fail(*arguments):
        nonlocal count
        transfer, count = count, count + 1
        if fault == (transfer, "dies"):
            os._exit(7)
        if fault == (transfer, "late"):
            time.sleep(3 * timeout_s + 10)
        return exchange(*arguments)

    module["exchange"] = exchange_or_fail


def describe_error(error: Exception, path: Path) -> str:
    return str(error) if isinstance(error, RankLost) else describe_exception(error, path, max_length=300)


# ---- In the process that starts them ------------------------------------------------------------------------


def make_parser() -> Parser:
    parser = Parser(
        prog="p25 --backward",
        description="Run the ring in several processes and compare its output and gradients with those of one device.",
        epilog="exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks; "
        "5 a rank crashed, timed out or received other tensors, or too little memory for all ranks; 130 interrupted",
    )
    parser.add_argument("--solution", action="store_true", help="run solutions/ instead of your file")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--dims", type=int, nargs=5, default=DIMS, metavar=PUZZLE.dim_names, help="sizes")
    parser.add_argument("--full", action="store_true", help="every query sees every key (default: causal)")
    parser.add_argument("--plain", action="store_true", help="one range per rank (default: zig-zag)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the random inputs")
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="wait for a neighbour (default: %(default)g)"
    )
    parser.add_argument(
        "--break", dest="fault", metavar="RANK:TRANSFER:HOW", help=f"spoil a rank: {', '.join(FAULTS)}"
    )
    return parser


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Run the ring and print a report. Raises UsageError, Unsolved, or EnvironmentProblem for a lost rank."""
    flags = make_parser().parse_args(arguments)
    exercise = Exercise(PUZZLE, PUZZLE.find_rung("torch"), roots.get_solutions() if flags.solution else None)
    fault = check_flags(flags)
    unsolved = [id for id, blank in exercise.read_blanks().items() if blank.size == 0]
    if unsolved:
        raise Unsolved(f"{format_path(exercise.path)}: unsolved blanks: {', '.join(unsolved)}")
    values = " ".join(("full" if flags.full else "causal", *([] if flags.plain else ["balanced"])))
    case = Case("ring", "", tuple(flags.dims), values, flags.ranks)
    reference = Reference(PUZZLE, "float32", flags.seed)
    print_lines(console, format_heading(case, exercise.path, flags))
    results = run_ring(console, exercise.path, case, reference, flags, fault)
    balanced = not flags.plain
    wrong: list[str] = []
    for name in RESULTS:
        got = layout.join_parts([result.values[name] for result in results], balanced)
        result = reference.compare_quantity(case, CPU, name, got)
        if not result.ok:
            wrong.append(name)
        mark = "✅" if result.ok else "❌"
        is_consequence = not result.ok and wrong[0] == "output" != name
        status = (
            CAUSED_BY_OUTPUT if is_consequence else f"error {result.error:.1e}, the limit {result.limit:.1e}"
        )
        print_lines(console, [f"   {mark} {name:<10} {status}"])
    print_lines(console, format_ledger(case, results))
    status = "✅ output and all gradients agree with one device" if not wrong else "❌ WRONG"
    print_lines(console, [f"Overall Result: {status}"])
    return int(bool(wrong))


def check_flags(flags) -> tuple[int, int, str] | None:
    """Return the requested fault. Raises UsageError, or EnvironmentProblem if there is too little memory."""
    if not 1 <= flags.ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {flags.ranks}: must be 1 to {MAX_RANKS}")
    B, N, G, S, d = flags.dims
    if min(flags.dims) < 1 or N % G:
        raise UsageError(
            f"--dims {B} {N} {G} {S} {d}: sizes must be at least 1, and {G} heads must divide {N}"
        )
    if flags.seconds <= 0:
        raise UsageError(f"--seconds {flags.seconds:g}: must be above 0")
    required_bytes, free_bytes = flags.ranks * BYTES_PER_PROCESS, get_free_memory()
    if required_bytes > free_bytes:
        message = f"that many processes take {required_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} are free"
        raise EnvironmentProblem(f"--ranks {flags.ranks}: {message}")
    if flags.fault is None:
        return None
    match = re.fullmatch(rf"(\d+):(\d+):({'|'.join(FAULTS)})", flags.fault)
    if not match or int(match[1]) >= flags.ranks:
        message = f"expected RANK:TRANSFER:HOW, a rank below {flags.ranks} and {', '.join(FAULTS)}"
        raise UsageError(f"--break {flags.fault}: {message}")
    return int(match[1]), int(match[2]), match[3]


def get_free_memory() -> int:
    """Return the bytes of free memory, or 2**63 if the system does not report them."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 2**63
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(match[1]) * 1024 if match else 2**63


def format_heading(case: Case, path: Path, flags) -> list[str]:
    B, N, G, S, d = case.dims
    ranks, cores = case.world_size, os.cpu_count() or 1
    mask_label = "causal" if "causal" in case.values else "every key visible"
    layout_label = "zig-zag" if "balanced" in case.values else "one range a rank"
    note = [f"note: {ranks} processes share {cores} cores: no time here says anything about a ring"]
    return [
        f"Testing {format_path(path)}: query {[B, N, S, d]}, key and value {[B, G, S, d]}, float32, {mask_label}, seed {flags.seed}",
        f"{ranks} process{'es' * (ranks > 1)} on gloo, {layout_label}: the largest part has "
        f"{max(count_positions(rank, ranks, S, 'balanced' in case.values) for rank in range(ranks))} of {S} positions",
        *(note if ranks > cores else []),
    ]


def run_ring(
    console: Console, path: Path, case: Case, reference: Reference, flags, fault: tuple[int, int, str] | None
) -> list[RankResult]:
    """Return every rank's results.

    On failure, prints a line per rank and raises WorkbookError if the code fails, else EnvironmentProblem.
    """
    arrays = reference.get_arrays(case)
    arguments = get_ring_arguments(case, arrays)
    parts = {name: layout.split_array(arrays[name], case.world_size, arguments[-1]) for name in INPUT_NAMES}
    jobs = []
    for rank in range(case.world_size):
        rank_arrays = {name: np.ascontiguousarray(parts[name][rank], np.float32) for name in INPUT_NAMES}
        rank_fault = fault[1:] if fault and fault[0] == rank else None
        jobs.append((path, rank_arrays, arguments, flags.seconds, rank_fault))
    describe: Callable[[Exception], str] = functools.partial(describe_error, path=path)
    try:
        return run_ranks(
            run_rank, jobs, format_error=describe, source_file=path, timeout_s=flags.seconds + 60
        )
    except RankError as error:
        lines = [re.sub(r"^(rank \d+ of \d+): (?=\1,)", "", line) for line in str(error).split("; ")]
        messages = {line.partition(": ")[2] for line in lines}
        same_message = len(messages) == 1 and len(lines) > 1
        shown_lines = [f"every rank: {messages.pop()}"] if same_message else lines
        print_lines(console, [f"   {line}" for line in shown_lines])
        count = f"{len(lines)} of {case.world_size} ranks"
        if any(f"{path}:" in line and "hangs at" not in line for line in lines):
            raise WorkbookError(f"{format_path(path)} fails in {count}") from error
        raise EnvironmentProblem(f"the ring is broken: {count} ended without a result") from error


def format_ledger(case: Case, results: list[RankResult]) -> list[str]:
    """Return lines that describe the ranks' saved bytes and computed tiles."""
    S = case.dims[3]
    balanced, causal = "balanced" in case.values, "causal" in case.values
    maximum, minimum = max(a.saved_bytes for a in results), min(a.saved_bytes for a in results)
    saved_bytes = (
        f"{maximum:,} bytes on each rank"
        if maximum == minimum
        else f"{minimum:,} to {maximum:,} bytes a rank"
    )
    tiles = [
        sum(layout.count_tiles(rank, len(results), S, balanced, TILE, causal)) for rank in range(len(results))
    ]
    return [
        f"kept for the backward pass (measured): {saved_bytes}, {sum(a.saved_bytes for a in results):,} on all",
        f"tiles of {TILE} x {TILE} scores by rank: {', '.join(f'{count:,}' for count in tiles)}",
    ]
