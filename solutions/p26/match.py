"""Puzzle 26, third rung: finding a formula in a graph, and replacing it with one operator.

SiLU is matched by its structure: a product of x and sigmoid(x). The tanh form of GELU has dozens of spellings (x*x*x,
x**3, constants on either side, rounded to eight digits), so it is matched by its values: a subgraph that depends only
on x is evaluated at a hundred points. `workbook p26 --rung match` checks the four parts.
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
"""Constants with eight digits cause errors of 1e-8; the exact form of GELU differs by 5e-4."""
FAR = 32
"""Maximum number of nodes to search before a result."""


def replace(gm, node, target, *args, **kwargs):
    """Replace a node with a call of `target`, which gets its metadata and its users."""
    # BLANK-START replace: insert before the node, copy its meta, move its users, erase it; then the nodes that only it used
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    dead = [node]
    while dead:
        last = dead.pop()
        if not last.users and not mutates(last):
            inputs = last.all_input_nodes
            gm.graph.erase_node(last)
            dead += [n for n in inputs if pointwise(n)]
    return new
    # BLANK-END replace


def silu(gm):
    """Replace x * sigmoid(x) with the workbook's SiLU, Mojo kernels with a backward pass; return the number of swaps."""
    # BLANK-START silu: both orders; the same x in both places, one floating dtype, nothing written in between
    num_changes = 0
    for node in list(gm.graph.nodes):
        if node.target not in MUL or len(node.args) != 2:
            continue
        for gate, x in (node.args, node.args[::-1]):
            found = isinstance(gate, Node) and gate.target in SIGMOID and gate.all_input_nodes == [x]
            if found and value(x).dtype in DTYPES and not written_between(gate, node):
                replace(gm, node, torch.ops.mojo_workbook.silu.default, x)
                num_changes += 1
                break
    return num_changes
    # BLANK-END silu


def leading_to(end):
    """Return the pointwise nodes that a node depends on, and their inputs, nearest first; at most FAR."""
    found = [end]
    for node in found:
        if pointwise(node) and len(found) < FAR:
            found += [n for n in node.all_input_nodes if n not in found]
    return found[1:]


def values(end, x, points):
    """Evaluate a node as a function of x at `points`; return None if it depends on anything else."""
    # BLANK-START values: evaluate the pointwise nodes between the two; any other node on the way means None
    known = {x: points}

    def run(node):
        if node not in known:
            if not pointwise(node):
                raise LookupError(node)
            args, kwargs = map_arg((node.args, node.kwargs), run)
            call = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
            known[node] = call(*args, **kwargs)
        return known[node]

    try:
        return run(end)
    except LookupError:
        return None
    # BLANK-END values


def gelu(gm):
    """Replace the tanh form of GELU in every spelling with one call; return the number of changes.

    The form is 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), which F.gelu calls approximate="tanh".
    """
    # BLANK-START gelu: for a node that a tanh leads to, try every node that leads to it as x; compare at POINTS
    expected = F.gelu(POINTS, approximate="tanh")
    num_changes = 0
    for end in list(gm.graph.nodes):
        before = leading_to(end)
        has_tanh = any(call_name(node) == "tanh" for node in before)
        for x in before if has_tanh else ():
            if not is_tensor(x) or not value(x).dtype == value(end).dtype in DTYPES:
                continue
            got = values(end, x, POINTS)
            first = next((n for n in x.users if n in before), end)
            if got is None or (got - expected).abs().max() > TOLERANCE or written_between(first, end):
                continue
            replace(gm, end, F.gelu, x, approximate="tanh")
            num_changes += 1
            break
    return num_changes
    # BLANK-END gelu
