"""LayerNorm + Linear under `torch.func`: grad, vjp, jacrev, vmap, and vmap over grad for gradients of single samples.

torch's transforms want an `autograd.Function` whose `setup_context` stands apart from its forward pass, and of an operator
a rule for batches. Rows of LayerNorm + Linear are independent, so that a batch of inputs under shared parameters is one
call; anything else (a batch of parameters, of gradients, per-sample parameter gradients) is a call for each member.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from harness.nn.autograd import (
    FIRST_ONLY,
    keep_for_backward,
    layernorm_linear,
    layernorm_linear_backward,
    only,
    wanted_of,
)

Argument = Tensor | float | str | None


class Transformed(Function):
    """The forward operator for transforms: returns output [..., O] and the statistics [2, ...]."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory):
        return layernorm_linear(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory)

    setup_context = staticmethod(keep_for_backward)

    @staticmethod
    def backward(ctx, grad_output, grad_statistics):
        needed = ctx.needs_input_grad
        gradients = TransformedBackward.apply(
            grad_output, *ctx.saved_tensors, wanted_of(needed), ctx.algorithm, ctx.memory
        )
        return (*only(gradients, needed), None, None, None)

    @staticmethod
    def jvp(ctx, *tangents):
        """As within hessian, forward mode over a gradient."""
        FIRST_ONLY.refuse_jvp()

    @staticmethod
    def vmap(info, in_dims, *arguments):
        """Of tensors at the level below: rows are independent, so a batched x alone is one call."""
        return batched(Transformed.apply, info, in_dims, arguments, rows_alone=True)


class TransformedBackward(Function):
    """The backward operator for transforms; its own derivative is refused."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*arguments):
        return layernorm_linear_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept: there is no second derivative."""

    backward = staticmethod(FIRST_ONLY.refuse_double_backward)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return batched(TransformedBackward.apply, info, in_dims, arguments)


def batched(call, info, in_dims, arguments, *, rows_alone: bool = False):
    """The results of a call on a batch, and where their batch axis is: in front, but for the statistics behind their first.

    `rows_alone` says that a batch of the first argument, all others shared, is one call on more rows.
    """
    if rows_alone and in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):
        output, statistics = call(arguments[0].movedim(in_dims[0], 0), *arguments[1:])
        return (output, statistics), (0, 1)
    members = [
        call(*(member(value, dim, i) for value, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(results) for results in zip(*members, strict=True)), (0,) * len(members[0])


def member(value: Argument, dim: int | None, index: int) -> Argument:
    """One member's share of an argument: all of it where it has no batch axis."""
    return value.select(dim, index) if isinstance(value, Tensor) and dim is not None else value


def _rule(operator):
    """The rule by which torch runs an operator on a batch."""
    rows_alone = operator is layernorm_linear

    def rule(info, in_dims, *arguments):
        return batched(operator, info, in_dims, arguments, rows_alone=rows_alone)

    return rule


layernorm_linear.register_vmap(_rule(layernorm_linear))
layernorm_linear_backward.register_vmap(_rule(layernorm_linear_backward))
