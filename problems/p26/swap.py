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
    # FILL IN (about 27 lines)
    # BLANK-END find


def refuse(match):
    """Return the reason why a pair must not be swapped, or ""."""
    # BLANK-START refuse: a write in between, a LayerNorm over two axes, a dtype without kernel, a weight or bias of other rank, factors
    # FILL IN (about 12 lines)
    # BLANK-END refuse


def swap(gm, match):
    """Replace the Linear by the operator, and remove the LayerNorm if it has no other users.

    torch.ops.p26.layernorm_linear.default(x, ln_weight, ln_bias, weight [O, H], bias, eps, "fast") returns the output
    and the statistics of the rows, as a tuple. It does not support autocast: all its tensors must have one dtype.
    """
    # BLANK-START swap: reshape x as between the two; transpose and cast where needed; getitem; move users; erase
    # FILL IN (about 13 lines)
    # BLANK-END swap


def backend(gm, example_inputs, tail, report):
    """Swap the allowed pairs in a graph and its subgraphs, and pass it to `tail`, another backend.

    `report(name, reason)` is called for every pair, with the model's name of its Linear (`layer_name`); `reason` is empty for
    swapped pairs.
    """
    # BLANK-START whole: for each of graph_modules(gm): find, refuse, swap, report, lint, recompile; then the tail
    # FILL IN (about 9 lines)
    # BLANK-END whole
