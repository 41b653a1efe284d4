"""What ReLU keeps for its backward pass, five ways: measured bytes, the ledger's, and whether the gradient is right."""

import math

import torch
from torch.autograd import Function

from harness.check.gradient_checks import count_saved_bytes
from harness.check.python_files import load_module
from harness.toolchain.roots import get_solutions

functions = load_module(get_solutions() / "p20" / "functions.py")


class ReluFromSign(Function):
    """What some texts call a mask of one bit: the sign of the input, and its mean over each row."""

    @staticmethod
    def forward(ctx, x):
        sign = x.sign()
        ctx.save_for_backward(sign, sign.mean(-1, keepdim=True))
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        sign, mean = ctx.saved_tensors
        return dy * (sign + mean) / 2


torch.manual_seed(0)
x = torch.randn(256, 1024, requires_grad=True)
dy = torch.randn(256, 1024)
n = x.numel()
ledger = {
    "PyTorch": ("the output", torch.relu, 4 * n),
    "ReluFromInput": ("the input", functions["ReluFromInput"].apply, 4 * n),
    "ReluFromOutput": ("the output", functions["ReluFromOutput"].apply, 4 * n),
    "ReluFromMask": ("a bool", functions["ReluFromMask"].apply, n),
    "ReluFromBits": ("a bit", functions["ReluFromBits"].apply, 4 * math.ceil(n / 32)),
    "ReluFromSign": ("sign and mean", ReluFromSign.apply, 4 * n + 4 * 256),
}
expected = dy * (x > 0)
print(f"{'':16}{'keeps':<15}{'measured':>10}{'ledger':>10}{'bits each':>11}  gradient")
for name, (what, function, bytes_) in ledger.items():
    kept, _ = count_saved_bytes(function, [x])
    (gradient,) = torch.autograd.grad(function(x), x, dy)
    verdict = (
        "right" if torch.equal(gradient, expected) else f"off by {(gradient - expected).abs().max():.2f}"
    )
    print(f"{name:16}{what:<15}{kept:>10,}{bytes_:>10,}{8 * kept / n:>11.2f}  {verdict}")
