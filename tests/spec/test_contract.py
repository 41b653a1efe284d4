"""Every puzzle's spec: truth and derivation match autograd, inputs are exact in the dtype, seeds are reproducible."""

import numpy as np
import pytest
import torch

from harness.check.reference import Reference
from harness.spec.cases import is_nonfinite
from harness.spec.catalogue import find_puzzle, list_puzzle_names

PUZZLES = [puzzle for puzzle in map(find_puzzle, list_puzzle_names()) if puzzle.list_cases(None)]
CASES = [(puzzle, case) for puzzle in PUZZLES for case in (*puzzle.list_cases(None), *puzzle.gate_cases)]
INEXACT_PUZZLE = "p27"
"""Puzzle whose truth differs from PyTorch's for infinite inputs, and whose large logits are not exact."""
EXCLUDED_INPUTS = ("mask", "attn_mask", "dln")
"""Inputs that contain -inf in every case, or depend on another input."""
every_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


@pytest.mark.parametrize(
    ("puzzle", "case"),
    [
        pytest.param(puzzle, case, id=f"{puzzle.name}-{case.name}")
        for puzzle, case in CASES
        if puzzle.name != INEXACT_PUZZLE or not is_nonfinite(case.values)
    ],
)
def test_truth_and_derivation_match_autograd(puzzle, case):
    reference = Reference(puzzle, "float64", 1)
    arrays, terms = reference.get_arrays(case), reference.get_term_magnitudes(case)
    exact, derived = puzzle.compute_exact(arrays), puzzle.derive(arrays, {})
    by_torch = puzzle.compute_reference(reference.make_strided_inputs(case))
    assert {label.split(".")[-1] for label in by_torch} <= exact.keys()
    for label, tensor in by_torch.items():
        name = label.split(".")[-1]
        truth = np.asarray(exact[name], np.longdouble)
        finite = np.isfinite(truth)
        # An all-zero truth is the result of cancelling terms of order 1.
        scale = max(np.abs(truth[finite]).max(initial=0), terms.get(name, 0)) or 1
        for got in (tensor.numpy().astype(float), np.asarray(getattr(derived, name), float)):
            assert got.shape == truth.shape, label
            assert np.array_equal(np.isfinite(got), finite), label
            assert np.abs(got[finite] - truth[finite]).max(initial=0) <= 1e-12 * scale, label


@every_puzzle
def test_inputs_are_exact_in_the_runs_dtype(puzzle):
    dtypes = ("float32", "bfloat16", "float16", "float64")
    for dtype, case in [(dtype, case) for dtype in dtypes for case in puzzle.list_cases(None)]:
        for name, array in puzzle.make_inputs(case, dtype, 5).items():
            exempt = puzzle.name == INEXACT_PUZZLE and (case.name, name) == ("large logits", "logits")
            if array.dtype.kind == "f" and array.ndim and not exempt:  # skip scalars
                tensor = torch.tensor(array)
                rounded = tensor.to(getattr(torch, dtype)).to(tensor.dtype)
                assert torch.allclose(rounded, tensor, rtol=0, atol=0, equal_nan=True), (case.name, name)


@pytest.mark.parametrize(
    ("puzzle", "case"),
    [pytest.param(p, case, id=f"{p.name}-{case.name}") for p, case in CASES if is_nonfinite(case.values)],
)
def test_one_element_of_one_tensor_is_nonfinite(puzzle, case):
    value, tensor = case.values.split(" in ")
    for name, array in puzzle.make_inputs(case, "float32", 0).items():
        if name not in EXCLUDED_INPUTS and array.dtype.kind == "f":
            nonfinite = array[~np.isfinite(array)]
            assert len(nonfinite) == (name == tensor), name
            assert name != tensor or np.array_equal(nonfinite, [float(value)], equal_nan=True)


@every_puzzle
def test_seeds_are_different_and_reproducible(puzzle):
    a, repeated, b = (puzzle.make_inputs(puzzle.list_cases(None)[1], "float32", seed) for seed in (0, 0, 1))
    assert all(np.array_equal(array, repeated[name], equal_nan=True) for name, array in a.items())
    assert not all(np.array_equal(array, b[name], equal_nan=True) for name, array in a.items())


@every_puzzle
def test_dims_replace_the_sizes(puzzle):
    dims = puzzle.list_cases(None)[2].dims
    assert {case.dims for case in puzzle.list_cases(dims)} == {dims}
