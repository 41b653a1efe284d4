"""Faults that the text shows: each slip is named, and no right code is."""

import pytest

from harness.check.source_faults import faults
from harness.learner import blanks
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle, puzzle_names
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


def faults_in(tmp_path, code: str) -> list:
    """The faults of a blank with this code."""
    path = tmp_path / "kernel.mojo"
    path.write_text(TEXT % code)
    return faults(path, blanks.find(path.read_text())["it"])


@pytest.mark.parametrize(
    ("code", "mistake", "words"),
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
def test_a_slip_is_named_with_its_line(tmp_path, code, mistake, words):
    (fault,) = faults_in(tmp_path, code)
    assert fault.mistake == mistake and words in fault.words
    assert (tmp_path / "kernel.mojo").read_text().splitlines()[fault.line - 1] == code.splitlines()[-1]


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
    ids=["right", "guarded", "computed", "in order", "no tensor", "a part", "two loops", "unfinished"],
)
def test_what_may_be_right_is_passed_over(tmp_path, code):
    assert faults_in(tmp_path, code) == []


def test_no_solution_shows_a_fault():
    for name in puzzle_names():
        puzzle = find_puzzle(name)
        for rung in puzzle.rungs:
            if isinstance(rung, MojoRung):
                path = Work(puzzle, rung, roots.solutions()).path
                for blank in blanks.find(path.read_text()).values():
                    assert faults(path, blank) == [], name


def test_a_file_that_cannot_be_read_shows_nothing(tmp_path):
    blank = blanks.Blank("it", "the task", "", (), 3)
    assert faults(tmp_path / "no.mojo", blank) == []
