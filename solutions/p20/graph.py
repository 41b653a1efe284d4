"""Puzzle 20, first rung: y = (x^2 + 2x) * 3 as a graph, and its derivative by hand.

`forward` computes the nodes a, b, c and y, one line each. Autograd then does two things, and you write both: it
computes the derivative along every edge, which is independent of the rest of the graph, and it traverses the graph
backwards from y, summing the gradients that reach a node. `workbook p20 --rung derive` checks both and draws the graph
of your own run.
"""


def forward(x):
    """Return every node of the graph by name, for a number x."""
    a = x**2
    b = 2 * x
    c = a + b
    y = c * 3
    return {"x": x, "a": a, "b": b, "c": c, "y": y}


def edges(v):
    """Return the derivative of every edge's end by its start, at the nodes' values v."""
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
