"""Puzzle 27's kernels: right, in 16 bits too, and unsolved as given."""

import itertools
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from harness.check import zoo
from harness.check.checker import Checker
from harness.check.diagnose import diagnose
from harness.check.reference import Reference
from harness.devices.recorder import Order, record_many
from harness.devices.targets import cpu
from harness.puzzles.p27 import derivation, kernels
from harness.puzzles.p27.spec import PUZZLE, cases
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

SEEDS = [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)]


def test_the_mean_of_losses_that_are_rounded_as_they_may_be_is_right():
    """As on a real GPU, whose logarithm gives other last digits: losses that are small beside their logits have few digits, and
    so has their mean. From exact losses the same mean is wrong."""
    (case,) = (case for case in cases() if case.name == "sums that cancel")
    reference = Reference(PUZZLE, "float32", 0)
    truth = reference.truth(case, cpu())
    exact = {name: truth[name].astype(np.float32) for name in ("row_loss", "row_lse", "places", "mean_loss")}
    moved = {name: exact[name] * np.float32(1 + 1.3e-6) for name in ("row_loss", "mean_loss")}
    for losses, right in ((moved["row_loss"], True), (exact["row_loss"], False)):
        outputs = exact | {"row_loss": losses, "mean_loss": moved["mean_loss"]}
        verdicts = reference.compare_all(case, cpu(), "loss", outputs, ["row_loss", "mean_loss"])
        assert verdicts["row_loss"].ok and verdicts["mean_loss"].ok == right


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_loss_of_a_rounded_lse_is_wrong_whatever_the_seed_and_said(seeds):
    """lse - z[target] in float32, beside log(total) - (z[target] - largest)."""
    for seed in seeds:
        judge_rounded_lse(Reference(PUZZLE, "float32", seed))


def judge_rounded_lse(reference):
    """Judge the loss by either formula."""
    (case,) = (case for case in PUZZLE.gate_cases if case.name == "far from 0")
    v, truth = kernels.derive(reference.arrays(case)), reference.truth(case, cpu())
    counted, target = v.counted[..., 0], v.row_target.astype(np.float32)
    largest = v.row_largest[..., 0].astype(np.float32)
    logarithm = np.log(np.exp((v.logits - v.row_largest).astype(np.float32)).sum(-1))
    losses = ((largest + logarithm - target, False), (logarithm - (target - largest), True))
    for loss, right in losses:
        got = {name: truth[name].astype(np.float32) for name in ("row_lse", "places")}
        got["row_loss"] = (counted * loss).astype(np.float32)
        verdict = reference.compare_all(case, cpu(), "loss", got, ["row_loss"])["row_loss"]
        assert verdict.ok == right, reference.seed
        if not right:
            shown = reference.evidence(case, cpu(), "row_loss", got["row_loss"], verdict)
            said = diagnose(PUZZLE, "row_loss", [shown], gate="row_loss")
            assert said.mistake == "lse-cancels" and "lse - z[target] cancels" in said.sentence


def test_a_running_maximum_that_starts_at_0_is_wrong():
    """It is right in each row with a positive logit; where all are far below 0, every exponential is 0."""
    (case,) = (case for case in PUZZLE.gate_cases if case.name == "far from 0")
    reference = Reference(PUZZLE, "float32", 0)
    v, truth = kernels.derive(reference.arrays(case)), reference.truth(case, cpu())
    for largest, right in ((v.row_largest, True), (np.maximum(v.row_largest, 0), False)):
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(np.exp(v.logits - largest).sum(-1)) - (v.row_target - largest[..., 0])
        got = {name: truth[name].astype(np.float32) for name in ("row_lse", "places")}
        got["row_loss"] = np.where(v.counted[..., 0] > 0, loss, 0).astype(np.float32)
        assert reference.compare_all(case, cpu(), "loss", got, ["row_loss"])["row_loss"].ok == right


