"""`p23 --claims`: the formulas, both methods at small sizes, what is kept, and a CSV that prints again."""

import csv

import pytest
import torch
import typed
from typed import text_console

from harness.errors import BadUse
from harness.puzzles.p23 import claim_methods, claim_rows, claims

SMALL = ["--lengths", "8", "24", "--batch", "2", "--heads", "3", "--dim", "4", "--rounds", "2"]


def printed(*arguments) -> tuple[int, str]:
    """Exit code and output."""
    console = text_console()
    return claims.run(console, [str(argument) for argument in arguments]), typed.printed(console)


def test_the_published_memory_is_not_what_its_formulas_give():
    """GiB at batch 8, 12 heads, d = 64; what is printed is another number, by a factor of two."""
    printed = {
        length: [f"{count / 2**30:.2f}" for count in claims.formula(length)] for length in (2048, 4096)
    }
    assert printed == {2048: ["6.00", "1.64"], 4096: ["24.00", "6.28"]}
    assert claims.PUBLISHED_GB[2048][0] * 1e9 < 0.6 * claims.formula(2048)[0]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_custom_backward_pass_is_right(scale):
    tensors = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *t: claim_methods.ByHand.apply(*t, scale), tensors)
    expected = torch.softmax(tensors[0] @ tensors[1].mT * (scale or 1), -1) @ tensors[2]
    torch.testing.assert_close(claim_methods.ByHand.apply(*tensors, scale), expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory, attention_graphs):
    """Rows and text of one small run."""
    target = tmp_path_factory.mktemp("claims") / "rows.csv"
    code, text = printed(*SMALL, "--csv", target)
    assert code == 0
    return target, text, claim_rows.read(target)


@pytest.mark.compiler
def test_every_candidate_is_measured_by_its_method(run):
    _, text, rows = run
    own = [(row.length, row.who) for row in rows if row.method == claim_rows.OWN]
    assert own == [(n, who) for n in (8, 24) for who in (claim_rows.AUTOGRAD, claim_rows.CUSTOM)], (
        "autograd first"
    )
    fair = {(row.length, row.who) for row in rows if row.method == claim_rows.FAIR}
    assert fair == {
        (n, who)
        for n in (8, 24)
        for who in (claim_rows.AUTOGRAD, claim_rows.CUSTOM, claim_rows.LAYER, claim_rows.SDPA)
    }
    assert all(row.ms > 0 and row.batch == 2 and row.heads == 3 and row.dim == 4 for row in rows)
    assert all(row.same_bits == "yes" for row in rows if row.method == claim_rows.FAIR)
    lines = text.splitlines()
    assert sum(line.split()[:1] == ["24"] for line in lines) == 3, "one in each table"
    assert max(map(len, lines)) <= 110


@pytest.mark.compiler
def test_what_is_kept_by_hand(run):
    """The custom pass saves no byte: both keep P, Q, K and V. The layer keeps the output and lse in the place of P."""
    kept = {row.who: row.kept for row in run[2] if (row.length, row.method) == (24, claim_rows.FAIR)}
    operand, heads = 2 * 3 * 24 * 4 * 4, 2 * 3
    assert kept[claim_rows.AUTOGRAD] == kept[claim_rows.CUSTOM] == 3 * operand + heads * 24 * 24 * 4
    assert kept[claim_rows.LAYER] == 4 * operand + heads * 24 * 4


@pytest.mark.compiler
def test_rows_that_were_kept_print_the_same(run):
    target, text, _ = run
    code, again = printed("--read", target)
    assert code == 0 and text.endswith(again)


def test_the_published_rows_stand_beside_what_is_measured(tmp_path):
    """Out of memory is said, on either side; the speed is a ratio of the times beside it."""
    whole = {"batch": 8, "heads": 12, "dim": 64, "device": "a GPU", "date": "2026-01-01"}
    rows = [
        claim_rows.Row(8192, claim_rows.OWN, claim_rows.AUTOGRAD, failed="OOM", **whole),
        claim_rows.Row(8192, claim_rows.OWN, claim_rows.CUSTOM, ms=100.0, peak=2**30, **whole),
        claim_rows.Row(2048, claim_rows.FAIR, claim_rows.AUTOGRAD, ms=10.0, kept=2**20, **whole),
        claim_rows.Row(2048, claim_rows.FAIR, claim_rows.CUSTOM, ms=12.5, **whole),
    ]
    claim_rows.kept_as_measured(rows, tmp_path / "rows.csv")
    assert claim_rows.read(tmp_path / "rows.csv") == rows
    times = {line.split()[0]: line.split() for line in claims.times(rows)[3:]}
    assert times["8192"][:7] == ["8192", "OOM", "1843", "-", "OOM", "100", "-"]
    assert times["2048"][1:4] == ["234", "142", "1.65x"] and times["2048"][7:10] == ["10", "12.5", "0.8x"]
    memory = {line.split()[0]: line.split() for line in claims.memory(rows)[3:]}
    assert memory["2048"][1:5] == ["3.2", "1.7", "6.00", "1.64"] and memory["8192"][5:7] == ["OOM", "1.00"]


