"""Measure times: clocks, rounds in which candidates take turns, and statistics.

A clock turns a call and a number of repeats into microseconds per call. `take_turns` runs every candidate
once in each round, in a new order each time, so that a ratio compares neighbours of one round: GPU clocks,
temperature and other users drift from round to round, and affect all of them equally.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

SLOW = 100_000.0
"""Microseconds of a call from which on a candidate takes part in SLOW_ROUNDS rounds only."""
SLOW_ROUNDS = 5
MOST_REPEATS = 5_000
FLUSH_BYTES = 2**28
"""Bytes written between two calls to flush a GPU's L2 cache; several times its size."""


# ---- Clocks -------------------------------------------------------------------------------------------------


class WallClock:
    """Calls that are done when they return: the CPU."""

    def synchronize(self) -> None:
        """Do nothing: a call is done when it returns."""

    def measure(self, call: Call, repeats: int) -> float:
        """Return the microseconds of one call, from `repeats` in a row."""
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e6 / repeats


class CudaClock:
    """Work on torch's current stream, between two CUDA events."""

    def synchronize(self) -> None:
        """Wait until the GPU has nothing to do."""
        import torch

        torch.cuda.synchronize()

    def measure(self, call: Call, repeats: int) -> float:
        """Return the microseconds of one call, from `repeats` in a row."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / repeats


class ColdClock(CudaClock):
    """A CudaClock that flushes the L2 cache before every call."""

    def __init__(self, device):
        import torch

        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, call: Call, repeats: int) -> float:
        """Return the microseconds of one call; the time of the flushes in between is not counted."""
        import torch

        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in marks:
            self.scratch.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in marks) * 1e3 / repeats


class IssueClock:
    """Time until a call returns: the work is started, not waited for."""

    def __init__(self, device: WallClock | CudaClock):
        self.synchronize = device.synchronize

    def measure(self, call: Call, repeats: int) -> float:
        """Return the microseconds until a call returns, from `repeats` in a row on an idle device."""
        self.synchronize()
        return WallClock().measure(call, repeats)


# ---- A CUDA graph -------------------------------------------------------------------------------------------


class Graph:
    """One call captured as a CUDA graph; calling it replays. `outputs` are those of the captured call.

    Args:
        prepare: Makes the call. It runs on the stream of the capture, because autograd runs a backward pass
            on the stream of its forward pass.

    Raises the exceptions of a call that cannot be captured.
    """

    WARM_UPS = 3

    def __init__(self, prepare: Callable[[], Callable[[], Any]]):
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call = prepare()  # kept: it may own tensors that the graph reads
            for _ in range(self.WARM_UPS):
                self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = self.call()
        torch.cuda.synchronize()

    def __call__(self) -> None:
        self.graph.replay()


# ---- Rounds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """Protocol of a column.

    Attributes:
        rounds: How often every candidate has its turn.
        burst: Microseconds of work in a turn, as many calls as fit, at least one.
        idle: Shortest and longest pause before a turn, in seconds; a GPU at its power limit lowers its clock within
            milliseconds of full work, and a pause brings it back.
    """

    rounds: int
    burst: float
    idle: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        low, high = (1000 * seconds for seconds in self.idle)
        pause = f"{low:g}-{high:g} ms idle, then " if high else ""
        return f"{pause}{self.burst / 1000:g} ms of calls, {self.rounds} shuffled rounds"


def repeats_for(clock, call: Call, burst: float) -> int:
    """Return how many calls make a burst, from one call after a warm-up."""
    clock.measure(call, 1)
    clock.synchronize()
    return max(1, min(MOST_REPEATS, round(burst / max(clock.measure(call, 1), 1e-3))))


def take_turns(
    calls: Mapping[Key, Call],
    clock,
    protocol: Protocol,
    *,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Key, list[float]]:
    """Measure the microseconds of a call for every candidate and round, in the order of the rounds.

    A candidate of SLOW microseconds and more has no entries after the first SLOW_ROUNDS.
    """
    order = random.Random(seed)
    repeats = {name: repeats_for(clock, call, protocol.burst) for name, call in calls.items()}
    taken: dict[Key, list[float]] = {name: [] for name in calls}
    with no_garbage_collection():
        for number in range(protocol.rounds):
            for name in order.sample(list(calls), len(calls)):
                if number >= SLOW_ROUNDS and taken[name][0] >= SLOW:
                    continue
                clock.synchronize()
                if protocol.idle[1]:
                    sleep(order.uniform(*protocol.idle))
                taken[name].append(clock.measure(calls[name], repeats[name]))
    return taken


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, so that it does not run during one candidate's turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_waited_calls(call: Call, wait: Call, seconds: float, most: int = 200) -> list[float]:
    """Return the microseconds of single calls, each waited for: two warm-ups, then for some seconds, at least 3 and at most `most`."""
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 5 or (time.perf_counter() - began < seconds and len(taken) < most + 2):
        start = time.perf_counter()
        call()
        wait()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken[2:]


# ---- Statistics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The median of some times and the quantiles between which three of five lie, in microseconds."""

    median: float
    p20: float
    p80: float


def summary(times: list[float]) -> Summary:
    """Return the summary of at least one time."""
    if len(times) == 1:
        return Summary(times[0], times[0], times[0])
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Summary(statistics.median(times), low, high)


def ratio(times: list[float], base: list[float]) -> float:
    """Return the median of the ratios of the rounds that both have."""
    return statistics.median(time / other for time, other in zip(times, base, strict=False))
