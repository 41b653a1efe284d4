"""Correct functions that must pass: PyTorch's, layers of `harness.nn`, and typical autograd.Functions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from zoo_cases import Arguments, make_targets

from harness import nn

ROWS = (..., "H")


def make_integers(high: int | str, *names: str):
    """Describe an input of integers below a number or a named size."""

    def make(sizes, generator: torch.Generator) -> Tensor:
        top = sizes[high] if isinstance(high, str) else high
        return torch.randint(max(top, 1), [sizes[name] for name in names], generator=generator)

    return make


def make_positive(*names: str):
    """Describe an input of positive numbers."""
    return lambda sizes, generator: (
        0.2 + torch.rand([sizes[n] for n in names], generator=generator, dtype=torch.float64)
    )


def compare_with_itself(name: str, function, inputs: dict | None = None, **options) -> Arguments:
    """Create a case that compares a PyTorch function with itself, to test the tolerance."""
    return Arguments(name, lambda: function, function, inputs or {"x": ROWS}, options)


IMAGE = ("N", 2, 8, 8)
INFINITE = ["infinity", "negative infinity"]
SQUARE = {name: ("B", 2, "S", "d") for name in "qkv"}
QKV = {"q": ("B", 2, "S", "d"), "k": ("B", 2, "T", "d"), "v": ("B", 2, "T", "d")}


def list_functions() -> list[Arguments]:
    """Return cases for functions of torch.nn.functional."""
    elementwise = [
        F.relu, F.relu6, F.gelu, F.silu, F.elu, F.selu, F.celu, F.leaky_relu, F.softplus, F.softsign, F.tanhshrink,
        F.hardtanh, F.hardswish, F.hardsigmoid, F.mish, F.logsigmoid, F.softshrink, F.hardshrink,
    ]  # fmt: skip
    two = {"x": ("N", "H"), "y": ("N", "H")}
    return [
        *(compare_with_itself(f.__name__, f) for f in elementwise),
        compare_with_itself("softmax", lambda x: F.softmax(x, -1)),
        compare_with_itself("log_softmax", lambda x: F.log_softmax(x, -1)),
        compare_with_itself("softmin", lambda x: F.softmin(x, -1)),
        compare_with_itself("glu", lambda x: F.glu(x, -1), {"x": ("N", 6)}),
        compare_with_itself("normalize", lambda x: F.normalize(x, dim=-1)),
        compare_with_itself("layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), {"x": ROWS, "w": ("H",), "b": ("H",)}),
        compare_with_itself("rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), {"x": ROWS, "w": ("H",)}),
        compare_with_itself("group_norm", lambda x: F.group_norm(x, 2), {"x": ("N", 4, "L")}),
        compare_with_itself("linear", F.linear, {"x": ROWS, "w": ("O", "H"), "b": ("O",)}),
        compare_with_itself("bilinear", F.bilinear, {"x": ("N", "H"), "y": ("N", "K"), "w": ("O", "H", "K")}),
        compare_with_itself("embedding", F.embedding, {"i": make_integers(11, "N", "T"), "w": (11, "H")}),
        compare_with_itself("cross_entropy", lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()), {"x": ("N", "T", "C"), "t": make_targets}),
        compare_with_itself("nll_loss", F.nll_loss, {"x": ("N", "C"), "t": make_integers("C", "N")}),
        compare_with_itself("mse_loss", F.mse_loss, two),
        compare_with_itself("l1_loss", F.l1_loss, two),
        compare_with_itself("smooth_l1_loss", F.smooth_l1_loss, two),
        compare_with_itself("huber_loss", F.huber_loss, two),
        compare_with_itself("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), {"x": ("N", "H"), "y": make_positive("N", "H")}),
        compare_with_itself("cosine_similarity", F.cosine_similarity, two),
        compare_with_itself("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, two),
        compare_with_itself("conv1d", F.conv1d, {"x": ("N", 3, "L"), "w": ("O", 3, 2)}),
        compare_with_itself("conv2d", F.conv2d, {"x": IMAGE, "w": ("O", 2, 3, 3)}),
        compare_with_itself("max_pool2d", lambda x: F.max_pool2d(x, 2), {"x": IMAGE}),
        compare_with_itself("avg_pool2d", lambda x: F.avg_pool2d(x, 2), {"x": IMAGE}),
        compare_with_itself("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), {"x": IMAGE}),
        compare_with_itself("pad", lambda x: F.pad(x, (1, 2))),
        compare_with_itself("scaled_dot_product_attention", F.scaled_dot_product_attention, QKV),
    ]  # fmt: skip


class Loss(torch.nn.Linear):
    """Cross-entropy of a linear layer."""

    def forward(self, x, t):
        return F.cross_entropy(super().forward(x).flatten(0, -2), t.flatten())


def attend_in_a_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call `ring_attention` in a process group of size one; the test destroys the group."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return nn.ring_attention(q, k, v)


def list_layers() -> list[Arguments]:
    """List cases for every layer of harness.nn with PyTorch as the reference."""

    def norm_linear(x, g, b, w, c):
        return F.linear(F.layer_norm(x, g.shape, g, b), w, c)

    def loss(x, w, t):
        return F.cross_entropy(x.flatten(0, 1) @ w.mT, t.flatten())

    modules = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 5))
    five = {"x": ROWS, "g": ("H",), "b": ("H",), "w": ("O", "H"), "c": ("O",)}
    return [
        Arguments("fused_layernorm_linear", lambda: nn.fused_layernorm_linear, norm_linear, five),
        Arguments("LayerNormLinear", lambda: nn.LayerNormLinear(6, 5), modules, {"x": (..., 6)}),
        Arguments("attention", lambda: nn.attention, F.scaled_dot_product_attention, QKV),
        Arguments(
            "attention, causal",
            lambda: lambda q, k, v: nn.attention(q, k, v, is_causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            QKV,
        ),
        # Infinite scores make lse and output NaN.
        Arguments(
            "attention_with_lse", lambda: nn.attention_with_lse, attend_with_lse, QKV, {"leave_out": INFINITE}
        ),
        Arguments(
            "linear_cross_entropy",
            lambda: lambda x, w, t: nn.linear_cross_entropy(x.flatten(0, 1), w, t.flatten()),
            loss,
            {"x": ("N", "T", "H"), "w": ("C", "H"), "t": make_targets},
        ),
        Arguments(
            "attention_varlen",
            lambda: lambda q, k, v, o: nn.attention_varlen(q, k, v, o, o),
            attend_each_sequence,
            {"q": (7, "N", "d"), "k": (7, "N", "d"), "v": (7, "N", "d"), "o": torch.tensor([0, 3, 7]).int()},
        ),
        Arguments("ring_attention", lambda: attend_in_a_ring, F.scaled_dot_product_attention, SQUARE),
        Arguments(
            "LinearCrossEntropy",
            lambda: nn.LinearCrossEntropy(6, 5),
            Loss(6, 5, bias=False),
            {"x": ("N", "T", 6), "t": make_integers(5, "N", "T")},
        ),
    ]


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention and each row's logsumexp, at least in float32."""
    scores = q @ k.mT / max(q.shape[-1], 1) ** 0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    return F.scaled_dot_product_attention(q, k, v), scores.to(wide).logsumexp(-1)


