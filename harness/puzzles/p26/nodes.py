"""Helpers for reading a Dynamo graph: names, shapes, and which nodes write to memory.

A node is a call that has not happened: `op` is its kind ("call_function", "call_method", or "placeholder" and
"output"), `target` the function, `args` and `kwargs` its arguments. Its result is described by a fake tensor,
which has a shape, a dtype and a device but no numbers.
"""

from torch import Tensor
from torch.fx import Node

from harness.nn.compile.match import bound, layer_norm, shape, value
from harness.nn.compile.purity import call_name, mutates

__all__ = [
    "CALLS", "POINTWISE", "bound", "call_name", "is_tensor", "layer_norm", "mutates", "pointwise", "shape",
    "value", "written_between",
]  # fmt: skip

CALLS = ("call_function", "call_method", "call_module")
"""The kinds of node that compute something."""
POINTWISE = frozenset(
    [
        "abs", "add", "cos", "div", "exp", "gelu", "log", "maximum", "minimum", "mul", "neg", "pow",
        "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "square", "sub", "tanh", "truediv",
        "where",
    ]
)  # fmt: skip
"""Names of functions and methods that compute each element by itself, into new memory."""


def is_tensor(node: object) -> bool:
    """Return whether an argument is a node whose result is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), Tensor)


def pointwise(node: object) -> bool:
    """Return whether a node computes each element of a new tensor separately."""
    return isinstance(node, Node) and node.op in CALLS and call_name(node) in POINTWISE and is_tensor(node)


def written_between(first: Node, last: Node) -> bool:
    """Return whether a node after `first` and before `last` may write to a tensor, or switches gradients or
    autocast on or off."""
    node = first.next
    while node is not last:
        if mutates(node):
            return True
        node = node.next
    return False
