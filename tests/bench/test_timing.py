"""Interleaved timing with fake clocks: order and duration of measurements, ratios and summaries."""

import gc
import random

import pytest

from harness.bench import timing
from harness.bench.timing import LaunchClock, Summary, TimingProtocol, WallClock


class FakeClock:
    """A clock that returns preset times, scaled by `drift` at each reading."""

    def __init__(self, microseconds, drift=1.0):
        self.microseconds, self.drift, self.readings = microseconds, drift, []
        self.waits = 0

    def synchronize(self):
        self.waits += 1

    def measure(self, call, repeats):
        for _ in range(repeats):
            call()
        name = call.__name__
        self.readings.append((name, repeats))
        return self.microseconds[name] * self.drift ** len(self.readings)


def make_calls(*names):
    """Return name -> no-op function."""
    calls = {}
    for name in names:

        def call():
            pass

        call.__name__ = name
        calls[name] = call
    return calls


def test_each_round_has_one_turn_per_candidate_in_random_order():
    clock = FakeClock({"a": 10.0, "b": 20.0, "c": 30.0})
    times_by_name = timing.time_interleaved(
        make_calls("a", "b", "c"), clock, TimingProtocol(6, burst_us=60.0)
    )
    assert {name: len(times) for name, times in times_by_name.items()} == {"a": 6, "b": 6, "c": 6}
    turns = [name for name, _ in clock.readings[6:]]  # the first six readings determine the repeats
    rounds = [turns[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1, "the order is random"


def test_burst_has_at_least_one_call():
    clock = FakeClock({"quick": 2.0, "slow": 9_000.0})
    timing.time_interleaved(make_calls("quick", "slow"), clock, TimingProtocol(1, burst_us=4_000.0))
    assert dict(clock.readings[4:]) == {"quick": 2_000, "slow": 1}
    clock = FakeClock({"nothing": 0.0})
    timing.time_interleaved(make_calls("nothing"), clock, TimingProtocol(1, burst_us=4_000.0))
    assert clock.readings[-1] == ("nothing", timing.MAX_REPEATS)


def test_each_turn_is_preceded_by_a_bounded_pause():
    pauses = []
    clock = FakeClock({"a": 10.0, "b": 10.0})

    def sleep(seconds):
        assert clock.waits == len(pauses) + 3, (
            "the device is idle"
        )  # the first two waits determine the repeats
        pauses.append(seconds)

    timing.time_interleaved(
        make_calls("a", "b"), clock, TimingProtocol(4, 40.0, pause_s=(0.06, 0.08)), sleep=sleep
    )
    assert len(pauses) == 8
    assert all(0.06 <= pause <= 0.08 for pause in pauses) and len(set(pauses)) > 1


def test_no_pause_by_default():
    def sleep(seconds):
        raise AssertionError

    timing.time_interleaved(make_calls("a"), FakeClock({"a": 10.0}), TimingProtocol(2, 40.0), sleep=sleep)


def test_slow_candidate_has_fewer_rounds():
    times_by_name = timing.time_interleaved(
        make_calls("a", "slow"),
        FakeClock({"a": 10.0, "slow": timing.SLOW_CALL_US}),
        TimingProtocol(7, burst_us=10.0),
    )
    assert len(times_by_name["a"]) == 7 and len(times_by_name["slow"]) == timing.SLOW_ROUNDS


def test_garbage_collector_is_paused_and_restored_after_an_error():
    states = []

    class FailingClock(FakeClock):
        def measure(self, call, repeats):
            states.append(gc.isenabled())
            if len(states) == 4:
                raise KeyboardInterrupt
            return 1.0

    with pytest.raises(KeyboardInterrupt):
        timing.time_interleaved(make_calls("a"), FailingClock({}), TimingProtocol(9, 1.0))
    assert states == [True, True, False, False] and gc.isenabled()


def test_ratio_of_rounds_is_robust_to_drift():
    """One candidate takes twice as long; the machine becomes ten times slower during the measurement."""
    noise = random.Random(1)
    drift = [10 ** (number / 8) for number in range(9)]
    base = [100 * d * noise.uniform(0.999, 1.001) for d in drift]
    slower = [200 * d * noise.uniform(0.999, 1.001) for d in drift]
    assert timing.compute_ratio(slower, base) == pytest.approx(2.0, rel=0.003)
    # If one candidate had only the first three rounds, the ratio of medians would be below 1.
    assert timing.compute_ratio(slower[:3], base) == pytest.approx(2.0, rel=0.003)
    assert timing.summarize(slower[:3]).median / timing.summarize(base).median < 1


def test_summary_has_median_and_quantiles():
    assert timing.summarize([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Summary(3.5, 2.0, 5.0)
    assert timing.summarize([7.0]) == Summary(7.0, 7.0, 7.0)


def test_protocol_description():
    assert (
        str(TimingProtocol(9, 4_000, (0.06, 0.08))) == "60-80 ms idle, then 4 ms of calls, 9 shuffled rounds"
    )
    assert str(TimingProtocol(3, 200_000)) == "200 ms of calls, 3 shuffled rounds"


def test_wall_clock_divides_by_the_number_of_calls(monkeypatch):
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert WallClock().measure(lambda: calls.append(1), 4) == pytest.approx(125_000)
    assert len(calls) == 4


def test_launch_time_starts_idle_and_does_not_synchronize():
    order = []

    class Device(WallClock):
        def synchronize(self):
            order.append("wait")

    LaunchClock(Device()).measure(lambda: order.append("call"), 3)
    assert order == ["wait", "call", "call", "call"]


def test_synchronized_timing_skips_two_warmups(monkeypatch):
    order = []
    times_by_name = timing.time_synchronized_calls(
        lambda: order.append("call"), lambda: order.append("wait"), timeout_s=0.0
    )
    assert order == ["call", "wait"] * 5 and len(times_by_name) == 3
    times_by_name = timing.time_synchronized_calls(lambda: None, lambda: None, timeout_s=60.0, max_calls=50)
    assert len(times_by_name) == 50
    clock = iter(range(0, 1000, 4))  # the clock advances four seconds per call
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    assert timing.time_synchronized_calls(lambda: None, lambda: None, timeout_s=10.0) == [4e6] * 3
