"""Operators registered with PyTorch, each twice: with a backward pass, and bare, for graphs that Inductor compiles.

What `torch.library.custom_op` puts around a function costs as much host time as most of these operators take: autograd in
Python, a search for results that alias arguments, a fence against Dynamo. A graph of Inductor's needs none of it, because the
backward pass is a graph by itself then (`harness.nn.compile.bare`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "mojo_workbook"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_twins: dict[Any, Any] = {}


def registered(
    name: str, schema: str, check: Callable[..., None] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function that changes none of its arguments as the operator `mojo_workbook::name`, and as `name_bare`.

    The result is what `torch.library.custom_op` returns; the bare one has the same fake results and no backward pass.

    Args:
        name: Of the operator.
        schema: Its arguments and results, in the language of PyTorch's own operators.
        check: Takes the operator's arguments, and raises where the function cannot take them. The bare operator goes without, because
            a compiled graph's arguments have been checked.
    """

    def register(function: Callable[..., Any]) -> Any:
        public = after(check, function) if check else function
        done = torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)(public)
        twin = f"{name}_bare"
        _library.define(twin + schema)
        for device in ("CPU", "CUDA"):
            _library.impl(twin, function, device)
        operators = getattr(torch.ops, NAMESPACE)
        whole = getattr(operators, name).default
        torch.library.register_fake(f"{NAMESPACE}::{twin}", whole, lib=_library)
        _twins[whole] = getattr(operators, twin).default
        return done

    return register


def after(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check of its arguments before it."""

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        check(*arguments)
        return function(*arguments)

    return checked


def bare_of(target: Any) -> Any:
    """The bare twin of a registered operator; anything else as it is."""
    return _twins.get(target, target)
