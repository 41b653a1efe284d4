"""The torch.compile backend "mojo_workbook": replaces layers with operators, then calls Inductor.

Use it as `torch.compile(model, backend="mojo_workbook")`; `mode`, `dynamic`, `fullgraph` and Inductor's
`options` work too. This backend has four more options:

- `report`: True prints which layers were replaced and which were not; a function is called with the `Report`.
- `attention`: True replaces `scaled_dot_product_attention` wherever the kernels support it, False never. By
  default it is replaced where gradients are needed and the kernels were measured to be faster.
- `head`: the same for a Linear followed by cross-entropy. By default it is replaced if the logits are large.
- `tail`: the backend that compiles the rest: "inductor", "aot_eager" (without a C++ compiler) or "eager".
"""

import functools
import operator
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from harness.nn import layers
from harness.nn.arguments import get_dtype_name
from harness.nn.compile.edit import NodeInserter, Swap, layer_name
from harness.nn.compile.head import find_heads, swap_head
from harness.nn.compile.match import (
    Match,
    Matches,
    Skipped,
    find_matches,
    graph_modules,
    keeps_rows,
    layer_norm,
    shape,
    slices_rows,
    value,
)

REPORT_VARIABLE = "MOJO_WORKBOOK_REPORT"
TAIL_BACKENDS = ("inductor", "aot_eager", "eager")
SDPA = torch.nn.functional.scaled_dot_product_attention
BACKEND_OPTIONS = ("report", "attention", "head", "tail")
"""Options of this backend; the others are Inductor's."""
VECTOR_BYTES = 16
MIN_UNALIGNED_RATIO = 12
"""Ratio of outputs to inputs from which unaligned rows are left to Inductor: on an H200 the operator is 10 %
faster at a ratio of 8 and 4 % slower at 16.
"""


@dataclass
class Report:
    """The layers replaced in a graph, and (name, reason) for each layer that was not replaced."""

    swaps: list[Swap] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    skipped_attentions: list[tuple[str, str]] = field(default_factory=list)
    heads: list[Swap] = field(default_factory=list)
    skipped_heads: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def format_lines(self) -> list[str]:
        """Return a line for each Linear after a LayerNorm, each attention and each head."""
        sections: list[tuple[list[Any], list[tuple[str, str]], str]] = [
            (self.swaps, self.skipped, "Linear layers after a LayerNorm"),
            (self.attentions, self.skipped_attentions, "attentions"),
            (self.heads, self.skipped_heads, "heads with cross-entropy"),
        ]
        lines = []
        for swapped, skipped, title in sections:
            if swapped or skipped:
                lines.append(
                    f"mojo_workbook: {len(swapped)} of {len(swapped) + len(skipped)} {title} swapped"
                )
            lines += [f"  {swap}" for swap in swapped]
            lines += [f"  left     {name}: {reason}" for name, reason in skipped]
        return lines


def mojo_workbook(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Rewrite a graph from Dynamo and compile it; return a function of its inputs that returns a tuple.

    `mode` and `options` are Inductor's, apart from BACKEND_OPTIONS; `name` is unused. Raises ValueError for
    an unknown `tail`.
    """
    patches = dict(options or {})
    own_options = {option: patches.pop(option, None) for option in BACKEND_OPTIONS}
    tail = own_options["tail"] or ("inductor" if has_compiler() else "aot_eager")
    if tail not in TAIL_BACKENDS:
        raise ValueError(f"tail {tail!r}: choose one of {', '.join(TAIL_BACKENDS)}")
    report = rewrite(gm, attention=own_options["attention"], head=own_options["head"])
    if callable(own_options["report"]):
        own_options["report"](report)
    elif report and (own_options["report"] or os.environ.get(REPORT_VARIABLE, "0") not in ("", "0")):
        print("\n".join(report.format_lines()), file=sys.stderr)
    if tail == "eager":
        return gm.forward
    # The lookup that PyTorch documents under "Custom Backends" (docs.pytorch.org, torch.compiler_custom_backends).
    compile_rest: Any = torch._dynamo.lookup_backend(tail)
    if tail == "aot_eager":
        return compile_rest(gm, example_inputs)
    patches = (torch._inductor.list_mode_options(mode) if mode else {}) | patches
    # Pass patches, because the backward pass is compiled later, after a context manager would have exited.
    return compile_rest(gm, example_inputs, config_patches=patches)


@functools.cache
def has_compiler() -> bool:
    """Return whether Inductor's C++ compiler exists; print a note once if it does not."""
    exists = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None
    if not exists:
        note = "no C++ compiler for Inductor; the rest of the model runs uncompiled (tail=aot_eager)"
        print(f"mojo_workbook: {note}", file=sys.stderr)
    return exists


def rewrite(gm: GraphModule, *, attention: bool | None = None, head: bool | None = None) -> Report:
    """Replace LayerNorm -> Linear, attention and heads in a graph and in the graphs that it calls.

    Heads come first: a head that is not replaced may still follow a LayerNorm.
    """
    report = Report()
    for graph_module in graph_modules(gm):
        heads = find_heads(graph_module, head)
        report.heads += swap_all(graph_module, heads, swap_head)
        report.skipped_heads += [(layer_name(skipped.linear), skipped.reason) for skipped in heads.skipped]
        matches = find_matches(graph_module)
        report.swaps += swap_all(graph_module, matches, swap_linear)
        report.skipped += [(layer_name(skipped.linear), skipped.reason) for skipped in matches.skipped]
        for node in find_attentions(graph_module, attention):
            slower = None if attention else get_reason_slower(node)
            if slower:
                report.skipped_attentions.append((layer_name(node), slower))
                continue
            try:
                report.attentions.append(swap_attention(graph_module, node))
            except (TypeError, ValueError, NotImplementedError) as error:
                report.skipped_attentions.append((layer_name(node), str(error)))
        if matches.matches or heads.matches or report.attentions:
            graph_module.graph.lint()
            graph_module.recompile()
    return report


def swap_all(gm: GraphModule, matches: Matches, swap: Callable[[GraphModule, Any], Any]) -> list[Any]:
    """Call `swap` for each match and return the results; skip a match for which it raises."""
    swapped = []
    for match in matches.matches:
        try:
            swapped.append(swap(gm, match))
        except (TypeError, ValueError, NotImplementedError) as error:  # raised by the operator's checks
            matches.skipped.append(Skipped(match.linear, str(error)))
    return swapped


def get_reason_linear_slower(match: Match) -> str:
    """Return the reason why a Linear is faster on a Hopper GPU without the operator, or "".

    The kernels copy outputs and gradients with rows that are not multiples of 16 bytes, such as a head of
    50,257 classes; Inductor pads such rows when it writes them.
    """
    out, H, O = value(match.linear), shape(match.x)[-1], shape(match.linear)[-1]
    unaligned = out.dtype.itemsize == 2 and isinstance(O, int) and O % (VECTOR_BYTES // 2) != 0
    if unaligned and O >= MIN_UNALIGNED_RATIO * H and is_hopper(out.device):
        return f"rows of {O} outputs are unaligned; padding by Inductor is faster"
    return ""


def is_hopper(device: torch.device) -> bool:
    cuda = device.type == "cuda" and not torch.version.hip
    return cuda and torch.cuda.get_device_capability(device) == (9, 0)


def find_attentions(gm: GraphModule, enabled: bool | None) -> list[Node]:
    """Return the attention calls to replace: all if `enabled`, none if False, by default those on Hopper."""
    nodes = [] if enabled is False else [node for node in gm.graph.nodes if node.target is SDPA]
    return [node for node in nodes if enabled or is_hopper(value(node).device)]


def get_reason_slower(node: Node) -> str | None:
    """Return the reason why attention is not replaced by default, or None if the kernels are faster."""
    # Import on demand: a model without attention does not need this module.
    from harness.nn import attention_layer

    query, key, values, mask, dropout_p = get_attention_arguments(node)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, values))):
        return "PyTorch is faster without gradients"
    return attention_layer.get_reason_slower(query, key, mask, dropout_p)


