"""Compare a backend with eager mode: outputs, gradients, aliasing, inputs, and the rewritten graph."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from harness.check.compare import FLOOR
from harness.nn.arguments import get_dtype_name
from harness.nn.compile.match import graph_modules
from harness.puzzles.p26.nodes import CALLS, call_name, mutates

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
Pass = Callable[[GraphModule], Any]
Module = dict[str, Any]
"""The namespace of a learner's file."""
Check = Callable[[Module], None]
"""Raises Fault if a gate is wrong."""
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38, 3e-39, math.inf, -math.inf, math.nan)


class Fault(Exception):
    """An error in a backend's behaviour: the mistake's id, and what was observed."""

    def __init__(self, kind: str, words: str):
        super().__init__(words)
        self.kind = kind


@dataclass(frozen=True)
class CompileCase:
    """One function to compile.

    Attributes:
        words: The description in reports.
        function: A function of tensors, or a module.
        inputs: The function's arguments.
        after: The operations expected to remain in the graph, by name in order; None to skip the comparison.
        kind: The mistake that explains any failure here; if empty, the symptom determines it.
        gradients: Whether the floating inputs require gradients.
        same_bits: Whether outputs must equal eager mode's bit for bit.
        more: Further inputs of other shapes, which must not cause another compilation.
        dynamic: torch.compile's option.
        autocast: Whether it runs under bfloat16 autocast.
        count: The number of changes that the pass must return; None to skip the comparison.
    """

    words: str
    function: Callable[..., Any]
    inputs: Sequence[Tensor]
    after: tuple[str, ...] | None = None
    kind: str = ""
    gradients: bool = True
    same_bits: bool = False
    more: tuple[Sequence[Tensor], ...] = ()
    dynamic: bool | None = None
    autocast: bool = False
    count: int | None = None


@dataclass
class Probe:
    """Wraps a backend: counts its graphs, checks its contract, and records the remaining operations."""

    backend: Backend
    graphs: int = 0
    left: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        results = gm.graph.output_node().args[0]
        assert isinstance(results, tuple | list)  # Dynamo's graphs return tuples
        requested = len(results)
        compiled = self.backend(gm, example_inputs)
        if not callable(compiled):
            raise Fault("not-callable", f"the backend returns {type(compiled).__name__}, expected a function")
        modules = list(graph_modules(gm))
        self.left = [call_name(n) for m in modules for n in m.graph.nodes if n.op in CALLS]
        unused = [n for m in modules for n in m.graph.nodes if n.op in CALLS and not n.users]
        self.dead = [call_name(n) for n in unused if not mutates(n) and not n.is_impure()]

        def run_checked(*args):
            outputs = compiled(*args)
            if not isinstance(outputs, tuple | list):
                kind = type(outputs).__name__
                raise Fault("not-a-tuple", f"the compiled function returns a {kind}, expected a tuple")
            if len(outputs) != requested:
                message = f"the compiled function returns {len(outputs)} outputs, the graph has {requested}"
                raise Fault("output-missing", message)
            return outputs

        return run_checked


@dataclass
class Outcome:
    """The results of a call: outputs, gradients (None if there is none), the inputs afterwards, and for each output
    the index of the input whose memory it shares."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    shares: list[int | None]


def call_with_gradients(
    call: Callable[..., Any], inputs: Sequence[Tensor], parameters: Sequence[Tensor], case: CompileCase
) -> Outcome:
    """Call a function on copies of the inputs; differentiate a weighted sum of all outputs."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format) for t in inputs]
    if case.gradients:
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        out = call(*leaves)
    outputs = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
    memory = [t.untyped_storage().data_ptr() for t in leaves]
    starts = [t.untyped_storage().data_ptr() for t in outputs]
    shares = [memory.index(start) if start in memory else None for start in starts]
    gradients: list[Tensor | None] = []
    if case.gradients:
        requested = [t for t in (*leaves, *parameters) if t.requires_grad]
        parts = [(t * weights(t)).sum().double() for t in outputs if t.requires_grad]
        gradients = [None] * len(requested)
        if parts:
            gradients = list(torch.autograd.grad(torch.stack(parts).sum(), requested, allow_unused=True))
    return Outcome([t.detach() for t in outputs], gradients, leaves, shares)


def weights(tensor: Tensor) -> Tensor:
    """Return fixed weights in a tensor's shape and dtype."""
    count = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return (0.3 + torch.sin(count)).to(tensor.dtype)