def test_either_form_of_gelu_is_right_whatever_the_seed():
    """By these seeds PyTorch's tanh form is lucky where the gradient crosses 0, and the limit is that of its sigmoid's form."""
    one = np.float32
    for seed, case in itertools.product((1, 10, 18), cases()):
        reference = Reference(PUZZLE, "float32", seed)
        arrays = reference.arrays(case)
        x, dx = arrays["x"].astype(one), arrays["dx"].astype(one)
        scale, cube = one(np.sqrt(2 / np.pi)), one(derivation.CUBE)
        u = scale * (x + cube * x * x * x)
        slope = scale * (1 + 3 * cube * x * x)
        with np.errstate(over="ignore"):
            s, t = 1 / (1 + np.exp(-2 * u)), np.tanh(u)
        forms = (
            {"gelu": x * s, "grad_gelu": dx * (s + 2 * x * s * (1 - s) * slope)},
            {"gelu": x * (1 + t) / 2, "grad_gelu": dx * ((1 + t) / 2 + x / 2 * (1 - t * t) * slope)},
        )
        for got in forms:
            verdicts = reference.compare_all(case, cpu(), "gelu", got, [*got])
            assert all(verdict.ok for verdict in verdicts.values()), (case.name, verdicts)


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_rounding_of_a_saved_lse_moves_a_gradient_by_no_more_than_its_size_allows(seeds):
    """p = exp(z - lse) is off by p |lse| 2^-24, as lse is: PyTorch saves log p, which is small where p is not."""
    far = [case for case in PUZZLE.gate_cases if case.name == "far from 0"]
    for seed in seeds:
        reference = Reference(PUZZLE, "float32", seed)
        for case in (*cases(), *far):
            arrays = reference.arrays(case)
            v = kernels.derive(arrays)
            moved = kernels.propagate_rounding(arrays, {"row_lse": v.row_lse.astype(np.float32)})
            bound = np.abs(v.row_p * v.row_lse[..., None]).max() * 2.0**-24 / max(1, v.count)
            assert moved["grad_rows"] <= 1.01 * bound, (seed, case.name)


@pytest.mark.compiles
def test_a_whole_run_rejects_what_the_gate_rejects(command_line):
    """A clipping that swallows NaN is right in every case of a graph: the gate has one of its own."""
    (wrong,) = (each for each in zoo.load("p27") if each.name == "mojo_clip_gradients_nan")
    flags = ("--backward", "--clip", "--device", "virtual")
    said = command_line("p27", *flags, "--ops", str(wrong.package().path))
    assert said.code == 1 and "❌ INCORRECT: clip_gradients" in said.out
    assert "❌ clip_gradients wrong in" in said.out and "ALL CORRECT" not in said.out


@pytest.mark.compiles
@pytest.mark.slow
def test_a_mistake_that_a_learner_has_tried_is_rejected_and_named(tmp_path):
    """Those of `learner_mistakes.toml`, in the small cases of each gate, recorded by one program."""
    told = tomllib.loads((Path(__file__).parent / "learner_mistakes.toml").read_text("utf-8"))["mojo"]
    tried = [(gate, name, each) for gate, named in told.items() for name, each in named.items()]
    solution, orders = roots.op_package(roots.solutions(), "p27").path, []
    for number, (gate, _, each) in enumerate(tried):
        package = shutil.copytree(solution, tmp_path / str(number) / "op")
        text = (package / PUZZLE.source).read_text()
        for old, new in each["edits"]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (package / PUZZLE.source).write_text(text)
        (variant,) = {known.variant for known in kernels.GATES if known.id == gate}
        dims = tuple(dict.fromkeys(case.dims for case in small(variant)))
        orders.append(Order(OpPackage(package), dims, (variant,), small_grid=True))
    record_many(orders, "p27")
    checker, others = Checker(PUZZLE), []
    for order, (gate, name, each) in zip(orders, tried, strict=True):
        (result,) = checker.check(order.package.path, [gate], small(*order.variants))
        if (result.state, result.mistake) != ("wrong", each["mistake"]):
            others.append((gate, name, result.state, result.mistake, result.diagnosis))
    assert not others


def small(variant: str) -> list:
    """The small cases of a variant."""
    every = (*cases(), *PUZZLE.gate_cases)
    return [case for case in every if case.variant in ("", variant) and np.prod(case.dims) <= 2000]


# ---- The mathematics ----------------------------------------------------------------------------------------


def test_places_are_sorted_by_token():
    tokens = np.array([[3, 0, 3], [1, 3, 0]])
    places = kernels.sorted_places(tokens, 5)
    assert places["order"].tolist() == [1, 5, 3, 0, 2, 4]
    assert places["starts"].tolist() == [0, 2, 3, 3, 6, 6]
