"""Puzzle 26, last rung: LayerNorm -> Linear in any model becomes one operator, puzzle 22's kernels.

The workbook's own backend, `torch.compile(model, backend="mojo_workbook")`, does this; here you write its core. In
Dynamo's graph the backward pass does not exist yet, so a swap also applies to the backward pass. `Match` describes a
pair, `NodeInserter` inserts nodes before another node and sets their fake tensors. `workbook p26 --rung swap` checks
the four parts.
"""

import operator

import torch

import harness.puzzles.p26.operator  # noqa: F401 registers p26::layernorm_linear
from harness.nn.compile.backend import erase_chain
from harness.nn.compile.edit import NodeInserter, layer_name
from harness.nn.compile.match import (
    DEFAULT_EPS,
    DTYPES,
    LAYER_NORM,
    PRODUCTS,
    TRANSPOSED,
    Match,
    graph_modules,
    is_no_op,
    keeps_rows,
    list_factors,
)
from harness.puzzles.p26.nodes import bound, layer_norm, shape, value, written_between


def find(gm):
    """Return a `Match` for every product of a LayerNorm output in a graph, in order.

    `PRODUCTS` maps the functions to the names of their arguments, in order; those in `TRANSPOSED` (GPT-2's Conv1D is an
    addmm) store the weight as [H, O]. `bound(node, names)` returns the arguments by name, positional or not. Between
    the LayerNorm and the product there may be nodes for which `keeps_rows` is true: a reshape or a no-op.
    """
    # BLANK-START find: from each product's input back to a LayerNorm; of the nodes in between, keep those that are not `is_no_op`
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in PRODUCTS:
            continue
        product = bound(node, PRODUCTS[node.target])
        source, between = product["input"], []
        while keeps_rows(source):
            between = between if is_no_op(source) else [source, *between]
            source = source.all_input_nodes[0]
        ln = layer_norm(source)
        if ln is None:
            continue
        norm = bound(ln, LAYER_NORM[ln.target])
        pair = Match(
            ln,
            node,
            norm["input"],
            norm.get("weight"),
            norm.get("bias"),
            product["weight"],
            product.get("bias"),
            norm.get("eps", DEFAULT_EPS),
            tuple(between),
            node.target in TRANSPOSED,
        )
        found.append(pair)
    return found
    # BLANK-END find


def refuse(match):
    """Return the reason why a pair must not be swapped, or ""."""
    # BLANK-START refuse: a write in between, a LayerNorm over two axes, a dtype without kernel, a weight or bias of other rank, factors
    normalized_shape = bound(match.ln, LAYER_NORM[match.ln.target])["normalized_shape"]
    if written_between(match.ln, match.linear):
        return "something between the two may write to a tensor"
    if len(normalized_shape) != 1:
        return f"LayerNorm is over {len(normalized_shape)} axes"
    if not {value(match.x).dtype, value(match.linear).dtype} <= set(DTYPES):
        return f"there is no kernel for {value(match.linear).dtype}"
    if len(shape(match.weight)) != 2 or (
        match.linear_bias is not None and len(shape(match.linear_bias)) != 1
    ):
        return "weight or bias has another rank"
    return list_factors(match.linear)
    # BLANK-END refuse


def swap(gm, match):
    """Replace the Linear by the operator, and remove the LayerNorm if it has no other users.

    torch.ops.p26.layernorm_linear.default(x, ln_weight, ln_bias, weight [O, H], bias, eps, "fast") returns the output
    and the statistics of the rows, as a tuple. It does not support autocast: all its tensors must have one dtype.
    """
    # BLANK-START swap: reshape x as between the two; transpose and cast where needed; getitem; move users; erase
    add = NodeInserter(gm, match.linear)
    x = match.x
    for reshape in match.between:
        x = add.method("reshape", x, *reshape.args[1:])
    weight = add.method("t", match.weight) if match.transposed else match.weight
    dtype = value(match.linear).dtype
    tensors = []
    for tensor in (x, match.ln_weight, match.ln_bias, weight, match.linear_bias):
        cast = tensor is not None and value(tensor).dtype != dtype
        tensors.append(add.method("to", tensor, dtype) if cast else tensor)
    outputs = add.function(torch.ops.p26.layernorm_linear.default, *tensors, match.eps, "fast")
    match.linear.replace_all_uses_with(add.function(operator.getitem, outputs, 0))
    erase_chain(gm, match.linear)
    # BLANK-END swap


def backend(gm, example_inputs, tail, report):
    """Swap the allowed pairs in a graph and its subgraphs, and pass it to `tail`, another backend.

    `report(name, reason)` is called for every pair, with the model's name of its Linear (`layer_name`); `reason` is empty for
    swapped pairs.
    """
    # BLANK-START whole: for each of graph_modules(gm): find, refuse, swap, report, lint, recompile; then the tail
    for module in graph_modules(gm):
        for match in find(module):
            reason = refuse(match)
            report(layer_name(match.linear), reason)
            if not reason:
                swap(module, match)
        module.graph.lint()
        module.recompile()
    return tail(gm, example_inputs)
    # BLANK-END whole
