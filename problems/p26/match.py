"""Puzzle 26, third rung: finding a formula in a graph, and replacing it with one operator.

SiLU is found by its shape: a product whose one side is the sigmoid of the other. The tanh form of GELU has dozens of
spellings (x*x*x, x**3, constants on either side and written out to eight digits), so it is found by what it computes: a
part of the graph that depends on x alone is tried at a hundred points. `workbook p26 --rung match` checks the
four parts.
"""

import operator

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_arg

import harness.puzzles.p26.activations  # noqa: F401 registers mojo_workbook::silu
from harness.puzzles.p26.nodes import call_name, is_tensor, mutates, pointwise, value, written_between

MUL = (operator.mul, torch.mul, "mul")
SIGMOID = (torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POINTS = torch.linspace(-6, 6, 100, dtype=torch.float64)
TOLERANCE = 1e-6
"""Constants with eight digits are 1e-8 away; the exact form of GELU is 5e-4 away."""
FAR = 32
"""Maximum number of nodes before a result to search."""


def replace(gm, node, target, *args, **kwargs):
    """Replace a node with a call of `target`: keep its metadata, and move its users."""
    # BLANK-START replace: insert before the node, copy its meta, move its users, erase it; then the nodes that only it used
    # FILL IN (about 12 lines)
    # BLANK-END replace


def silu(gm):
    """Replace x * sigmoid(x) with the workbook's SiLU, Mojo kernels with a backward pass; return the number of changes."""
    # BLANK-START silu: both orders; the same x in both places, one floating dtype, nothing written in between
    # FILL IN (about 11 lines)
    # BLANK-END silu


def leading_to(end):
    """Return the pointwise nodes that lead to a node, and their inputs, nearest first; FAR at most."""
    found = [end]
    for node in found:
        if pointwise(node) and len(found) < FAR:
            found += [n for n in node.all_input_nodes if n not in found]
    return found[1:]


def values(end, x, points):
    """Return a node's value as a function of x only, at `points`. None if it needs anything else."""
    # BLANK-START values: run the pointwise nodes between the two by hand; a node that is reached and is neither ends it
    # FILL IN (about 13 lines)
    # BLANK-END values


def gelu(gm):
    """Replace the tanh form of GELU in every spelling with one call; return the number of changes.

    The form is 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), which F.gelu calls approximate="tanh".
    """
    # BLANK-START gelu: for a node that a tanh leads to, try every node that leads to it as x; compare at POINTS
    # FILL IN (about 16 lines)
    # BLANK-END gelu
