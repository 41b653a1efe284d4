"""What puzzle 25's page says of rings of several GPUs is what was measured."""

import pytest
import ring_results

RING = ring_results.Ring([row for path in ring_results.RINGS for row in ring_results.rows_of(path)])


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


def test_the_page_s_own_claims_hold():
    """What the text says of the tables, by the numbers."""
    for kernels, d, length, ranks in RING.sizes():
        one, whole = (RING.ms(who, kernels, n, length, d) for who, n in (("one GPU", 1), ("ring", ranks)))
        assert ranks == 4 or (one / whole > 1.8) == (length > 32768), (kernels, d, length)
    assert all(float(row["apart"]) < 0.008 for row in RING.rows if row["candidate"] == "ring")
    assert all(
        float(row["apart"]) < 0.0067 for row in RING.rows if row["candidate"] == "one GPU" and row["apart"]
    )
