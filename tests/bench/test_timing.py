"""The protocol of all timing, on clocks that are made up: who has a turn when, for how long, and what is concluded."""

import gc
import random

import pytest

from harness.bench import timing
from harness.bench.timing import IssueClock, Protocol, Summary, WallClock


class MadeUpClock:
    """A clock that says of every call what it was told, drifting by a factor from one reading to the next."""

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


def named(*names):
    """Calls that do nothing, by name."""
    calls = {}
    for name in names:

        def call():
            pass

        call.__name__ = name
        calls[name] = call
    return calls


def test_every_candidate_has_one_turn_in_every_round_in_changing_order():
    clock = MadeUpClock({"a": 10.0, "b": 20.0, "c": 30.0})
    taken = timing.take_turns(named("a", "b", "c"), clock, Protocol(6, burst=60.0))
    assert {name: len(times) for name, times in taken.items()} == {"a": 6, "b": 6, "c": 6}
    turns = [name for name, _ in clock.readings[6:]]  # six readings set the repeats
    rounds = [turns[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1, "the order never changes"


def test_a_burst_holds_as_many_calls_as_fit_and_at_least_one():
    clock = MadeUpClock({"quick": 2.0, "slow": 9_000.0})
    timing.take_turns(named("quick", "slow"), clock, Protocol(1, burst=4_000.0))
    assert dict(clock.readings[4:]) == {"quick": 2_000, "slow": 1}
    clock = MadeUpClock({"nothing": 0.0})
    timing.take_turns(named("nothing"), clock, Protocol(1, burst=4_000.0))
    assert clock.readings[-1] == ("nothing", timing.MOST_REPEATS)


def test_a_pause_before_every_turn_within_its_bounds_on_an_idle_device():
    pauses = []
    clock = MadeUpClock({"a": 10.0, "b": 10.0})

    def sleep(seconds):
        assert clock.waits == len(pauses) + 3, "the device was still busy"  # two waits set the repeats
        pauses.append(seconds)

    timing.take_turns(named("a", "b"), clock, Protocol(4, 40.0, idle=(0.06, 0.08)), sleep=sleep)
    assert len(pauses) == 8
    assert all(0.06 <= pause <= 0.08 for pause in pauses) and len(set(pauses)) > 1


def test_no_pause_where_none_is_asked_for():
    def sleep(seconds):
        raise AssertionError

    timing.take_turns(named("a"), MadeUpClock({"a": 10.0}), Protocol(2, 40.0), sleep=sleep)


def test_a_slow_candidate_sits_out_after_a_few_rounds_and_the_others_go_on():
    taken = timing.take_turns(
        named("a", "slow"), MadeUpClock({"a": 10.0, "slow": timing.SLOW}), Protocol(7, burst=10.0)
    )
    assert len(taken["a"]) == 7 and len(taken["slow"]) == timing.SLOW_ROUNDS


def test_the_collector_stands_still_and_goes_on_even_after_an_error():
    states = []

    class Watching(MadeUpClock):
        def measure(self, call, repeats):
            states.append(gc.isenabled())
            if len(states) == 4:
                raise KeyboardInterrupt
            return 1.0

    with pytest.raises(KeyboardInterrupt):
        timing.take_turns(named("a"), Watching({}), Protocol(9, 1.0))
    assert states == [True, True, False, False] and gc.isenabled()


def test_a_ratio_of_rounds_survives_a_drift_that_the_ratio_of_medians_does_not():
    """Two candidates, one twice as slow; the machine slows down tenfold while they take turns."""
    noise = random.Random(1)
    drift = [10 ** (number / 8) for number in range(9)]
    base = [100 * d * noise.uniform(0.999, 1.001) for d in drift]
    slower = [200 * d * noise.uniform(0.999, 1.001) for d in drift]
    assert timing.ratio(slower, base) == pytest.approx(2.0, rel=0.003)
    # The first three rounds only, as for a slow candidate: still 2, while medians would compare other times.
    assert timing.ratio(slower[:3], base) == pytest.approx(2.0, rel=0.003)
    assert timing.summary(slower[:3]).median / timing.summary(base).median < 1


def test_median_and_quantiles():
    assert timing.summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Summary(3.5, 2.0, 5.0)
    assert timing.summary([7.0]) == Summary(7.0, 7.0, 7.0)


def test_a_protocol_says_what_it_does():
    assert str(Protocol(9, 4_000, (0.06, 0.08))) == "60-80 ms idle, then 4 ms of calls, 9 shuffled rounds"
    assert str(Protocol(3, 200_000)) == "200 ms of calls, 3 shuffled rounds"


def test_the_wall_clock_divides_by_the_calls(monkeypatch):
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert WallClock().measure(lambda: calls.append(1), 4) == pytest.approx(125_000)
    assert len(calls) == 4


def test_issue_time_begins_on_an_idle_device_and_does_not_wait():
    order = []

    class Device(WallClock):
        def synchronize(self):
            order.append("wait")

    IssueClock(Device()).measure(lambda: order.append("call"), 3)
    assert order == ["wait", "call", "call", "call"]


def test_waited_calls_are_each_waited_for_and_the_first_two_unseen(monkeypatch):
    order = []
    taken = timing.time_waited_calls(lambda: order.append("call"), lambda: order.append("wait"), seconds=0.0)
    assert order == ["call", "wait"] * 5 and len(taken) == 3
    taken = timing.time_waited_calls(lambda: None, lambda: None, seconds=60.0, most=50)
    assert len(taken) == 50
    clock = iter(range(0, 1000, 4))  # every look at the clock finds four more seconds gone
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    assert timing.time_waited_calls(lambda: None, lambda: None, seconds=10.0) == [4e6] * 3
