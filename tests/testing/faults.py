"""Bugs from public reports, each reproduced by an autograd.Function with one incorrect line."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from right_cases import make_integers
from torch import Tensor
from torch.autograd import Function
from zoo_cases import Arguments

EPS = 1e-5
ROWS = ("N", "T", "H")


def make_function(forward: Callable, backward: Callable) -> Callable:
    """Create an autograd.Function from forward and backward; return its `apply`."""
    name = backward.__name__.title().replace("_", "")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (Function,), methods).apply


def read_as_contiguous(t: Tensor) -> Tensor:
    """Return the values that a kernel reads if it assumes a contiguous tensor."""
    strides = torch.empty(t.shape, device="meta").stride()
    there = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided(t.shape, strides) if there >= t.numel() else torch.zeros_like(t)


def save_inputs(result: Callable) -> Callable:
    """Wrap a forward function to save its inputs."""

    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return result(*tensors)

    return forward


def scale_concatenated(ctx, dy):
    x, w = ctx.saved_tensors
    dy = read_as_contiguous(dy)
    return dy * w, (dy * x).flatten(0, -2).sum(0)


def attention_dout(ctx, do):
    q, k, v = ctx.saved_tensors
    do, scale = read_as_contiguous(do), q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    dp = do @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def average_axis(ctx, dy):
    (x,) = ctx.saved_tensors
    return (read_as_contiguous(dy) / x.shape[-1])[..., None].expand(x.shape)


def multiply_expanded(ctx, dy):
    x, w = ctx.saved_tensors
    return dy @ w.mT, read_as_contiguous(x).flatten(0, -2).mT @ dy.flatten(0, -2)


def compute_distances(ctx, dd):
    x, y = ctx.saved_tensors
    differences = x.view(-1).view(-1, 1, x.shape[-1]) - y
    d = 2 * dd[..., None] * differences
    return d.sum(1), -d.sum(0)


def view_rows(ctx, dy):
    x, w = ctx.saved_tensors
    return dy @ w, dy.view(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def entropy_in_logits(ctx, dloss):
    logits, target = ctx.saved_tensors
    p = logits.softmax(-1) - F.one_hot(target, logits.shape[-1])
    logits.data.copy_(p * dloss / len(target))
    return logits.data, None


def entropy_forward_in_place(ctx, logits, target):
    loss = F.cross_entropy(logits, target)
    logits.data.copy_((logits.softmax(-1) - F.one_hot(target, logits.shape[-1])) / len(target))
    ctx.save_for_backward(logits.data)
    return loss


def entropy_first_row(ctx, dloss):
    logits, target = ctx.saved_tensors
    return (logits.softmax(-1) - F.one_hot(target, logits.shape[-1])) * dloss[0], None


def entropy_divided(ctx, dloss):
    logits, target = ctx.saved_tensors
    return (logits.softmax(-1) - F.one_hot(target, logits.shape[-1])) * dloss / len(target), None


def rms_parts(ctx, dy):
    x, w = ctx.saved_tensors
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd, dy * w, rstd


def rms_sum_in_16_bits(ctx, dy):
    x_hat, g, rstd = rms_parts(ctx, dy)
    dw = torch.zeros(dy.shape[-1], dtype=dy.dtype)
    for part in (dy * x_hat).flatten(0, -2).split(16):
        dw += part.sum(0)
    return rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True)), dw


def rms_none_for_weight(ctx, dy):
    x_hat, g, rstd = rms_parts(ctx, dy)
    return rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True)), None


def rms_last_block(ctx, dy):
    x_hat, g, rstd = rms_parts(ctx, dy)
    each = (dy * x_hat).flatten(0, -2)
    block = 16 if len(each) >= 1024 else 1
    dw = each[: len(each) // block * block].sum(0)
    return rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True)), dw


def rms_across_columns(ctx, dy):
    x_hat, g, rstd = rms_parts(ctx, dy)
    c = (g * x_hat).mean(-1)
    wrong = c.shape[-1] == g.shape[-1]
    dx = rstd * (g - x_hat * (c[..., None, :].expand(g.shape) if wrong else c[..., None]))
    return dx, (dy * x_hat).flatten(0, -2).sum(0)


def rms_weight_forgotten(ctx, dy):
    x_hat, _, rstd = rms_parts(ctx, dy)
    return rstd * (dy - x_hat * (dy * x_hat).mean(-1, keepdim=True)), (dy * x_hat).flatten(0, -2).sum(0)


def square_with_attribute(ctx, x):
    ctx.twice = x * 2
    return ctx.twice.square()


def by_attribute(ctx, dy):
    return 4 * ctx.twice * dy


def square_with_saved(ctx, x):
    ctx.save_for_backward(2 * x)
    return x.square()


def by_saved(ctx, dy):
    return dy * ctx.saved_tensors[0]


def embedded_last_wins(ctx, dy):
    index, w = ctx.saved_tensors
    dw = torch.zeros_like(w)
    dw[index.flatten()] = dy.flatten(0, -2)
    return None, dw


def embedded_padding(ctx, dy):
    index, w = ctx.saved_tensors
    dw = torch.zeros_like(w).index_add_(0, index.flatten(), dy.flatten(0, -2))
    if index.numel() <= 768:
        dw[0] = 0
    return None, dw


def masked_softmax(ctx, dy):
    (x,) = ctx.saved_tensors
    p = x.softmax(-1)
    return p * (dy - (dy * p).sum(-1, keepdim=True))


def safe_softmax(x: Tensor) -> Tensor:
    """Compute softmax with zeros for fully masked rows."""
    hidden = (x == -torch.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, x).softmax(-1))


def bag_without_weights(ctx, dy):
    index, w, each = ctx.saved_tensors
    parts = (dy[:, None] * each[..., None]).flatten(0, -2)
    return None, torch.zeros_like(w).index_add_(0, index.flatten(), parts), None


def sum_bag(index: Tensor, w: Tensor, each: Tensor) -> Tensor:
    """Compute weighted sums of rows."""
    return (w[index] * each[..., None]).sum(1)


def flag_of_flattened(ctx, x, w):
    flat = x.flatten(0, -2)  # does not require a gradient because of no_grad
    ctx.save_for_backward(x, w)
    ctx.asks = x.requires_grad if x.dim() == 2 else flat.requires_grad
    return x @ w.mT


def use_flag_of_flattened(ctx, dy):
    x, w = ctx.saved_tensors
    return dy @ w if ctx.asks else None, dy.flatten(0, -2).mT @ x.flatten(0, -2)


def one_leading_axis(ctx, dy):
    x, w = ctx.saved_tensors
    rows, other = (dy[0], x[0]) if x.dim() == 3 else (dy, x)
    return dy @ w, rows.mT @ other


def layer_norm_subtracted_twice(ctx, dy):
    (x,) = ctx.saved_tensors
    rstd = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    y = (x - x.mean(-1, keepdim=True)) * rstd
    return rstd * (dy - 2 * dy.mean(-1, keepdim=True) - y * (dy * y).mean(-1, keepdim=True))


def rms(x, w):
    return F.rms_norm(x, w.shape, w, EPS)


XW = {"x": ROWS, "w": ("H",)}
LINEAR = {"x": ROWS, "w": ("O", "H")}
ENTROPY = {"x": ("N", "C"), "t": make_integers("C", "N")}
INDEXED = {"i": make_integers(5, "N", "T"), "w": (5, "H")}
UNREDUCED = lambda x, t: F.cross_entropy(x, t, reduction="none")  # noqa: E731
SUMMED = lambda x, t: F.cross_entropy(x, t, reduction="sum")  # noqa: E731
PADDED = lambda i, w: F.embedding(i, w, padding_idx=0)  # noqa: E731
FAULTS: list[tuple[str, Callable, Callable, Callable, dict]] = [
    ("pytorch/pytorch#194719", save_inputs(torch.mul), scale_concatenated, torch.mul, XW),
    ("Dao-AILab/flash-attention#355", save_inputs(F.scaled_dot_product_attention), attention_dout, F.scaled_dot_product_attention,
     {"q": ("B", "S", "d"), "k": ("B", "T", "d"), "v": ("B", "T", "d")}),
    ("torch/nn#345", save_inputs(lambda x: x.mean(-1)), average_axis, lambda x: x.mean(-1), {"x": ROWS}),
    ("pytorch/pytorch#30303", save_inputs(torch.matmul), multiply_expanded, torch.matmul, {"x": ROWS, "w": ("H", "O")}),
    ("pytorch/pytorch#69997", save_inputs(lambda x, y: (x[:, None] - y).square().sum(-1)), compute_distances,
     lambda x, y: (x[:, None] - y).square().sum(-1), {"x": ("N", "H"), "y": ("M", "H")}),
    ("NVIDIA/apex#1601", save_inputs(F.linear), view_rows, F.linear, LINEAR),
    ("unslothai/unsloth#5002", save_inputs(F.cross_entropy), entropy_in_logits, F.cross_entropy, ENTROPY),
    ("linkedin/Liger-Kernel#343", entropy_forward_in_place, lambda ctx, d: (ctx.saved_tensors[0] * d, None), F.cross_entropy, ENTROPY),
    ("linkedin/Liger-Kernel#1298", save_inputs(UNREDUCED), entropy_first_row, UNREDUCED, ENTROPY),
    ("paiml/aprender#2182", save_inputs(SUMMED), entropy_divided, SUMMED, ENTROPY),
    ("linkedin/Liger-Kernel#950", save_inputs(rms), rms_sum_in_16_bits, rms, XW),
    ("unslothai/unsloth#4533", save_inputs(rms), rms_none_for_weight, rms, XW),
    ("BobMcDear/attorch#18", save_inputs(rms), rms_last_block, rms, XW),
    ("BobMcDear/attorch#17", save_inputs(rms), rms_across_columns, rms, XW),
    ("karpathy/llm.c#763", save_inputs(rms), rms_weight_forgotten, rms, XW),
    ("pytorch/pytorch#58509", square_with_attribute, by_attribute, lambda x: (2 * x).square(), {"x": ROWS}),
    ("pytorch/pytorch#104040", square_with_saved, by_saved, torch.square, {"x": ROWS}),
    ("tenstorrent/tt-metal#6232", save_inputs(F.embedding), embedded_last_wins, F.embedding, INDEXED),
    ("pytorch/pytorch#28716", save_inputs(PADDED), embedded_padding, PADDED, INDEXED),
    ("pytorch/pytorch#41508", save_inputs(safe_softmax), masked_softmax, safe_softmax,
     {"x": lambda s, g: mask_scores(torch.randn(s["N"], s["H"], generator=g, dtype=torch.float64))}),
    ("meta-pytorch/torchrec#4602", save_inputs(sum_bag), bag_without_weights, sum_bag, {**INDEXED, "each": ("N", "T")}),
    ("verl-project/verl#6913", flag_of_flattened, use_flag_of_flattened, F.linear, LINEAR),
    ("flagos-ai/FlagGems#5392", save_inputs(F.linear), one_leading_axis, F.linear, LINEAR),
    ("tenstorrent/tt-metal#53204", save_inputs(lambda x: F.layer_norm(x, x.shape[-1:])), layer_norm_subtracted_twice,
     lambda x: F.layer_norm(x, x.shape[-1:]), {"x": ROWS}),
]  # fmt: skip


def mask_scores(x: Tensor) -> Tensor:
    """Mask some scores, and one row completely."""
    x[:, -1:] = -torch.inf
    x[:1] = -torch.inf
    return x


def list_faults() -> list[Arguments]:
    return [
        Arguments(report, lambda f=f, b=b: make_function(f, b), reference, inputs)
        for report, f, b, reference, inputs in FAULTS
    ]
