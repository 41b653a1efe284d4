"""Checks of a backend made of passes: stale code, child graphs, options, and Inductor itself.

Inductor and Dynamo are imported on demand: importing them takes seconds.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from harness.nn.compile.backend import has_compiler
from harness.nn.compile.match import graph_modules
from harness.puzzles.p26 import models
from harness.puzzles.p26.compile_cases import (
    CheckError,
    Module,
    X,
    capture_graph,
    check_equal,
    compile_and_run,
    find_stale_code,
    generate_code,
)
from harness.puzzles.p26.nodes import CALLS, call_name


def replace_sin_by_cos(gm: GraphModule) -> int:
    """Replace every sin by cos, a pass with a visible effect; return the number of changes."""
    sines = [n for n in gm.graph.nodes if call_name(n) == "sin"]
    for node in sines:
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.cos, node.args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    return len(sines)


def break_order(gm: GraphModule) -> int:
    """Break a graph with a sin by moving its second operation before the first."""
    calls = [n for n in gm.graph.nodes if n.op in CALLS]
    if "sin" not in map(call_name, calls):
        return 0
    calls[0].prepend(calls[1])
    return 1


def do_nothing(gm: GraphModule) -> int:
    return 0


def sine(x: Tensor) -> Tensor:
    return (x + 1.0).sin() * 2.0


def cosine(x: Tensor) -> Tensor:
    return (x + 1.0).cos() * 2.0


def checkpoint_cosine(x: Tensor) -> Tensor:
    return (checkpoint(sine, x, use_reentrant=False) + 1.0) * 3.0


def check_rewriting(m: Module) -> None:
    """Check that passes also run on child graphs, that code is regenerated, and that changes are counted."""
    gm = capture_graph(sine, X)
    old_outputs = gm.forward(X)  # code generated before the pass
    count = m["rewrite"](gm, [do_nothing, replace_sin_by_cos])
    (got,) = gm.forward(X)
    if torch.equal(got, *old_outputs):
        raise CheckError("stale-code", "the graph has changed, but the code that runs has not")
    if not torch.equal(got, cosine(X)):
        raise CheckError("value", "after the pass the graph computes something else")
    check_equal(count, 1, "what rewrite returns", "count")
    gm = generate_code(capture_graph(checkpoint_cosine, X.clone().requires_grad_()))
    count = m["rewrite"](gm, [replace_sin_by_cos])
    check_equal(count, 1, "the count of changes in a checkpointed region", "child-graphs")
    remaining = [call_name(n) for module in graph_modules(gm) for n in module.graph.nodes]
    if "sin" in remaining:
        raise CheckError("child-graphs", "the checkpointed region is unchanged")
    if stale_part := find_stale_code(gm):
        raise CheckError("stale-code", f"{stale_part} has changed, but the code that runs has not")
    both_changes = "the count of a change in the graph and one in its region"
    for description, function, passes, expected in (
        ("the count of a third pass", sine, [do_nothing, do_nothing, replace_sin_by_cos], 1),
        (both_changes, lambda x: checkpoint_cosine(x).sin(), [replace_sin_by_cos], 2),
    ):
        count = m["rewrite"](capture_graph(function, X.clone().requires_grad_()), passes)
        check_equal(count, expected, description, "value")
    for description, function, x in (
        ("", sine, X),
        (" in a checkpointed region", checkpoint_cosine, X.clone().requires_grad_()),
    ):
        try:
            m["rewrite"](capture_graph(function, x), [break_order])
        except RuntimeError:
            continue
        raise CheckError(
            "not-linted", f"a pass that puts a node before its input raises no error{description}"
        )


@contextlib.contextmanager
def replace_function(module: Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace one of Inductor's functions, also in the learner's file if it imports the function by name."""
    from torch._inductor import compile_fx as inductor

    original, imported = getattr(inductor, name), module.get(name)
    setattr(inductor, name, replacement)
    if imported is not None:
        module[name] = replacement
    try:
        yield
    finally:
        setattr(inductor, name, original)
        if imported is not None:
            module[name] = imported


