"""Puzzle 25's checkers: correct rings pass, incorrect ones are diagnosed."""

import pytest
from changed_solutions import write_edited_solution

from harness.check import zoo
from harness.check.checker import load_checker
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p25.spec import PUZZLE
from harness.toolchain import roots

pytestmark = pytest.mark.usefixtures("no_processes_left")
WRONG = zoo.load_wrong_solutions("p25")


@pytest.fixture(scope="module")
def checkers():
    """One checker per rung, to compute truth and baseline once."""
    return {rung.id: load_checker(Exercise(PUZZLE, rung)) for rung in PUZZLE.rungs}


@pytest.mark.parametrize("name", ["numpy_local_index", "local_index"])
def test_only_the_first_wrong_tensor_is_explained(name, checkers):
    wrong = next(item for item in WRONG if item.name == name)
    (result,) = checkers[wrong.rung].check(wrong.build_target(), [wrong.gate])
    consequences = [
        f"grad_{item} is computed from output, which is wrong: fix that first"
        for item in ("query", "key", "value")
    ]
    assert result.diagnosis[-3:] == consequences
    assert not any("grad_" in line for line in result.diagnosis[:-3])


@pytest.mark.parametrize(
    ("rung", "gates"), [("numpy", None), ("torch", ["exchange"])], ids=["numpy", "torch"]
)
def test_correct_ring_passes(rung, gates, checkers):
    results = checkers[rung].check(roots.get_solutions() / "p25" / PUZZLE.find_rung(rung).file, gates)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    assert all(len(result.comparisons) == len(PUZZLE.list_cases(None)) for result in results)


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_problem_files_start_unsolved(rung, checkers):
    path = roots.CHECKOUT / "problems" / "p25" / PUZZLE.find_rung(rung).file
    if not path.is_file():
        pytest.skip("problems/ is not there")
    results = checkers[rung].check(path)
    assert [result.gate.id for result in results] == list(PUZZLE.find_rung(rung).gates)
    assert {result.state for result in results} == {"unsolved"}


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_blank_is_checked_with_other_blanks_solved(rung, checkers, tmp_path):
    solution = (roots.get_solutions() / "p25" / PUZZLE.find_rung(rung).file).read_text()
    path = tmp_path / PUZZLE.find_rung(rung).file
    body = blanks.find_blanks(solution)["merge"].body
    path.write_text(
        blanks.join_segments(blanks.split_blanks(blanks.make_skeleton(solution)), {"merge": body})
    )
    merge, steps = checkers[rung].check(path, ["merge", "steps"])
    assert (merge.state, steps.state) == ("correct", "unsolved"), merge.diagnosis


def test_eight_ranks_agree_with_one_device(checkers):
    """This is the check of --ranks 8."""
    from dataclasses import replace

    selected = [case for case in PUZZLE.list_cases(None) if case.name in ("chapter", "uneven", "balanced")]
    cases = [replace(case, world_size=8) for case in selected]
    path = roots.get_solutions() / "p25" / "in_torch.py"
    (result,) = load_checker(Exercise(PUZZLE, PUZZLE.find_rung("torch"))).check(path, ["steps"], cases)
    assert result.state == "correct", result.diagnosis
    assert result.summary.startswith("8 processes")


