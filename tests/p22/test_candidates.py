"""Benchmark candidates of LayerNorm + Linear: results, operation counts, and names."""

import numpy as np
import pytest
import torch

from harness.bench.benchmark import PASSES, Problem, Unavailable
from harness.puzzles.p22 import candidates
from harness.puzzles.p22.candidates import BENCHMARK, CANDIDATES, Sizes
from harness.puzzles.p22.spec import PUZZLE

TINY = Sizes(6, 5, 7)
CPU = torch.device("cpu")
NAMES: tuple[str, ...] = ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias", "grad_output")
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


def test_operation_counts_by_pass():
    sizes = Sizes(2, 3, 5)
    assert [sizes.count_flops(name) for name in ("forward", "backward", "both")] == [60, 120, 180]


def test_truth_matches_the_formula():
    """Compare with the puzzle's longdouble formulas."""
    problem = candidates.make_problem(TINY, torch.float32, CPU)
    values = [tensor.detach().double().numpy() for tensor in (*problem.leaves, problem.grad_output)]
    arrays: dict[str, np.ndarray] = dict(zip(NAMES, values, strict=True))
    arrays |= {name: arrays[name][None] for name in ("input", "grad_output")}
    arrays["dln"] = arrays["grad_output"] @ arrays["linear_weight"]
    expected = {name: np.asarray(value, float) for name, value in PUZZLE.compute_exact(arrays).items()}
    for name, value in BENCHMARK.compute_truth(problem).items():
        np.testing.assert_allclose(
            value.numpy(force=True).reshape(expected[name].shape), expected[name], rtol=1e-9, atol=1e-9
        )


def test_lower_bound_runs_only_matmuls():
    problem = candidates.make_problem(TINY, torch.float32, CPU)
    products = BY_NAME["bare GEMMs"].build(problem)
    M, H, O = TINY.M, TINY.H, TINY.O
    shapes = {"forward": [(M, O)], "backward": [(M, H), (O, H)], "both": [(M, O), (M, H), (O, H)]}
    for direction, expected in shapes.items():
        outputs = products.prepare(direction)()
        assert [tuple(tensor.shape) for tensor in outputs] == expected
        assert not any(tensor.requires_grad for tensor in outputs)


@pytest.mark.compiles
def test_compiled_backward_pass_can_be_repeated():
    """A timed backward pass runs repeatedly, so it must not overwrite saved tensors."""
    problem = candidates.make_problem(Sizes(32, 16, 24), torch.float32, CPU)
    calls = candidates.build_compiled(problem)
    both = calls.prepare("both")()
    backward = calls.prepare("backward")
    for _ in range(4):
        for got, expected in zip(backward(), both[1:], strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
def test_slow_reference_kernels_are_skipped(algorithm):
    problem = Problem(Sizes(2**11, 2**10, 2**10), candidates.eager, (torch.empty(1),), torch.empty(1))
    with pytest.raises(Unavailable, match="written to be read"):
        candidates.build_max_graphs(algorithm)(problem)


def test_gpu_only_candidates_are_skipped_on_a_cpu():
    problem = candidates.make_problem(TINY, torch.float32, CPU)
    for name in ("liger", "least memory"):
        with pytest.raises(Unavailable):
            BY_NAME[name].build(problem)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["compile", "fused through MAX", "unfused through MAX"])
def test_candidates_match_autograd(name, request):
    if "MAX" in name:
        request.getfixturevalue("cpu_graphs")()  # which has these
    problem = candidates.make_problem(TINY, torch.float32, CPU)
    truth = BENCHMARK.compute_truth(problem)
    calls = BY_NAME[name].build(problem)
    for direction in PASSES:
        with torch.set_grad_enabled(direction != "inference"):
            prepared = calls.prepare(direction)
            for result in (prepared(), prepared()):
                calls.wait()
                for quantity, tensor in zip(BENCHMARK.list_quantities(direction), result, strict=True):
                    assert torch.allclose(tensor.detach().double(), truth[quantity], rtol=1e-4, atol=1e-4), (
                        quantity
                    )


@pytest.mark.compiles
def test_max_recomputes_on_each_call(cpu_graphs):
    cpu_graphs()
    problem = candidates.make_problem(TINY, torch.float32, CPU)
    for direction in ("forward", "backward", "both"):
        call = BY_NAME["fused through MAX"].build(problem).prepare(direction)
        first = [tensor.clone() for tensor in call()]
        for tensor in call():
            tensor.fill_(float("nan"))
        for tensor, expected in zip(call(), first, strict=True):
            assert torch.allclose(tensor, expected)
