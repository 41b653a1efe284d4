"""Puzzle 21: thirteen backward passes, each with a mistake that real code has made.

Every class has a correct forward pass. The code between the markers saves tensors for the backward pass, or is the
backward pass, or both. All support tensors of any leading shape and any floating-point dtype; sums over many rows are
at least float32. The last axis has H or C elements, and a "row" is one vector along it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

EPS = 1e-5
"""The constant added to a variance or a mean square."""
DROPPED = 0.25
"""The fraction of elements that dropout sets to 0."""
IGNORED = -100
"""The target of a row that the loss ignores."""
SLAB = 16
"""Rows that are summed at a time."""


def rows(t: Tensor) -> Tensor:
    """Reshape a tensor to a matrix of its rows, [rows, H]."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def memory(t: Tensor) -> Tensor:
    """Return the elements in memory order, like a kernel that gets an address and a count."""
    return torch.as_strided(t, (t.numel(),), (1,))


class Softmax(Function):
    """P = softmax(x) along the last axis, [..., C]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """P, [..., C]."""
        return torch.softmax(x, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save P."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dP):
        """Return the gradient of x, [..., C]."""
        (P,) = ctx.saved_tensors
        # BLANK-START softmax: fix the gradient of x
        weighted = dP * P
        return P * (weighted - weighted.sum(-1, keepdim=True))
        # BLANK-END softmax (unsolved while it reads as given: ec2548b2)


class LogSoftmax(Function):
    """y = log softmax(x) along the last axis, [..., C]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return y, [..., C]."""
        return torch.log_softmax(x, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save y."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [..., C]."""
        (y,) = ctx.saved_tensors
        # BLANK-START logsoftmax: fix the gradient of x
        return dy - y.exp() * dy.sum(0, keepdim=True)
        # BLANK-END logsoftmax (unsolved while it reads as given: 74feb928)


class CrossEntropy(Function):
    """The mean of -log softmax(logits)[target] over the rows whose target is not IGNORED.

    logits [..., C], target int64 [...], a loss without axes.
    """

    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(rows(logits), target.reshape(-1), ignore_index=IGNORED)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save both inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dloss):
        """Return the gradient of the logits, [..., C]."""
        logits, target = ctx.saved_tensors
        # BLANK-START crossentropy: fix the gradient of the logits
        counted = target != IGNORED
        onehot = F.one_hot(torch.where(counted, target, 0), logits.shape[-1])
        dlogits = (torch.softmax(logits, -1) - onehot) / counted.sum()
        return torch.where(counted[..., None], dlogits, 0.0), None
        # BLANK-END crossentropy (unsolved while it reads as given: 2c3b6c47)


class Attention(Function):
    """softmax(q k^T / sqrt(d)) v: q [..., S, d], k [..., T, d], v [..., T, e], result [..., S, e]."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the result, [..., S, e]."""
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the inputs; the probabilities are recomputed."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dout):
        """Return the gradients of q, k and v."""
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        P = torch.softmax(q @ k.mT * scale, -1)
        # BLANK-START attention: fix the gradients of q, k and v
        dP = dout @ v.mT
        dS = P * (dP - (dP * P).sum(-1, keepdim=True))
        return dS @ k, scale * dS.mT @ q, P.mT @ dout
        # BLANK-END attention (unsolved while it reads as given: 42785b3f)


class SiLU(Function):
    """y = x * sigmoid(x), [...]; the backward pass is a loop over memory, as in a kernel."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return y, [...]."""
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save x."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [...]."""
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        # BLANK-START silu: fix what is passed to the loop over memory
        x_memory, dy_memory = memory(x.contiguous()), memory(dy)
        s = torch.sigmoid(x_memory)
        memory(dx).copy_(dy_memory * s * (1 + x_memory * (1 - s)))
        return dx
        # BLANK-END silu (unsolved while it reads as given: b2c880fc)


class Sigmoid(Function):
    """y = 1 / (1 + exp(-x)), [...]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return y, [...]."""
        return torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save y, which is all that the backward pass needs."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [...]."""
        (y,) = ctx.saved_tensors
        # BLANK-START sigmoid: fix what happens to y
        return y.mul_(1 - y).mul_(dy)  # no further memory is needed
        # BLANK-END sigmoid (unsolved while it reads as given: 7ce6d388)


class Dropout(Function):
    """y = x / (1 - DROPPED) where `keep`, else 0: x [...], keep bool [...]."""

    @staticmethod
    def forward(x: Tensor, keep: Tensor) -> Tensor:
        """Return y, [...]."""
        return torch.where(keep, x / (1 - DROPPED), 0.0)

    # BLANK-START dropout: fix what is saved, and the gradient of x
    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save y, from which the mask can be recomputed."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [...]."""
        (y,) = ctx.saved_tensors
        return torch.where(y != 0, dy / (1 - DROPPED), 0.0), None

    # BLANK-END dropout (unsolved while it reads as given: efb5635f)


