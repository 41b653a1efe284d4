"""Who is to blame: runs made by hand, one for each way to get an element wrong, and the fault that must be named."""

from types import SimpleNamespace

import numpy as np
import pytest
from typed import present, stand_in

from harness.check.accesses import Accesses, Line, Place, Source, Thread, bank_conflicts, sectors
from harness.check.blame import Fault, blame
from harness.learner.blanks import Blank
from harness.vgpu import Events
from harness.vgpu.checks.events import Step, Tensor
from harness.vgpu.ptx.parser import Instr, Location

FILE = "/here/op/kernel.mojo"
BLANK = Blank("b", "the task", "    ", ("one", "two", "three"), 10)


def instruction(line: int) -> Instr | None:
    """An instruction of a line."""
    return stand_in(Instr, op="ld", loc=Location(FILE, line, 1)) if line else None


def launch(*steps, name="k", grid=(2, 1, 1), block=(4, 1, 1), shared=(), sizes=None, shuffles=False):
    """A launch from (kind, tensor, line, [(block, thread, element, value), ...]) for each step."""
    columns = [row for *_, rows in steps for row in rows]
    all_steps, first = [], 0
    for kind, tensor, line, rows in steps:
        all_steps.append(Step(kind, tensor, instruction(line), first, first + len(rows)))
        first += len(rows)
    names = {tensor for _, tensor, _, _ in steps if tensor}
    size = {name: 8 for name in names} | (sizes or {})
    tensors = {
        name: Tensor(name, "shared" if name in shared else "global", (size[name],), "float32", 4, size[name])
        for name in names
    }
    b, t, e, v = (np.array([row[k] for row in columns]) for k in range(4))
    events = Events(all_steps, tensors, b.astype(int), t.astype(int), e.astype(int), v.astype(float))
    body = [SimpleNamespace(op="shfl")] if shuffles else []
    kernel = SimpleNamespace(function=SimpleNamespace(body=body))
    return SimpleNamespace(name=name, grid=grid, block=block, events=events, findings=[], kernel=kernel)


def run(*launches) -> Accesses:
    """A run of some launches, in a file with a blank in lines 10 to 12."""
    from pathlib import Path

    return Accesses(launches, Source(Path(FILE), {"b": BLANK}))


def fault_of(mine: Accesses, theirs: Accesses, place: Place) -> Fault:
    """Who is to blame, where somebody is."""
    return present(blame(mine, theirs, place))


def copy(values, *, line=11, read=0, write=0, tensor="x"):
    """Thread t of block 0 reads element t + read of a tensor and writes element t + write of y."""
    reads = ("R", tensor, line - 1, [(0, t, t + read, values[t + read]) for t in range(4)])
    writes = ("W", "y", line, [(0, t, t + write, values[t + read]) for t in range(4)])
    return launch(reads, writes)


X = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_another_element_is_read():
    fault = fault_of(run(copy(X, read=1)), run(copy(X)), Place("y", 2))
    assert (fault.kind, fault.who) == ("element", Thread(0, 0, 2))
    assert [a.place for a in fault.extra] == [Place("x", 3)] and fault.missing == (Place("x", 2),)
    assert fault.line == Line(FILE, 10, "b") and (fault.got, fault.expected) == (4.5, 3.5)


def test_an_element_is_left_out():
    both = [(0, 0, 0, 1.0), (0, 0, 1, 2.0)]
    mine = launch(("R", "x", 10, both[:1]), ("W", "y", 12, [(0, 0, 0, 1.0)]))
    right = launch(("R", "x", 10, both), ("W", "y", 12, [(0, 0, 0, 3.0)]))
    fault = fault_of(run(mine), run(right), Place("y", 0))
    assert (fault.kind, fault.missing, fault.extra) == ("element", (Place("x", 1),), ())
    assert fault.line == Line(FILE, 10, "b"), "the read that should go on to this element"


def test_the_right_values_make_another_one():
    mine, right = copy(X), copy(X)
    mine.events.value[4:] *= 2
    fault = fault_of(run(mine), run(right), Place("y", 1))
    assert (fault.kind, fault.who, fault.got, fault.expected) == ("value", Thread(0, 0, 1), 5.0, 2.5)
    assert fault.line == Line(FILE, 11, "b")


def test_rounding_is_no_fault():
    mine, right = copy(X), copy(X)
    mine.events.value[4:] *= 1 + 1e-6
    assert fault_of(run(mine), run(right), Place("y", 1)).kind == "same"


def test_a_value_is_written_to_another_place():
    def swap(order):
        reads = ("R", "x", 10, [(0, 0, 0, 1.5), (0, 0, 1, 2.5)])
        return launch(reads, *(("W", "y", 11, [(0, 0, e, v)]) for e, v in order))

    fault = fault_of(run(swap([(0, 2.5), (1, 1.5)])), run(swap([(0, 1.5), (1, 2.5)])), Place("y", 0))
    assert (fault.kind, fault.missing) == ("place", (Place("y", 1),))


def test_the_last_read_before_a_write_is_another_element():
    def steps(order, written):
        return launch(
            *(("R", "x", 10, [(0, 0, e, X[e])]) for e in order), ("W", "y", 11, [(0, 0, 0, written)])
        )

    fault = fault_of(run(steps([0, 1], 7.0)), run(steps([1, 0], 9.0)), Place("y", 0))
    assert (fault.kind, fault.extra[0].place, fault.missing[0]) == ("order", Place("x", 1), Place("x", 0))
    assert fault.line == Line(FILE, 10, "b")