def attend_each_sequence(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Compute attention within each sequence."""
    parts = []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = [t[first:last].transpose(0, 1) for t in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(rows[0], rows[1], rows[2]).transpose(0, 1))
    return torch.cat(parts)


# ---- Typical autograd.Functions ---------------------------------------------------------------------------


class Exp(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


class Relu(Function):
    """Clamps, and clears the gradient where the input is negative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = dy.clone()
        dx[x < 0] = 0
        return dx


class Swish(Function):
    """Recomputes the sigmoid to save memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * (s * (1 + x * (1 - s)))


class Mish(Function):
    """x tanh(softplus(x))."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s, t = torch.sigmoid(x), F.softplus(x).tanh()
        return dy * (t + x * s * (1 - t * t))


class Linear(Function):
    """Linear with a bias, and None for gradients that are not needed."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy @ w
        if ctx.needs_input_grad[1]:
            dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        return dx, dw, db


class LayerNorm(Function):
    """LayerNorm, computed in float32 if the input is narrower."""

    @staticmethod
    def forward(ctx, x, w, b):
        wide = torch.promote_types(x.dtype, torch.float32)
        y, mean, rstd = torch.native_layer_norm(x.to(wide), w.shape, w.to(wide), b.to(wide), 1e-5)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, b, mean, rstd = ctx.saved_tensors
        wide = mean.dtype
        x_hat, dy = (x.to(wide) - mean) * rstd, dy.to(wide)
        g = dy * w
        dx = rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
        axes = tuple(range(x.dim() - 1))
        return dx.to(x.dtype), (dy * x_hat).sum(axes).to(w.dtype), dy.sum(axes).to(b.dtype)


class RMSNorm(Function):
    """RMSNorm as in Triton's tutorials, with one rstd per row."""

    @staticmethod
    def forward(ctx, x, w):
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, w, rstd)
        return (x.to(wide) * rstd * w).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        x_hat, m = x.to(rstd.dtype) * rstd, dy.to(rstd.dtype) * w
        dx = rstd * (m - x_hat * (m * x_hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * x_hat).sum(tuple(range(x.dim() - 1))).to(w.dtype)


class SwiGLU(Function):
    """silu(a) * b, with the sigmoid recomputed."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    @once_differentiable
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        wide = torch.promote_types(a.dtype, torch.float32)
        s = torch.sigmoid(a.to(wide))
        silu = a * s
        da = dc * (silu * (1 - s) + s) * b
        return da.to(a.dtype), (dc * silu).to(b.dtype)


class CrossEntropy(Function):
    """Computes the gradient in the forward pass, and scales it in the backward pass."""

    @staticmethod
    def forward(ctx, logits, target):
        wide = torch.promote_types(logits.dtype, torch.float32)
        p = logits.to(wide).log_softmax(-1)
        counted = target != -100
        index = target.clamp(min=0)[:, None]
        count = counted.sum()
        loss = -torch.where(counted, p.gather(-1, index)[:, 0], 0.0).sum() / count
        grad = p.exp()
        grad.scatter_add_(-1, index, -torch.ones_like(grad[:, :1]))
        ctx.save_for_backward(torch.where(counted[:, None], grad / count, 0.0).to(logits.dtype))
        return loss.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        return ctx.saved_tensors[0] * dloss, None


class Attention(Function):
    """Saves the log-sum-exp, and recomputes the probabilities."""

    @staticmethod
    def forward(ctx, q, k, v):
        q_, k_ = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k))
        scores = q_ @ k_.mT * (1 / math.sqrt(max(q.shape[-1], 1)))
        lse = scores.logsumexp(-1, keepdim=True)
        out = ((scores - lse).exp() @ v.to(scores.dtype)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        q_, k_, v_, o_, do_ = (t.to(lse.dtype) for t in (q, k, v, out, do))
        scale = 1 / math.sqrt(max(q.shape[-1], 1))
        p = (q_ @ k_.mT * scale - lse).exp()
        ds = p * (do_ @ v_.mT - (do_ * o_).sum(-1, keepdim=True)) * scale
        return (ds @ k_).to(q.dtype), (ds.mT @ q_).to(k.dtype), (p.mT @ do_).to(v.dtype)


class Embedding(Function):
    """Sums rows by index."""

    @staticmethod
    def forward(ctx, index, weight):
        ctx.save_for_backward(index)
        ctx.rows = weight.shape[0]
        return weight[index]

    @staticmethod
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        dw = dy.new_zeros(ctx.rows, dy.shape[-1], dtype=torch.promote_types(dy.dtype, torch.float32))
        dw.index_add_(0, index.flatten(), dy.flatten(0, -2).to(dw.dtype))
        return None, dw.to(dy.dtype)


class StraightThrough(Function):
    """Rounds, and passes the gradient within a range."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, dy, torch.zeros_like(dy))


class GradientScale(Function):
    """Identity with a scaled gradient, as in adversarial training."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class FocalLoss(Function):
    """Elementwise sigmoid focal loss with gamma 2, in a form that does not overflow."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        p = torch.sigmoid(x)
        return -(y * (1 - p) ** 2 * F.logsigmoid(x) + (1 - y) * p**2 * F.logsigmoid(-x))

    @staticmethod
    @once_differentiable
    def backward(ctx, dl):
        x, y = ctx.saved_tensors
        p = torch.sigmoid(x)
        up = y * (1 - p) ** 2 * (2 * p * F.logsigmoid(x) - (1 - p))
        down = (1 - y) * p**2 * (p - 2 * (1 - p) * F.logsigmoid(-x))
        return dl * (up + down), None


class Cumsum(Function):
    """Cumulative sum; the gradient is a reversed cumulative sum."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, dy):
        return dy.flip(-1).cumsum(-1).flip(-1)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention that propagates NaN; PyTorch's returns zeros for some NaN rows."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q.double() @ k.double().mT / math.sqrt(max(q.shape[-1], 1))).masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ v.double()).to(q.dtype)


def reverse_gradient(x: Tensor) -> Tensor:
    """Return x with a gradient of -0.5, using PyTorch operations."""
    return 1.5 * x.detach() - 0.5 * x


def round_straight_through(x: Tensor) -> Tensor:
    """Round with the gradient of hardtanh."""
    inside = torch.where(x.abs() <= 1, x, x.detach())
    return x.detach().round() + inside - inside.detach()


def compute_focal_loss(x: Tensor, y: Tensor) -> Tensor:
    """Compute the focal loss with PyTorch operations."""
    p = torch.sigmoid(x)
    return -(y * (1 - p) ** 2 * F.logsigmoid(x) + (1 - y) * p**2 * F.logsigmoid(-x))


def list_public() -> list[Arguments]:
    """List cases for typical autograd.Functions."""
    wb = {"x": ("N", "T", "H"), "w": ("H",), "b": ("H",)}
    binary = lambda s, g: torch.randint(2, (s["N"], s["H"]), generator=g)  # noqa: E731
    return [
        Arguments("exp", lambda: Exp.apply, torch.exp, {"x": ROWS}),
        Arguments("relu", lambda: Relu.apply, F.relu, {"x": ROWS}),
        Arguments("swish", lambda: Swish.apply, F.silu, {"x": ROWS}),
        Arguments("mish", lambda: Mish.apply, F.mish, {"x": ROWS}),
        Arguments("linear", lambda: Linear.apply, F.linear, {"x": ("N", "T", "H"), "w": ("O", "H"), "b": ("O",)}),
        Arguments("layer norm", lambda: LayerNorm.apply, lambda x, w, b: F.layer_norm(x, w.shape, w, b), wb),
        Arguments("rms norm", lambda: RMSNorm.apply, lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), {"x": ("N", "T", "H"), "w": ("H",)}),
        Arguments("swiglu", lambda: SwiGLU.apply, lambda a, b: F.silu(a) * b, {"a": ROWS, "b": ROWS}),
        Arguments("cross entropy", lambda: CrossEntropy.apply, F.cross_entropy, {"x": ("N", "C"), "t": make_integers("C", "N")}),
        Arguments("attention", lambda: Attention.apply, F.scaled_dot_product_attention, QKV),
        Arguments("attention, causal, by formula", lambda: attend_causally, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
              SQUARE),
        Arguments("embedding", lambda: Embedding.apply, F.embedding, {"i": make_integers(11, "N", "T"), "w": (11, "H")}),
        Arguments("straight through", lambda: StraightThrough.apply, round_straight_through, {"x": ROWS}),
        Arguments("gradient scale", lambda: lambda x: GradientScale.apply(x, 0.5), reverse_gradient, {"x": ROWS}),
        Arguments("focal loss", lambda: FocalLoss.apply, compute_focal_loss, {"x": ("N", "H"), "y": binary}),
        Arguments("cumsum", lambda: Cumsum.apply, lambda x: x.cumsum(-1), {"x": ROWS}),
    ]  # fmt: skip
