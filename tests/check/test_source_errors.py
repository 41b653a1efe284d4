"""Static checks of the source text: each mistake is reported, and correct code is accepted."""

import pytest

from harness.check.source_errors import find_source_errors
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

TEXT = """\
def helper(weight: ImmPtr[dtype], row: Int, wide: Int, high: Int) -> Int:
    return row


def kernel[dtype: DType](weight: ImmPtr[dtype], count: Int32, wide: Int32, high: Int32):
    var B = Int(count)
    var S = Int(count)
    var H = Int(wide)
    var O = Int(high)
    var W = TileTensor(weight, row_major(O, H))
    var x = TileTensor(input, row_major(B * S, H))
    var gamma = TileTensor(ln_weight.as_imm(), row_major(H))
    var tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[32, 33]())
    for seq in range(block_idx.y, S, grid_dim.y):
        var row = block_idx.x * S + seq
        # BLANK-START it: the task
%s
        # BLANK-END it
"""
LOOPS = (
    "        for o in range(O):\n            for h in range(thread_idx.x, H, block_dim.x):\n                "
)


def find_errors(tmp_path, code: str) -> list:
    path = tmp_path / "kernel.mojo"
    path.write_text(TEXT % code)
    return find_source_errors(path, blanks.find_blanks(path.read_text())["it"])


@pytest.mark.parametrize(
    ("code", "mistake", "expected"),
    [
        (LOOPS + "total += x[row][h]", "double-index", "`x[row, h]`"),
        (LOOPS + "total += W[h, o]", "indices-exchanged", "W is [O, H] and `h` runs over H: `W[o, h]`"),
        (LOOPS + "total += x[seq, h]", "part-of-an-axis", "`seq` runs over S, and this axis of x is B * S"),
        (LOOPS + "total += gamma[o]", "other-axis", "`o` runs over O, and this axis of gamma is H"),
        (
            LOOPS + "total += gamma[h]\n        for o in range(H):\n            total += W[o, 0]",
            "other-axis",
            "`o` runs over H, and this axis of W is O",
        ),
        (LOOPS + "_ = helper(weight, row, O, H)", "arguments-exchanged", "`O` is in place of wide"),
    ],
)
def test_error_is_reported_with_its_line(tmp_path, code, mistake, expected):
    (error,) = find_errors(tmp_path, code)
    assert error.mistake == mistake and expected in error.message
    assert (tmp_path / "kernel.mojo").read_text().splitlines()[error.line - 1] == code.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        LOOPS + "total += W[o, h] * x[row, h] * gamma[h] + tile[thread_idx.y, h]",
        LOOPS + "if h < O:\n                    total += gamma[h] * W[h, h]",
        LOOPS + "total += x[row, h + 1] * W[0, h]  # W[h, o] and x[row][h]",
        LOOPS + "_ = helper(weight, row, H, O)",
        LOOPS + "vector[h][0] = x[row, h][0]",
        "        for r in range(first, end):\n            total += x[r, 0]",
        "        for h in range(O):\n            pass\n" + LOOPS + "total += x[row, h]",
        "        for h in range(",
    ],
    ids=["correct", "guarded", "computed", "in order", "not a tensor", "range", "two loops", "unfinished"],
)
def test_possibly_correct_code_has_no_error(tmp_path, code):
    assert find_errors(tmp_path, code) == []


def test_solutions_have_no_error():
    for name in list_puzzle_names():
        puzzle = find_puzzle(name)
        for rung in puzzle.rungs:
            if isinstance(rung, MojoRung):
                path = Exercise(puzzle, rung, roots.get_solutions()).path
                for blank in blanks.find_blanks(path.read_text()).values():
                    assert find_source_errors(path, blank) == [], name


def test_unreadable_file_has_no_error(tmp_path):
    blank = blanks.Blank("it", "the task", "", (), 3)
    assert find_source_errors(tmp_path / "no.mojo", blank) == []
