"""Edit a graph captured by Dynamo: insert nodes with fake tensors, and look up layers' names in the model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node

from harness.nn.compile.match import value


class NodeInserter:
    """Inserts nodes with fake tensors before an anchor; an exception in the `with` block removes them."""

    def __init__(self, gm: GraphModule, anchor: Node):
        self.gm, self.anchor = gm, anchor
        self.added_nodes: list[Node] = []

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.anchor):
            return self.set_fake_tensor(self.gm.graph.call_function(target, args, kwargs), target)

    def method(self, name: str, *args: Any) -> Node:
        with self.gm.graph.inserting_before(self.anchor):
            return self.set_fake_tensor(self.gm.graph.call_method(name, args), getattr(torch.Tensor, name))

    def set_fake_tensor(self, node: Node, call: Callable[..., Any]) -> Node:
        self.added_nodes.append(node)
        if not isinstance(value(self.anchor), FakeTensor):
            message = "its tensors are wrapped, by a transform of torch.func or in a subclass"
            raise NotImplementedError(message)
        meta = {k: v for k, v in self.anchor.meta.items() if k != "example_value"}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        # Disable the caller's hooks, such as a checkpoint's, for the tensors saved here.
        with value(self.anchor).fake_mode, saved_tensors_hooks(lambda t: t, lambda t: t):
            node.meta = meta | {"example_value": call(*args, **kwargs)}
        return node

    def cast(self, dtype: torch.dtype, *tensors: Node | None) -> list[Node | None]:
        """Cast tensors to `dtype`, because autocast would cast the operands of a Linear only later."""
        return [t if t is None or value(t).dtype == dtype else self.method("to", t, dtype) for t in tensors]

    def __enter__(self) -> "NodeInserter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for node in reversed(self.added_nodes):
                self.gm.graph.erase_node(node)


def layer_name(node: Node) -> str:
    """Return the name of a node's layer, such as "transformer.h.0.mlp.c_fc", or the node's name."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return node.name
    return re.sub(r"^[LG]\['\w+'\]\.?", "", str(list(stack.values())[-1][0])) or node.name


@dataclass(frozen=True)
class Swap:
    """A replaced Linear, possibly `with_loss`: its name in the model, sizes and dtype."""

    name: str
    rows: tuple[Any, ...]
    in_features: int
    out_features: int
    dtype: str
    with_loss: bool = False

    def __str__(self) -> str:
        rows = "x".join(map(str, self.rows)) or "one"
        name = f"{self.name} with its loss" if self.with_loss else self.name
        return f"swapped  {name}: {rows} rows, {self.in_features} -> {self.out_features}, {self.dtype}"
