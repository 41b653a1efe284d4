"""Decide which nodes of a graph may write to a tensor, as unknown calls may. No call is moved across them."""

import functools
import inspect
import operator
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

MODE_SWITCHES = (
    "_set_grad_enabled",
    *(f"_{act}_{mode}" for act in ("enter", "exit") for mode in ("autocast", "inference_mode")),
)
"""Functions that Dynamo records for `torch.no_grad()` and similar modes."""
IN_PLACE = {operator.setitem, operator.delitem} | {
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and f"__{name}__" in dir(operator)
} - {operator.inv, operator.invert, operator.index}
PURE_METHODS = frozenset([
    "bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short", "type",
    "unique", "ndimension", "nelement", "new_tensor",
])  # fmt: skip
"""Tensor methods that do not write and have no operator of the same name."""
PURE_BUILTINS = frozenset(
    ["abs", "bool", "divmod", "float", "getattr", "int", "len", "max", "min", "pow", "round", "slice"]
)
C_MODULES = ("torch", "torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special")
"""Modules of C functions, whose names are those of their operators."""
PYTHON_MODULES = ("torch.functional", "torch.nn.functional")
STATEFUL_OPERATORS = ("batch_norm", "instance_norm")
"""Operators that write running statistics, although their schemas do not declare it."""


def call_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def switches_mode(node: Node) -> bool:
    return node.op == "call_function" and call_name(node) in MODE_SWITCHES


def mutates(node: Node) -> bool:
    """Return whether a node may change a tensor in place, or switch a mode."""
    if node.op in ("call_function", "call_method"):
        return node.kwargs.get("out") is not None or not is_pure(node)
    return node.op == "call_module"


def is_pure(node: Node) -> bool:
    """Return whether a call without `out` is known not to write to a tensor."""
    target, name = node.target, call_name(node)
    if any(part in name for part in STATEFUL_OPERATORS):
        return False
    if isinstance(target, str):
        return name in PURE_METHODS or is_pure_operator(getattr(aten, name, None))
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return is_pure_operator(target)
    module = getattr(target, "__module__", None)
    if module in C_MODULES:
        return name.startswith("sym_") or is_pure_operator(getattr(aten, name, None))
    if module in PYTHON_MODULES:
        return not name.endswith("_") and not may_write_argument(node)
    if module == "builtins":
        return name in PURE_BUILTINS
    return module == "math" or (module == "_operator" and target not in IN_PLACE)


@functools.cache
def is_pure_operator(packet: Any) -> bool:
    """Return whether no overload of an operator writes to an argument other than `out`."""
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    arguments = [a for name in packet.overloads() for a in getattr(packet, name)._schema.arguments]
    return not any(a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in arguments)


def may_write_argument(node: Node) -> bool:
    """Return whether `inplace` is set, or `max_norm`, which rescales rows of an embedding in place."""
    assert callable(node.target)
    arguments = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments
    return arguments.get("inplace", False) is not False or arguments.get("max_norm") is not None
