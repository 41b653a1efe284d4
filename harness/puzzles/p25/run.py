"""`p25 --backward`: run the ring in several processes on gloo, compare with one device, and report the saved
bytes.

Messages go over gloo unchanged. `--break` breaks a rank on purpose, to show what the others report. The
processes rendezvous through a file, so that no port can be in use.
"""

import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from harness.check.python_files import describe, load
from harness.check.reference import Reference
from harness.console import Parser, print_lines, shown
from harness.devices.processes import RankFailed, run_ranks
from harness.devices.targets import CPU
from harness.errors import BadUse, EnvironmentProblem, Unsolved, WorkbookError
from harness.learner.work import Work
from harness.nn.ring import agreed_length
from harness.puzzles.p25 import layout
from harness.puzzles.p25.checker import FOLLOWS, TENSORS, ring_arguments
from harness.puzzles.p25.ranks import bytes_saved
from harness.puzzles.p25.spec import EVERY, PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain import roots

DIMS = (1, 4, 2, 512, 32)
MOST_RANKS = 16
NEEDED = 300 * 2**20
"""Bytes of memory that a process takes once it has run, PyTorch included."""
LOST = r"\.cc:\d+\]|onnection|imed out|Broken pipe|[Gg]loo"
"""Messages of gloo for a rank that is gone or late, and never for a mistake in the code."""
FAULTS = ("dies", "late", "shape", "dtype")
TILE = 16


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        path: The file with the ring.
        arrays: Its part of query, key, value and grad_output.
        arguments: length, scale, causal and balanced.
        seconds: Its timeout for a neighbour.
        fault: (transfer, how) where this rank is to break.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    arguments: tuple
    seconds: float
    fault: tuple[int, str] | None = None


@dataclass
class Done:
    """A rank's values by quantity, and bytes saved for the backward pass."""

    values: dict[str, np.ndarray]
    kept: int


class Broken(Exception):
    """A ring that a rank has left, or whose tensors do not match: not a mistake in the code."""


# ---- In a rank's process ------------------------------------------------------------------------------------


def one_rank(job: Job) -> Done:
    """Run the ring forward and backward. Raise Broken if another rank is gone, late, or has other tensors."""
    module = load(job.path)
    spoil(module, job.fault, job.seconds)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=job.seconds))
    tensors = {name: torch.from_numpy(array) for name, array in job.arrays.items()}
    if job.fault and job.fault[1] == "shape":
        tensors = {name: tensor[:, :, :-1].contiguous() for name, tensor in tensors.items()}
    if job.fault and job.fault[1] == "dtype":
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in TENSORS[:3]]
    balanced = job.arguments[-1]
    try:
        query, key, value = leaves
        agreed_length(query, key, value, balanced, group, part_of)
        output, kept = bytes_saved(lambda: module["RingAttention"].apply(*leaves, *job.arguments, group))
        gradients = torch.autograd.grad(output, leaves, tensors["grad_output"])
    except (RuntimeError, ValueError) as error:
        words = str(error)
        if re.search(LOST, words):
            words = lost(words)
        elif not re.match(r"rank \d+", words):
            raise
        dist.destroy_process_group(
            group
        )  # so that ranks which wait for this one need not wait for their timeout
        raise Broken(words) from error
    pairs = zip(EVERY, (output, *gradients), strict=True)
    return Done({name: tensor.detach().numpy() for name, tensor in pairs}, kept)


def lost(words: str) -> str:
    """Return one sentence with this rank, its step if known, and its neighbours, for gloo's message."""
    rank, size = dist.get_rank(), dist.get_world_size()
    step = re.match(r"rank \d+(, step \d+)", words)
    neighbours = " or ".join(map(str, sorted({(rank - 1) % size, (rank + 1) % size})))
    how = "late" if "imed out" in words else "gone, or gave up on another"
    return f"rank {rank} of {size}{step[1] if step else ''}: rank {neighbours} is {how}"


def part_of(rank: int, size: int, length: int, balanced: bool) -> int:
    return len(layout.places(rank, size, length, balanced))


