"""Replace a Linear and the cross-entropy of its logits by `linear_cross_entropy`.

Between the two, rows of the logits may be sliced, and the logits reshaped to rows and cast to float32, as in
`logits.float().view(-1, V)`. A head is not replaced if another node or the graph's output uses its logits.
"""

import functools
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from harness.nn.arguments import get_accumulation_dtype, get_dtype_name
from harness.nn.compile.edit import NodeInserter, Swap, layer_name
from harness.nn.compile.match import (
    PRODUCTS,
    SEARCH_DEPTH,
    TRANSPOSED,
    Matches,
    Skipped,
    bound,
    explain_unsupported_matmul,
    find_mutation,
    keeps_rows,
    list_factors,
    match_calls,
    shape,
    slices_rows,
    value,
)
from harness.nn.compile.purity import call_name

LOSS_ARGS = tuple(
    ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"]
)
"""Arguments of `F.cross_entropy`."""
CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")
MIN_LOGITS_BYTES = 2**25
"""Size of the logits in float32 from which a head is replaced by default."""


@dataclass(frozen=True)
class HeadMatch:
    """A Linear and the cross-entropy of its logits.

    `path` has all nodes from the loss back to the Linear, inclusive. `args` has the arguments of both by
    name: `x`, `matrix` and `bias` of the Linear, and the arguments of the loss. `slices` are the row indices,
    in order.
    """

    linear: Node
    loss: Node
    path: tuple[Node, ...]
    args: dict[str, Any]
    slices: tuple[Any, ...]


def find_heads(gm: GraphModule, enabled: bool | None) -> Matches:
    """Return the heads to replace: all if `enabled`, none if False, by default those with large logits."""
    losses = () if enabled is False else (F.cross_entropy,)
    return match_calls(gm, losses, functools.partial(match_head, enabled=bool(enabled)))


def match_head(
    loss: Node, nodes: list[Node], order: dict[Node, int], enabled: bool
) -> HeadMatch | Skipped | None:
    """Return a match, a Skipped with the reason, or None if the loss's input is not a Linear."""
    args = bound(loss, LOSS_ARGS)
    path, reason = walk_back(loss, args["input"])
    linear = path[-1]
    if linear.target not in PRODUCTS:
        return None
    product = bound(linear, PRODUCTS[linear.target])
    args |= {"x": product["input"], "matrix": product["weight"], "bias": product.get("bias")}
    slices = tuple(node.args[1] for node in reversed(path) if node.target is operator.getitem)
    match = HeadMatch(linear, loss, path, args, slices)
    reason = reason or find_other_reader(path) or explain_unsupported(match) or list_factors(linear)
    reason = reason or find_mutation(nodes[order[linear] + 1 : order[loss]])
    if not reason and not enabled and value(linear).numel() * 4 < MIN_LOGITS_BYTES:
        reason = f"its logits are smaller than {MIN_LOGITS_BYTES >> 20} MiB"
    return Skipped(linear, reason) if reason else match


def walk_back(loss: Node, node: Any) -> tuple[tuple[Node, ...], str]:
    """Return the nodes from a loss back to a Linear, and the reason why they cannot be replaced, or ""."""
    path, reason, reshaped_before = [loss], "", False
    for _ in range(2 * SEARCH_DEPTH):
        if not isinstance(node, Node) or not node.all_input_nodes:
            break
        path.append(node)
        if node.target in PRODUCTS:
            break
        if slices_rows(node):
            reshaped_before = True
        elif not is_cast(node) and not reshapes_rows(node):
            reason = f"{call_name(node)} is between the Linear and its loss"
        elif reshaped_before and shape(node) != shape(node.all_input_nodes[0]):
            reason = "its logits are reshaped, then sliced"
        node = node.all_input_nodes[0]
    return tuple(path), reason


def reshapes_rows(node: Node) -> bool:
    flattens = (node.op == "call_method" and node.target == "flatten") or node.target is torch.flatten
    return keeps_rows(node) or (flattens and shape(node)[-1:] == shape(node.all_input_nodes[0])[-1:])


def is_cast(node: Node) -> bool:
    if node.op != "call_method" or node.target not in CASTS:
        return False
    return value(node).device == value(node.all_input_nodes[0]).device


def find_other_reader(path: tuple[Node, ...]) -> str:
    """Return a sentence about another reader of the logits, or ""."""
    for reader, node in pairwise(path):
        others = [user for user in node.users if user is not reader]
        if any(user.op == "output" for user in others):
            return "its logits are outputs"
        if others:
            return f"{call_name(others[0])} also reads its logits"
    return ""


def explain_unsupported(match: HeadMatch) -> str:
    """Return the reason why `linear_cross_entropy` does not support a match, or ""."""
    args, out = match.args, value(match.linear)
    if not all(isinstance(args[name], Node) for name in ("x", "matrix", "target")):
        return "an input is not a tensor of the graph"
    if args.get("weight") is not None:
        return "its loss has class weights"
    if args.get("size_average") is not None or args.get("reduce") is not None:
        return "its loss has a deprecated argument, size_average or reduce"
    if args.get("reduction", "mean") not in ("mean", "sum"):
        return f"its loss has the reduction {args['reduction']!r}"
    if value(args["target"]).dtype != torch.int64:
        return f"its targets are {get_dtype_name(value(args['target']).dtype)}, not classes"
    if len(shape(args["input"])) not in (1, 2):
        return f"its loss gets {len(shape(args['input']))} axes, not rows"
    for node in match.path[1:-1]:
        if value(node).dtype not in (out.dtype, get_accumulation_dtype(out.dtype)):
            return f"its logits are cast to {get_dtype_name(value(node).dtype)}"
    return explain_unsupported_matmul(out, value(args["x"]), args["matrix"], args["bias"])


def swap_head(gm: GraphModule, match: HeadMatch) -> Swap:
    """Replace a head and its loss; raise before any change if `linear_cross_entropy` rejects them."""
    # Import on demand: a model without a head does not need this module.
    from harness.nn.cross_entropy import linear_cross_entropy

    args, dtype, loss_dtype = match.args, value(match.linear).dtype, value(match.loss).dtype
    rows, features = shape(args["input"])[:-1], shape(args["x"])[-1]
    with NodeInserter(gm, match.loss) as insert:
        x = args["x"]
        for index in match.slices:
            x = insert.function(operator.getitem, x, index)
        if rows and len(shape(x)) == 1:
            x = insert.method("unsqueeze", x, 0)
        elif rows:
            x = insert.method("flatten", x, 0, -2)
        weight = insert.method("t", args["matrix"]) if match.linear.target in TRANSPOSED else args["matrix"]
        x, weight, bias = insert.cast(dtype, x, weight, args["bias"])
        names = ("ignore_index", "label_smoothing", "reduction")
        options = {name: args[name] for name in names if name in args}
        loss = insert.function(linear_cross_entropy, x, weight, args["target"], bias, **options)
        if value(loss).dtype != loss_dtype:
            loss = insert.method("to", loss, loss_dtype)
    sizes = rows, features, shape(match.linear)[-1]
    swapped = Swap(layer_name(match.linear), *sizes, get_dtype_name(dtype), with_loss=True)
    match.loss.replace_all_uses_with(loss)
    for node in match.path:
        gm.graph.erase_node(node)
    return swapped
