"""An own op package under `check_backward`: its backward kernel adds up without atomics."""

# ANCHOR: own
import torch

from harness.testing import MojoOps, check_backward

ops = MojoOps("book/examples/own_ops")


def ready(*tensors):
    """Return tensors as an op takes them."""
    return [t.detach().contiguous() for t in tensors]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x.new_empty(x.shape)
        ops.scale(y, *ready(x, w))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dw = x.new_empty(x.shape), w.new_empty(w.shape)
        ops.scale_backward(dx, dw, *ready(dy, x, w))
        return dx, dw


shapes = {"x": ("N", "H"), "w": ("H",)}
report = check_backward(Scale.apply, reference=torch.mul, inputs=shapes, dtypes=[torch.float32])
# ANCHOR_END: own
print(report)
