"""Find LayerNorm -> Linear in a graph captured by Dynamo.

A backend receives calls of PyTorch's functions before autograd: `F.layer_norm`, `F.linear`, `torch.addmm`
(GPT-2's Conv1D), methods such as `view`. So a replacement also applies to the backward pass.
`meta["example_value"]` of a node is a fake tensor with its shape, dtype and device.
"""

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # as PyTorch's page "Fake tensor" does
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from harness.nn.arguments import DTYPES, get_dtype_name
from harness.nn.compile.purity import call_name, mutates, switches_mode

aten = torch.ops.aten

LAYER_NORM = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    aten.layer_norm.default: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    aten.native_layer_norm.default: ("input", "normalized_shape", "weight", "bias", "eps"),
}
LINEAR = {F.linear: ("input", "weight", "bias"), aten.linear.default: ("input", "weight", "bias")}
# Matmuls whose second operand is the transposed weight, [H, O].
ADDMM = {function: ("bias", "input", "weight") for function in (torch.addmm, aten.addmm.default)}
MATMUL = {
    function: ("input", "weight")
    for function in (operator.matmul, torch.matmul, torch.mm, aten.mm.default, aten.matmul.default)
}
TRANSPOSED = ADDMM | MATMUL
ARGUMENT_ALIASES: dict[Any, dict[str, str]] = {
    **{op: {"input": "bias", "self": "bias", "mat1": "input", "mat2": "weight"} for op in ADDMM},
    **{op: {"self": "input", "other": "weight", "mat2": "weight"} for op in MATMUL},
}
"""Matmul -> names of its arguments in PyTorch that differ from the tables above."""
PRODUCTS = LINEAR | TRANSPOSED
RESHAPES = ("view", "reshape", torch.reshape, aten.view.default, aten.reshape.default)
DEVICES = ("cpu", "cuda")
DEFAULT_EPS = 1e-5
SEARCH_DEPTH = 4  # maximum number of nodes inspected between LayerNorm and Linear