def test_the_two_backward_passes_stand_in_a_table_of_their_own():
    rows = [
        claim_rows.Row(512, claim_rows.FAIR, claim_rows.TWO_PASSES, ms=3.0, same_bits="yes"),
        claim_rows.Row(512, claim_rows.FAIR, claim_rows.ONE_PASS, ms=2.5, same_bits="no"),
    ]
    assert claims.passes(rows)[-1].split() == ["512", "3", "yes", "2.5", "no"]
    assert claims.passes([claim_rows.Row(512, claim_rows.FAIR, claim_rows.AUTOGRAD)]) == []


@pytest.mark.long
def test_who_runs_out_of_memory_is_left_out(monkeypatch):
    def too_much(*_):
        raise torch.cuda.OutOfMemoryError("as if")

    monkeypatch.setattr(claim_methods, "eager", too_much)
    monkeypatch.setattr(claim_methods, "attention", too_much)
    rows = list(
        claim_methods.measure({"lengths": (8,), "batch": 1, "heads": 1, "dim": 4}, 1, lambda line: None)
    )
    failed = {(row.method, row.who) for row in rows if row.failed == "OOM" and not row.ms}
    assert failed == {
        (claim_rows.OWN, claim_rows.AUTOGRAD),
        (claim_rows.FAIR, claim_rows.AUTOGRAD),
        (claim_rows.FAIR, claim_rows.LAYER),
    }
    assert all(row.ms > 0 for row in rows if not row.failed) and len(rows) == 6


@pytest.mark.long
def test_who_would_take_too_long_is_left_out(monkeypatch):
    """From the length on at which it would, by the square of the lengths."""
    monkeypatch.setattr(claim_methods, "LONGEST", -1.0)
    monkeypatch.setattr(claim_methods, "attention", claim_methods.eager)
    rows = list(
        claim_methods.measure({"lengths": (8, 16), "batch": 1, "heads": 1, "dim": 4}, 1, lambda line: None)
    )
    fair = {(row.length, row.failed) for row in rows if row.method == claim_rows.FAIR}
    assert fair == {(8, ""), (16, claim_methods.TOO_LONG)}


def test_who_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(claim_methods, "attention", lambda *tensors: 1.01 * claim_methods.eager(*tensors))
    with pytest.raises(AssertionError, match="p23 at length 8 is wrong by"):
        list(claim_methods.measure({"lengths": (8,), "batch": 1, "heads": 1, "dim": 4}, 1, lambda line: None))


def test_the_published_ratios_are_those_of_the_published_times():
    ratios = [claims.published(length)[2] for length in claims.PUBLISHED]
    assert ratios == ["1.25x", "1.41x", "1.65x", "1.95x", "-"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--rounds", "-1"], "--rounds -1: must be at least 1"),
        (["--lengths", "8", "0"], "--lengths 0: must be at least 1"),
        (["--read", "/nowhere/rows.csv"], "--read /nowhere/rows.csv: no rows of p23 --claims"),
    ],
)
def test_bad_use(arguments, words):
    with pytest.raises(BadUse, match=words):
        printed(*arguments)


def test_files_that_cannot_be_read_or_written(tmp_path):
    other = tmp_path / "other.csv"
    with other.open("w", newline="") as file:
        csv.writer(file).writerows([["length", "color"], ["3", "red"]])
    with pytest.raises(BadUse, match="no rows of p23 --claims"):
        printed("--read", other)
    with pytest.raises(BadUse, match=r"--csv .*: No such file or directory"):
        claim_rows.kept_as_measured([], tmp_path / "nowhere" / "rows.csv")
