"""Checks of the swap of LayerNorm -> Linear: pairs found, pairs refused, values and gradients of many models."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from harness.check.python_files import load
from harness.nn.compile.match import graph_modules
from harness.puzzles.p26 import models
from harness.puzzles.p26.nodes import call_name
from harness.puzzles.p26.trying import (
    Backend,
    Fault,
    Module,
    Try,
    attempt,
    capture_graph,
    expect,
    stale,
    with_code,
)
from harness.toolchain import roots


def finding(m: Module) -> None:
    """Check how many pairs each spelling has, the fields of the first, and the result of the swap."""
    for pattern in models.PATTERNS:
        model, x = models.Pieces(pattern.body), models.rows(models.B, models.S)
        gm = capture_graph(model, x)
        pairs = list(m["find"](gm))
        if len(pairs) != pattern.pairs:
            kind = "not-rewritten" if len(pairs) < pattern.pairs else "false-match"
            raise Fault(kind, f"{pattern.words}: {len(pairs)} pairs found, expected {pattern.pairs}")
        for match in pairs:
            for field in ("x", "ln", "linear", "weight"):
                if not isinstance(getattr(match, field), torch.fx.Node):
                    raise Fault(
                        "value", f"{pattern.words}: {field} is {getattr(match, field)!r}, expected a node"
                    )
        if pairs:
            got = pairs[0].transposed, len(pairs[0].between)
            expected = pattern.transposed, pattern.between
            expect(got, expected, f"{pattern.words}: (transposed, reshapes in between)", "value")
            attempt(Try(f"{pattern.words}, swapped as found", model, (x,)), swapped_as(m["find"]))


def swapped_as(find: Callable[[GraphModule], list]) -> Backend:
    """Return a backend of the solution's `swap`, with the learner's `find` for each pair."""
    swap = library("swap")

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for match in find(gm):
            swap(gm, match)
        return models.with_standin(gm, example_inputs)

    return backend


def refusing(m: Module) -> None:
    """Check pairs that must stay, each with a reason, and pairs that may be swapped."""
    for words, body, kind in models.UNFIT:
        (match,) = library_matches(capture_graph(models.Pieces(body), models.rows(models.B, models.S)))
        if not m["refuse"](match):
            raise Fault(kind, f"{words}: refuse(match) has no objection")
    for dtype, fits in ((torch.float64, True), (torch.bfloat16, True), (torch.float32, True)):
        model = models.Pieces(lambda m, x: m.a(m.ln(x))).to(dtype)
        (match,) = library_matches(capture_graph(model, models.rows(models.B, models.S).to(dtype)))
        if (why := m["refuse"](match)) and fits:
            raise Fault("not-rewritten", f"LayerNorm -> Linear in {dtype} is refused: {why}")
    model = models.Pieces(lambda m, x: m.a(m.ln(x)))
    (match,) = library_matches(capture_graph(model, models.rows(models.B, models.S)))
    fake = match.linear.meta["example_value"]
    match.linear.meta["example_value"] = fake.to(torch.complex64)
    if not m["refuse"](match):
        raise Fault("dtype", "a pair in complex64 has no kernel, and refuse(match) has no objection")


def library(name: str) -> Callable[..., Any]:
    return load(roots.solutions() / "p26" / "swap.py")[name]


def library_matches(gm: GraphModule) -> list:
    """Return every pair of a graph, swappable or not, by `find` of the solution."""
    return library("find")(gm)


UNSAFE = {"item", "tolist", "numpy", "cpu", "nonzero", "cuda"}
"""Methods and functions that ask a tensor for its numbers, or move it: none of them can be recorded in a CUDA graph."""


def swapping(m: Module) -> None:
    """Check values and gradients of every model with the stand-in, and that the graph is safe to record."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for module in graph_modules(gm):
            before = {call_name(n) for n in module.graph.nodes}
            for match in library_matches(module):
                m["swap"](module, match)
            module.graph.lint()
            for node in module.graph.nodes:
                if call_name(node) in UNSAFE - before or unsafe_operator(node.target):
                    words = f"{call_name(node)} stands in the graph: a CUDA graph cannot record it"
                    raise Fault("cudagraph-unsafe", words)
            module.recompile()
        return models.with_standin(gm, example_inputs)

    swaps = 0
    for one in models.swaps():
        probe = attempt(one, backend)
        swaps += probe.left.count("standin")
        if not probe.left.count("standin"):
            raise Fault("not-rewritten", f"{one.words}: the operator is not in the graph")


def unsafe_operator(target: object) -> bool:
    """Return whether an operator declares that it cannot be recorded."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.cudagraph_unsafe in target.tags


def whole(m: Module) -> None:
    """Check the backend: child graphs, pairs that stay, and its report."""
    reports: list[tuple[str, str]] = []

    def tail(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if where := stale(gm):
            raise Fault("stale-code", f"{where} reaches the tail with the code of the graph that it was")
        return models.with_standin(gm, example_inputs)

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return m["backend"](with_code(gm), example_inputs, tail, lambda *line: reports.append(line))

    one = Try("under activation checkpointing", models.Pieces(models.recompute_norm), (models.rows(2, 3),))
    if not attempt(one, backend).left.count("standin"):
        raise Fault("child-graphs", "under activation checkpointing: the operator is not in the graph")
    for words, body, kind in models.UNFIT[:2]:
        attempt(Try(words, models.Pieces(body), (models.rows(2, 3),), kind=kind, gradients=False), backend)
    reports.clear()
    layers = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 6), torch.nn.Flatten(0, 0), torch.nn.LayerNorm([3, 6])
    )
    attempt(Try("LayerNorm, Linear, LayerNorm", layers, (models.rows(2, 3),)), backend)
    expect(reports, [("1", "")], "what is reported", "value")
    reports.clear()
    dropout = torch.nn.Sequential(torch.nn.LayerNorm([3, 8]), torch.nn.Linear(8, 6))
    attempt(Try("a LayerNorm over two axes", dropout, (models.rows(2, 3),)), backend)
    if len(reports) != 1 or reports[0][0] != "1" or not reports[0][1]:
        raise Fault(
            "value", f"a pair that stays is reported as {reports}, expected its name '1' and a reason"
        )


def with_kernels(m: Module) -> None:
    """Run once with puzzle 22's kernels instead of their stand-in, forward and backward."""
    attempt(
        Try("with the kernels of puzzle 22", models.Pieces(models.share_norm), (models.rows(2, 3),)),
        lambda gm, inputs: m["backend"](gm, inputs, lambda gm, inputs: gm.forward, lambda name, why: None),
    )
