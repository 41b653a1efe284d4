"""Puzzle 24's NumPy derivation against autograd, and its cases against every known mistake."""

import numpy as np
import pytest
import torch
from typed import as_triple

from harness.check.python_files import load_module
from harness.puzzles.p24 import orders
from harness.puzzles.p24.spec import GRADIENTS, PUZZLE
from harness.toolchain import roots

CASES = PUZZLE.list_cases(None)
SOLUTION = roots.get_solutions() / "p24"


def test_window_over_the_whole_grid_is_dense_attention():
    case = next(case for case in CASES if case.name == "the whole grid")
    arrays = {n: torch.tensor(a) for n, a in PUZZLE.make_inputs(case, "float64", 0).items()}
    leaves = as_triple(arrays[name].requires_grad_() for name in ("query", "key", "value"))
    output = torch.nn.functional.scaled_dot_product_attention(*leaves)
    grads = torch.autograd.grad(output, leaves, arrays["grad_output"])
    expected = dict(zip(("output", *GRADIENTS), (output, *grads), strict=True))
    outputs = PUZZLE.compute_reference(arrays)
    for name, truth in expected.items():
        torch.testing.assert_close(outputs[name], truth.detach(), rtol=1e-12, atol=1e-12)


def test_solution_saves_the_expected_tensors():
    """Query, key, value, the output, one number per row and the order are saved, but no reordered copy."""
    case = next(case for case in CASES if case.name == "hard values")
    tensors = {n: torch.tensor(a) for n, a in PUZZLE.make_inputs(case, "float64", 0).items()}
    saved = []
    attention = load_module(SOLUTION / "in_torch.py")["WindowAttention"]
    leaves = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = attention.apply(*leaves, tensors["order"], tensors["width"], tensors["radius"])
    rows = case.dims[0] * case.dims[1] * case.dims[2] * case.dims[3]
    assert sum(t.numel() for t in saved) == 4 * rows * case.dims[4] + rows + case.dims[2] * case.dims[3]
    saved_addresses = {t.data_ptr() for t in saved}
    assert saved_addresses.issuperset({output.data_ptr(), *(leaf.data_ptr() for leaf in leaves)})


@pytest.mark.parametrize("side", [1, 2, 4, 8, 64, 256])
def test_solution_follows_the_generalised_curve(side):
    functions = load_module(SOLUTION / "in_numpy.py")
    index = functions["index"](np.arange(side**2), side)
    assert np.array_equal(index, orders.make_hilbert_order(side, side))
    assert np.array_equal(functions["inverse"](index, side), np.arange(side**2))
