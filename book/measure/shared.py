"""What the scripts that measure share: rows that are written as they come, calls as CUDA graphs, graphs in turns, memory at the peak."""

import csv
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from harness.bench.timing import CudaClock, Protocol, take_turns

Key = TypeVar("Key", bound=Hashable)


def write(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> None:
    """Writes rows to the file that the command line names, and prints them: each at once, so that a run that is stopped keeps them.

    Args:
        columns: Where the first row does not have all. The runner adds machine, versions and date.
    """
    with open(sys.argv[1], "w", newline="", encoding="utf-8") as file:
        table = None
        for row in rows:
            if table is None:
                table = csv.DictWriter(file, columns or list(row), lineterminator="\n")
                table.writeheader()
            table.writerow(row)
            file.flush()
            print(*row.values(), flush=True)


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """What replays a call as a graph. It runs on a side stream before, so that nothing is built or chosen within the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def medians(
    replays: Mapping[Key, Callable[[], object]], rounds: int, burst: float, pause: float
) -> dict[Key, float]:
    """The median microseconds of a replay by graph, in shuffled turns of some microseconds after a pause in seconds."""
    taken = take_turns(replays, CudaClock(), Protocol(rounds, burst, (pause, pause)))
    return {name: statistics.median(times) for name, times in taken.items()}


def peak(call: Callable[[], object]) -> int:
    """Bytes at the peak of a call, above those in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