def spoil(module: dict[str, Any], fault: tuple[int, str] | None, seconds: float) -> None:
    """Count this rank's transfers, and make it exit or sleep at one."""
    exchange, begun = module["exchange"], 0

    def count_transfers(*arguments):
        nonlocal begun
        number, begun = begun, begun + 1
        if fault == (number, "dies"):
            os._exit(7)
        if fault == (number, "late"):
            time.sleep(3 * seconds + 10)
        return exchange(*arguments)

    module["exchange"] = count_transfers


def say(error: Exception, path: Path) -> str:
    """Describe a rank's failure in a line."""
    return str(error) if isinstance(error, Broken) else describe(error, path, longest=300)


# ---- In the process that starts them ------------------------------------------------------------------------


def parser() -> Parser:
    parser = Parser(
        prog="p25 --backward",
        description="Start the ring in several processes and compare output and gradients with one device.",
        epilog="exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks; "
        "5 a rank died, was late or had other tensors, or there is no room for so many; 130 interrupted",
    )
    parser.add_argument("--solution", action="store_true", help="run solutions/ in place of your file")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--dims", type=int, nargs=5, default=DIMS, metavar=PUZZLE.dim_names, help="sizes")
    parser.add_argument("--full", action="store_true", help="every query sees every key (default: causal)")
    parser.add_argument("--plain", action="store_true", help="one range for each rank (default: zig-zag)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="wait for a neighbour (default: %(default)g)"
    )
    parser.add_argument(
        "--break", dest="fault", metavar="RANK:TRANSFER:HOW", help=f"spoil a rank: {', '.join(FAULTS)}"
    )
    return parser


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Run the ring and report. Raise BadUse, Unsolved, and EnvironmentProblem if a rank was lost."""
    flags = parser().parse_args(arguments)
    work = Work(PUZZLE, PUZZLE.rung("torch"), roots.solutions() if flags.solution else None)
    fault = check(flags)
    empty = [id for id, blank in work.blanks().items() if blank.size == 0]
    if empty:
        raise Unsolved(f"{shown(work.path)}: unsolved blanks: {', '.join(empty)}")
    values = " ".join(("full" if flags.full else "causal", *([] if flags.plain else ["balanced"])))
    case = Case("ring", "", tuple(flags.dims), values, flags.ranks)
    reference = Reference(PUZZLE, "float32", flags.seed)
    print_lines(console, heading(case, work.path, flags))
    done = start(console, work.path, case, reference, flags, fault)
    balanced = not flags.plain
    wrong: list[str] = []
    for name in EVERY:
        got = layout.join_parts([each.values[name] for each in done], balanced)
        result = reference.compare_quantity(case, CPU, name, got)
        if not result.ok:
            wrong.append(name)
        mark = "✅" if result.ok else "❌"
        follows = not result.ok and wrong[0] == "output" != name
        words = FOLLOWS if follows else f"error {result.error:.1e}, the limit {result.limit:.1e}"
        print_lines(console, [f"   {mark} {name:<10} {words}"])
    print_lines(console, ledger(case, done))
    words = "✅ output and all gradients agree with one device" if not wrong else "❌ WRONG"
    print_lines(console, [f"Overall Result: {words}"])
    return int(bool(wrong))


def check(flags) -> tuple[int, int, str] | None:
    """Return the requested fault. Raise BadUse for invalid values, EnvironmentProblem for too little memory."""
    if not 1 <= flags.ranks <= MOST_RANKS:
        raise BadUse(f"--ranks {flags.ranks}: must be 1 to {MOST_RANKS}")
    B, N, G, S, d = flags.dims
    if min(flags.dims) < 1 or N % G:
        raise BadUse(f"--dims {B} {N} {G} {S} {d}: sizes must be at least 1, and {G} heads must divide {N}")
    if flags.seconds <= 0:
        raise BadUse(f"--seconds {flags.seconds:g}: must be above 0")
    requested, there = flags.ranks * NEEDED, available()
    if requested > there:
        raise EnvironmentProblem(
            f"--ranks {flags.ranks}: that many processes take {requested / 2**30:.1f} GiB, and {there / 2**30:.1f} are free"
        )
    if flags.fault is None:
        return None
    match = re.fullmatch(rf"(\d+):(\d+):({'|'.join(FAULTS)})", flags.fault)
    if not match or int(match[1]) >= flags.ranks:
        raise BadUse(
            f"--break {flags.fault}: expected RANK:TRANSFER:HOW, a rank below {flags.ranks} and {', '.join(FAULTS)}"
        )
    return int(match[1]), int(match[2]), match[3]


def available() -> int:
    """Return the bytes of free memory; infinite if the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 2**63
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else 2**63


