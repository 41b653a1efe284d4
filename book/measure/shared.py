"""What the scripts that measure share: rows that are written as they come, calls as CUDA graphs, graphs in turns, memory at the peak."""

import csv
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from harness.bench.timing import CudaClock, Graph, TimingProtocol, time_interleaved
from harness.toolchain import roots

Key = TypeVar("Key", bound=Hashable)


def import_cases(name: str) -> ModuleType:
    """Import a module of functions, wrong and right, from the tests of `check_backward`."""
    folder = str(roots.CHECKOUT / "tests" / "testing")
    if folder not in sys.path:  # the modules import each other
        sys.path.insert(0, folder)
    return import_module(name)


def write(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> None:
    """Writes rows to the file that the command line names, and prints them."""
    write_to(Path(sys.argv[1]), rows, columns)


def write_to(
    path: Path | None, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = (), said: bool = True
) -> None:
    """Writes rows to a file, if there is one: each at once, so that a run that is stopped keeps them.

    Args:
        columns: Where the first row does not have all. The runner adds machine, versions and date.
        said: Whether each is printed too.
    """
    with path.open("w", newline="", encoding="utf-8") if path else nullcontext() as file:
        table = None
        for row in rows:
            if file and table is None:
                table = csv.DictWriter(file, columns or list(row), lineterminator="\n")
                table.writeheader()
            if file and table:
                table.writerow(row)
                file.flush()
            if said:
                print(*row.values(), flush=True)


def capture(call: Callable[[], object]) -> Graph:
    """Captures a call as a graph. It runs before, so that nothing is built or chosen within the capture."""
    return Graph(lambda: call)


def medians(
    replays: Mapping[Key, Callable[[], object]], rounds: int, burst: float, pause: float
) -> dict[Key, float]:
    """The median microseconds of a replay by graph, in shuffled turns of some microseconds after a pause in seconds."""
    taken = time_interleaved(replays, CudaClock(), TimingProtocol(rounds, burst, (pause, pause)))
    return {name: statistics.median(times) for name, times in taken.items()}


def peak(call: Callable[[], object]) -> int:
    """Bytes at the peak of a call, above those in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
