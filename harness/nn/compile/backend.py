"""The torch.compile backend "mojo_workbook": LayerNorm -> Linear becomes the workbook's operator, Inductor does the rest.

`torch.compile(model, backend="mojo_workbook")`, also with `mode`, `dynamic`, `fullgraph` and Inductor's own `options`. Four
options are this backend's: `report` (True: print what was swapped and what was not; a function: it gets the `Report`),
`attention` (whether puzzle 23's kernels take the place
of `scaled_dot_product_attention`: True wherever they can, False nowhere; else where gradients are wanted and measurements say
that they are faster), `head` (whether a head and its cross-entropy become `linear_cross_entropy`: True wherever they can, False
nowhere; else where the logits are large), and `tail`, what compiles the rest: "inductor", "aot_eager" (no C++ compiler needed) or "eager".
"""

import functools
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from harness.nn import layers
from harness.nn.arguments import plain
from harness.nn.compile.edit import Adder, Swap, name_of
from harness.nn.compile.head import find_heads, swap_head
from harness.nn.compile.match import (
    Found,
    Left,
    Match,
    find,
    graph_modules,
    keeps_rows,
    layer_norm,
    shape,
    slices_rows,
    value,
)

REPORT = "MOJO_WORKBOOK_REPORT"
TAILS = ("inductor", "aot_eager", "eager")
ATTENTION = torch.nn.functional.scaled_dot_product_attention
OWN = ("report", "attention", "head", "tail")
"""The options that are not Inductor's."""
VECTOR_BYTES = 16
MANY_UNALIGNED = 12
"""From how many outputs for each input on rows that fill no whole vectors are left to Inductor: measured on an H200 with 8 (the swap
is a tenth faster) and 16 (it is 4 % slower)."""


@dataclass(frozen=True)
class Attention:
    """A scaled_dot_product_attention that was swapped: the model's name for its place, its shapes and dtype."""

    name: str
    query: tuple[Any, ...]
    key: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        shapes = (f"[{', '.join(map(str, shape))}]" for shape in (self.query, self.key))
        return f"swapped  {self.name}: attention of {' to '.join(shapes)}, {self.dtype}"


@dataclass
class Report:
    """What happened to one graph: the swaps, and (name, reason) of what stayed as it was; attention and heads apart."""

    swaps: list[Swap] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    attentions_left: list[tuple[str, str]] = field(default_factory=list)
    heads: list[Swap] = field(default_factory=list)
    heads_left: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def lines(self) -> list[str]:
        """The report as text, one line for each Linear after a LayerNorm, each attention and each head with its loss."""
        found: list[tuple[list[Any], list[tuple[str, str]], str]] = [
            (self.swaps, self.left, "Linear layers after a LayerNorm"),
            (self.attentions, self.attentions_left, "attentions"),
            (self.heads, self.heads_left, "heads with cross-entropy"),
        ]
        lines = []
        for swapped, left, what in found:
            if swapped or left:
                lines.append(f"mojo_workbook: {len(swapped)} of {len(swapped) + len(left)} {what} swapped")
            lines += [f"  {swap}" for swap in swapped] + [f"  left     {name}: {why}" for name, why in left]
        return lines


# ---- The backend --------------------------------------------------------------------------------------------