def heading(case: Case, path: Path, flags) -> list[str]:
    B, N, G, S, d = case.dims
    ranks, cores = case.world_size, os.cpu_count() or 1
    masked = "causal" if "causal" in case.values else "every key visible"
    order = "zig-zag" if "balanced" in case.values else "one range a rank"
    few = [f"note: {ranks} processes share {cores} cores: no time here says anything about a ring"]
    return [
        f"Testing {shown(path)}: query {[B, N, S, d]}, key and value {[B, G, S, d]}, float32, {masked}, seed {flags.seed}",
        f"{ranks} process{'es' * (ranks > 1)} on gloo, {order}: the largest part has "
        f"{max(part_of(rank, ranks, S, 'balanced' in case.values) for rank in range(ranks))} of {S} positions",
        *(few if ranks > cores else []),
    ]


def start(
    console: Console, path: Path, case: Case, reference: Reference, flags, fault: tuple[int, int, str] | None
) -> list[Done]:
    """Return every rank's results. Raise EnvironmentProblem, or WorkbookError if the code fails, after a line
    for each rank."""
    arrays = reference.arrays(case)
    arguments = ring_arguments(case, arrays)
    parts = {name: layout.split(arrays[name], case.world_size, arguments[-1]) for name in TENSORS}
    jobs = [
        Job(
            path,
            {name: np.ascontiguousarray(parts[name][rank], np.float32) for name in TENSORS},
            arguments,
            flags.seconds,
            fault[1:] if fault and fault[0] == rank else None,
        )
        for rank in range(case.world_size)
    ]
    describing: Callable[[Exception], str] = functools.partial(say, path=path)
    try:
        return run_ranks(
            one_rank, [(job,) for job in jobs], describe=describing, source=path, seconds=flags.seconds + 60
        )
    except RankFailed as error:
        lines = [re.sub(r"^(rank \d+ of \d+): (?=\1,)", "", line) for line in str(error).split("; ")]
        text = {line.partition(": ")[2] for line in lines}
        alike = len(text) == 1 and len(lines) > 1
        print_lines(console, [f"   every rank: {text.pop()}"] if alike else [f"   {line}" for line in lines])
        if any(f"{path}:" in line and "hangs at" not in line for line in lines):
            raise WorkbookError(f"{shown(path)} fails in {len(lines)} of {case.world_size} ranks") from error
        raise EnvironmentProblem(
            f"the ring is broken: {len(lines)} of {case.world_size} ranks ended without a result"
        ) from error


def ledger(case: Case, done: list[Done]) -> list[str]:
    """Return lines with the ranks' saved bytes and computed tiles."""
    S = case.dims[3]
    balanced, causal = "balanced" in case.values, "causal" in case.values
    most, least = max(each.kept for each in done), min(each.kept for each in done)
    kept = f"{most:,} bytes on each rank" if most == least else f"{least:,} to {most:,} bytes a rank"
    work = [sum(layout.tiles(rank, len(done), S, balanced, TILE, causal)) for rank in range(len(done))]
    return [
        f"kept for the backward pass (measured): {kept}, {sum(each.kept for each in done):,} on all",
        f"tiles of {TILE} x {TILE} scores by rank: {', '.join(f'{count:,}' for count in work)}",
    ]
