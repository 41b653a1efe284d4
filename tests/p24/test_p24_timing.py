"""The timing of orders on a GPU, tried on the CPU: every candidate computes the same window, and the table is whole."""

import csv

import torch

from harness.puzzles.p24 import timing

SMALL = (
    "--device",
    "cpu",
    "--batch",
    "1",
    "--heads",
    "2",
    "--rounds",
    "1",
    "--sizes",
    "8:1",
    "--tiles",
    "16",
    "32",
)


def test_every_candidate_is_timed_and_none_is_wrong(tmp_path, capsys):
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "orders.csv").open()))
    assert not [row["note"] for row in rows if row["note"]]
    flex = {row["candidate"] for row in rows if row["candidate"].startswith("Flex")}
    assert len(flex) == (4 + 2) * 2
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


def right_mask(problem, mask, tile, made=timing.block_mask):
    """The block mask without its count."""
    return made(problem, mask, tile)[0]


def test_a_block_mask_that_holds_other_tiles_than_are_counted(tmp_path, monkeypatch):
    made = timing.block_mask
    monkeypatch.setattr(timing, "block_mask", lambda problem, mask, tile: (made(problem, mask, tile)[0], 1))
    assert timing.main([*SMALL, "--csv", str(tmp_path / "orders.csv")]) == 1
    notes = [row["note"] for row in csv.DictReader((tmp_path / "orders.csv").open())]
    assert "AssertionError: row-major, tiles of 16: 1 in the block mask, 10 counted" in notes


def test_a_block_of_two_tiles_computes_what_either_needs():
    """16 x 16, radius 1: a tile is 4 rows, and needs itself and the one above and below."""
    problem = timing.Problem(1, 1, 16, 1, torch.device("cpu"))
    one, two = (timing.ours(problem, "row-major", blocks, timing.window_on_cpu) for blocks in (1, 2))
    assert (one.tile, one.pairs) == (64, 2 + 3 + 3 + 2)
    assert (two.tile, two.pairs) == (128, 3 + 3)
