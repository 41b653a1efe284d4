"""The autograd chapter's look at the registered operator of puzzle 22: opcheck, gradcheck and what is saved."""

import torch

from harness import fused_layernorm_linear
from harness.nn import layers

B, S, H, O = 2, 3, 5, 4
torch.manual_seed(0)
shapes = {"x": (B, S, H), "ln_weight": (H,), "ln_bias": (H,), "linear_weight": (O, H), "linear_bias": (O,)}
tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values()]

# ANCHOR: checks
operator = layers.operator()
print(torch.library.opcheck(operator, (*tensors, 1e-5)))
print("gradcheck:", torch.autograd.gradcheck(fused_layernorm_linear, tensors))
# ANCHOR_END: checks

# ANCHOR: saved
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
    fused_layernorm_linear(*tensors)
print("saved:", *saved)
# ANCHOR_END: saved
