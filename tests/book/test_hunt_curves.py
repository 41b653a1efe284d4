"""The loss curves: the same start and the same batches, one class that differs, and what becomes of the losses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from book.measure import hunt_curves as curves
from harness.check.python_files import load
from harness.puzzles.p21.subjects import WANTED
from harness.toolchain import roots


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[list[float], list[float]]]:
    """Short runs: enough for the curves to part."""
    return curves.pairs(40)


def test_both_begin_alike_and_both_fall(pairs):
    assert list(pairs) == list(curves.BUGS)
    for name, (right, wrong) in pairs.items():
        assert right[0] == pytest.approx(wrong[0], rel=1e-5), name
        assert wrong[-1] < wrong[0], f"{name}: the loss still goes down"
        assert right[-1] < 0.9 * right[0] and right[-1] != wrong[-1]


def test_the_wrong_adapter_never_moves():
    """What the flat part of the story rests on: not one step changes a or b."""
    wrong = next(bug for bug in curves.zoo.load("p21") if bug.name == "lowrank_none_for_all")
    module = load(wrong.target())
    functions = {w.name: module[w.name] for w in WANTED.values()} | {"right Softmax": module["Softmax"]}
    p = curves.parameters(0)
    loss = curves.loss_of(functions, p, *curves.batch(torch.Generator().manual_seed(0)))
    loss.backward()
    still, moved = p["a"].grad, p["key"].grad
    assert still is None or not still.any()
    assert moved is not None and moved.any()


def test_the_right_model_has_autograd_s_gradients():
    solution = load(roots.solutions() / "p21" / "hunt.py")
    functions = {w.name: solution[w.name] for w in WANTED.values()} | {"right Softmax": solution["Softmax"]}

    class Plain:
        def __init__(self, apply: Callable[..., Any]):
            self.apply = apply

    plain = {w.name: Plain(w.reference) for w in WANTED.values()}
    plain["right Softmax"] = plain["Softmax"]
    gradients = []
    for used in (functions, plain):
        p = curves.parameters(3)
        loss = curves.loss_of(used, p, *curves.batch(torch.Generator().manual_seed(4)))
        leaves = [t for t in p.values() if t.requires_grad]
        gradients.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_every_step_of_every_pair_is_a_row(pairs, monkeypatch):
    monkeypatch.setattr(curves, "pairs", lambda steps: pairs)
    rows = list(curves.rows(40))
    assert len(rows) == 120 and {*rows[0]} == {"bug", "step", "right", "wrong"}
    assert float(str(rows[0]["right"])) == pytest.approx(pairs[curves.BUGS[0]][0][0], abs=1e-6)
