"""What holds of every puzzle's spec: its truth and its derivation are what autograd says, its inputs fit the dtype, seeds repeat."""

import numpy as np
import pytest
import torch

from harness.check.reference import Reference
from harness.spec.cases import is_not_finite
from harness.spec.catalogue import find_puzzle, puzzle_names

PUZZLES = [puzzle for puzzle in map(find_puzzle, puzzle_names()) if puzzle.cases(None)]
CASES = [(puzzle, case) for puzzle in PUZZLES for case in (*puzzle.cases(None), *puzzle.gate_cases)]
OTHERWISE = "p27"
"""Whose truth in float64 is not PyTorch's where an input is infinite, and whose large logits are rounded by who takes them."""
FOLLOW = ("mask", "attn_mask", "dln")
"""Inputs that hold -inf by themselves, or what another one makes of NaN."""
every_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


@pytest.mark.parametrize(
    ("puzzle", "case"),
    [
        pytest.param(puzzle, case, id=f"{puzzle.name}-{case.name}")
        for puzzle, case in CASES
        if puzzle.name != OTHERWISE or not is_not_finite(case.values)
    ],
)
def test_truth_and_derivation_are_what_autograd_says(puzzle, case):
    reference = Reference(puzzle, "float64", 1)
    arrays, terms = reference.arrays(case), reference.terms(case)
    exact, derived = puzzle.exact(arrays), puzzle.derive(arrays, {})
    by_torch = puzzle.reference(reference.strided_inputs(case))
    assert {label.split(".")[-1] for label in by_torch} <= exact.keys()
    for label, tensor in by_torch.items():
        name = label.split(".")[-1]
        truth = np.asarray(exact[name], np.longdouble)
        finite = np.isfinite(truth)
        # Where truth is 0 throughout, terms of size 1 have cancelled.
        scale = max(np.abs(truth[finite]).max(initial=0), terms.get(name, 0)) or 1
        for got in (tensor.numpy().astype(float), np.asarray(getattr(derived, name), float)):
            assert got.shape == truth.shape, label
            assert np.array_equal(np.isfinite(got), finite), label
            assert np.abs(got[finite] - truth[finite]).max(initial=0) <= 1e-12 * scale, label


@every_puzzle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_inputs_are_exact_in_the_dtype_of_the_run(puzzle, dtype):
    for case in puzzle.cases(None):
        for name, array in puzzle.inputs(case, dtype, 5).items():
            exempt = puzzle.name == OTHERWISE and (case.name, name) == ("large logits", "logits")
            if array.dtype.kind == "f" and array.ndim and not exempt:  # a number is no tensor
                tensor = torch.tensor(array)
                held = tensor.to(getattr(torch, dtype)).to(tensor.dtype)
                assert torch.allclose(held, tensor, rtol=0, atol=0, equal_nan=True), (case.name, name)


@pytest.mark.parametrize(
    ("puzzle", "case"),
    [pytest.param(p, case, id=f"{p.name}-{case.name}") for p, case in CASES if is_not_finite(case.values)],
)
def test_one_element_of_one_tensor_is_no_number(puzzle, case):
    value, tensor = case.values.split(" in ")
    for name, array in puzzle.inputs(case, "float32", 0).items():
        if name not in FOLLOW and array.dtype.kind == "f":
            wild = array[~np.isfinite(array)]
            assert len(wild) == (name == tensor), name
            assert name != tensor or np.array_equal(wild, [float(value)], equal_nan=True)


@every_puzzle
def test_seeds_differ_and_repeat(puzzle):
    one, again, other = (puzzle.inputs(puzzle.cases(None)[1], "float32", seed) for seed in (0, 0, 1))
    assert all(np.array_equal(array, again[name], equal_nan=True) for name, array in one.items())
    assert not all(np.array_equal(array, other[name], equal_nan=True) for name, array in one.items())


@every_puzzle
def test_dims_replace_the_sizes(puzzle):
    dims = puzzle.cases(None)[2].dims
    assert {case.dims for case in puzzle.cases(dims)} == {dims}
