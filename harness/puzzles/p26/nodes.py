"""Helpers for reading a Dynamo graph: names, shapes, and which nodes write to memory."""

from torch import Tensor
from torch.fx import Node

from harness.nn.compile.match import bound, layer_norm, shape, value
from harness.nn.compile.purity import call_name, mutates

__all__ = [
    "CALLS", "POINTWISE", "bound", "call_name", "is_tensor", "layer_norm", "mutates", "pointwise", "shape", "value",
    "written_between",
]  # fmt: skip

CALLS = ("call_function", "call_method", "call_module")
"""The kinds of nodes that compute something."""
POINTWISE = frozenset(
    [
        "abs", "add", "cos", "div", "exp", "gelu", "log", "maximum", "minimum", "mul", "neg", "pow",
        "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "square", "sub", "tanh", "truediv",
        "where",
    ]
)  # fmt: skip
"""Names of functions and methods that compute each element separately, into new memory."""


def is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), Tensor)


def pointwise(node: object) -> bool:
    """Return whether a node computes each element of a new tensor separately."""
    return isinstance(node, Node) and node.op in CALLS and call_name(node) in POINTWISE and is_tensor(node)


def written_between(first: Node, last: Node) -> bool:
    """Return whether any node between `first` and `last` may write to a tensor, or switches grad mode or autocast."""
    node = first.next
    while node is not last:
        if mutates(node):
            return True
        node = node.next
    return False
