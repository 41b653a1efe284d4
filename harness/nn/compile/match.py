"""Finds LayerNorm -> Linear in a graph that Dynamo has captured.

Dynamo hands a backend PyTorch's own functions: `F.layer_norm`, `F.linear`, `torch.addmm` (GPT-2's Conv1D), methods such
as `view`. At this level both directions of a training step are still ahead, so what is swapped here is swapped in the
backward pass too. Nodes carry a fake tensor (shape, dtype, device, no numbers) in `meta["example_value"]`.
"""

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from harness.nn.arguments import DTYPES, plain
from harness.nn.compile.purity import called, mutates, switches

aten = torch.ops.aten

LAYER_NORM = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    aten.layer_norm.default: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    aten.native_layer_norm.default: ("input", "normalized_shape", "weight", "bias", "eps"),
}
LINEAR = {F.linear: ("input", "weight", "bias"), aten.linear.default: ("input", "weight", "bias")}
# Products whose second factor is [H, O]: the transposed weight.
ADDMM = {function: ("bias", "input", "weight") for function in (torch.addmm, aten.addmm.default)}
MATMUL = {
    function: ("input", "weight")
    for function in (operator.matmul, torch.matmul, torch.mm, aten.mm.default, aten.matmul.default)
}
TRANSPOSED = ADDMM | MATMUL
KEYWORDS: dict[Any, dict[str, str]] = {
    **{op: {"input": "bias", "self": "bias", "mat1": "input", "mat2": "weight"} for op in ADDMM},
    **{op: {"self": "input", "other": "weight", "mat2": "weight"} for op in MATMUL},
}
"""What PyTorch calls the arguments of these products, where the tables above have other names."""
PRODUCTS = LINEAR | TRANSPOSED
RESHAPES = ("view", "reshape", torch.reshape, aten.view.default, aten.reshape.default)
DEVICES = ("cpu", "cuda")
DEFAULT_EPS = 1e-5
FAR = 4  # nodes between the two that are looked through for a reason to give


@dataclass(frozen=True)
class Match:
    """One Linear after a LayerNorm.

    Attributes:
        ln, linear: The two nodes.
        x: What LayerNorm reads.
        ln_weight, ln_bias, linear_bias: Nodes, or None.
        weight: Node of the linear weight: [O, H], or [H, O] where `transposed`.
        eps: A number, or a node where it is symbolic.
        between: The reshapes and slices between the two, in order; they keep the last axis, so they commute with LayerNorm.
        transposed: Whether the weight lies as [H, O].
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
class Left:
    """A Linear that stays as it is although a LayerNorm is near, and why."""

    linear: Node
    why: str


@dataclass
class Found:
    """What one graph holds."""

    matches: list[Any] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def find(gm: GraphModule) -> Found:
    """Every LayerNorm -> Linear of a graph, and those that only look like one."""
    return each_judged(gm, PRODUCTS, judge)


def each_judged(gm: GraphModule, functions: Collection[Any], judge: Callable[..., Any]) -> Found:
    """What `judge` says of each call of some functions: of the call, all nodes in order, and the place of each."""
    found = Found()
    nodes = list(gm.graph.nodes)
    order = {node: k for k, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "call_function" and node.target in functions:
            judged = judge(node, nodes, order)
            if isinstance(judged, Left):
                found.left.append(judged)
            elif judged:
                found.matches.append(judged)
    return found


def judge(linear: Node, nodes: list[Node], order: dict[Node, int]) -> Match | Left | None:
    """A match, the reason why it is none, or None where no LayerNorm leads to this Linear."""
    given = bound(linear, PRODUCTS[linear.target])
    between, node, why = walk_back(given["input"])
    ln = layer_norm(node)
    if ln is None:
        return None
    if why:
        return Left(linear, why)
    norm = bound(ln, LAYER_NORM[ln.target])
    match = Match(
        ln=ln,
        linear=linear,
        x=norm["input"],
        ln_weight=norm.get("weight"),
        ln_bias=norm.get("bias"),
        weight=given["weight"],
        linear_bias=given.get("bias"),
        eps=norm.get("eps", DEFAULT_EPS),
        between=between,
        transposed=linear.target in TRANSPOSED,
    )
    why = (
        unfit(match, norm["normalized_shape"])
        or scaled(linear)
        or changed(nodes[order[ln] + 1 : order[linear]])
    )
    return Left(linear, why) if why else match


def changed(between: list[Node]) -> str:
    """Why a call cannot be moved over these nodes; empty where it can."""
    node = next((n for n in between if mutates(n)), None)
    if node is None:
        return ""
    does = "switches a mode of PyTorch" if switches(node) else "may change a tensor in place"
    return f"{called(node)} between the two {does}"


def bound(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call by name, however they were written."""
    ours = KEYWORDS.get(node.target, {})
    by_keyword = {ours.get(keyword, keyword): argument for keyword, argument in node.kwargs.items()}
    return dict(zip(names, node.args, strict=False)) | by_keyword


