"""Puzzle 27's kernels: correct formulas pass, rounding errors fail, and learners' mistakes are named."""

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
from harness.devices.recorder import RecordRequest, record_many
from harness.devices.targets import make_cpu_target
from harness.puzzles.p27 import derivation, kernels
from harness.puzzles.p27.spec import PUZZLE, cases
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

SEEDS = [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)]


def test_mean_of_rounded_losses_passes():
    """The mean of rounded losses matches rounded losses, but not exact ones. A GPU's logarithm rounds
    differently, and losses much smaller than their logits have few correct digits."""
    (case,) = (case for case in cases() if case.name == "sums that cancel")
    reference = Reference(PUZZLE, "float32", 0)
    truth = reference.get_truth(case, make_cpu_target())
    exact = {name: truth[name].astype(np.float32) for name in ("row_loss", "row_lse", "places", "mean_loss")}
    perturbed = {name: exact[name] * np.float32(1 + 1.3e-6) for name in ("row_loss", "mean_loss")}
    for losses, is_correct in ((perturbed["row_loss"], True), (exact["row_loss"], False)):
        outputs = exact | {"row_loss": losses, "mean_loss": perturbed["mean_loss"]}
        results = reference.compare_all(case, make_cpu_target(), "loss", outputs, ["row_loss", "mean_loss"])
        assert results["row_loss"].ok and results["mean_loss"].ok == is_correct


@pytest.mark.parametrize("seeds", SEEDS)
def test_loss_from_a_rounded_lse_fails_for_all_seeds(seeds):
    """Compare lse - z[target] with log(total) - (z[target] - max) in float32."""
    for seed in seeds:
        check_rounded_lse(Reference(PUZZLE, "float32", seed))


def check_rounded_lse(reference):
    """Check the loss of both formulas: only the one that subtracts the maximum first is accurate."""
    (case,) = (case for case in PUZZLE.gate_cases if case.name == "far from 0")
    v, truth = kernels.derive(reference.get_arrays(case)), reference.get_truth(case, make_cpu_target())
    valid, target = v.valid[..., 0], v.row_target.astype(np.float32)
    largest = v.row_max[..., 0].astype(np.float32)
    logarithm = np.log(np.exp((v.logits - v.row_max).astype(np.float32)).sum(-1))
    losses = ((largest + logarithm - target, False), (logarithm - (target - largest), True))
    for loss, is_correct in losses:
        got = {name: truth[name].astype(np.float32) for name in ("row_lse", "places")}
        got["row_loss"] = (valid * loss).astype(np.float32)
        result = reference.compare_all(case, make_cpu_target(), "loss", got, ["row_loss"])["row_loss"]
        assert result.ok == is_correct, reference.seed
        if not is_correct:
            evidence = reference.make_evidence(case, make_cpu_target(), "row_loss", got["row_loss"], result)
            diagnosis = diagnose(PUZZLE, "row_loss", [evidence], gate="row_loss")
            assert diagnosis.mistake == "lse-cancels" and "lse - z[target] cancels" in diagnosis.sentence


def test_running_maximum_starting_at_zero_fails():
    """It is correct for rows with a positive logit, but underflows if all logits are far below 0."""
    (case,) = (case for case in PUZZLE.gate_cases if case.name == "far from 0")
    reference = Reference(PUZZLE, "float32", 0)
    v, truth = kernels.derive(reference.get_arrays(case)), reference.get_truth(case, make_cpu_target())
    for largest, is_correct in ((v.row_max, True), (np.maximum(v.row_max, 0), False)):
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(np.exp(v.logits - largest).sum(-1)) - (v.row_target - largest[..., 0])
        got = {name: truth[name].astype(np.float32) for name in ("row_lse", "places")}
        got["row_loss"] = np.where(v.valid[..., 0] > 0, loss, 0).astype(np.float32)
        assert (
            reference.compare_all(case, make_cpu_target(), "loss", got, ["row_loss"])["row_loss"].ok
            == is_correct
        )


