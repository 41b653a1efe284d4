"""Locating bugs by comparing accesses: a hand-written pair of runs for each kind of bug."""

from types import SimpleNamespace

import numpy as np
import pytest
from typed import make_stub, unwrap

from harness.check.accesses import (
    Accesses,
    Element,
    Line,
    Source,
    Thread,
    count_bank_conflicts,
    count_sectors,
)
from harness.check.blame import RootCause, find_root_cause
from harness.learner.blanks import Blank
from harness.vgpu import Events
from harness.vgpu.checks.events import Step, Tensor
from harness.vgpu.ptx.parser import Instr, Location

FILE = "/here/op/kernel.mojo"
BLANK = Blank("b", "the task", "    ", ("one", "two", "three"), 10)


def make_instruction(line: int) -> Instr | None:
    return make_stub(Instr, op="ld", loc=Location(FILE, line, 1)) if line else None


def make_launch(*steps, name="k", grid=(2, 1, 1), block=(4, 1, 1), shared=(), sizes=None, shuffles=False):
    """Create a launch with one step per (kind, tensor, line, [(block, thread, element, value), ...])."""
    all_rows = [row for *_, rows in steps for row in rows]
    all_steps, first_row = [], 0
    for kind, tensor, line, rows in steps:
        all_steps.append(Step(kind, tensor, make_instruction(line), first_row, first_row + len(rows)))
        first_row += len(rows)
    names = {tensor for _, tensor, _, _ in steps if tensor}
    tensor_sizes = {name: 8 for name in names} | (sizes or {})
    tensors = {
        name: Tensor(
            name,
            "shared" if name in shared else "global",
            (tensor_sizes[name],),
            "float32",
            4,
            tensor_sizes[name],
        )
        for name in names
    }
    block_ids, thread_ids, elements, values = (np.array([row[k] for row in all_rows]) for k in range(4))
    events = Events(
        all_steps,
        tensors,
        block_ids.astype(int),
        thread_ids.astype(int),
        elements.astype(int),
        values.astype(float),
    )
    body = [SimpleNamespace(op="shfl")] if shuffles else []
    kernel = SimpleNamespace(function=SimpleNamespace(body=body))
    return SimpleNamespace(name=name, grid=grid, block=block, events=events, findings=[], kernel=kernel)


def make_run(*launches) -> Accesses:
    """Create the accesses of a run, in a file with a blank at lines 10 to 12."""
    from pathlib import Path

    return Accesses(launches, Source(Path(FILE), {"b": BLANK}))


def find_cause(actual: Accesses, expected: Accesses, element: Element) -> RootCause:
    return unwrap(find_root_cause(actual, expected, element))


def copy_x(values, *, line=11, read=0, write=0, tensor="x"):
    """Create a launch: thread t reads element t + read of `tensor` and writes element t + write of y."""
    reads = ("R", tensor, line - 1, [(0, t, t + read, values[t + read]) for t in range(4)])
    writes = ("W", "y", line, [(0, t, t + write, values[t + read]) for t in range(4)])
    return make_launch(reads, writes)


X = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_wrong_element_read():
    cause = find_cause(make_run(copy_x(X, read=1)), make_run(copy_x(X)), Element("y", 2))
    assert (cause.kind, cause.thread) == ("element", Thread(0, 0, 2))
    assert [a.element for a in cause.extra] == [Element("x", 3)] and cause.missing == (Element("x", 2),)
    assert cause.line == Line(FILE, 10, "b") and (cause.got, cause.expected) == (4.5, 3.5)


def test_missing_read():
    both = [(0, 0, 0, 1.0), (0, 0, 1, 2.0)]
    actual = make_launch(("R", "x", 10, both[:1]), ("W", "y", 12, [(0, 0, 0, 1.0)]))
    expected = make_launch(("R", "x", 10, both), ("W", "y", 12, [(0, 0, 0, 3.0)]))
    cause = find_cause(make_run(actual), make_run(expected), Element("y", 0))
    assert (cause.kind, cause.missing, cause.extra) == ("element", (Element("x", 1),), ())
    assert cause.line == Line(FILE, 10, "b"), "the read whose loop stops too early"


