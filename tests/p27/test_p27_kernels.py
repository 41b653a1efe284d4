"""Puzzle 27's kernels: right, in 16 bits too, unsolved as given, each wrong one rejected by its own name."""

import numpy as np
import pytest
import torch
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker
from harness.check.compare import compare
from harness.check.reference import Reference
from harness.devices.recorder import Order, record_many
from harness.devices.targets import cpu
from harness.learner import blanks
from harness.puzzles.p27 import derivation, kernels
from harness.puzzles.p27.spec import GATE_CASES, LONG, PUZZLE, cases
from harness.spec.rounding import rounded
from harness.toolchain import roots

WRONG = [wrong for wrong in zoo.load("p27") if not wrong.rung]
VARIANT = {gate.id: gate.variant for gate in kernels.GATES}
USUAL = ("chapter", "large logits", "many places", "1 x 1 x 389", "1 x 513 x 1")


def cases_for(kernel):
    """The cases that a wrong kernel is judged by: those that it needs, where it says so, else the usual ones."""
    of_variant = [case for case in GATE_CASES if case.variant == VARIANT[kernel.gate]]
    return [case for case in (*cases(), *of_variant) if case.name in (kernel.cases or USUAL)]


@pytest.fixture(scope="module")
def checkers(request):
    """A checker of each dtype; the chosen wrong kernels are recorded together."""
    orders = [
        Order(
            each.package(), tuple(dict.fromkeys(case.dims for case in cases_for(each))), (VARIANT[each.gate],), small_grid=True,
            dtype=each.dtype,
        )
        for each in chosen(request, "kernel")
    ]  # fmt: skip
    record_many(orders, "p27")
    return {dtype: Checker(PUZZLE, dtype=dtype) for dtype in {each.dtype for each in WRONG}}


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, checkers):
    gates = [gate.id for gate in kernels.GATES if gate.variant == VARIANT[kernel.gate]]
    results = {r.gate.id: r for r in checkers[kernel.dtype].check(kernel.package(), gates, cases_for(kernel))}
    named = results[kernel.gate]
    wrong = {id for id, result in results.items() if result.state == "wrong"}
    assert wrong == {kernel.gate, *kernel.also}, "\n".join(named.diagnosis)
    assert named.mistake == kernel.mistake, "\n".join(named.diagnosis)
    for id in kernel.also:
        assert results[id].diagnosis[0].endswith("which is wrong: mend that first")


def test_the_mean_of_losses_that_are_rounded_as_they_may_be_is_right():
    """As on a real GPU, whose logarithm gives other last digits: losses that are small beside their logits have few digits, and
    so has their mean. From exact losses the same mean is wrong."""
    (case,) = (case for case in cases() if case.name == "sums that cancel")
    reference = Reference(PUZZLE, "float32", 0)
    truth = {name: torch.as_tensor(array) for name, array in reference.truth(case, cpu()).items()}
    exact = {name: truth[name].float() for name in ("row_loss", "row_lse", "places", "mean_loss")}
    moved = {name: exact[name] * (1 + 1.3e-6) for name in ("row_loss", "mean_loss")}
    for losses, right in ((moved["row_loss"], True), (exact["row_loss"], False)):
        outputs = exact | {"row_loss": losses, "mean_loss": moved["mean_loss"]}
        verdicts = reference.compared(case, cpu(), "loss", outputs, ["row_loss", "mean_loss"])
        assert verdicts["row_loss"].ok and verdicts["mean_loss"].ok == right


def test_the_zoo_has_two_wrong_kernels_for_every_gate():
    for gate in kernels.GATES:
        assert sum(wrong.gate == gate.id for wrong in WRONG) >= 2, gate.id
    assert all(len(wrong.story.splitlines()) == 1 for wrong in WRONG)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernels_are_right_on_the_virtual_gpu(dtype):
    results = Checker(PUZZLE, dtype=dtype).check(roots.op_package(roots.solutions(), "p27"))
    assert {r.gate.id: r.state for r in results} == {gate.id: "correct" for gate in kernels.GATES}, [
        r.diagnosis for r in results
    ]


def test_what_is_given_is_unsolved(tmp_path):
    blanks.generate(roots.solutions() / "p27", tmp_path / "p27")
    assert {r.state for r in Checker(PUZZLE).check(tmp_path / "p27" / "op")} == {"unsolved"}


# ---- The mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_derivation_is_pytorch_s_and_every_known_mistake_is_rejected(dtype):
    reference = Reference(PUZZLE, dtype, 0)
    known = [m for m in kernels.MISTAKES if m not in derivation.MISTAKES]

    def right(changes, case) -> bool:
        derived = kernels.derive(reference.arrays(case), changes)
        truth, baseline = reference.truth(case, cpu()), reference.baseline(case, cpu())
        return all(
            compare(
                rounded(np.asarray(getattr(derived, name), np.float64), PUZZLE.written_dtype(name, dtype)),
                truth[name], baseline[name], PUZZLE.written_dtype(name, dtype),
            ).ok
            for name in kernels.QUANTITIES
        )  # fmt: skip

    every = [*cases(), LONG]
    assert [case.name for case in every if not right({}, case)] == []
    # What passes through float16 is no mistake in bfloat16, which has three binary digits fewer.
    finer = {"p-rounded-to-float16", "added-in-float16"} if dtype == "bfloat16" else set[str]()
    assert {m.id for m in known if all(right(m.changes, case) for case in every)} == finer


def test_places_are_sorted_by_token():
    tokens = np.array([[3, 0, 3], [1, 3, 0]])
    places = kernels.sorted_places(tokens, 5)
    assert places["order"].tolist() == [1, 5, 3, 0, 2, 4]
    assert places["starts"].tolist() == [0, 2, 3, 3, 6, 6]
