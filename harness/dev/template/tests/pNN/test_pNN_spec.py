"""Puzzle NN: the reference agrees with the formulas, and every known mistake differs from them."""

import numpy as np
import torch
from harness.puzzles.pNN.spec import MISTAKES, PUZZLE, derive, reference


def test_reference_and_derivation_agree_with_the_formulas():
    for case in PUZZLE.list_cases(None):
        arrays = PUZZLE.make_inputs(case, "float64", 0)
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        truth, outputs = PUZZLE.compute_exact(arrays), reference(tensors)
        for name, expected in truth.items():
            np.testing.assert_allclose(outputs[name].numpy(), expected.astype(float), rtol=1e-12)
            np.testing.assert_allclose(getattr(derive(arrays), name), expected.astype(float), rtol=1e-12)


def test_every_mistake_changes_its_quantity():
    arrays = PUZZLE.make_inputs(PUZZLE.list_cases(None)[0], "float64", 0)
    for mistake in MISTAKES:
        for name in mistake.changes:
            assert not np.allclose(
                getattr(derive(arrays, mistake.changes), name),
                PUZZLE.compute_exact(arrays)[name].astype(float),
            )
