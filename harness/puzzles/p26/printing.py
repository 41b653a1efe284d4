"""Checks of the printer: tables of rows, groups and histories, and a run of it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.puzzles.p26.nodes import call_name
from harness.puzzles.p26.trying import Fault, Module, Try, attempt, capture_graph, expect, numbers


def plain(x: Tensor, w: Tensor) -> Tensor:
    """Compute a product with pointwise work before and after it."""
    return torch.relu((x * 2.0).sin() @ w + 1.0).to(torch.bfloat16)


def split(x: Tensor) -> Tensor:
    """Compute an operation that returns a tuple."""
    a, b = x.chunk(2)
    return a + b


X, W = numbers(), numbers(rows=6)
ROWS = (
    (plain, (X, W), [*((name, (4, 6), "float32") for name in ("mul", "sin", "matmul", "add", "relu")), ("to", (4, 6), "bfloat16")]),
    (split, (X,), [("chunk", None, "tuple"), *((name, (2, 6), "float32") for name in ("getitem", "getitem", "add"))]),
)  # fmt: skip
"""(function, inputs, a row for each of its operations)."""


def as_items(got, what: str, kind: str) -> Iterable:
    """Return a blank's result if it is iterable; a blank without a `return` gives None."""
    if not isinstance(got, Iterable):
        raise Fault(kind, f"{what} is {got!r}, expected a list")
    return got


def table(m: Module) -> None:
    """Check names, shapes and dtypes of two graphs."""
    for function, inputs, expected in ROWS:
        rows = as_items(m["rows"](capture_graph(function, *inputs)), "rows(gm)", "rows")
        expect([tuple(row) for row in rows], expected, "rows(gm)", "rows")


def two_paths(x: Tensor, w: Tensor) -> Tensor:
    """Feed the sum from relu directly and through a product: one loop cannot hold both."""
    h = torch.relu(x)
    return h @ w + h


def join_chains(x: Tensor, w: Tensor) -> Tensor:
    """Join two chains; a single operation follows the product."""
    return torch.sin((torch.exp(x) + torch.cos(x) * 2.0) @ w)


def in_a_row(x: Tensor, w: Tensor) -> Tensor:
    """Join an existing group with the last operation."""
    return x.sin().cos().exp()


def from_nothing(x: Tensor, w: Tensor) -> Tensor:
    """Make the sum depend on a call without inputs; graph inputs are no dependency."""
    return x.cos() + torch.arange(6).sin()


GROUPS = (
    ("(x * 2).sin() @ w, + 1 and relu", plain, [["mul", "sin"], ["add", "relu"]]),
    ("relu(x) @ w + relu(x): the sum waits for the product, which waits for relu", two_paths, []),
    ("exp(x) + cos(x) * 2, then a product and sin", join_chains, [["exp", "cos", "mul", "add"]]),
    ("nothing pointwise", lambda x, w: x @ w, []),
    ("x.sin().cos().exp(), the last of the graph", in_a_row, [["sin", "cos", "exp"]]),
    ("x.cos() + sin(arange(6)): the sum waits for arange, x.cos() does not", from_nothing, [["add", "sin"]]),
)


def grouping(m: Module) -> None:
    """Check groups of pointwise operations."""
    for words, function, expected in GROUPS:
        groups = as_items(m["groups"](capture_graph(function, X, W)), f"{words}: groups(gm)", "groups")
        got = [sorted(call_name(n) for n in group) for group in groups]
        expect(sorted(got), sorted(sorted(g) for g in expected), f"{words}: groups(gm)", "groups")


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2.0).sin() + 1.0, x.cos()


def answers(m: Module) -> None:
    """Check that the printer changes nothing: two outputs in their order, one output, gradients."""
    for words, function in (("two outputs", pair), ("one output", torch.sin)):
        attempt(Try(words, function, (X,), same_bits=True), m["Printer"](write=lambda line: None))


def shown(m: Module) -> None:
    """Check for a head and a line for each operation, once for each graph and not at each call."""
    lines: list[str] = []
    printer = m["Printer"](write=lines.append)
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=printer)
    for _ in range(3):
        compiled(X, W)
    heads = [line for line in lines if str(line).startswith("Graph")]
    if len(heads) != 1:
        raise Fault(
            "not-shown", f"{len(heads)} lines begin with Graph for one graph that is called three times"
        )
    if "Graph 0/0: 6 ops, 2 fusable groups" not in heads[0]:
        raise Fault("not-shown", f"the head is {heads[0]!r}, expected 'Graph 0/0: 6 ops, 2 fusable groups'")
    for name, size, dtype in ROWS[0][2]:
        parts = (name, *map(str, size or ()), dtype)
        if not any(all(part in str(line) for part in parts) for line in lines if line not in heads):
            raise Fault("not-shown", f"no line shows {name}, {size} and {dtype}")
    expect([tuple(id) for id in printer.ids], [(0, 0)], "printer.ids", "not-shown")


def broken(x: Tensor) -> Tensor:
    """Break the graph in the middle."""
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


HISTORIES = (
    ([], (0, 0)),
    ([(0, 0)], (0, 0)),
    ([(0, 0), (1, 0)], (1, 0)),
    ([(0, 0), (0, 1), (0, 2)], (0, 2)),
    ([(0, 0), (0, 0)], (0, 0)),
    ([(0, 0), (1, 0), (0, 1), (1, 1), (3, 0)], (2, 2)),
)


def counting(m: Module) -> None:
    """Count breaks and recompilations of lists of ids, then of functions that have them."""
    for ids, expected in HISTORIES:
        expect(m["history"](ids), expected, f"history({ids})", "history")
    for words, function, inputs, expected in (
        ("three shapes", torch.sin, [X, X[:2], numbers(rows=9)], (0, 1)),
        ("a graph break", broken, [X], (1, 0)),
    ):
        printer = m["Printer"](write=lambda line: None)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=printer)
        for x in inputs:
            compiled(x)
        expect(m["history"](printer.ids), expected, f"{words}: history(printer.ids)", "history")