def mojo_workbook(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites a graph of Dynamo's and hands it on.

    Args:
        gm: The graph; it is changed.
        example_inputs: Fake or real tensors, and symbolic sizes, in the order of its placeholders.
        mode: One of Inductor's.
        options: Inductor's, and this backend's own, OWN.
        name: What torch calls this compilation; not used.

    Returns:
        A function of the graph's inputs that returns its outputs as a tuple.

    Raises:
        ValueError: `tail` is none of those that there are.
    """
    own, patches = split(options or {})
    tail = own.get("tail") or ("inductor" if has_compiler() else "aot_eager")
    if tail not in TAILS:
        raise ValueError(f"tail {tail!r}: choose one of {', '.join(TAILS)}")
    report = rewrite(gm, attention=own.get("attention"), head=own.get("head"))
    tell(report, own.get("report") or os.environ.get(REPORT, "0") not in ("", "0"))
    if tail == "eager":
        return gm.forward
    if tail == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, example_inputs)
    from torch._inductor.compile_fx import compile_fx

    patches = (torch._inductor.list_mode_options(mode) if mode else {}) | patches
    # As patches: the backward pass is compiled later, when a context manager would be over.
    compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return compiled


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This backend's own options, and those for Inductor."""
    own = {name: value for name, value in options.items() if name in OWN}
    return own, {name: value for name, value in options.items() if name not in own}


def tell(report: Report, listener: Any) -> None:
    """Prints the report to standard error, or hands it to a function; nothing where nobody asked or it is empty."""
    if callable(listener):
        listener(report)
    elif listener and report:
        print("\n".join(report.lines()), file=sys.stderr)


@functools.cache
def has_compiler() -> bool:
    """Whether there is the C++ compiler that Inductor wants; where there is none, says so, once."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        print(
            "mojo_workbook: no C++ compiler for Inductor; the rest of the model runs uncompiled (tail=aot_eager)",
            file=sys.stderr,
        )
        return False
    return True


# ---- The rewrite --------------------------------------------------------------------------------------------


def rewrite(
    gm: GraphModule,
    *,
    attention: bool | None = None,
    head: bool | None = None,
) -> Report:
    """Swaps every LayerNorm -> Linear of a graph and of the graphs that it calls.

    Attention is swapped everywhere, nowhere, or, where `attention` is None, if that is faster; a head with its loss likewise, or if its
    logits are large. Heads come first: one that stays may come after a LayerNorm.
    """
    report = Report()
    for graph_module in graph_modules(gm):
        ends = find_heads(graph_module, head)
        report.heads += each_swapped(graph_module, ends, swap_head)
        report.heads_left += [(name_of(one.linear), one.why) for one in ends.left]
        found = find(graph_module)
        report.swaps += each_swapped(graph_module, found, swap)
        report.left += [(name_of(one.linear), one.why) for one in found.left]
        for node in attentions_of(graph_module, attention):
            slower = None if attention else may_be_slower(node)
            if slower:
                report.attentions_left.append((name_of(node), slower))
                continue
            try:
                report.attentions.append(swap_attention(graph_module, node))
            except (TypeError, ValueError, NotImplementedError) as error:
                report.attentions_left.append((name_of(node), str(error)))
        if found.matches or ends.matches or report.attentions:
            graph_module.graph.lint()
            graph_module.recompile()
    return report


def each_swapped(gm: GraphModule, found: Found, swap: Callable[[GraphModule, Any], Any]) -> list[Any]:
    """What `swap` says of each match that it swaps; what it refuses is left."""
    done = []
    for match in found.matches:
        try:
            done.append(swap(gm, match))
        except (TypeError, ValueError, NotImplementedError) as error:  # the operator itself says no
            found.left.append(Left(match.linear, str(error)))
    return done


def copies_cost(match: Match) -> str:
    """Why a Linear on a Hopper is faster without the swap; empty where it is not.

    The kernels copy outputs and their gradients whose rows fill no whole vectors, as a head's of 50,257 classes. Inductor writes such
    rows with padding to begin with.
    """
    out, H, O = value(match.linear), shape(match.x)[-1], shape(match.linear)[-1]
    unaligned = out.dtype.itemsize == 2 and isinstance(O, int) and O % (VECTOR_BYTES // 2) != 0
    if unaligned and O >= MANY_UNALIGNED * H and is_hopper(out.device):
        return f"rows of {O} outputs fill no whole vectors, which Inductor pads at less cost"
    return ""


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of the kind that was measured."""
    nvidia = device.type == "cuda" and not torch.version.hip
    return nvidia and torch.cuda.get_device_capability(device) == (9, 0)


def attentions_of(gm: GraphModule, asked: bool | None) -> list[Node]:
    """Those that may be swapped: all or none where it was asked for or forbidden, else those on a Hopper, of which there are measurements."""
    nodes = [] if asked is False else [node for node in gm.graph.nodes if node.target is ATTENTION]
    return [node for node in nodes if asked or is_hopper(value(node).device)]


def may_be_slower(node: Node) -> str | None:
    """Why an attention is left to PyTorch where nobody has asked for a swap; None where the swap is faster."""
    # Here, because a model without attention does not need the kernels' module.
    from harness.nn import attention_layer

    given = attention_arguments(node)
    query, key, values = (value(given[name]) for name in ("query", "key", "value"))
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, values))):
        return "without gradients PyTorch's is the faster one"
    return attention_layer.may_be_slower(query, key, mask_of(given), given.get("dropout_p") or 0.0)