def test_both_forms_of_gelu_pass_for_all_seeds():
    """For these seeds the sigmoid form determines the limit, since the tanh form is nearly exact near 0."""
    float32 = np.float32
    for seed, case in itertools.product((1, 10, 18), cases()):
        reference = Reference(PUZZLE, "float32", seed)
        arrays = reference.get_arrays(case)
        x, dx = arrays["x"].astype(float32), arrays["dx"].astype(float32)
        scale, cube = float32(np.sqrt(2 / np.pi)), float32(derivation.CUBIC_COEFF)
        u = scale * (x + cube * x * x * x)
        slope = scale * (1 + 3 * cube * x * x)
        with np.errstate(over="ignore"):
            s, t = 1 / (1 + np.exp(-2 * u)), np.tanh(u)
        forms = (
            {"gelu": x * s, "grad_gelu": dx * (s + 2 * x * s * (1 - s) * slope)},
            {"gelu": x * (1 + t) / 2, "grad_gelu": dx * ((1 + t) / 2 + x / 2 * (1 - t * t) * slope)},
        )
        for got in forms:
            results = reference.compare_all(case, make_cpu_target(), "gelu", got, [*got])
            assert all(result.ok for result in results.values()), (case.name, results)


@pytest.mark.parametrize("seeds", SEEDS)
def test_rounded_lse_changes_gradients_within_the_limit(seeds):
    """Rounding lse gives p = exp(z - lse) the error p |lse| 2^-24; PyTorch saves log p instead."""
    far_cases = [case for case in PUZZLE.gate_cases if case.name == "far from 0"]
    for seed in seeds:
        reference = Reference(PUZZLE, "float32", seed)
        for case in (*cases(), *far_cases):
            arrays = reference.get_arrays(case)
            v = kernels.derive(arrays)
            perturbed = kernels.propagate_rounding(arrays, {"row_lse": v.row_lse.astype(np.float32)})
            bound = np.abs(v.row_p * v.row_lse[..., None]).max() * 2.0**-24 / max(1, v.count)
            assert perturbed["grad_rows"] <= 1.01 * bound, (seed, case.name)


@pytest.mark.slow
@pytest.mark.compiles
def test_full_run_includes_the_gates_cases(command_line):
    """Only a case of the gate, not of the graph, detects clipping that drops NaN."""
    (wrong,) = (
        kernel for kernel in zoo.load_wrong_solutions("p27") if kernel.name == "mojo_clip_gradients_nan"
    )
    flags = ("--backward", "--clip", "--device", "virtual")
    result = command_line("p27", *flags, "--ops", str(wrong.build_package().path))
    assert result.code == 1 and "❌ INCORRECT: clip_gradients" in result.out
    assert "❌ clip_gradients wrong in" in result.out and "ALL CORRECT" not in result.out


@pytest.mark.compiles
@pytest.mark.slow
def test_learner_mistakes_are_rejected_and_named(tmp_path):
    """Check `learner_mistakes.toml` in each gate's small cases, recorded by a single program."""
    mistakes = tomllib.loads((Path(__file__).parent / "learner_mistakes.toml").read_text("utf-8"))["mojo"]
    entries = [
        (gate, name, edits)
        for gate, edits_by_name in mistakes.items()
        for name, edits in edits_by_name.items()
    ]
    solution, orders = roots.make_op_package(roots.get_solutions(), "p27").path, []
    for number, (gate, _, edits) in enumerate(entries):
        package = shutil.copytree(solution, tmp_path / str(number) / "op")
        text = (package / PUZZLE.source).read_text()
        for old, new in edits["edits"]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (package / PUZZLE.source).write_text(text)
        (variant,) = {known.variant for known in kernels.GATES if known.id == gate}
        dims = tuple(dict.fromkeys(case.dims for case in list_small_cases(variant)))
        orders.append(RecordRequest(OpPackage(package), "p27", dims, (variant,), small_grid=True))
    record_many(orders)
    checker, unidentified = Checker(PUZZLE), []
    for order, (gate, name, edits) in zip(orders, entries, strict=True):
        (result,) = checker.check(order.package.path, [gate], list_small_cases(*order.variants))
        if (result.state, result.mistake) != ("wrong", edits["mistake"]):
            unidentified.append((gate, name, result.state, result.mistake, result.diagnosis))
    assert not unidentified


def list_small_cases(variant: str) -> list:
    all_cases = (*cases(), *PUZZLE.gate_cases)
    return [case for case in all_cases if case.variant in ("", variant) and np.prod(case.dims) <= 2000]


# ---- The mathematics ----------------------------------------------------------------------------------------


def test_positions_are_sorted_by_token():
    tokens = np.array([[3, 0, 3], [1, 3, 0]])
    positions = kernels.sort_positions(tokens, 5)
    assert positions["order"].tolist() == [1, 5, 3, 0, 2, 4]
    assert positions["starts"].tolist() == [0, 2, 3, 3, 6, 6]
