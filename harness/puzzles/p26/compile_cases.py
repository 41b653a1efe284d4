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
GraphPass = Callable[[GraphModule], Any]
Module = dict[str, Any]
"""The namespace of a learner's file."""
Check = Callable[[Module], None]
"""Raises CheckError if a gate is wrong."""
SPECIAL_VALUES = (0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38, 3e-39, math.inf, -math.inf, math.nan)


class CheckError(Exception):
    """An error in a backend's behaviour: the mistake's id, and what was observed."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class CompileCase:
    """One function to compile.

    Attributes:
        label: The description in reports.
        function: A function of tensors, or a module.
        inputs: The function's arguments.
        expected_ops: The operations expected to remain in the graph, by name in order; None to skip the comparison.
        kind: The mistake that explains any failure here; if empty, the symptom determines it.
        gradients: Whether the floating inputs require gradients.
        bit_exact: Whether outputs must equal eager mode's bit for bit.
        more_inputs: Further inputs of other shapes, which must not cause another compilation.
        dynamic: torch.compile's option.
        autocast: Whether it runs under bfloat16 autocast.
        num_changes: The number of changes that the pass must return; None to skip the comparison.
    """

    label: str
    function: Callable[..., Any]
    inputs: Sequence[Tensor]
    expected_ops: tuple[str, ...] | None = None
    kind: str = ""
    gradients: bool = True
    bit_exact: bool = False
    more_inputs: tuple[Sequence[Tensor], ...] = ()
    dynamic: bool | None = None
    autocast: bool = False
    num_changes: int | None = None


@dataclass
class Probe:
    """Wraps a backend: counts its graphs, checks its contract, and records the remaining operations."""

    backend: Backend
    num_graphs: int = 0
    remaining_ops: list[str] = field(default_factory=list)
    unused_ops: list[str] = field(default_factory=list)

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        results = gm.graph.output_node().args[0]
        assert isinstance(results, tuple | list)  # Dynamo's graphs return tuples
        num_outputs = len(results)
        compiled = self.backend(gm, example_inputs)
        if not callable(compiled):
            raise CheckError(
                "not-callable", f"the backend returns {type(compiled).__name__}, expected a function"
            )
        modules = list(graph_modules(gm))
        self.remaining_ops = [call_name(n) for m in modules for n in m.graph.nodes if n.op in CALLS]
        unused = [n for m in modules for n in m.graph.nodes if n.op in CALLS and not n.users]
        self.unused_ops = [call_name(n) for n in unused if not mutates(n) and not n.is_impure()]

        def run_checked(*args):
            outputs = compiled(*args)
            if not isinstance(outputs, tuple | list):
                kind = type(outputs).__name__
                raise CheckError("not-a-tuple", f"the compiled function returns a {kind}, expected a tuple")
            if len(outputs) != num_outputs:
                message = f"the compiled function returns {len(outputs)} outputs, the graph has {num_outputs}"
                raise CheckError("output-missing", message)
            return outputs

        return run_checked


@dataclass
class Outcome:
    """The results of a call: outputs, gradients (None if there is none), the inputs afterwards, and for each output
    the index of the input whose memory it shares."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    shared_inputs: list[int | None]


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
    shared_inputs = [memory.index(start) if start in memory else None for start in starts]
    gradients: list[Tensor | None] = []
    if case.gradients:
        grad_inputs = [t for t in (*leaves, *parameters) if t.requires_grad]
        terms = [(t * make_weights(t)).sum().double() for t in outputs if t.requires_grad]
        gradients = [None] * len(grad_inputs)
        if terms:
            gradients = list(torch.autograd.grad(torch.stack(terms).sum(), grad_inputs, allow_unused=True))
    return Outcome([t.detach() for t in outputs], gradients, leaves, shared_inputs)