@dataclass(frozen=True)
class Match:
    """A Linear that follows a LayerNorm.

    Attributes:
        x: The input of LayerNorm.
        weight: Node of the linear weight: [O, H], or [H, O] if `transposed`.
        eps: A number, or a node if it is symbolic.
        between: The reshapes and slices between the two, in order. They preserve the last axis, so they
            commute with LayerNorm.
    """

    ln: Node
    linear: Node
    x: Node
    ln_weight: Node | None
    ln_bias: Node | None
    weight: Node
    linear_bias: Node | None
    eps: Any
    between: tuple[Node, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class Skipped:
    """A Linear after a LayerNorm that is not replaced, and the reason."""

    linear: Node
    reason: str


@dataclass
class Matches:
    """The matches of one graph, and the calls that cannot be replaced."""

    matches: list[Any] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def find_matches(gm: GraphModule) -> Matches:
    """Return all LayerNorm -> Linear pairs of a graph, and those that cannot be replaced, with the reason."""
    return match_calls(gm, PRODUCTS, match_linear)


def match_calls(gm: GraphModule, functions: Collection[Any], match: Callable[..., Any]) -> Matches:
    """Collect `match(call, nodes, positions of nodes)` for each call of the given functions."""
    matches = Matches()
    nodes = list(gm.graph.nodes)
    order = {node: k for k, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "call_function" and node.target in functions:
            result = match(node, nodes, order)
            if isinstance(result, Skipped):
                matches.skipped.append(result)
            elif result:
                matches.matches.append(result)
    return matches


def match_linear(linear: Node, nodes: list[Node], order: dict[Node, int]) -> Match | Skipped | None:
    """Return a match, a Skipped with the reason, or None if the Linear's input is not a LayerNorm."""
    args = bound(linear, PRODUCTS[linear.target])
    between, node, reason = walk_back(args["input"])
    ln = layer_norm(node)
    if ln is None:
        return None
    if reason:
        return Skipped(linear, reason)
    norm = bound(ln, LAYER_NORM[ln.target])
    affine = norm["input"], norm.get("weight"), norm.get("bias"), args["weight"], args.get("bias")
    eps = norm.get("eps", DEFAULT_EPS)
    match = Match(ln, linear, *affine, eps, between, linear.target in TRANSPOSED)
    reason = explain_unsupported(match, norm["normalized_shape"]) or list_factors(linear)
    reason = reason or find_mutation(nodes[order[ln] + 1 : order[linear]])
    return Skipped(linear, reason) if reason else match


def find_mutation(between: list[Node]) -> str:
    """Return the reason why a call cannot be moved across these nodes, or ""."""
    node = next((n for n in between if mutates(n)), None)
    if node is None:
        return ""
    effect = "switches a mode of PyTorch" if switches_mode(node) else "may change a tensor in place"
    return f"{call_name(node)} in between {effect}"


def bound(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    aliases = ARGUMENT_ALIASES.get(node.target, {})
    by_keyword = {aliases.get(keyword, keyword): argument for keyword, argument in node.kwargs.items()}
    return dict(zip(names, node.args, strict=False)) | by_keyword


def layer_norm(node: Any) -> Node | None:
    """Return the LayerNorm of a value: the node, the native_layer_norm that it indexes, or None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is operator.getitem and node.args[1] == 0:
        inner = node.args[0]
        if isinstance(inner, Node) and inner.target is aten.native_layer_norm.default:
            return inner
        return None
    return node if node.target in LAYER_NORM.keys() - {aten.native_layer_norm.default} else None


def walk_back(node: Any) -> tuple[tuple[Node, ...], Any, str]:
    """Return the reshapes and slices before a Linear, the node before them, and a reason to skip it or ""."""
    between: list[Node] = []
    reason = ""
    for _ in range(SEARCH_DEPTH):
        if not isinstance(node, Node) or layer_norm(node) is not None or not node.all_input_nodes:
            break
        if node.target in PRODUCTS:
            break
        if keeps_rows(node) or slices_rows(node):
            if not is_no_op(node):
                between.append(node)
        else:
            reason = f"{call_name(node)} is between the LayerNorm and the Linear"
        node = node.all_input_nodes[0]
    return tuple(reversed(between)), node, reason


def keeps_rows(node: Node) -> bool:
    """Return whether a node is a no-op or a reshape that preserves the last axis."""
    if is_no_op(node):
        return True
    reshapes = node.op in ("call_method", "call_function") and node.target in RESHAPES
    return reshapes and shape(node)[-1:] == shape(node.all_input_nodes[0])[-1:]


def slices_rows(node: Node) -> bool:
    """Return whether a node is an index that selects entire rows, such as `hidden[:, -1:]`."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    rank = len(shape(node.all_input_nodes[0]))
    args = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not rank or not all(part is None or part is ... or isinstance(part, int | slice) for part in args):
        return False
    index_count = sum(part is not None and part is not ... for part in args)
    rest = (slice(None),) * (rank - index_count)
    position = args.index(...) if ... in args else len(args)
    return bool((args[:position] + rest + args[position + 1 :])[-1] == slice(None))


def is_no_op(node: Node) -> bool:
    """Return whether a node has no effect: `contiguous`, or a disabled dropout."""
    if node.op == "call_method" and node.target == "contiguous" and not node.kwargs and len(node.args) == 1:
        return True
    if node.target is not F.dropout:
        return False
    args = bound(node, ("input", "p", "training", "inplace"))
    return not args.get("inplace", False) and (args.get("training", True) is False or args.get("p") == 0.0)


def explain_unsupported(match: Match, normalized_shape: Any) -> str:
    if not all(isinstance(n, Node) for n in (match.x, match.weight)):
        return "an input is not a tensor of the graph"
    if isinstance(normalized_shape, list | tuple) and len(normalized_shape) != 1:
        return f"LayerNorm is over {len(normalized_shape)} axes"
    return explain_unsupported_matmul(value(match.linear), value(match.x), match.weight, match.linear_bias)


def explain_unsupported_matmul(out: FakeTensor, x: FakeTensor, weight: Node, bias: Node | None) -> str:
    if out.dtype not in DTYPES or x.dtype not in DTYPES:
        return f"there is no kernel for {get_dtype_name(out.dtype)}"
    if x.device.type not in DEVICES:
        return f"there is no kernel for the device {x.device.type}"
    if len(shape(weight)) != 2:
        return f"its weight has {len(shape(weight))} axes"
    if bias is not None and len(shape(bias)) != 1:
        return "the bias is not a vector"
    return ""


def list_factors(linear: Node) -> str:
    """Return the factors other than 1 that make an addmm differ from a Linear, or ""."""
    factors = {name: linear.kwargs[name] for name in ("beta", "alpha") if linear.kwargs.get(name, 1) != 1}
    return " and ".join(f"{name} is {factor}" for name, factor in factors.items())


def value(node: Node) -> FakeTensor:
    return node.meta["example_value"]


def shape(node: Node) -> tuple[Any, ...]:
    tensor = node.meta.get("example_value")
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield a graph and the graphs that it calls, such as checkpointed regions and `torch.cond` branches."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield module
