"""The runs behind the book's access pictures are those of the kernels as they are, and the figures show what they hold."""

from pathlib import Path

import pytest

from book.figures import figures, recorded_pictures
from book.measure import access_pictures
from harness.check import zoo
from harness.devices.recorder import Order, record_many
from harness.puzzles.p22 import spec as p22


@pytest.fixture(scope="module")
def recorded(solution) -> None:
    """Records all that the two pictures need in one program."""
    bug = next(kernel for kernel in zoo.load("p22") if kernel.name == access_pictures.BUG)
    sizes = {solution: (p22.PUZZLE.dims, access_pictures.SMALL), bug.package(): (access_pictures.SMALL,)}
    orders = [Order(package, (dims,), ("fused",), True) for package, all_ in sizes.items() for dims in all_]
    record_many(orders, "p22", "float32")


@pytest.mark.compiler
def test_the_accesses_are_those_of_the_solution(recorded):
    fresh = access_pictures.solution()
    assert {**fresh, "grid": [*fresh["grid"]], "block": [*fresh["block"]]} == recorded_pictures.load(
        "fused_backward"
    )


@pytest.mark.compiler
def test_the_bug_is_that_of_the_zoo(recorded):
    kept, fresh = recorded_pictures.load("bug"), access_pictures.bug()
    words = [
        [(s["kind"], s["text"], s["source"] and s["source"][1]) for s in data["story"]]
        for data in (kept, fresh)
    ]
    assert words[0] == words[1], "lines may move, what is said may not"
    assert kept["tensors"] == fresh["tensors"]
    assert [launch["e"] for launch in kept["runs"][0]] == [launch["e"] for launch in fresh["runs"][0]]


def test_the_figures_say_what_the_run_did():
    B, S, H, O = p22.PUZZLE.dims
    label = figures.grid()
    assert f"A grid of {B} by {S} blocks" in label
    assert (
        f"{O} of {B * S * O} elements of grad_output" in label
        and f"{H} of {B * S * H} elements of input" in label
    )
    assert f"{O * H} of {O * H} elements of linear_weight" in label
    assert f"writes {H} of {B * S * H} elements of grad_input" in label
    assert f"each element receives {B * S} atomic additions" in figures.fan_in()


def test_ranges_hold_what_is_contiguous():
    assert access_pictures.ranges([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]


def test_the_page_is_written_beside_the_book(tmp_path):
    recorded_pictures.write_page(tmp_path)
    page = (tmp_path / recorded_pictures.PAGE).read_text()
    assert page.startswith("<!doctype html>") and "@DATA@" not in page and str(Path.home()) not in page
    assert "dy[seq * B + Int(block_idx.x), o]" in page


def test_the_page_of_the_wrong_kernel_leads_back_to_the_book(tmp_path):
    recorded_pictures.write_page(tmp_path)
    page = (tmp_path / recorded_pictures.PAGE).read_text(encoding="utf-8")
    assert page.index("<body>") < page.index('<a href="index.html">') < page.index("</body>")
