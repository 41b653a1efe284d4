"""The rows behind the page on attention's time and memory are those that it is about."""

from book.figures import claims_chart
from harness.puzzles.p23 import claim_rows, claims


def test_the_rows_in_the_repository_are_those_of_the_page():
    """All published lengths by both methods, on a GPU, at the sizes that the published memory follows from."""
    kept = claim_rows.read(claims_chart.MEASURED)
    assert {row.length for row in kept} == set(claims.PUBLISHED)
    assert {(row.batch, row.heads, row.dim) for row in kept} == {(8, 12, 64)}
    assert all("H200" in row.device and (row.ms > 0 or row.failed) for row in kept)
    assert {row.who for row in kept} >= {
        claim_rows.AUTOGRAD,
        claim_rows.CUSTOM,
        claim_rows.LAYER,
        claim_rows.SDPA,
    }
