"""What puzzle 25's page says of rings of several GPUs is what was measured."""

import pytest
from book_paths import BOOK

from book.figures import ring_results

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


def test_what_the_page_says_of_the_hidden_share():
    table = ring_results.pages()["ring_where.md"].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
    share = {(kernels, d, length): int(hidden.strip("%")) for kernels, d, length, *_, hidden in rows}
    sizes = [(kernels, d) for kernels, d, length in share if length == "32,768"]
    falls = {size: share[*size, "32,768"] - share[*size, "131,072"] for size in sizes}
    assert {size for size in sizes if falls[size] < 0} == {("cuDNN", "64")}
    assert max(falls, key=lambda size: falls[size]) == ("cuDNN", "128")
    page = " ".join((BOOK / "src" / "puzzle_25" / "gpus.md").read_text().split())
    for words, size in (("the share rises", ("cuDNN", "64")), ("from", ("cuDNN", "128"))):
        first, second = share[*size, "32,768"], share[*size, "131,072"]
        assert f"{words}{' from' * (words != 'from')} {first} % to {second} %" in page
    assert sum(75 <= value <= 82 for value in share.values()) >= 6, "about four fifths"