def test_wrong_value_from_correct_reads():
    actual, expected = copy_x(X), copy_x(X)
    actual.events.value[4:] *= 2
    cause = find_cause(make_run(actual), make_run(expected), Element("y", 1))
    assert (cause.kind, cause.thread, cause.got, cause.expected) == ("value", Thread(0, 0, 1), 5.0, 2.5)
    assert cause.line == Line(FILE, 11, "b")


def test_rounding_difference_is_not_a_bug():
    actual, expected = copy_x(X), copy_x(X)
    actual.events.value[4:] *= 1 + 1e-6
    assert find_cause(make_run(actual), make_run(expected), Element("y", 1)).kind == "same"


def test_value_written_to_wrong_element():
    def write(order):
        reads = ("R", "x", 10, [(0, 0, 0, 1.5), (0, 0, 1, 2.5)])
        return make_launch(reads, *(("W", "y", 11, [(0, 0, e, v)]) for e, v in order))

    cause = find_cause(
        make_run(write([(0, 2.5), (1, 1.5)])), make_run(write([(0, 1.5), (1, 2.5)])), Element("y", 0)
    )
    assert (cause.kind, cause.missing) == ("place", (Element("y", 1),))


def test_reads_in_wrong_order():
    def make(order, written_value):
        return make_launch(
            *(("R", "x", 10, [(0, 0, e, X[e])]) for e in order), ("W", "y", 11, [(0, 0, 0, written_value)])
        )

    cause = find_cause(make_run(make([0, 1], 7.0)), make_run(make([1, 0], 9.0)), Element("y", 0))
    assert cause.kind == "order"
    assert (cause.extra[0].element, cause.missing[0]) == (Element("x", 1), Element("x", 0))
    assert cause.line == Line(FILE, 10, "b")


@pytest.mark.parametrize(
    ("actual", "expected", "kind", "thread_index"),
    [
        ([("W", 0, 1.0)], [("W", 0, 1.0), ("W", 1, 2.0)], "missing write", 1),
        ([("W", 0, 1.0), ("W", 1, 2.0)], [("W", 1, 2.0)], "extra write", 0),
        ([("W", 0, 1.0)], [("A", 0, 1.0)], "kind", 0),
        ([("A", 0, 1.0)], [("W", 0, 1.0)], "atomic", 0),
        ([("A", 0, 1.0), ("A", 0, 1.0)], [("A", 0, 1.0)], "count", 0),
    ],
)
def test_writes_of_wrong_thread_or_kind(actual, expected, kind, thread_index):
    def make(writes):
        return make_launch(*((kind, "y", 11, [(0, thread, 3, value)]) for kind, thread, value in writes))

    cause = find_cause(make_run(make(actual)), make_run(make(expected)), Element("y", 3))
    assert (cause.kind, cause.thread.thread) == (kind, thread_index)
    assert cause.line == Line(FILE, 11, "b")


def test_order_of_additions_is_ignored():
    def make(values):
        return make_launch(*(("A", "y", 11, [(0, 0, 0, value)]) for value in values))

    cause = find_cause(make_run(make([1.0, 2.0])), make_run(make([2.0, 1.0])), Element("y", 0))
    assert cause.kind == "same"