MERGE_LINE, END = "    share = torch.sigmoid(", "lse, block_lse)\n    # BLANK-END"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MERGE_LINE, "    share = torch.nothing(", "rank 0 of 2: {at}: AttributeError: module 'torch' has no attribute 'nothing'"),
        (END, END.replace(")", ") + 1e-9"), "merge of out 1, lse 0.5 with 2, 1.5: lse is 1.813261688518, expected 1.813261687518"),
        (MERGE_LINE, f"    __import__('os')._exit(7)\n{MERGE_LINE}", "ended without an answer (exit code 7)"),
    ],
    ids=["an exception", "a small error", "a rank dies"],
)  # fmt: skip
def test_wrong_merges_are_rejected(old, new, message, checkers, tmp_path):
    path = write_edited_solution(PUZZLE, "torch", tmp_path, (old, new))
    (result,) = checkers["torch"].check(path, ["merge"])
    assert result.state == "wrong" and result.hint == "merge-2"
    line = path.read_text().partition(new)[0].count("\n") + 1
    assert message.format(at=f"{path}:{line}") in "\n".join(result.diagnosis), result.diagnosis


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("P * dP - delta[..., None]", "with the row sum subtracted from P * dP, outside the bracket"),
        ("dP - delta[..., None]", "without the factor P"),
        ("P * (dP * P - delta[..., None])", "with P multiplied in twice: P * (dP * P - sum(dP * P))"),
        ("P * (dP + delta[..., None])", "with the row sum added, not subtracted"),
    ],
)
@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_softmax_mistakes_are_reported(rung, wrong, message, checkers, tmp_path):
    """Invisible blocks are masked in the NumPy rung and skipped in the PyTorch rung."""
    path = write_edited_solution(PUZZLE, rung, tmp_path, ("P * (dP - delta[..., None])", wrong))
    (result,) = checkers[rung].check(path, ["recompute"])
    assert message in "\n".join(result.diagnosis), result.diagnosis


CORRECT_EDITS = {
    "numpy": {
        "merge": """
    total = np.logaddexp(lse, block_lse)
    shares = (np.exp(each - finite(total)[..., 0])[..., None] for each in (lse, block_lse))
    return sum(share * part for share, part in zip(shares, (out, block_out), strict=True)), total
"""
    },
    "torch": {
        "merge": """
    largest = torch.maximum(finite(lse), finite(block_lse))
    weights = [torch.exp(each[..., None] - largest) for each in (lse, block_lse)]
    total = weights[0] + weights[1]
    found = (weights[0] * out + weights[1] * block_out) / total.masked_fill(total == 0, 1)
    return found, (torch.log(total) + largest)[..., 0]
""",
        "exchange": """
    peers = [dist.get_global_rank(group, (rank + step) % size) for step in (1, -1)]
    received = [torch.empty(shape, dtype=tensors[i].dtype) for i, shape in enumerate(shapes)]
    works = [dist.irecv(tensor, peers[1], group) for tensor in received]
    return received, works + [dist.isend(tensor.contiguous(), peers[0], group) for tensor in tensors]
""",
        "home": """
        finish(works, step, group)
        dK, dV = (added[0], added[1]) if dK is None else (added[0] + dK, added[1] + dV)
        (dK, dV), works = exchange([dK, dV], [shape, shape], group)
        if step == size - 1:
            finish(works, step, group)
""",
    },
}


@pytest.mark.parametrize("rung", CORRECT_EDITS)
def test_other_correct_rings_pass(rung, checkers, tmp_path):
    path = write_edited_solution(
        PUZZLE, rung, tmp_path, **{gate: body.strip("\n") for gate, body in CORRECT_EDITS[rung].items()}
    )
    results = checkers[rung].check(path, list(CORRECT_EDITS[rung]))
    assert {result.state for result in results} == {"correct"}, [result.diagnosis for result in results]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("return pieces", "chunks(0, 2, 8, True) is [(0, 2), (2, 4), (4, 6), (6, 8)], expected [(0, 2), (6, 8)]"),
        ("return pieces[rank]", "chunks(0, 2, 8, True): TypeError: "),
    ],
)  # fmt: skip
def test_invalid_chunks_are_rejected(new, message, checkers, tmp_path):
    path = write_edited_solution(
        PUZZLE, "numpy", tmp_path, ("return [pieces[rank], pieces[2 * size - 1 - rank]]", new)
    )
    (result,) = checkers["numpy"].check(path, ["balanced"])
    assert result.state == "wrong" and message in result.diagnosis[0], result.diagnosis