@contextlib.contextmanager
def record_compile_fx(module: Module) -> Iterator[list[dict]]:
    """Record the calls of compile_fx without compiling anything."""
    from torch._dynamo.backends.debugging import aot_eager

    calls: list[dict] = []

    def record_call(gm: GraphModule, example_inputs: list[Any], **options) -> Callable[..., Any]:
        calls.append({"operations": [call_name(n) for n in gm.graph.nodes if n.op in CALLS], **options})
        return aot_eager(gm, example_inputs)

    with replace_function(module, "compile_fx", record_call):
        yield calls


def check_handoff(m: Module) -> None:
    """Check that the rewritten graph reaches compile_fx with mode and options, once for two shapes."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return m["backend"](gm, example_inputs, [replace_sin_by_cos], **options)

    for options, expected in (
        ({}, {}),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"options": {"max_autotune": False}}, {"max_autotune": False}),
    ):
        with record_compile_fx(m) as calls:
            torch._dynamo.reset()
            compiled = torch.compile(sine, backend=backend, dynamic=True)
            for x in (X, X[:2]):
                got = compiled(x)
        label = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"
        if len(calls) != 1:
            label += f": compile_fx is called {len(calls)} times for two shapes, expected once"
            raise CheckError("shape-baked", label)
        if not torch.allclose(got, cosine(x)):
            raise CheckError(
                "not-rewritten", f"{label}: compile_fx is given {', '.join(calls[0]['operations'])}"
            )
        patches = calls[0].get("config_patches") or {}
        if {name: patches.get(name) for name in expected} != expected:
            raise CheckError("options-lost", f"{label}: config_patches is {patches}, expected {expected}")


def check_inductor(m: Module) -> None:
    if not has_compiler():
        return

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return m["backend"](gm, example_inputs, [replace_sin_by_cos])

    x = X.clone().requires_grad_()
    got = compile_and_run(backend, sine, x)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    if not torch.allclose(got, cosine(x)) or not torch.allclose(gradient, -2.0 * (x + 1.0).sin()):
        raise CheckError("value", "compiled by Inductor it computes something else")


def check_both_graphs(m: Module) -> None:
    """Check that Inductor compiles both the forward and the backward ATen graph from AOTAutograd."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx as inductor

    graphs: list[tuple[str, list[str]]] = []
    backward_flags: list[bool] = []
    original, can_compile = inductor.compile_fx_inner, has_compiler()

    def record_direction(gm: GraphModule, example_inputs: list[Any], **options) -> Any:
        backward_flags.append(options.get("is_backward", False))
        return original(gm, example_inputs, **options) if can_compile else make_boxed_func(gm.forward)

    x = models.make_rows(4).requires_grad_()
    model = models.PatternModel(lambda m, x: m.ln(x).sin())
    leaves = [x, model.ln.weight, model.ln.bias]
    try:
        with replace_function(m, "compile_fx_inner", record_direction):
            got = compile_and_run(lambda gm, inputs: m["aot"](gm, inputs, graphs), model, x)
            gradients = torch.autograd.grad(got.sum(), leaves)
    except Exception as error:
        if graphs and any(name.startswith("native_layer_norm") for name in graphs[0][1]):
            message = "LayerNorm is not decomposed, and Inductor rejects it: pass Inductor's table of decompositions"
            raise CheckError("no-decompositions", message) from error
        raise
    if not torch.allclose(got, model(x), atol=1e-5):
        raise CheckError("value", "the forward graph computes something else")
    directions = [direction for direction, _ in graphs]
    check_equal(directions, ["forward", "backward"], "the directions of the graphs", "value")
    for actual, expected in zip(gradients, torch.autograd.grad(model(x).sum(), leaves), strict=True):
        if not torch.allclose(actual, expected, atol=1e-4):
            raise CheckError("gradient", "a gradient is wrong")
    check_equal(backward_flags, [False, True], "is_backward of the two graphs", "direction")
    forward, backward = ({name.split(".")[0] for name in names} for _, names in graphs)
    if "layer_norm" in forward:
        raise CheckError("value", "the forward graph is Dynamo's, not the graph of ATen operations")
    if "sin" not in forward or "cos" not in backward:
        message = f"the reported operations of the forward graph are {', '.join(sorted(forward))}"
        raise CheckError("rows", message[:300])
