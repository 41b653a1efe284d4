"""Edit a graph that Dynamo has captured: add nodes with their fake tensors, and name layers as the model does."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node

from harness.nn.compile.match import value


class Adder:
    """Adds nodes with fake tensors before a node of a graph; an exception in its `with` block removes them."""

    def __init__(self, gm: GraphModule, before: Node):
        self.gm, self.before = gm, before
        self.added: list[Node] = []

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.before):
            return self.finish(self.gm.graph.call_function(target, args, kwargs), target)

    def method(self, name: str, *args: Any) -> Node:
        with self.gm.graph.inserting_before(self.before):
            return self.finish(self.gm.graph.call_method(name, args), getattr(torch.Tensor, name))

    def finish(self, node: Node, call: Callable[..., Any]) -> Node:
        self.added.append(node)
        if not isinstance(value(self.before), FakeTensor):
            raise NotImplementedError(
                "its tensors are wrapped, by a transform of torch.func or in a subclass"
            )
        known = {k: v for k, v in self.before.meta.items() if k != "example_value"}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        # Under the caller's hooks, as a checkpoint's, what the call saves would count as the model's.
        with value(self.before).fake_mode, saved_tensors_hooks(lambda t: t, lambda t: t):
            node.meta = known | {"example_value": call(*args, **kwargs)}
        return node

    def cast(self, dtype: torch.dtype, *tensors: Node | None) -> list[Node | None]:
        """Cast tensors: under autocast a Linear computes in a dtype that its operands do not have yet."""
        return [t if t is None or value(t).dtype == dtype else self.method("to", t, dtype) for t in tensors]

    def __enter__(self) -> "Adder":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for node in reversed(self.added):
                self.gm.graph.erase_node(node)


def name_of(node: Node) -> str:
    """Return the model's name of the layer that a node comes from, as "transformer.h.0.mlp.c_fc"; else the node's."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return node.name
    return re.sub(r"^[LG]\['\w+'\]\.?", "", str(list(stack.values())[-1][0])) or node.name


@dataclass(frozen=True)
class Swap:
    """A Linear that was replaced, alone or `with_loss`: its name in the model, sizes and dtype."""

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
