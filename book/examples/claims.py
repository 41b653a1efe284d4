"""Three things that texts say of custom backward passes, measured: each is false."""

import torch
import torch.nn.functional as F

from harness.check.gradient_checks import kept_bytes
from harness.check.python_files import load
from harness.toolchain.roots import solutions

torch.manual_seed(0)
functions = load(solutions() / "p20" / "functions.py")

# ANCHOR: stable
logits, dP = 10 * torch.randn(4096, 512), torch.randn(4096, 512)


def naive(P, dP):
    return P * dP - P * (P * dP).sum(-1, keepdim=True)


def stable(P, dP):
    return P * (dP - (P * dP).sum(-1, keepdim=True))


P = logits.softmax(-1)
truth = stable(logits.double().softmax(-1), dP.double())
for name, formula in {"naive": naive, "stable": stable, "PyTorch": None}.items():
    leaf = logits.clone().requires_grad_()
    got = formula(P, dP) if formula else torch.autograd.grad(leaf.softmax(-1), leaf, dP)[0]
    print(f"softmax backward, {name:8} off by {((got - truth).abs().max() / truth.abs().max()).item():.1e}")
# ANCHOR_END: stable

# ANCHOR: output
x = torch.randn(4096, 512, requires_grad=True)
kept, lines = kept_bytes(lambda x: F.softmax(x, -1), [x])
print("PyTorch's softmax keeps", *lines, "and its output has", 4 * x.numel())
# ANCHOR_END: output

# ANCHOR: attention
q, k, v = (torch.randn(8, 512, 64, requires_grad=True) for _ in range(3))
for name, function in {
    "PyTorch": F.scaled_dot_product_attention,
    "custom": functions["Attention"].apply,
}.items():
    print(f"attention, {name:8} keeps {kept_bytes(function, [q, k, v])[0] / 1e6:5.2f} MB")
# ANCHOR_END: attention

# ANCHOR: autocast
low = torch.randn(4, 8, dtype=torch.bfloat16)
with torch.autocast("cpu", torch.bfloat16):
    print("softmax of bfloat16 under autocast on a CPU:", F.softmax(low, -1).dtype)
# ANCHOR_END: autocast