def check_case(case: CompileCase, backend: Backend) -> Probe:
    """Compile a case with a backend and compare it with eager mode. Raises Fault if they differ."""
    probe = Probe(backend)
    torch._dynamo.reset()
    compiled = torch.compile(case.function, backend=probe, fullgraph=True, dynamic=case.dynamic)
    try:
        for count, inputs in enumerate((case.inputs, *case.more)):
            before = probe.graphs
            compare(case, compiled, inputs)
            if count and probe.graphs > before:
                message = "another shape causes another compilation: a size became a constant"
                raise Fault("shape-baked", message)
        if case.after is not None:
            compare_graph(case.after, probe)
    except Exception as error:
        inner = find_original_exception(error)
        if isinstance(inner, Fault):
            raise Fault(case.kind or inner.kind, f"{case.words}: {inner}") from error
        if case.kind:
            message = " ".join(str(inner).split())
            raise Fault(case.kind, f"{case.words}: {type(inner).__name__}: {message}"[:300]) from error
        raise
    return probe


def find_original_exception(error: BaseException) -> BaseException:
    """Return a backend's original exception, which Dynamo may wrap or chain to its own."""
    current: BaseException | None = error
    while current is not None:
        inner = getattr(current, "inner_exception", current)
        if isinstance(inner, Fault):
            return inner
        current = current.__cause__ or current.__context__
    return getattr(error, "inner_exception", error)


def compare(case: CompileCase, compiled: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Compare the compiled function with eager mode on one set of inputs. Raises Fault if they differ."""
    is_module = isinstance(case.function, nn.Module)
    parameters = list(case.function.parameters()) if is_module else []
    eager = call_with_gradients(case.function, inputs, parameters, case)
    got = call_with_gradients(compiled, inputs, parameters, case)
    truth = eager if case.same_bits else run_in_float64(replace(case, autocast=False), inputs)
    compare_outputs(case, got, eager, truth)
    for index, (ours, theirs) in enumerate(zip(got.inputs, eager.inputs, strict=True)):
        if not torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
            raise Fault("input-written", f"the call changes input {index}")
    for index, (ours, theirs) in enumerate(zip(got.shares, eager.shares, strict=True)):
        if ours != theirs:
            message = f"output {index} shares the memory of input {ours}, but not in eager mode"
            raise Fault("aliased", "an output is a copy" if ours is None else message)
    gradients = zip(got.gradients, eager.gradients, truth.gradients, strict=True)
    for index, (ours, theirs, exact) in enumerate(gradients):
        name = get_tensor_name(index, inputs, case)
        if (ours is None) != (theirs is None):
            received = "no gradient" if ours is None else "a gradient, but none in eager mode"
            raise Fault("no-gradient", f"{name} gets {received}")
        if ours is None or theirs is None or exact is None:
            continue
        if error_text := describe_error(ours, theirs, exact, False, case.autocast):
            raise Fault("gradient", f"the gradient of {name} {error_text}")


def compare_outputs(case: CompileCase, got: Outcome, eager: Outcome, truth: Outcome) -> None:
    faults = []
    outputs = zip(got.outputs, eager.outputs, truth.outputs, strict=True)
    for index, (ours, theirs, exact) in enumerate(outputs):
        if ours.shape != theirs.shape:
            message = f"output {index} has shape {list(ours.shape)}, expected {list(theirs.shape)}"
            faults.append(Fault("shape", message))
        elif ours.dtype != theirs.dtype:
            dtypes = f"{get_dtype_name(ours.dtype)}, expected {get_dtype_name(theirs.dtype)}"
            faults.append(Fault("dtype", f"output {index} is {dtypes}"))
        elif error_text := describe_error(ours, theirs, exact, case.same_bits, case.autocast):
            faults.append(Fault("value", f"output {index} {error_text}"))
    if not faults:
        return
    remaining = list(got.outputs)
    for theirs in eager.outputs:
        candidates = [t for t in remaining if t.shape == theirs.shape and t.dtype == theirs.dtype]
        equal = next((t for t in candidates if torch.allclose(t.double(), theirs.double())), None)
        if equal is None:
            raise faults[0]
        remaining = [t for t in remaining if t is not equal]
    if len(eager.outputs) > 1:
        raise Fault("output-order", "the outputs are correct, but in the wrong order")
    raise faults[0]


def run_in_float64(case: CompileCase, inputs: Sequence[Tensor]) -> Outcome:
    function, parameters = case.function, []
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
        parameters = list(function.parameters())
    float64_inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    return call_with_gradients(function, float64_inputs, parameters, case)


def describe_error(got: Tensor, eager: Tensor, exact: Tensor, same_bits: bool, autocast: bool) -> str:
    """Describe a tensor's wrong values, "" if correct. Under autocast, allow errors of bfloat16's magnitude."""
    if same_bits:
        same = (got == eager) | (got.isnan() & eager.isnan())
        if got.is_floating_point():
            same &= (got.signbit() == eager.signbit()) | got.isnan()
        if same.all():
            return ""
        index = tuple((~same).nonzero()[0].tolist())
        count = f"{int((~same).sum())} of {same.numel()} elements"
        return f"has {count} with other bits: {format_number(got[index])} for {format_number(eager[index])}"
    scale = exact.double().abs().max().clamp(min=1e-30)
    error = ((got.double() - exact.double()).abs().max() / scale).item()
    baseline = ((eager.double() - exact.double()).abs().max() / scale).item()
    limit = 2 * baseline + FLOOR["bfloat16" if autocast else get_dtype_name(got.dtype)]
    if error <= limit:
        return ""
    return f"is wrong: its error is {error:.1e}, eager mode's {baseline:.1e}, the limit {limit:.1e}"


def format_number(number: Tensor) -> str:
    """Format a number with as many digits as its dtype distinguishes: "100663304"."""
    return f"{number.item():.9g}" if number.is_floating_point() else str(number.item())


def compare_graph(requested: Sequence[str], probe: Probe) -> None:
    if list(requested) == probe.left:
        return
    if probe.dead:
        message = f"{', '.join(probe.dead)} are still in the graph, but nothing uses their results"
        raise Fault("dead-nodes", message)
    kind = "not-rewritten" if len(probe.left) >= len(requested) else "rewritten-too-much"
    expected = ", ".join(requested) or "nothing"
    raise Fault(kind, f"the graph holds {', '.join(probe.left) or 'nothing'}; expected {expected}")


def get_tensor_name(index: int, inputs: Sequence[Tensor], case: CompileCase) -> str:
    """Return the name of the tensor that a gradient belongs to: "input 0", or the parameter's name."""
    floating = [k for k, t in enumerate(inputs) if t.is_floating_point()]
    if index < len(floating):
        return f"input {floating[index]}"
    assert isinstance(case.function, nn.Module)
    trainable = [name for name, p in case.function.named_parameters() if p.requires_grad]
    return trainable[index - len(floating)]


def compile_and_run(backend: Backend, function: Callable[..., Any], *inputs: Tensor, **options) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options)(*inputs)


