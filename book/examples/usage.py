"""The overview's usage example: the pair in plain PyTorch, as one function, as a layer, and as a bare custom op.

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

# ANCHOR: explain
print(layer.explain(x))  # which kernels run for this input, and why
# ANCHOR_END: explain

# ANCHOR: custom_op
from pathlib import Path  # noqa: E402

from max.experimental.torch import CustomOpLibrary  # noqa: E402

ops = CustomOpLibrary(Path("solutions/p22/op"))
sizes = {"batch_size": 4, "seq_len": 4, "hidden_dim": 8, "output_dim": 16}
forward = ops.layernorm_linear[{"algorithm": "fused", **sizes}]

# An op writes into a tensor that it is given; it knows nothing of autograd, hence the detached inputs.
result = torch.empty(4, 4, 16)
forward(result, x.detach(), *(parameter.detach() for parameter in layer.parameters()))
torch.testing.assert_close(result, expected.detach())
# ANCHOR_END: custom_op

print("all three agree with PyTorch")
