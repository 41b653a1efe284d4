"""The derive rung: finite differences match autograd, and each known mistake is rejected and named."""

import shutil

import numpy as np
import pytest
import torch

from harness.check.checker import load_checker
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p22 import derive_rung
from harness.puzzles.p22.derive_checker import (
    DeriveChecker,
    compute_by_differences,
    compute_directional_derivative,
)
from harness.puzzles.p22.ops import EPS
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain import roots

GATES = [gate.id for gate in derive_rung.GATES]
CASES = [case for case in PUZZLE.list_cases(None) if " in " not in case.values]
SOLUTION = roots.get_solutions() / "p22" / "derive.py"


@pytest.fixture(scope="module")
def checker():
    """The checker that the command line would load."""
    warm = load_checker(Exercise(PUZZLE, derive_rung.RUNG))
    assert isinstance(warm, DeriveChecker)
    return warm


def test_finite_differences_have_nine_correct_digits():
    x = np.array([3.0, 3.1, 2.95, 3.02])
    direction = np.array([1.0, -2.0, 0.5, 0.25])
    np.testing.assert_allclose(
        compute_directional_derivative(np.sin, x, direction), np.cos(x) * direction, rtol=1e-9
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_truth_matches_autograd(case):
    arrays = PUZZLE.make_inputs(case, "float64", 0)
    v = PUZZLE.derive(arrays, {})
    truth = compute_by_differences(v)
    x = torch.tensor(v.row_x, requires_grad=True)
    g, direction = torch.tensor(v.row_g), torch.tensor(v.row_v)

    def x_hat(row):
        return torch.nn.functional.layer_norm(row, row.shape, eps=EPS)

    def assert_truth_is_close(name, expected):
        expected = expected.detach().numpy()
        np.testing.assert_allclose(truth[name], expected, rtol=0, atol=3e-9 * np.abs(expected).max())

    assert_truth_is_close("dmean", torch.autograd.grad(x.mean(), x)[0])
    assert_truth_is_close("dvar", torch.autograd.grad(x.var(correction=0), x)[0])
    assert_truth_is_close("jvp", torch.autograd.functional.jvp(x_hat, x, direction)[1])
    gradient = torch.autograd.grad(g @ x_hat(x), x)[0].numpy()
    by_hand = v.row_scale * (v.row_g - truth["row_c2"] - v.row_x_hat * truth["row_c1"])
    np.testing.assert_allclose(by_hand, gradient, rtol=0, atol=3e-9 * np.abs(v.row_g).max() * v.row_scale)


def test_solution_is_correct_on_finite_cases(checker):
    results = checker.check(SOLUTION)
    assert [result.gate.id for result in results] == GATES
    for result in results:
        assert result.state == "correct", result.diagnosis
        assert [comparison.case for comparison in result.comparisons] == CASES
        assert all(v.limit < 1e-8 for c in result.comparisons for v in c.results.values())


@pytest.mark.parametrize("mistake", derive_rung.MISTAKES, ids=lambda mistake: mistake.id)
def test_known_mistakes_are_rejected_and_named(checker, tmp_path, mistake):
    """The tested function returns the mistake's values."""
    (quantity,) = mistake.changes
    gate = next(gate for gate in derive_rung.GATES if quantity in gate.quantities)
    arguments = {"dmean": "x", "dvar": "x", "jvp": "v, x_hat, rstd", "c2": "g, x_hat", "c1": "g, x_hat"}[
        gate.id
    ]
    path = tmp_path / "derive.py"
    text = SOLUTION.read_text().replace(f"def {gate.id}(", f"def right_{gate.id}(")
    path.write_text(f"{text}\n\nVALUES = []\n\n\ndef {gate.id}({arguments}):\n    return VALUES.pop(0)\n")
    values = [
        np.array(getattr(PUZZLE.derive(PUZZLE.make_inputs(c, "float64", 0), mistake.changes), quantity))
        for c in CASES
    ]
    numbers = repr([value.tolist() for value in values])
    path.write_text(path.read_text().replace("VALUES = []", f"VALUES = [np.array(v) for v in {numbers}]"))
    (result,) = checker.check(path, [gate.id])
    assert result.state == "wrong" and result.mistake == mistake.id, result.diagnosis


def test_nonscalar_result_is_rejected(checker, tmp_path):
    path = tmp_path / "derive.py"
    path.write_text(SOLUTION.read_text().replace("return g.mean()", "return g"))
    result = checker.check(path, ["c2"])[0]
    assert result.state == "wrong"
    assert "expected one number for the whole row, not an array of shape [8]" in result.diagnosis[0]


# ---- The command line ---------------------------------------------------------------------------------------


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """A copy of the checkout with an unsolved problem."""
    shutil.copytree(roots.CHECKOUT / "solutions", tmp_path / "solutions", symlinks=True)
    blanks.generate_problems(tmp_path / "solutions", tmp_path / "problems")
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    return tmp_path / "problems" / "p22" / "derive.py"


def test_rung_is_inferred_from_the_gate(command_line, learner):
    assert command_line("p22", "--rung", "derive").code == 3
    shutil.copy(SOLUTION, learner)
    result = command_line("p22", "--gate", "jvp")
    assert result.code == 0 and "jvp" in result.out
    assert command_line("p22", "--rung", "derive").code == 0
    listed = command_line("list", "p22").out
    assert listed.index("derive.py") < listed.index("backward.py") < listed.index("layernorm_linear.mojo")
