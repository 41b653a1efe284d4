"""`pytest --engines`: every launch on the virtual GPU runs in both engines, and everything about it is compared.

NumPy runs it as always; then memory is put back and the launch runs as machine code, where that engine takes it. It must
leave the same bytes and the same map of written bytes, have executed as many instructions, and come to its end only where
NumPy has found nothing, not even a note. What differs fails the test that launched it; the end of the run says how much
ran natively. Needs llvmlite.
"""

import collections
import copy

import pytest

COUNTS: collections.Counter = collections.Counter()


def pytest_addoption(parser):
    parser.addoption(
        "--engines", action="store_true", help="run every launch of the virtual GPU in both engines"
    )


@pytest.fixture(autouse=True, scope="session")
def both_engines(request):
    """Puts `compared` in the place of the engines, where the option is given."""
    if not request.config.getoption("--engines"):
        yield
        return
    from harness.vgpu import machine

    held, machine.execute = machine.execute, compared
    yield
    machine.execute = held


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        text = ", ".join(f"{name} {count}" for name, count in sorted(COUNTS.items()))
        terminalreporter.write_line(f"engines compared: {text}")


def compared(run) -> None:
    """Run a launch in both engines. Raises AssertionError where they differ, and what NumPy raises."""
    from harness.vgpu.engines.native import engine

    if run.trial or not can_be_native(run):
        COUNTS["for NumPy alone"] += 1
        run.execute()
        return
    arena = run.arena
    before = {e: arena.snapshot(e) for e in arena.extents}
    try:
        run.execute()
    except Exception as error:
        stopped = error
    else:
        stopped = None
    after = {e: arena.snapshot(e) for e in arena.extents}
    flags = [(e, e.written, e.writer) for e in arena.extents]
    for e, state in before.items():
        arena.restore(e, state)
    other = run.fresh()
    numpy_counters = run.counters
    other.launch = copy.copy(run.launch)
    native = engine.ran(other)
    mine = {e: arena.snapshot(e) for e in arena.extents}
    writers = [
        (e, e.written, e.writer if e.written else held[2])
        for e, held in zip(arena.extents, flags, strict=True)
    ]
    for e, state in after.items():
        arena.restore(e, state)
    for e, written, writer in flags:
        e.written, e.writer = written, writer
    run.launch.counters = numpy_counters
    name = f"{run.kernel.name} {run.grid} {run.block}"
    if not native:
        left = run.launch.findings or stopped
        COUNTS["left to NumPy with findings" if left else "left to NumPy without findings"] += 1
        assert all(
            (a[0] == b[0]).all() and (a[1] == b[1]).all()
            for a, b in zip(before.values(), mine.values(), strict=True)
        ), f"{name}: memory was not put back"
    else:
        COUNTS["ran natively"] += 1
        assert stopped is None and not run.launch.findings, (
            f"{name}: only NumPy finds {run.launch.findings or stopped}"
        )
        for e, state in after.items():
            bad = (state[0] != mine[e][0]) & (state[1] != 0)
            assert not bad.any(), f"{name}: {e.name} differs at byte {bad.argmax()} and {bad.sum()} in all"
            assert (state[1] == mine[e][1]).all(), f"{name}: the written map of {e.name} differs"
            assert state[2] == mine[e][2], f"{name}: {e.name} is ready in one engine"
        assert writers == flags, f"{name}: other tensors are written"
        same = other.counters.instructions, other.counters.flops, other.counters.barriers
        assert same == (numpy_counters.instructions, numpy_counters.flops, numpy_counters.barriers), (
            f"{name}: counters {same}"
        )
    if stopped is not None:
        raise stopped


def can_be_native(run) -> bool:
    """Whether the native engine would try this launch; why not is counted."""
    from harness.vgpu.engines.native import engine

    why = engine.refusal(run)
    if why is None:
        native = engine.native_of(run.kernel)
        why = native if isinstance(native, str) else None
    assert not (why or "").startswith(engine.NOT_TRANSLATED), why
    if why is not None:
        COUNTS[f"refused: {why[:60]}"] += 1
    return why is None
