"""The counter-example of the derivation: dx of one row by autograd, by the full formula, by the diagonal one."""

import torch
import torch.nn.functional as F

H, EPS = 8, 1e-5
torch.manual_seed(22)
x = torch.randn(H, dtype=torch.float64, requires_grad=True)
g = torch.randn(H, dtype=torch.float64)  # the gradient at x_hat

x_hat = F.layer_norm(x, [H], eps=EPS)
(autograd,) = torch.autograd.grad(x_hat, x, g)

# ANCHOR: formulas
x_hat = x_hat.detach()
rstd = torch.rsqrt(x.detach().var(correction=0) + EPS)
c1 = (g * x_hat).mean()
c2 = g.mean()
full = rstd * (g - c2 - x_hat * c1)
diagonal = rstd * g * (1 - 1 / H - x_hat**2 / H)
# ANCHOR_END: formulas


def difference(dx: torch.Tensor) -> float:
    """The largest difference from autograd, as a part of the largest gradient."""
    return float((dx - autograd).abs().max() / autograd.abs().max())


print("  i    autograd        full    diagonal")
for i in range(H):
    print(f"{i:3} {autograd[i]:11.6f} {full[i]:11.6f} {diagonal[i]:11.6f}")
sums = (round(float(dx.sum()), 6) + 0.0 for dx in (autograd, full, diagonal))  # + 0.0: no minus before a zero
print("sum", *(f"{value:11.6f}" for value in sums))
small = "below 1e-12" if difference(full) < 1e-12 else f"{difference(full):.1e}"
print(f"relative error: full {small}, diagonal {difference(diagonal):.2f}")
