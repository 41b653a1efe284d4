"""Measure times: clocks, rounds in which candidates take turns, and statistics.

`time_interleaved` runs every candidate once per round, in a new order; ratios compare times of the same round,
which drifting clocks, temperature and other users affect equally.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

SLOW_CALL_US = 100_000.0
"""A candidate whose call takes this many microseconds or more gets only SLOW_ROUNDS rounds."""
SLOW_ROUNDS = 5
MAX_REPEATS = 5_000
FLUSH_BYTES = 2**28
"""Bytes written between two calls to flush a GPU's L2 cache; several times its size."""


# ---- Clocks ------------------------------------------------------------------------------------------------


class WallClock:
    """A clock for synchronous calls, as on a CPU."""

    def synchronize(self) -> None:
        """Do nothing: a call is done when it returns."""

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds of `repeats` calls in a row."""
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e6 / repeats


class CudaClock:
    """A clock for work on PyTorch's current stream, using CUDA events."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds of `repeats` calls in a row."""
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
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds of `repeats` calls, without the flushes between them."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            self.scratch.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) * 1e3 / repeats


class LaunchClock:
    """A clock for the time until a call returns, without waiting for the work that it starts."""

    def __init__(self, device: WallClock | CudaClock):
        self.synchronize = device.synchronize

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds until a call returns, over `repeats` calls; the device starts idle."""
        self.synchronize()
        return WallClock().measure(call, repeats)


# ---- A CUDA graph ------------------------------------------------------------------------------------------


class Graph:
    """One call captured as a CUDA graph; calling the object replays it. `outputs` are those of the call.

    `prepare` runs on the capture's stream: autograd runs a backward pass on the stream of the forward pass.
    Raises the exception of a call that cannot be captured.
    """

    NUM_WARMUPS = 3

    def __init__(self, prepare: Callable[[], Callable[[], Any]]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call = prepare()  # keep it alive: it may own tensors that the graph reads
            for _ in range(self.NUM_WARMUPS):
                self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = self.call()
        torch.cuda.synchronize()

    def __call__(self) -> None:
        self.graph.replay()


# ---- Rounds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimingProtocol:
    """The rounds, bursts and pauses of a column.

    Attributes:
        rounds: Turns per candidate.
        burst: Microseconds of work per turn: as many calls as fit, at least one.
        idle: Shortest and longest pause before a turn, in seconds; a GPU at its power limit lowers its clock
            within milliseconds of full work, and a pause brings it back.
    """

    rounds: int
    burst_us: float
    pause_s: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        low, high = (1000 * seconds for seconds in self.pause_s)
        pause = f"{low:g}-{high:g} ms idle, then " if high else ""
        return f"{pause}{self.burst_us / 1000:g} ms of calls, {self.rounds} shuffled rounds"


def estimate_repeats(clock, call: Call, burst_us: float) -> int:
    """Return how many calls fill a burst, estimated from one call after a warm-up."""
    clock.measure(call, 1)
    clock.synchronize()
    return max(1, min(MAX_REPEATS, round(burst_us / max(clock.measure(call, 1), 1e-3))))


def time_interleaved(
    calls: Mapping[Key, Call],
    clock,
    protocol: TimingProtocol,
    *,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Key, list[float]]:
    """Return each candidate's microseconds per call, one entry per round.

    A candidate that takes SLOW_CALL_US or more has only SLOW_ROUNDS entries.
    """
    rng = random.Random(seed)
    repeats = {name: estimate_repeats(clock, call, protocol.burst_us) for name, call in calls.items()}
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    with disable_garbage_collection():
        for round_index in range(protocol.rounds):
            for name in rng.sample(list(calls), len(calls)):
                if round_index >= SLOW_ROUNDS and samples[name][0] >= SLOW_CALL_US:
                    continue
                clock.synchronize()
                if protocol.pause_s[1]:
                    sleep(rng.uniform(*protocol.pause_s))
                samples[name].append(clock.measure(calls[name], repeats[name]))
    return samples


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, so that it does not run during one candidate's turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_synchronized_calls(call: Call, wait: Call, timeout_s: float, max_calls: int = 200) -> list[float]:
    """Return the microseconds of 3 to `max_calls` synchronized calls within `seconds`, after two warm-ups."""
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - started < timeout_s and len(samples) < max_calls + 2):
        start = time.perf_counter()
        call()
        wait()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples[2:]


# ---- Statistics --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The median and the 20th and 80th percentiles of times, in microseconds."""

    median: float
    p20: float
    p80: float


def summarize(times: list[float]) -> Summary:
    if len(times) == 1:
        return Summary(times[0], times[0], times[0])
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Summary(statistics.median(times), low, high)


def compute_ratio(times: list[float], base_times: list[float]) -> float:
    """Return the median ratio over the rounds in both lists."""
    return statistics.median(time / base_time for time, base_time in zip(times, base_times, strict=False))
