"""The launches of a CUDA graph one after the other: `python -m book.measure timeline`, on a GPU.

bfloat16, forward and backward with all gradients, of the layer, of `torch.compile` and of the three bare products, under
PyTorch's profiler. A row for each launch: when it begins, from the first one on, and how long it takes, the medians of some
replays with a pause behind each. A launch that begins early waits within its time for the one before.
"""

import statistics
import sys
from collections.abc import Iterator

import torch

from book.measure.kernel_times import kernel_name, profile_of
from book.measure.shared import write
from harness.bench.timing import Graph
from harness.puzzles.p22.candidates import Products, Sizes, compiled, make_problem, ours

REPLAYS = 15
WHO = {"bare GEMMs": Products, "fast": ours("fast"), "compile": compiled()}


def launches(graph: Graph) -> list[tuple[str, float, float]]:
    """The name of each launch of a replay, when it begins and how long it takes, in microseconds.

    Raises RuntimeError where replays differ.
    """
    graph()
    profile = profile_of(graph, REPLAYS)
    assert profile.profiler and profile.profiler.kineto_results  # it is over
    return replays_of(
        [
            (event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
            for event in profile.profiler.kineto_results.events()
            if str(event.device_type()).endswith("CUDA")
        ]
    )


def replays_of(events: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """One replay made of REPLAYS equal ones, from the name, begin and duration of every launch, in any order."""
    events = sorted(events, key=lambda event: event[1])
    length = len(events) // REPLAYS
    replays = (
        [events[first : first + length] for first in range(0, length * REPLAYS, length)] if length else []
    )
    if not length or len(events) % REPLAYS:
        raise RuntimeError(f"{len(events)} launches in {REPLAYS} replays")
    # On two branches the launches of one may come before or after those of the other: the same ones are compared.
    replays = [sorted(replay, key=lambda event: event[0]) for replay in replays]
    replayed = []
    for same in zip(*replays, strict=True):
        if len({name for name, *_ in same}) > 1:
            raise RuntimeError(f"different launches in {REPLAYS} replays")
        begins = [
            event[1] - min(replay, key=lambda event: event[1])[1]
            for event, replay in zip(same, replays, strict=True)
        ]
        replayed.append(
            (same[0][0], statistics.median(begins), statistics.median(event[2] for event in same))
        )
    return sorted(replayed, key=lambda launch: launch[1])


def rows(sizes: Sizes) -> Iterator[dict]:
    """A row for each launch of everybody."""
    problem = make_problem(sizes, torch.bfloat16, torch.device("cuda"))
    for who, build in WHO.items():
        call = build(problem).prepare("both")
        call()
        for position, (name, begin, us) in enumerate(launches(Graph(lambda call=call: call))):
            row = {**vars(sizes), "candidate": who, "position": position, "kernel": kernel_name(name)}
            yield row | {"begin_us": f"{begin:.1f}", "us": f"{us:.1f}"}
    torch.compiler.reset()


if __name__ == "__main__":
    write(row for words in sys.argv[2:] for row in rows(Sizes(*map(int, words.split(",")))))
