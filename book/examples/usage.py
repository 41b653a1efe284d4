"""The overview's usage example: the pair in plain PyTorch, as one function, and as a layer.

Run it from the top of the checkout: `uv run python book/examples/usage.py`. The book shows the marked regions.
"""

# ANCHOR: usage
import torch
from torch import nn

import harness

x = torch.randn(4, 4, 8, requires_grad=True)  # [batch, sequence, hidden]
ln, linear = nn.LayerNorm(8), nn.Linear(8, 16)

# Plain PyTorch: two operations, and autograd knows the gradient of each.
expected = linear(ln(x))
expected.sum().backward()
expected_dx, x.grad = x.grad, None

# The same function and the same five gradients from the Mojo kernels.
output = harness.fused_layernorm_linear(x, ln.weight, ln.bias, linear.weight, linear.bias)
output.sum().backward()
torch.testing.assert_close(output, expected)
torch.testing.assert_close(x.grad, expected_dx)

# In a model: a layer instead of nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16)).
layer = harness.LayerNormLinear(8, 16)
layer.load_state_dict(nn.Sequential(ln, linear).state_dict())
torch.testing.assert_close(layer(x), expected)
# ANCHOR_END: usage

print(layer.explain(x))  # which kernels run for this input, and why

print("both agree with PyTorch")