@pytest.mark.parametrize(
    ("mine", "right", "kind", "who"),
    [
        ([("W", 0, 1.0)], [("W", 0, 1.0), ("W", 1, 2.0)], "missing write", 1),
        ([("W", 0, 1.0), ("W", 1, 2.0)], [("W", 1, 2.0)], "extra write", 0),
        ([("W", 0, 1.0)], [("A", 0, 1.0)], "kind", 0),
        ([("A", 0, 1.0)], [("W", 0, 1.0)], "atomic", 0),
        ([("A", 0, 1.0), ("A", 0, 1.0)], [("A", 0, 1.0)], "count", 0),
    ],
)
def test_writes_that_differ_in_who_or_how(mine, right, kind, who):
    def steps(writes):
        return launch(*((how, "y", 11, [(0, thread, 3, value)]) for how, thread, value in writes))

    fault = fault_of(run(steps(mine)), run(steps(right)), Place("y", 3))
    assert (fault.kind, fault.who.thread) == (kind, who)
    assert fault.line == Line(FILE, 11, "b")


def test_additions_of_one_thread_may_come_in_any_order():
    def steps(values):
        return launch(*(("A", "y", 11, [(0, 0, 0, value)]) for value in values))

    assert fault_of(run(steps([1.0, 2.0])), run(steps([2.0, 1.0])), Place("y", 0)).kind == "same"


def test_the_way_back_goes_through_launches_and_shared_memory():
    def both(wrong):
        first = launch(
            ("R", "x", 10, [(0, 3, 3 - wrong, X[3 - wrong])]),
            ("W", "tile", 11, [(0, 3, 5, X[3 - wrong])]),
            ("barrier", "", 0, []),
            ("R", "tile", 12, [(0, 0, 5, X[3 - wrong])]),
            ("W", "scratch", 12, [(0, 0, 1, X[3 - wrong])]),
            shared=("tile",),
        )
        second = launch(
            ("R", "scratch", 0, [(0, 1, 1, X[3 - wrong])]), ("W", "y", 0, [(0, 1, 1, X[3 - wrong])]), name="l"
        )
        return run(first, second)

    fault = fault_of(both(1), both(0), Place("y", 1))
    assert [hop.read.place for hop in fault.hops] == [Place("scratch", 1), Place("tile", 5, 0, 0)]
    assert (fault.kind, fault.who) == ("element", Thread(0, 0, 3))
    assert fault.missing == (Place("x", 3),) and fault.extra[0].place == Place("x", 2)


def test_the_way_back_may_pass_a_place_twice():
    """Thread 1 stores to a cell, and after it thread 0 doubles what is there."""

    def doubled(stored):
        return launch(
            ("R", "x", 10, [(0, 1, 0, 1.5)]),
            ("W", "y", 11, [(0, 1, 0, stored)]),
            ("R", "y", 12, [(0, 0, 0, stored)]),
            ("W", "y", 12, [(0, 0, 0, 2 * stored)]),
        )

    fault = fault_of(run(doubled(4.0)), run(doubled(1.5)), Place("y", 0))
    assert (fault.kind, fault.who, fault.got, fault.expected) == ("value", Thread(0, 0, 1), 4.0, 1.5)
    assert [hop.write.who for hop in fault.hops] == [Thread(0, 0, 0)]


def test_shared_memory_of_another_block_is_another_place():
    launched = launch(("W", "tile", 11, [(0, 0, 5, 1.0), (1, 0, 5, 2.0)]), shared=("tile",))
    accesses = run(launched)
    rows = np.flatnonzero(accesses.at(Place("tile", 5, 0, 1)))
    assert [accesses.access(int(row)).value for row in rows] == [2.0]


def test_a_value_from_a_shuffle_leads_to_the_thread_that_read_wrong():
    def steps(wrong):
        reads = [(0, t, t + (wrong and t == 3), X[t + (wrong and t == 3)]) for t in range(4)]
        total = sum(value for *_, value in reads)
        return run(launch(("R", "x", 10, reads), ("W", "y", 11, [(0, 0, 0, total)]), shuffles=True))

    fault = fault_of(steps(True), steps(False), Place("y", 0))
    assert (fault.kind, fault.who) == ("element", Thread(0, 0, 3))


def test_reads_of_another_blank_do_not_count():
    outside = ("R", "x", 90, [(0, 0, 7, 0.5)])
    mine = launch(("R", "x", 10, [(0, 0, 1, 2.5)]), outside, ("W", "y", 11, [(0, 0, 0, 2.5)]))
    right = launch(("R", "x", 10, [(0, 0, 0, 1.5)]), ("W", "y", 11, [(0, 0, 0, 1.5)]))
    fault = fault_of(run(mine), run(right), Place("y", 0))
    assert [a.place.element for a in fault.extra] == [1]


def test_nobody_writes_it():
    assert blame(run(copy(X)), run(copy(X)), Place("y", 7)) is None


# ---- What a step costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 1), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts(stride, extra):
    rows = [(0, t, t * stride, 0.0) for t in range(32)]
    launched = launch(("R", "tile", 1, rows), shared=("tile",), sizes={"tile": 2048}, block=(32, 1, 1))
    assert bank_conflicts(launched.events, launched.events.steps[0]) == extra


@pytest.mark.parametrize(("stride", "moved", "least"), [(1, 4, 4), (8, 32, 4), (0, 1, 1), (2, 8, 4)])
def test_sectors(stride, moved, least):
    rows = [(0, t, t * stride, 0.0) for t in range(32)]
    launched = launch(("R", "x", 1, rows), sizes={"x": 2048}, block=(32, 1, 1))
    assert sectors(launched.events, launched.events.steps[0]) == (moved, least)
