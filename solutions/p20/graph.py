"""Puzzle 20, first rung: y = (x^2 + 2x) * 3 as a graph, and its derivative by hand.

`forward` computes the nodes a, b, c and y, one line each. What autograd then does has two parts, and you write both: the
derivative along every single edge, which knows nothing of the rest of the graph, and the walk back from y, which adds
up what arrives at a node. `workbook p20 --rung derive` checks them and draws the graph of your own run.
"""


def forward(x):
    """Return every node of the graph by name, for a number x."""
    a = x**2
    b = 2 * x
    c = a + b
    y = c * 3
    return {"x": x, "a": a, "b": b, "c": c, "y": y}


def edges(v):
    """Return the derivative along every edge at the nodes' values v: how fast the edge's end changes with its start."""
    # BLANK-START edges: return a dict with "x->a", "x->b", "a->c", "b->c" and "c->y"
    return {"x->a": 2 * v["x"], "x->b": 2.0, "a->c": 1.0, "b->c": 1.0, "c->y": 3.0}
    # BLANK-END edges


def backward(d):
    """Return the derivative of y by every node, from the derivatives d along the edges."""
    # BLANK-START backward: return a dict with "y", "c", "b", "a" and "x"; begin with y, whose gradient is 1
    grad = {"y": 1.0}
    grad["c"] = grad["y"] * d["c->y"]
    grad["b"] = grad["c"] * d["b->c"]
    grad["a"] = grad["c"] * d["a->c"]
    grad["x"] = grad["a"] * d["x->a"] + grad["b"] * d["x->b"]  # two paths arrive here: they add
    return grad
    # BLANK-END backward
