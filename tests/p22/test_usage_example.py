"""The usage examples in the README and the book run, and their results match PyTorch's."""

import runpy

import torch
import torch.nn.functional as F

from harness.toolchain.roots import CHECKOUT

EXAMPLE = CHECKOUT / "book" / "examples" / "usage.py"
LAYERS = CHECKOUT / "book" / "examples" / "layers.py"


def test_usage_example_matches_pytorch(monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    names = runpy.run_path(str(EXAMPLE))
    assert "agree with PyTorch" in capsys.readouterr().out
    x, ln, linear = (names[name] for name in ("x", "ln", "linear"))
    exact = F.linear(
        F.layer_norm(x.double(), (8,), ln.weight.double(), ln.bias.double()),
        linear.weight.double(),
        linear.bias.double(),
    )
    assert (names["output"] - exact).abs().max() < 1e-5
    (dx,) = torch.autograd.grad(exact.sum(), x)
    # The example calls backward() twice with the same gradient, so the parameters' gradients accumulate.
    assert (x.grad - dx).abs().max() < 1e-5


def test_layers_example_matches_pytorch():
    """The README quotes the example file, and the example's model matches PyTorch's."""
    code = LAYERS.read_text().partition("# ANCHOR: layers\n")[2].partition("# ANCHOR_END")[0]
    assert f"```python\n{code}```" in (CHECKOUT / "README.md").read_text()
    names = runpy.run_path(str(LAYERS))
    assert all(parameter.grad.isfinite().all() for parameter in names["layer"].parameters())
    model = names["model"].eval()  # without its dropout
    reference = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, norm_first=True).eval()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(3, 5, 64)
    torch.testing.assert_close(model(x), reference(x))


def test_relu_example_is_an_operator():
    relu = runpy.run_path(str(CHECKOUT / "book" / "examples" / "relu_operator.py"))["relu"]
    torch.library.opcheck(relu, (torch.randn(3, 5, requires_grad=True),))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(relu(x), torch.relu(x))
    torch.autograd.gradcheck(relu, x)
