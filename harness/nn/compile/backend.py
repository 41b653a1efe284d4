"""The torch.compile backend "mojo_workbook": replaces layers by the workbook's operators; Inductor does the rest.

`torch.compile(model, backend="mojo_workbook")`, also with `mode`, `dynamic`, `fullgraph` and Inductor's
`options`. Four options are this backend's:

- `report`: True prints what was replaced and what was not; a function gets the `Report`.
- `attention`: True replaces `scaled_dot_product_attention` wherever kernels support it, False never; else
  where gradients are needed and measurements say that it is faster.
- `head`: likewise for a Linear with its cross-entropy; else where the logits are large.
- `tail`: what compiles the rest: "inductor", "aot_eager" (no C++ compiler needed) or "eager".
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
    Left,
    Match,
    Matches,
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
"""Outputs per input from which on unaligned rows are left to Inductor: on an H200 the operator is a tenth faster with 8
and 4 % slower with 16."""


@dataclass(frozen=True)
class Attention:
    """A scaled_dot_product_attention that was replaced: its name in the model, shapes and dtype."""

    name: str
    query: tuple[Any, ...]
    key: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        shapes = (f"[{', '.join(map(str, shape))}]" for shape in (self.query, self.key))
        return f"swapped  {self.name}: attention of {' to '.join(shapes)}, {self.dtype}"


@dataclass
class Report:
    """Replacements in one graph, and (name, reason) of each layer left."""

    swaps: list[Swap] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    attentions_left: list[tuple[str, str]] = field(default_factory=list)
    heads: list[Swap] = field(default_factory=list)
    heads_left: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def lines(self) -> list[str]:
        """Return the report as text, one line per Linear after a LayerNorm, attention and head with its loss."""
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
    """Rewrite a graph of Dynamo's and compile it; return a function of its inputs that returns a tuple.

    `mode` and `options` are Inductor's, but for the options OWN; torch passes a `name`, which is not used.
    Raises ValueError for an unknown `tail`.
    """
    patches = dict(options or {})
    own = {option: patches.pop(option, None) for option in OWN}
    tail = own["tail"] or ("inductor" if has_compiler() else "aot_eager")
    if tail not in TAILS:
        raise ValueError(f"tail {tail!r}: choose one of {', '.join(TAILS)}")
    report = rewrite(gm, attention=own["attention"], head=own["head"])
    if callable(own["report"]):
        own["report"](report)
    elif report and (own["report"] or os.environ.get(REPORT, "0") not in ("", "0")):
        print("\n".join(report.lines()), file=sys.stderr)
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


@functools.cache
def has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler; print once if it does not."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        text = "no C++ compiler for Inductor; the rest of the model runs uncompiled (tail=aot_eager)"
        print(f"mojo_workbook: {text}", file=sys.stderr)
        return False
    return True


# ---- The rewrite --------------------------------------------------------------------------------------------


def rewrite(gm: GraphModule, *, attention: bool | None = None, head: bool | None = None) -> Report:
    """Replace every LayerNorm -> Linear of a graph and of the graphs that it calls, and attention and heads.

    Heads come first: one that is left may follow a LayerNorm.
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


def each_swapped(gm: GraphModule, found: Matches, swap: Callable[[GraphModule, Any], Any]) -> list[Any]:
    """Return the result of `swap` for each match; a match that it refuses is left."""
    done = []
    for match in found.matches:
        try:
            done.append(swap(gm, match))
        except (TypeError, ValueError, NotImplementedError) as error:  # the operator itself refuses
            found.left.append(Left(match.linear, str(error)))
    return done


def copies_cost(match: Match) -> str:
    """Return why a Linear on a Hopper is faster without the operator; else "".

    The kernels copy outputs and gradients whose rows are not whole vectors, as a head's of 50,257 classes;
    Inductor pads such rows when it writes them.
    """
    out, H, O = value(match.linear), shape(match.x)[-1], shape(match.linear)[-1]
    unaligned = out.dtype.itemsize == 2 and isinstance(O, int) and O % (VECTOR_BYTES // 2) != 0
    if unaligned and O >= MANY_UNALIGNED * H and is_hopper(out.device):
        return f"rows of {O} outputs fill no whole vectors, which Inductor pads at less cost"
    return ""


def is_hopper(device: torch.device) -> bool:
    cuda = device.type == "cuda" and not torch.version.hip
    return cuda and torch.cuda.get_device_capability(device) == (9, 0)


def attentions_of(gm: GraphModule, requested: bool | None) -> list[Node]:
    """Return those that may be replaced: all if requested, none if forbidden, else those on a Hopper."""
    nodes = [] if requested is False else [node for node in gm.graph.nodes if node.target is ATTENTION]
    return [node for node in nodes if requested or is_hopper(value(node).device)]


def may_be_slower(node: Node) -> str | None:
    """Return why an attention is left to PyTorch unless requested; None if ours is faster."""
    # Here, because a model without attention does not need the kernels' module.
    from harness.nn import attention_layer

    query, key, values, mask, dropout_p = attention_arguments(node)
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, values))):
        return "without gradients PyTorch's is the faster one"
    return attention_layer.may_be_slower(query, key, mask, dropout_p)


def attention_arguments(node: Node) -> tuple[Any, ...]:
    """Return query, key, value, attn_mask and dropout_p of scaled_dot_product_attention, tensors as fake ones."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    args = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    fake = [value(each) if isinstance(each, Node) else each for each in map(args.get, names)]
    return *fake[:4], fake[4] or 0.0


def swap_attention(gm: GraphModule, node: Node) -> Attention:
    """Replace PyTorch's attention by the workbook's; raise without a change if that has no kernels for it."""
    from harness.nn.attention_layer import attention, explain

    args = attention_arguments(node)
    text = explain(*args, enable_gqa=True)
    if text.startswith("PyTorch"):
        raise NotImplementedError(f"attention leaves it to {text}")
    with Adder(gm, node) as add:
        output = add.function(attention, *node.args, **node.kwargs)
    done = Attention(name_of(node), tuple(args[0].shape), tuple(args[1].shape), plain(value(node).dtype))
    node.replace_all_uses_with(output)
    gm.graph.erase_node(node)
    return done


def swap(gm: GraphModule, match: Match) -> Swap:
    """Replace one Linear by the operator; raise without a change if it refuses or is slower."""
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
    """Erase a node and the unused nodes that led to it; no others, since they may have effects."""
    behind = [linear]
    while behind:
        node = behind.pop()
        if node.users or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes[:1] if node is not linear else node.all_input_nodes
        gm.graph.erase_node(node)
        behind += [n for n in inputs if leads(n)]


def leads(node: Node) -> bool:
    """Return whether a node is a LayerNorm, or may be between one and a Linear."""
    if layer_norm(node) is not None:
        return True
    return bool(node.all_input_nodes) and (keeps_rows(node) or slices_rows(node))
