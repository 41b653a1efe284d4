"""The timing of orders on a GPU, tried on the CPU: every candidate computes the same window, and the table is whole."""

import csv

import pytest
import torch
import torch.nn.functional as F

from book.measure import orders as timing

pytestmark = pytest.mark.long  # PyTorch's FlexAttention takes long to import

SMALL = (
    "--device", "cpu", "--batch", "1", "--heads", "2", "--rounds", "1", "--sizes", "8:1", "--tiles", "16",
    "32",
)  # fmt: skip


def test_every_candidate_is_timed_and_none_is_wrong(tmp_path, capsys):
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "orders.csv").open()))
    assert not [row["note"] for row in rows if row["note"]]
    flex = {row["candidate"] for row in rows if row["candidate"].startswith("Flex")}
    assert len(flex) == (4 + 3 + 2) * 2
    errors = {row["candidate"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {name for name in flex if "NATTEN" not in name} | {"SDPA, masked"} | {
        row["candidate"] for row in rows if row["candidate"].startswith("Mojo")
    }
    assert all(1e-4 < float(error) < timing.EXACT for error in errors.values())
    own = {row["candidate"]: int(row["tile_pairs"]) for row in rows if row["candidate"].startswith("Mojo")}
    assert own == {f"Mojo, {order}, {tile}": 1 for order in timing.orders.ORDERS for tile in (64, 128)}
    assert {row["pass"] for row in rows if row["candidate"] in flex | set(own)} == {"forward", "both"}
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_a_wrong_candidate_is_said_to_be_wrong(tmp_path, monkeypatch):
    """One whose window is that of another order."""
    right = timing.Problem.window
    monkeypatch.setattr(
        timing.Problem, "window", lambda self, order: right(self, "tiled" if order == "hilbert" else order)
    )
    monkeypatch.setattr(timing.orders, "window_tiles", lambda *_: torch.ones(0))
    monkeypatch.setattr(
        timing, "block_mask", lambda problem, mask, tile: (right_mask(problem, mask, tile), 0)
    )
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 1
    notes = {row["candidate"]: row["note"] for row in csv.DictReader((tmp_path / "orders.csv").open())}
    assert notes["Flex, hilbert, 16"].startswith("WRONG: ") and not notes["Flex, z-order, 16"]


def test_a_candidate_that_is_off_in_float64_is_said_to_be_wrong(tmp_path, monkeypatch):
    """Were all of them alike, and wrong: the first is no truth."""
    monkeypatch.setattr(timing.Problem, "exact", lambda self: [1.01 * t[0, 0].double() for t in self.cells])
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 1
    notes = {row["candidate"]: row["note"] for row in csv.DictReader((tmp_path / "orders.csv").open())}
    assert "from float64" in notes["SDPA, masked"] and not notes["SDPA, every key"]


def test_float64_in_parts_is_float64(monkeypatch):
    """Of the first head, with chunks that do not divide its queries."""
    monkeypatch.setattr(timing, "CHUNK", 23)
    problem = timing.Problem(2, 2, 8, 2, torch.device("cpu"))
    *leaves, grad = (t[0, 0].double().requires_grad_() for t in problem.cells)
    output = F.scaled_dot_product_attention(*leaves, attn_mask=problem.dense_mask())
    right = [output, *torch.autograd.grad(output, leaves, grad)]
    for one, other in zip(problem.exact(), right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("order", ["row-major", "z-order", "tiled"])
def test_masks_by_arithmetic(order):
    """The window; and NATTEN's, which is as large at an edge and the same away from one."""
    side, radius = 16, 2
    problem = timing.Problem(1, 1, side, radius, torch.device("cpu"))
    every = torch.arange(side**2)
    position = (None, None, every[:, None], every)
    window = problem.window(order)(*position)
    assert torch.equal(problem.by_arithmetic(order)(*position), window)
    inward = problem.by_arithmetic(order, inward=True)(*position)
    assert (inward.sum(1) == (2 * radius + 1) ** 2).all() and not torch.equal(inward, window)
    whole = window.sum(1) == (2 * radius + 1) ** 2
    assert torch.equal(inward[whole], window[whole]) and whole.sum() == (side - 2 * radius) ** 2


def right_mask(problem, mask, tile, block_mask=timing.block_mask):
    """The block mask without its count."""
    return block_mask(problem, mask, tile)[0]


def test_a_block_mask_that_holds_other_tiles_than_are_counted(tmp_path, monkeypatch):
    block_mask = timing.block_mask
    monkeypatch.setattr(
        timing, "block_mask", lambda problem, mask, tile: (block_mask(problem, mask, tile)[0], 1)
    )
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 1
    notes = [row["note"] for row in csv.DictReader((tmp_path / "orders.csv").open())]
    assert "AssertionError: row-major, tiles of 16: 1 in the block mask, 10 counted" in notes


def test_a_block_of_two_tiles_computes_what_either_needs():
    """16 x 16, radius 1: a tile is 4 rows, and needs itself and the one above and below."""
    problem = timing.Problem(1, 1, 16, 1, torch.device("cpu"))
    one, two = (timing.ours(problem, "row-major", blocks, timing.window_on_cpu) for blocks in (1, 2))
    assert (one.tile, one.pairs) == (64, 2 + 3 + 3 + 2)
    assert (two.tile, two.pairs) == (128, 3 + 3)
