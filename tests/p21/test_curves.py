"""The loss curves: the same start and the same batches, one class that differs, and what becomes of the losses."""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import cli
from harness.check.python_files import load
from harness.puzzles.p21 import curves
from harness.puzzles.p21.subjects import WANTED
from harness.toolchain import roots


@pytest.fixture(scope="module")
def pairs() -> dict[str, curves.Pair]:
    """Short runs: enough for the curves to part."""
    return curves.pairs(40)


def test_both_begin_alike_and_both_fall(pairs):
    assert list(pairs) == list(curves.BUGS)
    for name, pair in pairs.items():
        assert pair.right[0] == pytest.approx(pair.wrong[0], rel=1e-5), name
        assert pair.wrong[-1] < pair.wrong[0], f"{name}: the loss still goes down"
        assert pair.right[-1] < 0.9 * pair.right[0]
    assert all(
        right != wrong for pair in pairs.values() for right, wrong in [(pair.right[-1], pair.wrong[-1])]
    )


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


def test_the_command_draws_and_writes(monkeypatch, capsys, tmp_path, pairs):
    monkeypatch.setattr(curves, "pairs", lambda steps: pairs)
    target = tmp_path / "curves.csv"
    assert cli.main(["p21", "--curves", "--steps", "40", "--csv", str(target)]) == 0
    said = capsys.readouterr().out
    assert said.count("final loss: right") == 3 and "step 40" in said
    rows = list(csv.DictReader(target.open()))
    assert len(rows) == 120 and float(rows[0]["right"]) == pytest.approx(
        pairs[curves.BUGS[0]].right[0], abs=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--steps", "3"), "--steps 3: must be at least 20"), (("--csv", "no/such/folder.csv"), "--csv no/such/folder.csv: ")],
)  # fmt: skip
def test_bad_use_is_a_line(monkeypatch, capsys, pairs, arguments, words):
    monkeypatch.setattr(curves, "pairs", lambda steps: pairs)
    assert cli.main(["p21", "--curves", *arguments]) == 2
    assert words in capsys.readouterr().err