def get_attention_arguments(node: Node) -> tuple[Any, ...]:
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    args = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    values = [value(each) if isinstance(each, Node) else each for each in map(args.get, names)]
    return *values[:4], values[4] or 0.0


def swap_attention(gm: GraphModule, node: Node) -> str:
    """Replace PyTorch's attention; return its line of the report. Raises before any change if unsupported."""
    from harness.nn.attention_layer import attention, explain

    args = get_attention_arguments(node)
    description = explain(*args, enable_gqa=True)
    if description.startswith("PyTorch"):
        raise NotImplementedError(f"attention would run {description}")
    with NodeInserter(gm, node) as insert:
        output = insert.function(attention, *node.args, **node.kwargs)
    shapes = (f"[{', '.join(map(str, tensor.shape))}]" for tensor in args[:2])
    dtype = get_dtype_name(value(node).dtype)
    swapped = f"swapped  {layer_name(node)}: attention of {' to '.join(shapes)}, {dtype}"
    node.replace_all_uses_with(output)
    gm.graph.erase_node(node)
    return swapped


def swap_linear(gm: GraphModule, match: Match) -> Swap:
    """Replace one Linear with the operator; raise before any change if it is unsupported or slower."""
    if reason := get_reason_linear_slower(match):
        raise NotImplementedError(reason)
    with NodeInserter(gm, match.linear) as insert:
        x = match.x
        for step in match.between:
            if step.target is operator.getitem:
                x = insert.function(operator.getitem, x, step.args[1])
            else:
                x = insert.method("reshape", x, *step.args[1:])
        weight = insert.method("t", match.weight) if match.transposed else match.weight
        tensors = x, match.ln_weight, match.ln_bias, weight, match.linear_bias
        output = insert.function(layers.get_operator(), *tensors, match.eps)
        # The metadata of the output may differ if the graph itself enables autocast.
        output.meta["example_value"] = value(match.linear)
    *rows, O = shape(match.linear)
    dtype = get_dtype_name(value(match.linear).dtype)
    swapped = Swap(layer_name(match.linear), tuple(rows), shape(match.x)[-1], O, dtype)
    match.linear.replace_all_uses_with(output)
    erase_chain(gm, match.linear)
    return swapped


def erase_chain(gm: GraphModule, linear: Node) -> None:
    """Erase a node and the unused LayerNorm and reshapes before it; other nodes may have side effects."""
    pending = [linear]
    while pending:
        node = pending.pop()
        if node.users or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes[:1] if node is not linear else node.all_input_nodes
        gm.graph.erase_node(node)
        pending += [n for n in inputs if may_precede_linear(n)]


def may_precede_linear(node: Node) -> bool:
    """Return whether a node is a LayerNorm, or may occur between a LayerNorm and a Linear."""
    if layer_norm(node) is not None:
        return True
    return bool(node.all_input_nodes) and (keeps_rows(node) or slices_rows(node))