def make_weights(tensor: Tensor) -> Tensor:
    """Return fixed weights in a tensor's shape and dtype."""
    indices = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return (0.3 + torch.sin(indices)).to(tensor.dtype)


def check_case(case: CompileCase, backend: Backend) -> Probe:
    """Compile a case with a backend and compare it with eager mode. Raises CheckError if they differ."""
    probe = Probe(backend)
    torch._dynamo.reset()
    compiled = torch.compile(case.function, backend=probe, fullgraph=True, dynamic=case.dynamic)
    try:
        for count, inputs in enumerate((case.inputs, *case.more_inputs)):
            num_graphs = probe.num_graphs
            compare(case, compiled, inputs)
            if count and probe.num_graphs > num_graphs:
                message = "another shape causes another compilation: a size became a constant"
                raise CheckError("shape-baked", message)
        if case.expected_ops is not None:
            compare_graph(case.expected_ops, probe)
    except Exception as error:
        original = find_original_exception(error)
        if isinstance(original, CheckError):
            raise CheckError(case.kind or original.kind, f"{case.label}: {original}") from error
        if case.kind:
            message = " ".join(str(original).split())
            raise CheckError(
                case.kind, f"{case.label}: {type(original).__name__}: {message}"[:300]
            ) from error
        raise
    return probe


def find_original_exception(error: BaseException) -> BaseException:
    """Return a backend's original exception, which Dynamo may wrap or chain to its own."""
    current: BaseException | None = error
    while current is not None:
        inner = getattr(current, "inner_exception", current)
        if isinstance(inner, CheckError):
            return inner
        current = current.__cause__ or current.__context__
    return getattr(error, "inner_exception", error)


