"""Puzzle 25's tables of several GPUs: they say what the measurements say, and a simulation is made of measured steps."""

import pytest

from book.figures import ring_results
from book.measure import record

STEPS = (
    ("transfer", 0, 3),
    ("attention", 1, 11),
    ("elements", 11, 12),
    ("attention", 12, 20),
    ("elements", 20, 22),
)
BACK = (
    ("attention", 23, 24),
    ("attention", 24, 44),
    ("transfer", 25, 30),
    ("attention", 46, 64),
    ("elements", 64, 66),
)
RANK = [*STEPS, *BACK, ("transfer", 66, 70), ("elements", 70, 71)]
"""A rank of two: blocks at 1, 12, 24 and 46, the way home from 66."""


def test_a_trace_is_cut_at_its_blocks():
    assert ring_results.steps_of(RANK) == [12, 12, 22, 20, 5]


def test_a_trace_without_four_blocks_is_refused():
    with pytest.raises(ValueError, match="expected the kernels of four blocks, found 2"):
        ring_results.steps_of([*STEPS])


def test_a_simulated_ring_repeats_the_second_step():
    waits = [
        (kind, start + 100 * (start > 0), end + 100) for kind, start, end in RANK
    ]  # it began 100 earlier
    assert ring_results.simulated([RANK, RANK], 0.0, 2) == pytest.approx(0.071)
    assert ring_results.simulated([RANK, RANK], 0.0, 4) == pytest.approx(0.071 + 2 * 0.032)
    assert ring_results.simulated([RANK, waits], 0.001, 8) == pytest.approx(0.071 + 6 * 0.033)


def test_unions_and_what_they_have_in_common():
    assert ring_results.union([(3, 5), (0, 1), (4, 7)]) == [(0, 1), (3, 7)]
    assert ring_results.common([(0, 4), (6, 9)], [(3, 7)]) == 2


def test_the_table_has_the_numbers_of_the_file():
    rows = {
        (r["candidate"], r["kernels"], r["ranks"], r["length"], r["d"], r["causal"]): r
        for r in record.rows("ring_four")
    }
    one, four = (
        float(rows[*who, "131072", "64", "1"]["ms"])
        for who in (("one GPU", "flash", "1"), ("ring", "flash", "4"))
    )
    line = next(
        line
        for line in ring_results.pages()["ring_times.md"].splitlines()
        if line.startswith("| flash | 64 | 131,072 | 4 |")
    )
    assert (
        f"| {one:,.1f} ms | {four:,.1f} ms | {one / four:.2f} |" in line and f"{one / four / 4:.1%}" in line
    )


RING = ring_results.Ring([row for name in ring_results.RINGS for row in record.rows(name)])


def test_two_simulated_gpus_are_the_measured_two():
    """The trace of two, put together again, against the times without a profiler."""
    for (kernels, d, length), ranks in ring_results.traces(ring_results.TWO).items():
        measured = RING.ms("ring", kernels, 2, length, d)
        assert ring_results.simulated(ranks, 0.0, 2) == pytest.approx(measured, rel=0.12), (
            kernels,
            d,
            length,
        )


def test_simulated_four_are_the_measured_four():
    """To 5 %: the page names both."""
    lines = [line.split(" | ") for line in ring_results.simulated_table(RING).splitlines()[2:]]
    both = [
        (float(one.split()[0]), float(other.split()[0]))
        for *_, one, _, other in lines
        if other.split()[0] != "|"
    ]
    assert len(both) == 4 and all(one == pytest.approx(other, rel=0.05) for one, other in both), both