def attention_arguments(node: Node) -> dict[str, Any]:
    """What a scaled_dot_product_attention is given, by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def mask_of(given: dict[str, Any]) -> torch.Tensor | None:
    """The mask among these arguments, as a fake tensor."""
    mask = given.get("attn_mask")
    return value(mask) if isinstance(mask, Node) else None


def swap_attention(gm: GraphModule, node: Node) -> Attention:
    """Puts the workbook's attention, which takes the same arguments, in the place of PyTorch's.

    Nothing is changed where it refuses them (TypeError, ValueError or NotImplementedError), nor where it would leave them to PyTorch's.
    """
    from harness.nn.attention_layer import attention, explain

    given = attention_arguments(node)
    query, key, values = (value(given[name]) for name in ("query", "key", "value"))
    said = explain(query, key, values, mask_of(given), given.get("dropout_p") or 0.0, enable_gqa=True)
    if said.startswith("PyTorch"):
        raise NotImplementedError(f"attention leaves it to {said}")
    with Adder(gm, node) as add:
        output = add.function(attention, *node.args, **node.kwargs)
    dtype = plain(value(node).dtype)
    done = Attention(name_of(node), shape(given["query"]), shape(given["key"]), dtype)
    node.replace_all_uses_with(output)
    gm.graph.erase_node(node)
    return done


def swap(gm: GraphModule, match: Match) -> Swap:
    """Puts the operator in the place of one Linear, and drops what nobody uses any more.

    Nothing is changed where the operator refuses its arguments (TypeError, ValueError or NotImplementedError), nor where it is slower.
    """
    if cause := copies_cost(match):
        raise NotImplementedError(cause)
    with Adder(gm, match.linear) as add:
        x = match.x
        for step in match.between:
            if step.target is operator.getitem:
                x = add.function(operator.getitem, x, step.args[1])
            else:
                x = add.method("reshape", x, *step.args[1:])
        weight = add.method("t", match.weight) if match.transposed else match.weight
        tensors = x, match.ln_weight, match.ln_bias, weight, match.linear_bias
        output = add.function(layers.operator(), *tensors, match.eps)
        # Where the graph itself switches autocast on, what it makes here is not seen.
        output.meta["example_value"] = value(match.linear)
    *rows, O = shape(match.linear)
    done = Swap(name_of(match.linear), tuple(rows), shape(match.x)[-1], O, plain(value(match.linear).dtype))
    match.linear.replace_all_uses_with(output)
    drop(gm, match.linear)
    return done


def drop(gm: GraphModule, linear: Node) -> None:
    """Erases a node and, of what led to it, what nobody else uses; no more, since other nodes may have effects."""
    behind = [linear]
    while behind:
        node = behind.pop()
        if node.users or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes[:1] if node is not linear else node.all_input_nodes
        gm.graph.erase_node(node)
        behind += [n for n in inputs if leads(n)]


def leads(node: Node) -> bool:
    """Whether a node is one of those that stand between a LayerNorm and a Linear, or the LayerNorm."""
    if layer_norm(node) is not None:
        return True
    return bool(node.all_input_nodes) and (keeps_rows(node) or slices_rows(node))
