"""Shared by the tests of puzzle 22: its public ops, each compiled once for all."""

import pytest
from public_ops import load_public_ops

from harness.toolchain.roots import CHECKOUT


@pytest.fixture(scope="session")
def public_ops():
    """The solution's package as MAX's own PyTorch binding loads it: the calls of test_public_ops.py and of `--demo-simple`."""
    import torch

    x, row, y, column = torch.empty(4, 4, 8), torch.empty(8), torch.empty(4, 4, 16), torch.empty(16)
    weight = torch.empty(16, 8)
    sizes = {"batch_size": 4, "seq_len": 4, "hidden_dim": 8, "output_dim": 16}

    def calls(ops):
        for output_dim in (16, 15):
            parameters = {"algorithm": "fused", **sizes, "output_dim": output_dim}
            ops.layernorm_linear[parameters](y, x, row, row, weight, column)
        for parameters in (sizes, {**sizes, "algorithm": "unfused"}):
            ops.layernorm_linear_backward[parameters](x, row, row, weight, column, y, x, row, row, weight)

    return load_public_ops(CHECKOUT / "solutions" / "p22" / "op", calls)