def compare(case: CompileCase, compiled: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Compare the compiled function with eager mode on one set of inputs. Raises CheckError if they differ."""
    is_module = isinstance(case.function, nn.Module)
    parameters = list(case.function.parameters()) if is_module else []
    eager = call_with_gradients(case.function, inputs, parameters, case)
    got = call_with_gradients(compiled, inputs, parameters, case)
    truth = eager if case.bit_exact else run_in_float64(replace(case, autocast=False), inputs)
    compare_outputs(case, got, eager, truth)
    for index, (actual, expected) in enumerate(zip(got.inputs, eager.inputs, strict=True)):
        if not torch.equal(actual.nan_to_num(), expected.nan_to_num()):
            raise CheckError("input-written", f"the call changes input {index}")
    for index, (actual, expected) in enumerate(zip(got.shared_inputs, eager.shared_inputs, strict=True)):
        if actual != expected:
            message = f"output {index} shares the memory of input {actual}, but not in eager mode"
            raise CheckError("aliased", "an output is a copy" if actual is None else message)
    gradients = zip(got.gradients, eager.gradients, truth.gradients, strict=True)
    for index, (actual, expected, exact) in enumerate(gradients):
        name = get_tensor_name(index, inputs, case)
        if (actual is None) != (expected is None):
            received = "no gradient" if actual is None else "a gradient, but none in eager mode"
            raise CheckError("no-gradient", f"{name} gets {received}")
        if actual is None or expected is None or exact is None:
            continue
        if error_text := describe_error(actual, expected, exact, False, case.autocast):
            raise CheckError("gradient", f"the gradient of {name} {error_text}")


def compare_outputs(case: CompileCase, got: Outcome, eager: Outcome, truth: Outcome) -> None:
    errors = []
    outputs = zip(got.outputs, eager.outputs, truth.outputs, strict=True)
    for index, (actual, expected, exact) in enumerate(outputs):
        if actual.shape != expected.shape:
            message = f"output {index} has shape {list(actual.shape)}, expected {list(expected.shape)}"
            errors.append(CheckError("shape", message))
        elif actual.dtype != expected.dtype:
            dtypes = f"{get_dtype_name(actual.dtype)}, expected {get_dtype_name(expected.dtype)}"
            errors.append(CheckError("dtype", f"output {index} is {dtypes}"))
        elif error_text := describe_error(actual, expected, exact, case.bit_exact, case.autocast):
            errors.append(CheckError("value", f"output {index} {error_text}"))
    if not errors:
        return
    remaining = list(got.outputs)
    for expected in eager.outputs:
        candidates = [t for t in remaining if t.shape == expected.shape and t.dtype == expected.dtype]
        equal = next((t for t in candidates if torch.allclose(t.double(), expected.double())), None)
        if equal is None:
            raise errors[0]
        remaining = [t for t in remaining if t is not equal]
    if len(eager.outputs) > 1:
        raise CheckError("output-order", "the outputs are correct, but in the wrong order")
    raise errors[0]


def run_in_float64(case: CompileCase, inputs: Sequence[Tensor]) -> Outcome:
    function, parameters = case.function, []
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
        parameters = list(function.parameters())
    float64_inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    return call_with_gradients(function, float64_inputs, parameters, case)


def describe_error(got: Tensor, eager: Tensor, exact: Tensor, bit_exact: bool, autocast: bool) -> str:
    """Describe a tensor's wrong values, "" if correct. Under autocast, allow errors of bfloat16's magnitude."""
    if bit_exact:
        is_equal = (got == eager) | (got.isnan() & eager.isnan())
        if got.is_floating_point():
            is_equal &= (got.signbit() == eager.signbit()) | got.isnan()
        if is_equal.all():
            return ""
        index = tuple((~is_equal).nonzero()[0].tolist())
        count = f"{int((~is_equal).sum())} of {is_equal.numel()} elements"
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


def compare_graph(expected_ops: Sequence[str], probe: Probe) -> None:
    if list(expected_ops) == probe.remaining_ops:
        return
    if probe.unused_ops:
        message = f"{', '.join(probe.unused_ops)} are still in the graph, but nothing uses their results"
        raise CheckError("dead-nodes", message)
    kind = "not-rewritten" if len(probe.remaining_ops) >= len(expected_ops) else "rewritten-too-much"
    expected_text = ", ".join(expected_ops) or "nothing"
    raise CheckError(
        kind, f"the graph holds {', '.join(probe.remaining_ops) or 'nothing'}; expected {expected_text}"
    )


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

    def store_graph(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    compile_and_run(store_graph, function, *inputs, **options)
    return captured[0]


def make_pass_backend(graph_pass: GraphPass) -> Backend:
    """Return a backend that runs a pass, lints the graph, regenerates its code, and runs it."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph_pass(gm)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            message = " ".join(str(error).split())[:150]
            raise CheckError("out-of-order", f"lint rejects the graph: {message}") from error
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


def make_numbers(dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    """Return normally distributed numbers [rows, 6], or integers from -9 to 9 for integer dtypes."""
    generator = torch.Generator().manual_seed(26)
    if dtype.is_floating_point:
        return torch.randn(rows, 6, generator=generator).to(dtype)
    return torch.randint(-9, 10, (rows, 6), generator=generator).to(dtype)


def make_special_values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(SPECIAL_VALUES, dtype=dtype)


X = make_numbers()
"""The default inputs."""


def check_equal(got: object, expected: object, description: str, kind: str = "value") -> None:
    if got != expected:
        raise CheckError(kind, f"{description} is {got!r}, expected {expected!r}"[:300])


def make_table_check(pass_name: str, cases: tuple[CompileCase, ...]) -> Check:
    """Return a check that runs the file's pass `pass_name` on every function of a table."""

    def check(m: Module) -> None:
        for case in cases:
            counts: list[object] = []
            check_case(case, make_pass_backend(lambda gm, counts=counts: counts.append(m[pass_name](gm))))
            if case.num_changes is not None:
                check_equal(counts[0], case.num_changes, f"{case.label}: {pass_name}(gm)", "count")

    check.__name__ = pass_name
    return check
