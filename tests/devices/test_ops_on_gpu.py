"""Public contract of the ops of puzzles 19, 20, 23 and 24: names, argument order, values on the virtual GPU.

Nothing is taken from the puzzles' specs, because other harnesses rely on these ops. `tests/p22/test_public_ops.py` tests
puzzle 22's.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.toolchain.roots import CHECKOUT, get_solutions, make_op_package

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

OPS = {
    "p19": {"ramp_map": "mapped vector", "ramp_index": "shifted matrix offset",
        "ramp_cast": "products half_matrix half_vector", "ramp_reduce": "row_sums matrix",
        "ramp_tile": "mirrored vector", "ramp_atomic": "column_sums matrix",
        "ramp_stages": "staged_sums matrix", "ramp_rmsnorm": "normalised matrix weight"},
    "p20": {"relu_mask": "output mask input", "relu_mask_backward": "grad_input grad_output mask",
        "softmax": "output input", "softmax_backward": "grad_input grad_output output"},
    "p23": {"attention": "output query key value",
        "attention_backward": "grad_query grad_key grad_value grad_output query key value"},
    "p24": {"hilbert_gather": "gathered input order", "hilbert_scatter": "grad_input grad_gathered order"},
}  # fmt: skip
"""Puzzle -> op -> arguments in order."""


def test_ops_have_names_and_arguments_in_max_bindings():
    from max.experimental.torch import CustomOpLibrary
    from max.graph import KernelLibrary

    kernels = KernelLibrary()
    kernels.load_paths([make_op_package(get_solutions(), puzzle).compile() for puzzle in OPS])
    library = CustomOpLibrary(kernels)
    for name, arguments in {
        name: op_arguments for ops in OPS.values() for name, op_arguments in ops.items()
    }.items():
        assert " ".join(getattr(library, name).torch_signature.parameters) == arguments


def make_inputs() -> dict[str, torch.Tensor]:
    """Return inputs for `ops_on_gpu_run.py`; the last row of x contains one -inf."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **dict.fromkeys(("x", "dy"), (5, 9)),
        **dict.fromkeys(("query", "grad_output"), (2, 3, 5, 4)),
        **dict.fromkeys(("key", "value"), (2, 3, 7, 4)),
        "cells": (2, 3, 12, 5),
        "matrix": (3, 7),
        "weight": (7,),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["x"][-1, 3] = -torch.inf
    order = torch.randperm(12, generator=generator).int()
    return {**tensors, "words": torch.zeros(2, dtype=torch.int32), "order": order}


@pytest.fixture(scope="module")
def op_results(tmp_path_factory) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Outputs of the ops, and errors of calls with invalid shapes."""
    folder = tmp_path_factory.mktemp("ops")
    (folder / "puzzles").symlink_to(get_solutions())
    arrays = {name: tensor.numpy() for name, tensor in make_inputs().items()}
    np.savez(folder / "run.npz", allow_pickle=False, **arrays)
    program = [sys.executable, Path(__file__).with_name("ops_on_gpu_run.py"), folder / "run.npz"]
    completed = subprocess.run(
        [sys.executable, "-m", "harness", "vgpu", "exec", "--", *program, *(f"{folder}/puzzles/{name}/op" for name in OPS)],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert completed.returncode == 0 and ", 0 errors" in completed.stderr, completed.stderr
    outputs = {name: torch.from_numpy(array) for name, array in np.load(folder / "run.npz").items()}
    return outputs, json.loads(completed.stdout.splitlines()[-1])


def assert_close(got, expected):
    assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_relu_forward_and_backward(op_results):
    outputs, x = op_results[0], make_inputs()["x"]
    assert torch.equal(outputs["relu"], x.relu())
    assert torch.equal(outputs["grad_relu"], make_inputs()["dy"] * (x > 0))
    bits = [(int(word) >> i) & 1 for word in outputs["mask"] for i in range(32)]
    assert bits[:45] == (x > 0).int().flatten().tolist() and not any(bits[45:])


def test_softmax_forward_and_backward(op_results):
    leaf = make_inputs()["x"].double().requires_grad_()
    expected = leaf.softmax(-1)
    assert_close(op_results[0]["softmax"], expected.detach())
    assert_close(
        op_results[0]["grad_softmax"], torch.autograd.grad(expected, leaf, make_inputs()["dy"].double())[0]
    )


def test_attention_forward_and_backward(op_results):
    query, key, value = (make_inputs()[name].double().requires_grad_() for name in ("query", "key", "value"))
    expected = F.scaled_dot_product_attention(query, key, value)
    assert_close(op_results[0]["attention"], expected.detach())
    gradients = torch.autograd.grad(expected, (query, key, value), make_inputs()["grad_output"].double())
    for name, gradient in zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True):
        assert_close(op_results[0][name], gradient)


def test_hilbert_gather_and_scatter(op_results):
    cells, order = make_inputs()["cells"], make_inputs()["order"].long()
    assert torch.equal(op_results[0]["gathered"], cells[:, :, order])
    assert torch.equal(op_results[0]["scattered"], cells)


def test_rmsnorm_is_written_in_place(op_results):
    assert_close(
        op_results[0]["normalized"], F.rms_norm(make_inputs()["matrix"], (7,), make_inputs()["weight"], 1e-5)
    )


def test_inconsistent_shapes_are_reported(op_results):
    messages = (
        "key has size 3 along axis 3, expected 4",
        "order has size 11 along axis 0, expected 12",
        "weight has size 6 along axis 0, expected 7",
    )
    for error, expected in zip(op_results[1], messages, strict=True):
        assert expected in error
