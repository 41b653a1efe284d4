"""The autograd chapter's hand-written backward pass: the normalisation of LayerNorm, checked in three ways."""

import torch
from torch.autograd.gradcheck import GradcheckError

# ANCHOR: function


class Normalise(torch.autograd.Function):
    """x [..., H] to x_hat: each row minus its mean, divided by its standard deviation."""

    @staticmethod
    def forward(ctx, x, eps):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, mean, rstd)
        return (x - mean) * rstd

    @staticmethod
    def backward(ctx, g):
        x, mean, rstd = ctx.saved_tensors
        x_hat = (x - mean) * rstd
        c1 = (g * x_hat).mean(-1, keepdim=True)
        c2 = g.mean(-1, keepdim=True)
        return rstd * (g - c2 - x_hat * c1), None  # one gradient for each argument; eps has none


# ANCHOR_END: function

# ANCHOR: check
torch.manual_seed(0)
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
print("gradcheck:", torch.autograd.gradcheck(lambda x: Normalise.apply(x, 1e-5), x))

g = torch.randn(3, 8, dtype=torch.float64)
(by_hand,) = torch.autograd.grad(Normalise.apply(x, 1e-5), x, g)
(by_torch,) = torch.autograd.grad(torch.nn.functional.layer_norm(x, [8], eps=1e-5), x, g)
print("largest difference from PyTorch below 1e-12:", bool((by_hand - by_torch).abs().max() < 1e-12))
# ANCHOR_END: check


class WrongNormalise(Normalise):
    """The same, without the correction c1."""

    @staticmethod
    def backward(ctx, g):
        _, _, rstd = ctx.saved_tensors
        return rstd * (g - g.mean(-1, keepdim=True)), None


try:
    torch.autograd.gradcheck(lambda x: WrongNormalise.apply(x, 1e-5), x)
except GradcheckError as error:
    print("without c1:", str(error).splitlines()[0])