def capture_graph(function: Callable[..., Any], *inputs: Tensor, **options) -> GraphModule:
    captured: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    compile_and_run(keep, function, *inputs, **options)
    return captured[0]


def run_pass(graph_pass: Pass) -> Backend:
    """Return a backend that runs a pass, lints the graph, regenerates its code, and runs it."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph_pass(gm)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            message = " ".join(str(error).split())[:150]
            raise Fault("out-of-order", f"lint rejects the graph: {message}") from error
        gm.recompile()
        return gm.forward

    return backend


def generate_code(gm: GraphModule) -> GraphModule:
    for module in graph_modules(gm):
        assert module.code
    return gm


def find_stale_code(gm: GraphModule) -> str:
    """Return which graph's generated code is stale, "the graph" or "a child graph", or "" if none."""
    for module in graph_modules(gm):
        if module.code != module.graph.python_code("self").src:
            return "the graph" if module is gm else "a child graph"
    return ""


# ---- Check helpers ------------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    """Return normally distributed numbers [rows, 6], or integers from -9 to 9 for integer dtypes."""
    generator = torch.Generator().manual_seed(26)
    if dtype.is_floating_point:
        return torch.randn(rows, 6, generator=generator).to(dtype)
    return torch.randint(-9, 10, (rows, 6), generator=generator).to(dtype)


def make_special_values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(SPECIAL, dtype=dtype)


X = numbers()
"""The default inputs."""


def expect(got: object, expected: object, what: str, kind: str = "value") -> None:
    if got != expected:
        raise Fault(kind, f"{what} is {got!r}, expected {expected!r}"[:300])


def make_table_check(name: str, listed: tuple[CompileCase, ...]) -> Check:
    """Return a check that runs the file's pass `name` on every function of a table."""

    def check(m: Module) -> None:
        for case in listed:
            counts: list[object] = []
            check_case(case, run_pass(lambda gm, counts=counts: counts.append(m[name](gm))))
            if case.count is not None:
                expect(counts[0], case.count, f"{case.words}: {name}(gm)", "count")

    check.__name__ = name
    return check
