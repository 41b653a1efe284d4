"""Replace a Linear and the cross-entropy of its logits by `linear_cross_entropy`.

Between the two, rows may be sliced, reshaped into rows and cast to float32, as in `logits.float().view(-1,
V)`. A head is left if anything else reads its logits or the graph returns them.
"""

import functools
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from harness.nn.arguments import plain, wide
from harness.nn.compile.edit import Adder, Swap, name_of
from harness.nn.compile.match import (
    FAR,
    PRODUCTS,
    TRANSPOSED,
    Left,
    Matches,
    bound,
    find_write,
    keeps_rows,
    list_factors,
    match_calls,
    shape,
    slices_rows,
    unfit_linear,
    value,
)
from harness.nn.compile.purity import call_name

LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
"""The arguments of `F.cross_entropy`."""
CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")
SMALL = 2**25
"""Bytes of logits in float32 below which a head is not replaced, unless requested."""


@dataclass(frozen=True)
class HeadMatch:
    """A Linear and the cross-entropy of its logits.

    `path` are all nodes from the loss to the Linear, both included; `given` the args of both by name:
    `x`, `matrix` and `bias`, and those of the loss; `slices` the indices of rows, to be applied in order.
    """

    linear: Node
    loss: Node
    path: tuple[Node, ...]
    given: dict[str, Any]
    slices: tuple[Any, ...]


def find_heads(gm: GraphModule, asked: bool | None) -> Matches:
    """Return a graph's heads: all if requested, none if forbidden, else those with large logits."""
    losses = () if asked is False else (F.cross_entropy,)
    return match_calls(gm, losses, functools.partial(match_head, asked=bool(asked)))


def match_head(loss: Node, nodes: list[Node], order: dict[Node, int], asked: bool) -> HeadMatch | Left | None:
    """Return a match, the reason against one, or None if no Linear leads to this loss."""
    args = bound(loss, LOSS)
    path, why = walk_back(loss, args["input"])
    linear = path[-1]
    if linear.target not in PRODUCTS:
        return None
    product = bound(linear, PRODUCTS[linear.target])
    args |= {"x": product["input"], "matrix": product["weight"], "bias": product.get("bias")}
    slices = tuple(node.args[1] for node in reversed(path) if node.target is operator.getitem)
    match = HeadMatch(linear, loss, path, args, slices)
    why = why or unread(path) or unfit(match) or list_factors(linear)
    why = why or find_write(nodes[order[linear] + 1 : order[loss]])
    if not why and not asked and value(linear).numel() * 4 < SMALL:
        why = f"its logits take less than {SMALL >> 20} MiB"
    return Left(linear, why) if why else match


def walk_back(loss: Node, node: Any) -> tuple[tuple[Node, ...], str]:
    """Return the nodes from a loss towards a Linear, and the obstacle between them, if any."""
    path, why, reshaped_before = [loss], "", False
    for _ in range(2 * FAR):
        if not isinstance(node, Node) or not node.all_input_nodes:
            break
        path.append(node)
        if node.target in PRODUCTS:
            break
        if slices_rows(node):
            reshaped_before = True
        elif not casts(node) and not reshapes_rows(node):
            why = f"{call_name(node)} is between it and its loss"
        elif reshaped_before and shape(node) != shape(node.all_input_nodes[0]):
            why = "its logits are reshaped, then sliced"
        node = node.all_input_nodes[0]
    return tuple(path), why


def reshapes_rows(node: Node) -> bool:
    flat = (node.op == "call_method" and node.target == "flatten") or node.target is torch.flatten
    return keeps_rows(node) or (flat and shape(node)[-1:] == shape(node.all_input_nodes[0])[-1:])


def casts(node: Node) -> bool:
    """Return whether a node changes only the dtype."""
    if node.op != "call_method" or node.target not in CASTS:
        return False
    return value(node).device == value(node.all_input_nodes[0]).device


def unread(path: tuple[Node, ...]) -> str:
    """Return another reader of the logits, or ""."""
    for reader, node in pairwise(path):
        others = [user for user in node.users if user is not reader]
        if any(user.op == "output" for user in others):
            return "its logits are returned"
        if others:
            return f"{call_name(others[0])} reads its logits too"
    return ""


def unfit(match: HeadMatch) -> str:
    """Return why `linear_cross_entropy` does not support a match; else ""."""
    args, out = match.given, value(match.linear)
    if not all(isinstance(args[name], Node) for name in ("x", "matrix", "target")):
        return "an input is not a tensor of the graph"
    if args.get("weight") is not None:
        return "its loss has weights for classes"
    if args.get("size_average") is not None or args.get("reduce") is not None:
        return "its loss has an argument of old: size_average or reduce"
    if args.get("reduction", "mean") not in ("mean", "sum"):
        return f"its loss has the reduction {args['reduction']!r}"
    if value(args["target"]).dtype != torch.int64:
        return f"its targets are {plain(value(args['target']).dtype)}, not classes"
    if len(shape(args["input"])) not in (1, 2):
        return f"its loss gets {len(shape(args['input']))} axes, not rows"
    for node in match.path[1:-1]:
        if value(node).dtype not in (out.dtype, wide(out.dtype)):
            return f"its logits are cast to {plain(value(node).dtype)}"
    return unfit_linear(out, value(args["x"]), args["matrix"], args["bias"])


def swap_head(gm: GraphModule, match: HeadMatch) -> Swap:
    """Replace a head and its loss; raise without a change if `linear_cross_entropy` refuses them."""
    # Here, because a model without a head does not need the kernels' module.
    from harness.nn.cross_entropy import linear_cross_entropy

    args, dtype, requested = match.given, value(match.linear).dtype, value(match.loss).dtype
    rows, features = shape(args["input"])[:-1], shape(args["x"])[-1]
    with Adder(gm, match.loss) as add:
        x = args["x"]
        for index in match.slices:
            x = add.function(operator.getitem, x, index)
        if rows and len(shape(x)) == 1:
            x = add.method("unsqueeze", x, 0)
        elif rows:
            x = add.method("flatten", x, 0, -2)
        weight = add.method("t", args["matrix"]) if match.linear.target in TRANSPOSED else args["matrix"]
        x, weight, bias = add.cast(dtype, x, weight, args["bias"])
        options = {
            name: args[name] for name in ("ignore_index", "label_smoothing", "reduction") if name in args
        }
        loss = add.function(linear_cross_entropy, x, weight, args["target"], bias, **options)
        if value(loss).dtype != requested:
            loss = add.method("to", loss, requested)
    done = Swap(name_of(match.linear), rows, features, shape(match.linear)[-1], plain(dtype), with_loss=True)
    match.loss.replace_all_uses_with(loss)
    for node in match.path:
        gm.graph.erase_node(node)
    return done
