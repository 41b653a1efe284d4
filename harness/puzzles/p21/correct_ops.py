"""Correct ops that a learner's test must accept; each trips some kind of overly strict test."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from harness.check.gradients import Subject
from harness.puzzles.p21.subjects import (
    ALL_SIZES,
    EPS,
    REFERENCES,
    RandomInputs,
    make_rows,
    make_rows_and_weight,
)

FULL_PRECISION_DTYPES = (torch.float64, torch.float32)
ALL_DTYPES = (*FULL_PRECISION_DTYPES, torch.bfloat16, torch.float16)
"""The dtypes that the hunt's classes support."""


@dataclass(frozen=True)
class Op(Subject):
    """A function as passed to the learner's `check`; `dtypes` lists its supported dtypes, widest first."""

    name: str = ""
    dtypes: tuple[torch.dtype, ...] = FULL_PRECISION_DTYPES


def make_op(gate: str, function, name: str, dtypes: tuple[torch.dtype, ...] = ALL_DTYPES) -> Op:
    reference = REFERENCES[gate]
    return Op(
        function, reference.function, reference.make_inputs, sizes=reference.sizes, name=name, dtypes=dtypes
    )


# ---- Unusual implementations --------------------------------------------------------------------------------


def softmax_by_logsumexp(x: Tensor) -> Tensor:
    return (x - x.logsumexp(-1, keepdim=True)).exp()


def scaled_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...st,...te->...se", torch.softmax((q / q.shape[-1] ** 0.5) @ k.mT, -1), v)


class StandardiseInFloat32(Function):
    """Imitates a kernel that is compiled only for float32 and uses the three-term formula."""

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


class AddBiasInRandomOrder(Function):
    """Sums the bias gradient in a different order in each call, as atomics do."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        rows = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        total = torch.zeros(dy.shape[-1], dtype=dy.dtype)
        for chunk in rows[torch.randperm(len(rows))].split(max(1, len(rows) // 7)):
            total = total + chunk.sum(0)
        return dy, total


class ReluFromMask(Function):
    """ReLU that saves one bool per element."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        """Return a gradient that is 0 where x is 0, as in PyTorch."""
        (mask,) = ctx.saved_tensors
        return torch.where(mask, dy, torch.zeros_like(dy))


def make_inputs_near_kink(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return inputs, some 0 and some so close to 0 that a finite difference crosses ReLU's kink."""
    (x,) = make_rows(sizes, seed)
    flat = x.view(-1)
    flat[::3] = 0.0
    flat[1::5] = 1e-8
    return (x,)


class ScaleByMatrix(Function):
    """Computes the weight gradient as a float32 matrix product; supports only bfloat16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        products = (dy.float() * x.float()).reshape(x.shape[:-1].numel(), x.shape[-1])
        return dy * weight, (torch.ones(1, len(products)) @ products)[0].to(weight.dtype)


def make_gelu_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return inputs, some so large that GELU's gradient is a constant 0 or 1 for finite differences."""
    random = RandomInputs(seed)
    return (random.rows(sizes) * 6,)


def steep_tanh(x: Tensor) -> Tensor:
    """Return -1,000,000 tanh(x), whose gradient is large, and negative for an incoming gradient of ones."""
    return -1e6 * torch.tanh(x)


def steep_tanh_in_parts(x: Tensor) -> Tensor:
    """Return `steep_tanh` as a sum of 50 terms, so that accumulating its gradient has rounding errors."""
    return torch.stack([-2e4 * torch.tanh(x) for _ in range(50)]).sum(0)


def silu_with_unused_input(x: Tensor, _: Tensor) -> Tensor:
    """Return SiLU of x; the second input has no gradient, which autograd allows."""
    return F.silu(x)


OTHER_OPS = (
    ("relu, with inputs at its kink", ReluFromMask.apply, F.relu, make_inputs_near_kink),
    ("gelu, with inputs where it is flat", lambda x: F.gelu(x), F.gelu, make_gelu_inputs),
    ("tanh, scaled to be steep, in parts", steep_tanh_in_parts, steep_tanh, make_rows),
    ("silu, with an unused second input", silu_with_unused_input, silu_with_unused_input, make_rows_and_weight),
)  # fmt: skip
"""Name, function, reference and inputs of the ops without a gate."""


def list_correct_ops(solution: dict) -> list[Op]:
    """Return every correct op: the classes in `solution`, a module's namespace, and the ops of this file."""
    return [
        *(make_op(gate, solution[reference.name].apply, gate) for gate, reference in REFERENCES.items()),
        make_op("softmax", softmax_by_logsumexp, "softmax, with logsumexp"),
        make_op("attention", scaled_query_attention, "attention, with the scale in the query"),
        make_op("attention", F.scaled_dot_product_attention, "attention, PyTorch's own"),
        make_op("standardise", StandardiseInFloat32.apply, "standardise, in float32 only", (torch.float32,)),
        make_op(
            "addbias", AddBiasInRandomOrder.apply, "addbias, summed in a random order", FULL_PRECISION_DTYPES
        ),
        make_op("scale", ScaleByMatrix.apply, "scale, in bfloat16 only", (torch.bfloat16,)),
        *(
            Op(function, reference, make, sizes=ALL_SIZES, name=name)
            for name, function, reference, make in OTHER_OPS
        ),
    ]
