"""Measure times: clocks, interleaved rounds, and statistics.

`time_interleaved` runs all candidates once per round, in random order. Ratios compare times of the same
round, which clock frequency, temperature and other users affect equally.
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
"""A candidate whose calls take at least this long is measured in only SLOW_ROUNDS rounds."""
SLOW_ROUNDS = 5
MAX_REPEATS = 5_000
FLUSH_BYTES = 2**28
"""Bytes written to flush a GPU's L2 cache; several times its size."""


# ---- Clocks ------------------------------------------------------------------------------------------------


class WallClock:
    """Times synchronous calls, as on a CPU."""

    def synchronize(self) -> None:
        """Do nothing: a call is done when it returns."""

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds of `repeats` calls in a row."""
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e6 / repeats


class CudaClock:
    """Times work on PyTorch's current stream with CUDA events."""

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
    """Times calls with CUDA events, and flushes the L2 cache before each call."""

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
    """Times calls until they return, without the work that they start on the device."""

    def __init__(self, device: WallClock | CudaClock):
        self.synchronize = device.synchronize

    def measure(self, call: Call, repeats: int) -> float:
        """Return the mean microseconds until a call returns, over `repeats` calls on an idle device."""
        self.synchronize()
        return WallClock().measure(call, repeats)


# ---- A CUDA graph ------------------------------------------------------------------------------------------


class Graph:
    """A call captured as a CUDA graph, with its `outputs`; calling the object replays the graph.

    `prepare` runs on the stream of the capture, because autograd runs a backward pass on the stream of its
    forward pass. Raises the exception of a call that cannot be captured.
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
    """Parameters of the measurements in a column.

    Attributes:
        rounds: Number of measurements per candidate.
        burst_us: Duration of a measurement; the call is repeated as often as fits, at least once.
        pause_s: Minimum and maximum pause before a measurement. At its power limit a GPU lowers its clock
            frequency within milliseconds; it recovers during the pause.
    """

    rounds: int
    burst_us: float
    pause_s: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        low, high = (1000 * seconds for seconds in self.pause_s)
        pause = f"{low:g}-{high:g} ms idle, then " if high else ""
        return f"{pause}{self.burst_us / 1000:g} ms of calls, {self.rounds} shuffled rounds"


def estimate_repeats(clock, call: Call, burst_us: float) -> int:
    """Estimate the number of calls in a burst from one call after a warm-up."""
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
    """Return each candidate's microseconds per call in every round; slow candidates have SLOW_ROUNDS."""
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
    """Disable Python's garbage collector, which could run during a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_synchronized_calls(call: Call, wait: Call, timeout_s: float, max_calls: int = 200) -> list[float]:
    """Time synchronized calls after two warm-ups: at least 3, at most `max_calls`, until the timeout."""
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
    """Median, 20th and 80th percentiles of times, in microseconds."""

    median: float
    p20: float
    p80: float


def summarize(times: list[float]) -> Summary:
    if len(times) == 1:
        return Summary(times[0], times[0], times[0])
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Summary(statistics.median(times), low, high)


def compute_ratio(times: list[float], base_times: list[float]) -> float:
    """Return the median ratio over the rounds that both lists have."""
    return statistics.median(time / base_time for time, base_time in zip(times, base_times, strict=False))