def test_bug_is_traced_through_launches_and_shared_memory():
    def make_launches(offset):
        first = make_launch(
            ("R", "x", 10, [(0, 3, 3 - offset, X[3 - offset])]),
            ("W", "tile", 11, [(0, 3, 5, X[3 - offset])]),
            ("barrier", "", 0, []),
            ("R", "tile", 12, [(0, 0, 5, X[3 - offset])]),
            ("W", "scratch", 12, [(0, 0, 1, X[3 - offset])]),
            shared=("tile",),
        )
        second = make_launch(
            ("R", "scratch", 0, [(0, 1, 1, X[3 - offset])]),
            ("W", "y", 0, [(0, 1, 1, X[3 - offset])]),
            name="l",
        )
        return make_run(first, second)

    cause = find_cause(make_launches(1), make_launches(0), Element("y", 1))
    assert [hop.read.element for hop in cause.chain] == [Element("scratch", 1), Element("tile", 5, 0, 0)]
    assert (cause.kind, cause.thread) == ("element", Thread(0, 0, 3))
    assert cause.missing == (Element("x", 3),) and cause.extra[0].element == Element("x", 2)


def test_trace_can_visit_an_element_twice():
    """Thread 1 stores to an element, then thread 0 doubles it."""

    def double(stored):
        return make_launch(
            ("R", "x", 10, [(0, 1, 0, 1.5)]),
            ("W", "y", 11, [(0, 1, 0, stored)]),
            ("R", "y", 12, [(0, 0, 0, stored)]),
            ("W", "y", 12, [(0, 0, 0, 2 * stored)]),
        )

    cause = find_cause(make_run(double(4.0)), make_run(double(1.5)), Element("y", 0))
    assert (cause.kind, cause.thread, cause.got, cause.expected) == ("value", Thread(0, 0, 1), 4.0, 1.5)
    assert [hop.write.thread for hop in cause.chain] == [Thread(0, 0, 0)]


def test_shared_memory_is_separate_for_each_block():
    launch = make_launch(("W", "tile", 11, [(0, 0, 5, 1.0), (1, 0, 5, 2.0)]), shared=("tile",))
    accesses = make_run(launch)
    rows = np.flatnonzero(accesses.select_element(Element("tile", 5, 0, 1)))
    assert [accesses.get_access(int(row)).value for row in rows] == [2.0]


def test_bug_is_traced_through_a_shuffle():
    def make(wrong):
        reads = [(0, t, t + (wrong and t == 3), X[t + (wrong and t == 3)]) for t in range(4)]
        total = sum(value for *_, value in reads)
        return make_run(make_launch(("R", "x", 10, reads), ("W", "y", 11, [(0, 0, 0, total)]), shuffles=True))

    cause = find_cause(make(True), make(False), Element("y", 0))
    assert (cause.kind, cause.thread) == ("element", Thread(0, 0, 3))


def test_reads_in_another_blank_are_ignored():
    other_read = ("R", "x", 90, [(0, 0, 7, 0.5)])
    actual = make_launch(("R", "x", 10, [(0, 0, 1, 2.5)]), other_read, ("W", "y", 11, [(0, 0, 0, 2.5)]))
    expected = make_launch(("R", "x", 10, [(0, 0, 0, 1.5)]), ("W", "y", 11, [(0, 0, 0, 1.5)]))
    cause = find_cause(make_run(actual), make_run(expected), Element("y", 0))
    assert [a.element.index for a in cause.extra] == [1]


def test_unwritten_element():
    assert find_root_cause(make_run(copy_x(X)), make_run(copy_x(X)), Element("y", 7)) is None


@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 1), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts_are_counted(stride, extra):
    rows = [(0, t, t * stride, 0.0) for t in range(32)]
    launch = make_launch(("R", "tile", 1, rows), shared=("tile",), sizes={"tile": 2048}, block=(32, 1, 1))
    assert count_bank_conflicts(launch.events, launch.events.steps[0]) == extra


@pytest.mark.parametrize(("stride", "count", "minimum"), [(1, 4, 4), (8, 32, 4), (0, 1, 1), (2, 8, 4)])
def test_sectors_are_counted(stride, count, minimum):
    rows = [(0, t, t * stride, 0.0) for t in range(32)]
    launch = make_launch(("R", "x", 1, rows), sizes={"x": 2048}, block=(32, 1, 1))
    assert count_sectors(launch.events, launch.events.steps[0]) == (count, minimum)
