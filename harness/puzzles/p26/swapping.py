"""Checks of swapping LayerNorm -> Linear: pairs found and refused, values and gradients of many models."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from harness.check.python_files import load_module
from harness.nn.compile.match import graph_modules
from harness.puzzles.p26 import models
from harness.puzzles.p26.compile_cases import (
    Backend,
    CheckError,
    CompileCase,
    Module,
    capture_graph,
    check_case,
    check_equal,
    find_stale_code,
    generate_code,
)
from harness.puzzles.p26.nodes import call_name
from harness.toolchain import roots


def check_find(m: Module) -> None:
    """Check the number of pairs in each spelling, the first pair's fields, and the swapped graph's results."""
    for pattern in models.PATTERNS:
        model, x = models.PatternModel(pattern.body), models.make_rows(models.B, models.S)
        gm = capture_graph(model, x)
        pairs = list(m["find"](gm))
        if len(pairs) != pattern.num_pairs:
            kind = "not-rewritten" if len(pairs) < pattern.num_pairs else "false-match"
            raise CheckError(kind, f"{pattern.label}: {len(pairs)} pairs found, expected {pattern.num_pairs}")
        for match in pairs:
            for field in ("x", "ln", "linear", "weight"):
                node = getattr(match, field)
                if not isinstance(node, torch.fx.Node):
                    raise CheckError("value", f"{pattern.label}: {field} is {node!r}, expected a node")
        if pairs:
            got = pairs[0].transposed, len(pairs[0].between)
            expected = pattern.transposed, pattern.num_reshapes
            check_equal(got, expected, f"{pattern.label}: (transposed, reshapes in between)", "value")
            case = CompileCase(f"{pattern.label}, swapped as found", model, (x,))
            check_case(case, make_swapping_backend(m["find"]))


def make_swapping_backend(find: Callable[[GraphModule], list]) -> Backend:
    """Return a backend that swaps the pairs from the learner's `find` with the solution's `swap`."""
    swap = load_from_solution("swap")

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for match in find(gm):
            swap(gm, match)
        return models.insert_stand_in(gm, example_inputs)

    return backend


def check_refusals(m: Module) -> None:
    """Check that pairs which must not be swapped are refused with a reason, and other pairs are not refused."""
    x = models.make_rows(models.B, models.S)
    for label, body, kind in models.UNSWAPPABLE:
        (match,) = find_with_solution(capture_graph(models.PatternModel(body), x))
        if not m["refuse"](match):
            raise CheckError(kind, f"{label}: refuse(match) returns no reason")
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model = models.PatternModel(lambda m, x: m.a(m.ln(x))).to(dtype)
        (match,) = find_with_solution(capture_graph(model, x.to(dtype)))
        if reason := m["refuse"](match):
            raise CheckError("not-rewritten", f"LayerNorm -> Linear in {dtype} is refused: {reason}")
    model = models.PatternModel(lambda m, x: m.a(m.ln(x)))
    (match,) = find_with_solution(capture_graph(model, x))
    fake_output = match.linear.meta["example_value"]
    match.linear.meta["example_value"] = fake_output.to(torch.complex64)
    if not m["refuse"](match):
        raise CheckError("dtype", "a pair in complex64 has no kernel, but refuse(match) returns no reason")


def load_from_solution(name: str) -> Callable[..., Any]:
    return load_module(roots.get_solutions() / "p26" / "swap.py")[name]


def find_with_solution(gm: GraphModule) -> list:
    """Return every pair that the solution's `find` finds in a graph, swappable or not."""
    return load_from_solution("find")(gm)


UNSAFE_CALLS = {"item", "tolist", "numpy", "cpu", "nonzero", "cuda"}
"""Methods and functions that read a tensor's values or move it, which a CUDA graph cannot record."""


def check_swaps(m: Module) -> None:
    """Check values and gradients of every model with the stand-in, and that a CUDA graph can record them."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for module in graph_modules(gm):
            initial_calls = {call_name(n) for n in module.graph.nodes}
            for match in find_with_solution(module):
                m["swap"](module, match)
            module.graph.lint()
            for node in module.graph.nodes:
                if call_name(node) in UNSAFE_CALLS - initial_calls or is_unsafe_operator(node.target):
                    error = f"{call_name(node)} is in the graph: a CUDA graph cannot record it"
                    raise CheckError("cudagraph-unsafe", error)
            module.recompile()
        return models.insert_stand_in(gm, example_inputs)

    for case in models.list_swap_cases():
        probe = check_case(case, backend)
        if not probe.remaining_ops.count("standin"):
            raise CheckError("not-rewritten", f"{case.label}: the operator is not in the graph")


def is_unsafe_operator(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.cudagraph_unsafe in target.tags


def check_backend(m: Module) -> None:
    """Check the backend on child graphs and refused pairs, and check its reports."""
    reports: list[tuple[str, str]] = []

    def tail(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if stale := find_stale_code(gm):
            raise CheckError("stale-code", f"{stale} reaches the tail with code generated before the swap")
        return models.insert_stand_in(gm, example_inputs)

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return m["backend"](generate_code(gm), example_inputs, tail, lambda *line: reports.append(line))

    x = models.make_rows(2, 3)
    case = CompileCase("under activation checkpointing", models.PatternModel(models.recompute_norm), (x,))
    if not check_case(case, backend).remaining_ops.count("standin"):
        raise CheckError("child-graphs", "under activation checkpointing: the operator is not in the graph")
    for label, body, kind in models.UNSWAPPABLE[:2]:
        case = CompileCase(label, models.PatternModel(body), (x,), kind=kind, gradients=False)
        check_case(case, backend)
    reports.clear()
    layers = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 6), torch.nn.Flatten(0, 0), torch.nn.LayerNorm([3, 6])
    )
    check_case(CompileCase("LayerNorm, Linear, LayerNorm", layers, (x,)), backend)
    check_equal(reports, [("1", "")], "what is reported", "value")
    reports.clear()
    two_axes = torch.nn.Sequential(torch.nn.LayerNorm([3, 8]), torch.nn.Linear(8, 6))
    check_case(CompileCase("a LayerNorm over two axes", two_axes, (x,)), backend)
    if len(reports) != 1 or reports[0][0] != "1" or not reports[0][1]:
        raise CheckError(
            "value", f"a refused pair is reported as {reports}, expected its name '1' and a reason"
        )


def check_kernels(m: Module) -> None:
    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return m["backend"](gm, example_inputs, lambda gm, inputs: gm.forward, lambda name, reason: None)

    model = models.PatternModel(models.share_norm)
    check_case(CompileCase("with the kernels of puzzle 22", model, (models.make_rows(2, 3),)), backend)
