"""Derivatives that a function does not have, refused in one line that says what has them.

What is computed by hand has a gradient and nothing else. Autograd itself would be silent in three places: a gradient that is
computed without a graph counts as constant, an operator drops the tangent of a dual tensor, and both give a number.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from harness.nn.private import get_unwrapped, is_batched, is_grad_tracking, is_wrapped, transforms_active

Tensor = torch.Tensor


@dataclass(frozen=True)
class FirstOnly:
    """A function that has first derivatives, by its backward pass, and no others.

    Attributes:
        function: Its name.
        instead: What of PyTorch's has the others.
    """

    function: str
    instead: str

    def refuse(self, *, batches: bool = True, **tensors: object) -> None:
        """Raises NotImplementedError, naming the argument, where a derivative is asked for that only others have.

        Those are a tangent, and within torch.func grad, vjp, jacrev and hessian; vmap too where no `batches` can be taken.
        """
        self.refuse_tangents(**tensors)
        if not transforms_active():
            return
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                continue
            if any(map(is_grad_tracking, levels(tensor))):
                raise NotImplementedError(
                    f"{name}: {self.function} has no rule for the gradients of torch.func; use torch.autograd.grad, or "
                    f"{self.instead}"
                )
            if not batches and is_wrapped(tensor):
                raise NotImplementedError(f"{name}: {self.function} has no rule for torch.func.vmap")

    def refuse_tangents(self, **tensors: object) -> None:
        """Raises NotImplementedError for a dual tensor of forward-mode differentiation, naming the argument."""
        if forward_ad._current_level < 0:
            return
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and any(map(has_tangent, levels(tensor))):
                self.refuse_jvp(name)

    def refuse_jvp(self, name: str = "") -> NoReturn:
        """Raises NotImplementedError: a derivative in forward mode, of an argument."""
        argument = f"{name}: " if name else ""
        raise NotImplementedError(
            f"{argument}{self.function} has no forward-mode derivative; use {self.instead} where one is needed"
        )

    def refuse_double_backward(self, ctx, *grads) -> NoReturn:
        """Raises NotImplementedError: a backward pass of a backward pass."""
        raise NotImplementedError(
            f"{self.function} has no double backward: its gradients cannot be differentiated again; "
            f"use {self.instead} where a second derivative is needed"
        )

    def once(self, compute: Callable) -> Callable:
        """A function that computes without a graph, so that whoever differentiates its results is refused.

        It may be the backward pass of an autograd.Function: its results follow from what that has saved, too.
        """

        @functools.wraps(compute)
        def computed(*arguments, **named):
            with torch.no_grad():
                results = compute(*arguments, **named)
            if not torch.is_grad_enabled():
                return results  # before what is saved is read again, which a checkpoint refuses
            sources = [each for each in sources_of((*arguments, *named.values())) if each.requires_grad]
            if not sources:
                return results
            alone = isinstance(results, Tensor)
            # In a list, so that they are no inputs, of which the outputs would be views.
            marked = Refused.apply(self, [results] if alone else list(results), *sources)
            return marked[0] if alone else marked

        return computed


class Refused(torch.autograd.Function):
    """Hands tensors on that follow from others; their gradient is refused in the words of a FirstOnly."""

    @staticmethod
    def forward(ctx, first_only: FirstOnly, results: list, *sources: Tensor):
        ctx.first_only = first_only
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        ctx.first_only.refuse_double_backward(ctx, *grads)


def sources_of(arguments: tuple) -> Iterator[Tensor]:
    """The tensors among arguments, and what a backward pass has saved."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, FunctionCtx):
            saved = argument.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] (torch declares it for nobody)
            yield from (tensor for tensor in saved if tensor is not None)


def levels(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and what torch.func's transforms have wrapped in it, from the innermost transform outwards."""
    yield tensor
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor is dual; a batch of duals is not asked, what is in it is."""
    return not is_batched(tensor) and forward_ad.unpack_dual(tensor).tangent is not None
