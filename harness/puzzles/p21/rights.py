"""Correct implementations that a test must accept: other formulas, other dtypes, sums in no fixed order,
inputs at a kink.

Each is correct and fails a test that is too strict: one that needs float64, bitwise equality, or finite
differences across a kink.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from harness.check.gradients import Subject
from harness.puzzles.p21.subjects import ALL_SIZES, EPS, WANTED, Random, one, with_weight

WIDE = (torch.float64, torch.float32)
EVERY = (*WIDE, torch.bfloat16, torch.float16)
"""The dtypes in which the hunt's classes compute."""


@dataclass(frozen=True)
class Op(Subject):
    """A function as passed to the learner's `check`.

    Attributes:
        name: Its name in reports.
        dtypes: The dtypes that it supports, the widest first.
    """

    name: str = ""
    dtypes: tuple[torch.dtype, ...] = WIDE


def op_of(gate: str, function, name: str, dtypes: tuple[torch.dtype, ...] | None = None) -> Op:
    """Return a function as an op of a gate's class."""
    requested = WANTED[gate]
    return Op(
        function,
        requested.reference,
        requested.make,
        sizes=requested.sizes,
        name=name,
        dtypes=dtypes or EVERY,
    )


# ---- Written differently ------------------------------------------------------------------------------------


def softmax_by_logsumexp(x: Tensor) -> Tensor:
    """Compute softmax as the exponential of its logarithm."""
    return (x - x.logsumexp(-1, keepdim=True)).exp()


def scaled_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...st,...te->...se", torch.softmax((q / q.shape[-1] ** 0.5) @ k.mT, -1), v)


class StandardiseInFloat32(Function):
    """A kernel that is compiled for float32 only, with the three-term formula."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"this kernel is compiled for float32, not for {x.dtype}")
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        ctx.save_for_backward(x, mean, rstd)
        return (x - mean) * rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        """Return dx through the gradients of variance and mean."""
        x, mean, rstd = ctx.saved_tensors
        H = x.shape[-1]
        dvariance = (dy * (x - mean)).sum(-1, keepdim=True) * -0.5 * rstd**3
        dmean = -(dy * rstd).sum(-1, keepdim=True)
        return dy * rstd + dvariance * 2 * (x - mean) / H + dmean / H


class AddBiasInNoOrder(Function):
    """Sums the gradient of the bias in another order at each call, as atomics do."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        rows = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        total = torch.zeros(dy.shape[-1], dtype=dy.dtype)
        for part in rows[torch.randperm(len(rows))].split(max(1, len(rows) // 7)):
            total = total + part.sum(0)
        return dy, total


class ReluFromMask(Function):
    """ReLU that saves a bool for each element."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        """Return a gradient that is 0 where x is 0, as in PyTorch."""
        (passes,) = ctx.saved_tensors
        return torch.where(passes, dy, torch.zeros_like(dy))


def near_kink(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return numbers of which some are 0, and some so near that a finite difference reaches across."""
    (x,) = one(sizes, seed)
    flat = x.view(-1)
    flat[::3] = 0.0
    flat[1::5] = 1e-8
    return (x,)


class ScaleByMatrix(Function):
    """Computes the gradient of the weight as a product of float32 matrices; bfloat16 only."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        products = (dy.float() * x.float()).reshape(x.shape[:-1].numel(), x.shape[-1])
        return dy * weight, (torch.ones(1, len(products)) @ products)[0].to(weight.dtype)


def gelu_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return numbers of which some are so large that the gradient is 0 or 1, flat for finite differences."""
    random = Random(seed)
    return (random.rows(sizes) * 6,)


def steep_tanh(x: Tensor) -> Tensor:
    """Return -1,000,000 tanh(x), with gradients far from 1, negative for a gradient of ones."""
    return -1e6 * torch.tanh(x)


def steep_tanh_in_parts(x: Tensor) -> Tensor:
    """Return the same in 50 parts, whose gradients are summed with rounding."""
    return torch.stack([-2e4 * torch.tanh(x) for _ in range(50)]).sum(0)


def silu_with_unused(x: Tensor, _: Tensor) -> Tensor:
    """Return SiLU; the other input gets no gradient, which autograd allows."""
    return F.silu(x)


def correct_ops(solution: dict) -> list[Op]:
    """Return every correct implementation: the classes of the solution (a module's names), and those of this
    file."""
    return [
        *(op_of(gate, solution[requested.name].apply, gate) for gate, requested in WANTED.items()),
        op_of("softmax", softmax_by_logsumexp, "softmax, by logsumexp"),
        op_of("attention", scaled_query_attention, "attention, with the scale in the query"),
        op_of("attention", F.scaled_dot_product_attention, "attention, PyTorch's own"),
        op_of("standardise", StandardiseInFloat32.apply, "standardise, in float32 alone", (torch.float32,)),
        op_of("addbias", AddBiasInNoOrder.apply, "addbias, summed in no fixed order", WIDE),
        op_of("scale", ScaleByMatrix.apply, "scale, in bfloat16 alone", (torch.bfloat16,)),
        Op(ReluFromMask.apply, F.relu, near_kink, sizes=ALL_SIZES, name="relu, with inputs at its kink"),
        Op(lambda x: F.gelu(x), F.gelu, gelu_inputs, sizes=ALL_SIZES, name="gelu, with flat parts"),
        Op(steep_tanh_in_parts, steep_tanh, one, sizes=ALL_SIZES, name="tanh, falling steeply, in parts"),
        Op(
            silu_with_unused,
            silu_with_unused,
            with_weight,
            sizes=ALL_SIZES,
            name="silu, beside an input that it does not use",
        ),
    ]