class RMSNorm(Function):
    """y = x / rms * weight with rms = sqrt(mean(x^2) + EPS) along the last axis: x [..., H], weight [H].

    Also return rms [..., 1], for logs; it is not differentiable.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [..., H] and rms [..., 1]."""
        rms = RMSNorm.rms_of(x)
        return x / rms * weight, rms

    @staticmethod
    def rms_of(x: Tensor) -> Tensor:
        """sqrt(mean(x^2) + EPS), [..., 1]."""
        return (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    # BLANK-START rmsnorm: fix what autograd is told about the outputs
    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the inputs."""
        ctx.save_for_backward(*inputs)

    # BLANK-END rmsnorm (unsolved while it reads as given: 226f535f)
    @staticmethod
    def backward(ctx, dy, _):
        """Return the gradients of x [..., H] and weight [H]."""
        x, weight = ctx.saved_tensors
        # Recomputed, since a saved intermediate would be a constant in a second derivative.
        rms = RMSNorm.rms_of(x)
        x_hat, g = x / rms, dy * weight
        dx = (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) / rms
        return dx, rows(dy * x_hat).sum(0)


class Standardise(Function):
    """y = (x - mean) * rstd with rstd = 1 / sqrt(variance + EPS), along the last axis, [..., H]."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return y, [..., H]."""
        return (x - x.mean(-1, keepdim=True)) * Standardise.rstd_of(x)

    @staticmethod
    def rstd_of(x: Tensor) -> Tensor:
        """1 / sqrt(variance + EPS), [..., 1]."""
        return (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()

    # BLANK-START standardise: fix what is saved, and where
    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save y and rstd."""
        ctx.save_for_backward(output)
        Standardise.rstd = Standardise.rstd_of(*inputs)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [..., H]."""
        (y,), rstd = ctx.saved_tensors, Standardise.rstd
        return rstd * (dy - dy.mean(-1, keepdim=True) - y * (dy * y).mean(-1, keepdim=True))

    # BLANK-END standardise (unsolved while it reads as given: 50947079)


class AddBias(Function):
    """y = x + bias: x [..., H], bias [H]."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        """Return y, [..., H]."""
        return x + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save nothing."""

    @staticmethod
    def backward(ctx, dy):
        """Return the gradients of x [..., H] and bias [H]."""
        # BLANK-START addbias: fix the gradient of the bias
        return dy, rows(dy).sum(0).expand_as(dy)
        # BLANK-END addbias (unsolved while it reads as given: e23986de)


class Scale(Function):
    """y = x * weight: x [..., H], weight [H]."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """Return y, [..., H]."""
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save both inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradients of x [..., H] and weight [H], the latter slab by slab."""
        x, weight = ctx.saved_tensors
        # BLANK-START scale: fix the sum over the rows
        total = torch.zeros_like(weight)
        for dy_slab, x_slab in zip(rows(dy).split(SLAB), rows(x).split(SLAB), strict=True):
            total += (dy_slab * x_slab).sum(0)
        return dy * weight, total
        # BLANK-END scale (unsolved while it reads as given: 5aa215dd)


class Linear(Function):
    """y = x weight^T: x [..., H], weight [O, H], y [..., O]."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """Return y, [..., O]."""
        return x @ weight.T

    # BLANK-START linear: fix what is saved of the shapes
    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save both inputs, and x's leading shape."""
        x, weight = inputs
        ctx.save_for_backward(x, weight)
        if x.dim() > 2:
            ctx.leading = x.shape[:-1]

    # BLANK-END linear (unsolved while it reads as given: f9796138)
    @staticmethod
    def backward(ctx, dy):
        """Return the gradients of x [..., H] and weight [O, H]."""
        x, weight = ctx.saved_tensors
        dx = (rows(dy) @ weight).reshape(*ctx.leading, weight.shape[1])
        return dx, rows(dy).T @ rows(x)


class LowRank(Function):
    """y = x a^T b^T, a LoRA adapter: x [..., H], a [r, H], b [O, r], y [..., O]."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return y, [..., O]."""
        return x @ a.T @ b.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradients of x [..., H], a [r, H] and b [O, r]; None for those not requested."""
        x, a, b = ctx.saved_tensors
        # BLANK-START lowrank: fix what is computed, and when
        if not ctx.needs_input_grad[0]:
            return None, None, None
        inner = dy @ b
        return inner @ a, rows(inner).T @ rows(x), rows(dy).T @ rows(x @ a.T)
        # BLANK-END lowrank (unsolved while it reads as given: 9a5704df)
