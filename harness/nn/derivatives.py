"""Refuse second derivatives of gradients that are computed by hand, which autograd would take for constants."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch.autograd.function import FunctionCtx

Tensor = torch.Tensor


def first_order(function: str, instead: str) -> Callable[[Callable], Callable]:
    """Return a decorator for a backward pass: differentiating its results raises NotImplementedError.

    Args:
        function: Its name in the error message.
        instead: PyTorch's function that has second derivatives.
    """
    message = (
        f"{function} has no double backward: its gradients cannot be differentiated again; "
        f"use {instead} where a second derivative is needed"
    )

    def decorate(compute: Callable) -> Callable:
        @functools.wraps(compute)
        def wrapper(*arguments):
            with torch.no_grad():
                results = compute(*arguments)
            if not torch.is_grad_enabled():
                return results  # without unpacking saved tensors again, which a checkpoint refuses
            sources = [tensor for tensor in sources_of(arguments) if tensor.requires_grad]
            # The results are in a list: as inputs of Refused they would become views.
            return Refused.apply(message, list(results), *sources) if sources else results

        return wrapper

    return decorate


class Refused(torch.autograd.Function):
    """Pass results on as functions of the sources, whose gradients raise."""

    @staticmethod
    def forward(ctx, message: str, results: list, *sources: Tensor):
        ctx.message = message
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.message)


def check_first_order(*tensors: object) -> None:
    """Raise PyTorch's own error for a tangent or a transform of torch.func."""
    Refused.apply("", [], *tensors)


def sources_of(arguments: tuple) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and those that a backward pass has saved."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, FunctionCtx):
            saved = argument.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] (torch does not declare it)
            yield from (tensor for tensor in saved if tensor is not None)