def layer_norm(node: Any) -> Node | None:
    """The LayerNorm that a value is the result of: the node itself, or the first of the results of aten's."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is operator.getitem and node.args[1] == 0:
        inner = node.args[0]
        if isinstance(inner, Node) and inner.target is aten.native_layer_norm.default:
            return inner
        return None
    return node if node.target in LAYER_NORM.keys() - {aten.native_layer_norm.default} else None


def walk_back(node: Any) -> tuple[tuple[Node, ...], Any, str]:
    """From a Linear's input towards a LayerNorm: (reshapes and slices on the way, where it ends, what stands in the way)."""
    between: list[Node] = []
    why = ""
    for _ in range(FAR):
        if not isinstance(node, Node) or layer_norm(node) is not None or not node.all_input_nodes:
            break
        if node.target in PRODUCTS:
            break
        if keeps_rows(node) or slices_rows(node):
            if not skipped(node):
                between.append(node)
        else:
            why = f"{called(node)} stands between LayerNorm and it"
        node = node.all_input_nodes[0]
    return tuple(reversed(between)), node, why


def keeps_rows(node: Node) -> bool:
    """Whether a node hands its input's rows on as they are: a reshape that keeps the last axis, or nothing at all."""
    if skipped(node):
        return True
    reshapes = node.op in ("call_method", "call_function") and node.target in RESHAPES
    return reshapes and shape(node)[-1:] == shape(node.all_input_nodes[0])[-1:]


def slices_rows(node: Node) -> bool:
    """Whether a node is `x[index]` with numbers, slices, None and ... that takes whole rows: GPT-2's `hidden[:, -1:]`."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    axes = len(shape(node.all_input_nodes[0]))
    given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not axes or not all(part is None or part is ... or isinstance(part, int | slice) for part in given):
        return False
    taken = sum(part is not None and part is not ... for part in given)
    rest = (slice(None),) * (axes - taken)
    at = given.index(...) if ... in given else len(given)
    return bool((given[:at] + rest + given[at + 1 :])[-1] == slice(None))


def skipped(node: Node) -> bool:
    """Whether a node does nothing: `contiguous`, or a dropout that is switched off."""
    if node.op == "call_method" and node.target == "contiguous" and not node.kwargs and len(node.args) == 1:
        return True
    if node.target is not F.dropout:
        return False
    given = bound(node, ("input", "p", "training", "inplace"))
    return not given.get("inplace", False) and (given.get("training", True) is False or given.get("p") == 0.0)


def unfit(match: Match, normalized_shape: Any) -> str:
    """Why the kernels do not compute this pair; empty where they do."""
    if not all(isinstance(n, Node) for n in (match.x, match.weight)):
        return "an input is no tensor of the graph"
    if isinstance(normalized_shape, list | tuple) and len(normalized_shape) != 1:
        return f"LayerNorm is over {len(normalized_shape)} axes"
    return unfit_linear(value(match.linear), value(match.x), match.weight, match.linear_bias)


def unfit_linear(out: FakeTensor, x: FakeTensor, weight: Node, bias: Node | None) -> str:
    """Why the kernels do not compute a product; empty where they do."""
    if out.dtype not in DTYPES or x.dtype not in DTYPES:
        return f"there is no kernel for {plain(out.dtype)}"
    if x.device.type not in DEVICES:
        return f"there is no kernel for the device {x.device.type}"
    if len(shape(weight)) != 2:
        return f"its weight has {len(shape(weight))} axes"
    if bias is not None and len(shape(bias)) != 1:
        return "what is added is no vector"
    return ""


def scaled(linear: Node) -> str:
    """Why an addmm is no Linear: it has factors."""
    factors = {name: linear.kwargs[name] for name in ("beta", "alpha") if linear.kwargs.get(name, 1) != 1}
    return " and ".join(f"{name} is {factor}" for name, factor in factors.items())


def value(node: Node) -> FakeTensor:
    """The fake tensor of a node."""
    return node.meta["example_value"]


def shape(node: Node) -> tuple[Any, ...]:
    """The shape of a node's tensor; its sizes may be symbolic. Empty where it is no tensor."""
    found = node.meta.get("example_value")
    return tuple(found.shape) if isinstance(found, torch.Tensor) else ()


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """A graph and those that it calls: bodies of checkpointed regions and of `torch.cond`."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield module
