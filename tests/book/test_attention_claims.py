"""The measurement of attention's claims: gradients, both methods, saved bytes, and skipped candidates."""

import pytest
import torch

pytest.importorskip("max.driver")  # runs puzzle 23's kernels
from book.measure import attention_claims
from book.measure.attention_claims import AUTOGRAD, CUSTOM, FAIR, OWN, SDPA, measure

DIMS = {"batch": 2, "heads": 3, "dim": 4}


@pytest.mark.parametrize("scale", [None, 0.3])
def test_custom_backward_pass_is_correct(scale):
    tensors = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *t: attention_claims.ByHand.apply(*t, scale), tensors)
    expected = torch.softmax(tensors[0] @ tensors[1].mT * (scale or 1), -1) @ tensors[2]
    torch.testing.assert_close(attention_claims.ByHand.apply(*tensors, scale), expected)


@pytest.fixture(scope="module")
def rows():
    """Rows of a measurement at small sizes."""
    return list(measure((8, 24), DIMS, 2))


def test_candidates_are_measured_by_both_methods(rows):
    separate = [(row.length, row.who) for row in rows if row.method == OWN]
    assert separate == [(n, candidate) for n in (8, 24) for candidate in (AUTOGRAD, CUSTOM)], "autograd first"
    interleaved = {(row.length, row.who) for row in rows if row.method == FAIR}
    assert interleaved == {(n, candidate) for n in (8, 24) for candidate in (AUTOGRAD, CUSTOM, SDPA)}
    assert all(row.ms > 0 for row in rows)
    assert all(row.same_bits == "yes" for row in rows if row.method == FAIR)


def test_saved_bytes_match_manual_count(rows):
    """Autograd and the custom backward pass both save P, Q, K and V."""
    saved_bytes = {row.who: row.kept for row in rows if (row.length, row.method) == (24, FAIR)}
    operand_bytes, heads = 2 * 3 * 24 * 4 * 4, 2 * 3
    assert saved_bytes[AUTOGRAD] == saved_bytes[CUSTOM] == 3 * operand_bytes + heads * 24 * 24 * 4


def test_out_of_memory_candidate_is_skipped(monkeypatch):
    def raise_out_of_memory(*_):
        raise torch.cuda.OutOfMemoryError("as if")

    monkeypatch.setattr(attention_claims, "eager", raise_out_of_memory)
    rows = list(measure((8,), DIMS, 1))
    failed = {(row.method, row.who) for row in rows if row.failed == "OOM" and not row.ms}
    assert failed == {(OWN, AUTOGRAD), (FAIR, AUTOGRAD)}
    assert all(row.ms > 0 for row in rows if not row.failed) and len(rows) == 5


def test_slow_candidate_is_skipped(monkeypatch):
    """Times of longer inputs are extrapolated quadratically."""
    monkeypatch.setattr(attention_claims, "LONGEST", -1.0)
    outcomes = {(row.length, row.failed) for row in measure((8, 16), DIMS, 1) if row.method == FAIR}
    assert outcomes == {(8, ""), (16, attention_claims.TOO_LONG)}


def test_wrong_candidate_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention_claims, "eager", lambda q, k, v: 1.01 * torch.softmax(q @ k.mT / 2, -1) @ v)
    with pytest.raises(AssertionError, match="autograd at length 8 is wrong by"):
        list(measure((8,), DIMS, 1))


@pytest.mark.gpu
def test_gpu_kernels_are_correct_and_reproducible():
    rows = list(measure((256,), {"batch": 2, "heads": 4, "dim": 64}, 3))
    assert all(row.ms > 0 and row.peak > 0 and not row.failed for row in rows)
    bits = {row.who: row.same_bits for row in rows if row.method == FAIR}
    assert bits[attention_claims.TWO_PASSES] == "yes"
