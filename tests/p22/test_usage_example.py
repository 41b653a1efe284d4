"""The usage example that the book's overview shows runs as it stands, and its numbers are PyTorch's."""

import runpy

import pytest
import torch
import torch.nn.functional as F

from harness.toolchain.roots import CHECKOUT

EXAMPLE = CHECKOUT / "book" / "examples" / "usage.py"


@pytest.mark.compiler
def test_usage_example(layer_graphs, monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    names = runpy.run_path(str(EXAMPLE))
    assert "agree with PyTorch" in capsys.readouterr().out
    x, ln, linear = (names[name] for name in ("x", "ln", "linear"))
    exact = F.linear(
        F.layer_norm(x.double(), (8,), ln.weight.double(), ln.bias.double()),
        linear.weight.double(),
        linear.bias.double(),
    )
    for name in ("output", "result"):
        assert (names[name] - exact).abs().max() < 1e-5
    (dx,) = torch.autograd.grad(exact.sum(), x)
    # The example calls backward() with the same gradient twice for the parameters, and once for x.
    assert (x.grad - dx).abs().max() < 1e-5
