"""Checks of the printer: its rows, groups and history, and whole runs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.puzzles.p26.compile_cases import (
    CheckError,
    CompileCase,
    Module,
    capture_graph,
    check_case,
    check_equal,
    make_numbers,
)
from harness.puzzles.p26.nodes import call_name


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu((x * 2.0).sin() @ w + 1.0).to(torch.bfloat16)


def split(x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    return a + b


X, W = make_numbers(), make_numbers(rows=6)
ROW_CASES = (
    (plain, (X, W), [*((name, (4, 6), "float32") for name in ("mul", "sin", "matmul", "add", "relu")), ("to", (4, 6), "bfloat16")]),
    (split, (X,), [("chunk", None, "tuple"), *((name, (2, 6), "float32") for name in ("getitem", "getitem", "add"))]),
)  # fmt: skip
"""Function, inputs, and one expected row per operation."""


def require_items(got, description: str, kind: str) -> Iterable:
    """Return a function's result; raise CheckError if it is not iterable, such as None after a missing `return`."""
    if not isinstance(got, Iterable):
        raise CheckError(kind, f"{description} is {got!r}, expected a list")
    return got


def check_table(m: Module) -> None:
    for function, inputs, expected in ROW_CASES:
        rows = require_items(m["rows"](capture_graph(function, *inputs)), "rows(gm)", "rows")
        check_equal([tuple(row) for row in rows], expected, "rows(gm)", "rows")


def two_paths(x: Tensor, w: Tensor) -> Tensor:
    """Add relu's result to its matrix product, so that relu and the sum cannot share a loop."""
    h = torch.relu(x)
    return h @ w + h


def join_chains(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin((torch.exp(x) + torch.cos(x) * 2.0) @ w)


def add_call_without_inputs(x: Tensor, w: Tensor) -> Tensor:
    """Make the sum depend on a call without inputs; graph inputs are not dependencies."""
    return x.cos() + torch.arange(6).sin()


GROUP_CASES = (
    ("(x * 2).sin() @ w, + 1 and relu", plain, [["mul", "sin"], ["add", "relu"]]),
    ("relu(x) @ w + relu(x): the sum waits for the product, which waits for relu", two_paths, []),
    ("exp(x) + cos(x) * 2, then a product and sin", join_chains, [["exp", "cos", "mul", "add"]]),
    ("nothing pointwise", lambda x, w: x @ w, []),
    ("x.sin().cos().exp(), the last of the graph", lambda x, w: x.sin().cos().exp(), [["sin", "cos", "exp"]]),
    (
        "x.cos() + sin(arange(6)): the sum waits for arange, x.cos() does not",
        add_call_without_inputs,
        [["add", "sin"]],
    ),
)


def check_groups(m: Module) -> None:
    for label, function, expected in GROUP_CASES:
        groups = require_items(m["groups"](capture_graph(function, X, W)), f"{label}: groups(gm)", "groups")
        got = [sorted(call_name(n) for n in group) for group in groups]
        check_equal(sorted(got), sorted(sorted(g) for g in expected), f"{label}: groups(gm)", "groups")


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2.0).sin() + 1.0, x.cos()


def check_unchanged(m: Module) -> None:
    """Check that the printer changes nothing: two outputs in order, one output, gradients."""
    for label, function in (("two outputs", two_outputs), ("one output", torch.sin)):
        check_case(CompileCase(label, function, (X,), bit_exact=True), m["Printer"](write=lambda line: None))


def check_lines(m: Module) -> None:
    """Check that a head and a line per operation are printed once per graph, not at each call."""
    lines: list[str] = []
    printer = m["Printer"](write=lines.append)
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=printer)
    for _ in range(3):
        compiled(X, W)
    headings = [line for line in lines if str(line).startswith("Graph")]
    if len(headings) != 1:
        error = f"{len(headings)} lines begin with Graph for one graph that is called three times"
        raise CheckError("not-shown", error)
    if "Graph 0/0: 6 ops, 2 fusable groups" not in headings[0]:
        raise CheckError(
            "not-shown", f"the head is {headings[0]!r}, expected 'Graph 0/0: 6 ops, 2 fusable groups'"
        )
    for name, size, dtype in ROW_CASES[0][2]:
        parts = (name, *map(str, size or ()), dtype)
        if not any(all(part in str(line) for part in parts) for line in lines if line not in headings):
            raise CheckError("not-shown", f"no line shows {name}, {size} and {dtype}")
    check_equal([tuple(id) for id in printer.ids], [(0, 0)], "printer.ids", "not-shown")


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


HISTORY_CASES = (
    ([], (0, 0)),
    ([(0, 0)], (0, 0)),
    ([(0, 0), (1, 0)], (1, 0)),
    ([(0, 0), (0, 1), (0, 2)], (0, 2)),
    ([(0, 0), (0, 0)], (0, 0)),
    ([(0, 0), (1, 0), (0, 1), (1, 1), (3, 0)], (2, 2)),
)


def check_history(m: Module) -> None:
    """Check the counts of breaks and recompilations, for lists of ids and then for functions."""
    for ids, expected in HISTORY_CASES:
        check_equal(m["history"](ids), expected, f"history({ids})", "history")
    for label, function, inputs, expected in (
        ("three shapes", torch.sin, [X, X[:2], make_numbers(rows=9)], (0, 1)),
        ("a graph break", broken, [X], (1, 0)),
    ):
        printer = m["Printer"](write=lambda line: None)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=printer)
        for x in inputs:
            compiled(x)
        check_equal(m["history"](printer.ids), expected, f"{label}: history(printer.ids)", "history")
