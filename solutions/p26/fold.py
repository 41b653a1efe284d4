"""Puzzle 26, second rung: products with constants folded, and what a rewrite may not touch.

x * 2.0 * 3.0 reads and writes x twice, x * 6.0 once. The rewrite is small but has all the pitfalls of a large one:
constants on either side, dtypes in which the product differs, values with other users, tensors that are written to in
between, aliased memory. The rule of this rung: results must be bitwise identical. `workbook p26 --rung fold` checks the
five parts; every pass returns the number of nodes that it has changed.
"""

import math
import operator

import torch

from harness.puzzles.p26.nodes import is_tensor, mutates, pointwise, value, written_between

MUL = (operator.mul, torch.mul, "mul")
"""The targets of a product in Dynamo's graph: x * y, torch.mul(x, y), x.mul(y). `x *= y` is operator.imul, in place."""


def factor(node):
    """Return (x, c) if a node is the product of a tensor x and a number c, on either side; None for any other node."""
    # BLANK-START factor: no keywords; a number is an int or a float, neither a bool nor a node
    if node.target not in MUL or node.kwargs:
        return None
    for x, c in (node.args, node.args[::-1]):
        if is_tensor(x) and type(c) in (int, float):
            return x, c
    return None
    # BLANK-END factor


def exact(a, b, dtype):
    """Return whether x * a * b and x * (a * b) have the same bits for every x of a dtype."""
    # BLANK-START exact: of integers, whether the product fits; else at most one is not a power of two, and neither is a fraction
    if dtype.is_complex or dtype == torch.bool:
        return False
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return type(a) is type(b) is int and all(info.min <= c <= info.max for c in (a, b, a * b))
    whole = all(abs(c) >= 1 and float(c).is_integer() for c in (a, b))
    power_of_two = any(math.frexp(c)[0] in (0.5, -0.5) for c in (a, b))
    return whole and power_of_two and abs(a * b) <= torch.finfo(dtype).max
    # BLANK-END exact


def fold(gm):
    """Fold (x * a) * b into x * (a * b), for chains of any length; an inner product with other users stays."""
    # BLANK-START chain: walk over a copy of the nodes; one dtype throughout, nothing written in between; then erase dead nodes
    num_changes = 0
    for node in list(gm.graph.nodes):
        outer = factor(node)
        inner = factor(outer[0]) if outer else None
        if not inner:
            continue
        (product, b), (x, a) = outer, inner
        one_dtype = value(x).dtype == value(product).dtype == value(node).dtype
        if one_dtype and exact(a, b, value(node).dtype) and not written_between(product, node):
            node.args = (x, a * b)
            if not product.users:
                gm.graph.erase_node(product)
            num_changes += 1
    return num_changes
    # BLANK-END chain


def drop_ones(gm):
    """Remove products with 1 where it cannot be observed.

    x * 1.0 is a copy of x: a user that returns it, takes a view of it or writes to it must not get x. And it converts
    integers to floats.
    """
    # BLANK-START neutral: nothing in the graph is written, every user allocates its result, the dtype is the same
    if any(mutates(node) for node in gm.graph.nodes):
        return 0
    num_changes = 0
    for node in list(gm.graph.nodes):
        found = factor(node)
        if not found or found[1] != 1 or value(found[0]).dtype != value(node).dtype:
            continue
        if all(pointwise(user) for user in node.users):
            node.replace_all_uses_with(found[0])
            gm.graph.erase_node(node)
            num_changes += 1
    return num_changes
    # BLANK-END neutral


def sweep(gm):
    """Remove every node whose result is not used and that has no side effect.

    `graph.eliminate_dead_code()` drops `y.add_(1)` and `torch.neg(x, out=y)` too: it assumes that a call whose result
    is not used has no effect.
    """
    # BLANK-START sweep: from the last node to the first; keep inputs, the output, what mutates and what is impure
    num_changes = 0
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and not mutates(node) and not node.is_impure():
            gm.graph.erase_node(node)
            num_changes += 1
    return num_changes
    # BLANK-END sweep
