"""The stepper of the online softmax: what it ends with is right, and its row has what the page says of it."""

import re

import numpy as np

from book.figures import online_steps
from harness.puzzles.p23 import spec as p23


def test_the_last_step_is_the_row_of_the_exact_answer():
    """The sums are made tile by tile; the answer they are compared with, of the whole row at once."""
    place, last = online_steps.row(), online_steps.tiles()[-1]
    exact = p23.PUZZLE.exact(online_steps.arrays())
    np.testing.assert_allclose(last.sums / last.total, np.float64(exact["output"][place]), rtol=1e-12)
    np.testing.assert_allclose(last.largest + np.log(last.total), float(exact["lse"][place]), rtol=1e-12)


def test_the_row_is_the_one_that_the_page_describes():
    """Nothing seen before; grown; unchanged, with a hidden key each; grown by the last key."""
    first, second, third, last = online_steps.tiles()
    assert first.rescale == 0 and 0 < second.rescale < 1 and third.rescale == 1 and 0 < last.rescale < 1
    assert [int(np.isneginf(tile.scores).sum()) for tile in (first, second, third, last)] == [0, 1, 1, 0]
    assert second.scores[0] == second.largest and np.isneginf(second.scores[1])
    assert last.scores[1] == last.largest


def test_the_tables_hold_these_numbers():
    pages = online_steps.pages()
    assert list(pages) == ["1", "2", "3", "4", "quotient"]
    numbers = re.findall(r"<td>(.*?)</td>", pages["2"])
    tile = online_steps.tiles()[1]
    assert numbers[:2] == [f"{tile.scores[0]:.3f}", "-inf"] and numbers[2:4] == ["1.000", "0.000"]
    assert [float(number) for number in numbers[4:]] == [round(float(value), 3) for value in tile.sums]
    assert f"rescale = {tile.rescale:.4f}" in pages["2"]
