"""Puzzle 28's spec: the reference against autograd, known mistakes, and constants that match the kernels."""

import math
import re

import numpy as np
import torch

from book.measure import record
from harness.puzzles.p28 import limits, recorded, whole_pass
from harness.puzzles.p28.spec import (
    BLOCK_ROWS,
    COUNTED_DIMS,
    GATES,
    LANES,
    MAX_HIDDEN,
    PUZZLE,
    TENSOR_CORE_DIMS,
)
from harness.toolchain import roots

SOURCE = (roots.get_solutions() / "p28" / "op" / "parts.mojo").read_text()


def test_gradients_match_autograd():
    """Compare with LayerNorm's gradients for the output gradient dln."""
    arrays = PUZZLE.make_inputs(PUZZLE.list_cases(None)[1], "float64", 0)
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    x, gamma, beta = (tensors[n].requires_grad_(True) for n in ("input", "ln_weight", "ln_bias"))
    y = torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)
    gradients = torch.autograd.grad(y, (x, gamma, beta), tensors["dln"])
    truth = PUZZLE.compute_exact(arrays)
    np.testing.assert_allclose(y.detach().numpy(), truth["rows_out"].astype(float), rtol=1e-9)
    for name, gradient in zip(("grad_input", "grad_ln_weight", "grad_ln_bias"), gradients, strict=True):
        np.testing.assert_allclose(gradient.numpy(), truth[name].astype(float), rtol=1e-7, atol=1e-9)


def test_product_gradients_match_autograd():
    arrays = PUZZLE.make_inputs(PUZZLE.list_cases(None)[1], "float64", 0)
    names = ("ln_out_16", "weight_16", "bias_16")
    ln_out, weight, bias = (torch.tensor(arrays[name]).requires_grad_(True) for name in names)
    y = torch.nn.functional.linear(ln_out, weight, bias)
    gradients = torch.autograd.grad(y, (ln_out, weight, bias), torch.tensor(arrays["dy_16"]))
    truth = PUZZLE.compute_exact(arrays)
    np.testing.assert_allclose(y.detach().numpy(), truth["output"].astype(float), rtol=1e-9)
    for name, gradient in zip(
        ("grad_ln_out", "grad_linear_weight", "grad_linear_bias"), gradients, strict=True
    ):
        np.testing.assert_allclose(gradient.numpy(), truth[name].astype(float), rtol=1e-9, atol=1e-12)


def test_spec_constants_match_the_kernels():
    def constant(name: str) -> int:
        match = re.search(rf"^comptime {name} = (\d+)$", SOURCE, re.M)
        assert match, name
        return int(match[1])

    assert (constant("LANES"), constant("BLOCK_ROWS"), constant("PER_THREAD") * constant("LANES")) == (
        LANES,
        BLOCK_ROWS,
        MAX_HIDDEN,
    )
    assert (constant("VECTOR_BYTES"), constant("TILE"), constant("SLAB_ROWS")) == (
        limits.VECTOR,
        limits.TILE,
        limits.SLAB,
    )
    assert (constant("BLOCK"), constant("THREAD_TILE"), constant("BLOCK_COLUMNS")) == (
        limits.BLOCK_TILE,
        limits.THREAD_TILE,
        limits.TENSOR_CORE_TILE[1],
    )


def test_limits_apply_to_the_counted_case():
    """The counted case has only full blocks and tiles, and is small enough for a laptop."""
    rows, hidden, outputs = COUNTED_DIMS
    assert hidden == 768 and rows <= 64 and rows * hidden * outputs <= 2**22
    assert rows % limits.BLOCK_TILE == 0 and outputs % limits.BLOCK_TILE == 0 and rows % limits.SLAB == 0
    cases = [case for case in PUZZLE.list_cases(None) if case.checks_limits]
    assert [case.dims for case in cases if not case.variant] == [COUNTED_DIMS] and cases[0].in_16_bits
    large = [case for case in cases if case.variant]
    assert {case.dims for case in large} == {TENSOR_CORE_DIMS}
    assert not any(case.in_16_bits for case in large), (
        "their kernels compute in bfloat16 whatever the run's dtype"
    )
    height, width = limits.TENSOR_CORE_TILE
    assert (
        TENSOR_CORE_DIMS[0] % height == 0 and TENSOR_CORE_DIMS[1] % width == TENSOR_CORE_DIMS[2] % width == 0
    )
    assert TENSOR_CORE_DIMS[0] * TENSOR_CORE_DIMS[1] * TENSOR_CORE_DIMS[2] <= 2**27


def test_each_step_limits_a_separate_counter():
    """A blank's initial code exceeds only its gate's first limit, not those of earlier steps."""
    for gate in GATES:
        limit = gate.limits[0]
        assert all(limit.initial_costs[dtype] > limit.maximum for dtype in (limits.F32, limits.BF16)), gate.id
        assert len({limit.id for limit in gate.limits}) == len(gate.limits)


def test_reports_show_the_recorded_times():
    measured = record.read("fast_steps")
    assert (measured.machine, measured.date) == (recorded.MACHINE, recorded.DATE)
    rows = {(row["form"], row["step"]): row for row in measured.rows if row["dtype"] == "bfloat16"}
    assert float(rows["bare", "all"]["median_us"]) == recorded.MATMULS_US
    assert [*recorded.STEP_TIMES] == [gate.id for gate in GATES]
    for number, (step, (size, initial, solution, share, passes)) in enumerate(recorded.STEP_TIMES.items(), 1):
        solution_row = rows["solution", step]
        assert (size, share) == (
            int(solution_row["rows"]),
            solution_row["of_products"] or solution_row["of_memory"],
        )
        times = (rows["first", step], solution_row, rows["pass", str(number)])
        assert [float(row["median_us"]) for row in times] == [initial, solution, passes]


def test_full_pass_uses_the_learners_steps():
    initial, yours = [line.split() for line in whole_pass.format_lines({"shuffles": {}}, "bfloat16")][3:5]
    assert (initial[:2], yours) == (["given", "13"], ["yours", "-", "-", "-"])
    products, x = math.prod(TENSOR_CORE_DIMS), TENSOR_CORE_DIMS[0] * TENSOR_CORE_DIMS[1]
    assert int(initial[2].replace(",", "")) > 3 * 2 * 2 * products, "each multiply-add loads two elements"
    assert 3 * 2 * products < int(initial[3].replace(",", "")) < 3 * 2 * products + 40 * x
