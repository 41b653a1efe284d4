"""A SiLU of one's own under `check_backward`: its backward pass is a loop over memory, as a kernel's is."""

# ANCHOR: own
import torch
import torch.nn.functional as F

from harness.testing import check_backward


def memory(t):
    """What a kernel sees that gets an address and a count."""
    return torch.as_strided(t, (t.numel(),), (1,))


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        given, coming = memory(x.contiguous()), memory(dy)
        s = torch.sigmoid(given)
        return (coming * s * (1 + given * (1 - s))).reshape(x.shape)


report = check_backward(SiLU.apply, reference=F.silu, inputs={"x": ("N", "H")})
print(report)
# ANCHOR_END: own
