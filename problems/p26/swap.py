"""Puzzle 26, last rung: LayerNorm -> Linear in any model becomes one operator, puzzle 22's kernels.

The workbook's own backend, `torch.compile(model, backend="mojo_workbook")`, does this; here you write its heart. At the
level of Dynamo's graph both directions of a training step are still ahead, so what is swapped here is swapped in the
backward pass too. `Match` says what a pair is, `NodeInserter` inserts nodes before another one and gives each its fake tensor.
`workbook p26 --rung swap` checks the four parts.
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
    """Return a `Match` for every product in a graph that a LayerNorm leads to, in order.

    `PRODUCTS` has the functions and the names of their arguments, in order; those of `TRANSPOSED` (GPT-2's Conv1D is
    an addmm) hold the weight as [H, O]. `bound(node, names)` gives the arguments by name, however they were written.
    On the way from the product back to the LayerNorm may stand what `keeps_rows`: a reshape, or what does nothing.
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

    torch.ops.p26.layernorm_linear.default(x, ln_weight, ln_bias, weight [O, H], bias, eps, "fast") returns the
    output and the statistics of the rows, as a tuple. It knows nothing of autocast: all its tensors have one dtype.
    """
    # BLANK-START swap: what was reshaped between the two happens to x; transpose and cast where needed; getitem; move users; drop
    # FILL IN (about 13 lines)
    # BLANK-END swap


def backend(gm, example_inputs, tail, report):
    """Swap the allowed pairs in a graph and in the graphs that it calls, and pass it to `tail`, another backend.

    `report(name, why)` is called for every pair, with the name that the model has for its Linear (`layer_name`); `why` is
    empty for those that are swapped.
    """
    # BLANK-START whole: for each of graph_modules(gm): find, refuse, swap, report, lint, recompile; then the tail
    # FILL IN (about 9 lines)
    # BLANK-END whole
