"""Compare a backend with eager mode: outputs, gradients, aliasing, inputs, and the remaining graph.

Eager mode is the truth for results that keep their bits, and float64 for those that may be rounded otherwise.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from harness.check.compare import FLOOR
from harness.nn.arguments import plain
from harness.nn.compile.match import graph_modules
from harness.puzzles.p26.nodes import CALLS, call_name, mutates

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
Pass = Callable[[GraphModule], Any]
Module = dict[str, Any]
"""The names that a learner's file defines."""
Check = Callable[[Module], None]
"""Raises Fault where a gate is wrong."""
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38, 3e-39, math.inf, -math.inf, math.nan)


class Fault(Exception):
    """A fault of a backend: the id of the mistake, and the observation."""

    def __init__(self, kind: str, words: str):
        super().__init__(words)
        self.kind = kind


@dataclass(frozen=True)
class Try:
    """One function to compile.

    Attributes:
        words: Its description in reports.
        function: A function of tensors, or a module.
        inputs: Its arguments.
        after: The names of the operations that should remain in the graph, in order; None to skip the comparison.
        kind: The mistake that explains any failure here; without one, the symptom names it.
        gradients: Whether the floating inputs require gradients.
        same_bits: Whether outputs must equal eager mode's bit for bit.
        more: Further inputs, of other shapes, for the same compilation.
        dynamic: torch.compile's option.
        autocast: Whether it runs under bfloat16 autocast.
        count: How many changes the pass returns; None to skip the comparison.
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
    """A wrapper around a backend: counts its graphs, checks its contract, and records the names of the
    remaining operations."""

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
                words = f"the compiled function returns {len(outputs)} outputs, the graph has {requested}"
                raise Fault("output-missing", words)
            return outputs

        return run_checked


@dataclass
class Outcome:
    """The results of a call: outputs, gradients (None without one), the inputs after it, and the input with
    which each output shares memory."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    shares: list[int | None]


def outcome(
    call: Callable[..., Any], inputs: Sequence[Tensor], parameters: Sequence[Tensor], one: Try
) -> Outcome:
    """Call a function on copies of inputs; gradients are those of a weighted sum of all outputs."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format) for t in inputs]
    if one.gradients:
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
        out = call(*leaves)
    outputs = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
    memory = [t.untyped_storage().data_ptr() for t in leaves]
    shares = [
        memory.index(t.untyped_storage().data_ptr()) if t.untyped_storage().data_ptr() in memory else None
        for t in outputs
    ]
    gradients: list[Tensor | None] = []
    if one.gradients:
        requested = [t for t in (*leaves, *parameters) if t.requires_grad]
        parts = [(t * weights(t)).sum().double() for t in outputs if t.requires_grad]
        gradients = [None] * len(requested)
        if parts:
            gradients = list(torch.autograd.grad(torch.stack(parts).sum(), requested, allow_unused=True))
    return Outcome([t.detach() for t in outputs], gradients, leaves, shares)


def weights(tensor: Tensor) -> Tensor:
    """Return numbers of a tensor's shape and dtype, the same for the same shape."""
    count = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return (0.3 + torch.sin(count)).to(tensor.dtype)


def attempt(one: Try, backend: Backend) -> Probe:
    """Compile a function with a backend and compare. Raise Fault."""
    probe = Probe(backend)
    torch._dynamo.reset()
    compiled = torch.compile(one.function, backend=probe, fullgraph=True, dynamic=one.dynamic)
    try:
        for count, inputs in enumerate((one.inputs, *one.more)):
            before = probe.graphs
            compare(one, compiled, inputs)
            if count and probe.graphs > before:
                words = "another shape is another compilation: a size was taken as a number"
                raise Fault("shape-baked", words)
        if one.after is not None:
            compare_graph(one.after, probe)
    except Exception as error:
        inner = cause_of(error)
        if isinstance(inner, Fault):
            raise Fault(one.kind or inner.kind, f"{one.words}: {inner}") from error
        if one.kind:
            words = " ".join(str(inner).split())
            raise Fault(one.kind, f"{one.words}: {type(inner).__name__}: {words}"[:300]) from error
        raise
    return probe


def cause_of(error: BaseException) -> BaseException:
    """Return the original exception of a backend. Dynamo wraps it, or hides it by failing on the half-changed
    graph."""
    current: BaseException | None = error
    while current is not None:
        inner = getattr(current, "inner_exception", current)
        if isinstance(inner, Fault):
            return inner
        current = current.__cause__ or current.__context__
    return getattr(error, "inner_exception", error)


def compare(one: Try, compiled: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Compare the compiled function with eager mode on one set of inputs."""
    is_module = isinstance(one.function, nn.Module)
    parameters = list(one.function.parameters()) if is_module else []
    eager = outcome(one.function, inputs, parameters, one)
    got = outcome(compiled, inputs, parameters, one)
    truth = eager if one.same_bits else in_float64(replace(one, autocast=False), inputs)
    compare_outputs(one, got, eager, truth)
    for index, (ours, theirs) in enumerate(zip(got.inputs, eager.inputs, strict=True)):
        if not torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
            raise Fault("input-written", f"input {index} is another after the call")
    for index, (ours, theirs) in enumerate(zip(got.shares, eager.shares, strict=True)):
        if ours != theirs:
            words = (
                f"output {index} shares the memory of input {ours}"
                if ours is not None
                else "an output is a copy"
            )
            raise Fault("aliased", f"{words}, and in eager mode it does not" if ours is not None else words)
    for index, (ours, theirs, exact) in enumerate(
        zip(got.gradients, eager.gradients, truth.gradients, strict=True)
    ):
        if (ours is None) != (theirs is None):
            which = "no gradient" if ours is None else "a gradient, and eager mode gives none"
            raise Fault("no-gradient", f"{name_of(index, inputs, one)} gets {which}")
        if (
            ours is not None
            and theirs is not None
            and exact is not None
            and (far := distance(ours, theirs, exact, False, one.autocast))
        ):
            raise Fault("gradient", f"the gradient of {name_of(index, inputs, one)} {far}")


def compare_outputs(one: Try, got: Outcome, eager: Outcome, truth: Outcome) -> None:
    """Compare number, shape, dtype and values."""
    faults = []
    for index, (ours, theirs, exact) in enumerate(
        zip(got.outputs, eager.outputs, truth.outputs, strict=True)
    ):
        if ours.shape != theirs.shape:
            words = f"output {index} has shape {list(ours.shape)}, expected {list(theirs.shape)}"
            faults.append(Fault("shape", words))
        elif ours.dtype != theirs.dtype:
            faults.append(
                Fault("dtype", f"output {index} is {plain(ours.dtype)}, expected {plain(theirs.dtype)}")
            )
        elif far := distance(ours, theirs, exact, one.same_bits, one.autocast):
            faults.append(Fault("value", f"output {index} {far}"))
    if not faults:
        return
    rest = list(got.outputs)
    for theirs in eager.outputs:
        alike = [k for k, t in enumerate(rest) if t.shape == theirs.shape and t.dtype == theirs.dtype]
        equal = [k for k in alike if torch.allclose(rest[k].double(), theirs.double())]
        if not equal:
            raise faults[0]
        rest.pop(equal[0])
    if len(eager.outputs) > 1:
        raise Fault("output-order", "the outputs are right and come in another order")
    raise faults[0]


def in_float64(one: Try, inputs: Sequence[Tensor]) -> Outcome:
    """Run in float64: the inputs, the parameters, and all arithmetic."""
    function = one.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    return outcome(function, [t.double() if t.is_floating_point() else t for t in inputs], parameters, one)


def distance(got: Tensor, eager: Tensor, exact: Tensor, same_bits: bool, autocast: bool) -> str:
    """Describe wrong values of a tensor; empty if they are correct. Under autocast they have bfloat16's
    spread."""
    if same_bits:
        same = (got == eager) | (got.isnan() & eager.isnan())
        if got.is_floating_point():
            same &= (got.signbit() == eager.signbit()) | got.isnan()
        if same.all():
            return ""
        at = tuple((~same).nonzero()[0].tolist())
        return f"has {int((~same).sum())} of {same.numel()} elements with other bits: {digits(got[at])} for {digits(eager[at])}"
    scale = exact.double().abs().max().clamp(min=1e-30)
    error = ((got.double() - exact.double()).abs().max() / scale).item()
    baseline = ((eager.double() - exact.double()).abs().max() / scale).item()
    limit = 2 * baseline + FLOOR["bfloat16" if autocast else plain(got.dtype)]
    if error <= limit:
        return ""
    return f"is wrong: its error is {error:.1e}, eager mode's {baseline:.1e}, the limit {limit:.1e}"


def digits(number: Tensor) -> str:
    """Format a number with as many digits as its dtype distinguishes: "100663304"."""
    return f"{number.item():.9g}" if number.is_floating_point() else str(number.item())


def compare_graph(requested: Sequence[str], probe: Probe) -> None:
    """Compare the remaining operations with the expected ones."""
    if list(requested) == probe.left:
        return
    if probe.dead:
        words = f"{', '.join(probe.dead)} stay in the graph, and nothing uses their results"
        raise Fault("dead-nodes", words)
    kind = "not-rewritten" if len(probe.left) >= len(requested) else "rewritten-too-much"
    expected = ", ".join(requested) or "nothing"
    raise Fault(kind, f"the graph holds {', '.join(probe.left) or 'nothing'}; expected {expected}")


def name_of(index: int, inputs: Sequence[Tensor], one: Try) -> str:
    """Name the tensor of a gradient: "input 0", or the parameter's name."""
    floating = [k for k, t in enumerate(inputs) if t.is_floating_point()]
    if index < len(floating):
        return f"input {floating[index]}"
    assert isinstance(one.function, nn.Module)
    asking = [name for name, p in one.function.named_parameters() if p.requires_grad]
    return asking[index - len(floating)]


def outputs_of(backend: Backend, function: Callable[..., Any], *inputs: Tensor, **options) -> Any:
    """Return a function's outputs under a backend, with a fresh compilation."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options)(*inputs)


def capture_graph(function: Callable[..., Any], *inputs: Tensor, **options) -> GraphModule:
    kept: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        kept.append(gm)
        return gm.forward

    outputs_of(keep, function, *inputs, **options)
    return kept[0]


def run_pass(one: Pass) -> Backend:
    """Return a backend that runs a pass, lints, regenerates the code, and runs the graph."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        one(gm)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise Fault(
                "out-of-order", f"lint refuses the graph: {' '.join(str(error).split())[:150]}"
            ) from error
        gm.recompile()
        return gm.forward

    return backend


def with_code(gm: GraphModule) -> GraphModule:
    """Generate the code of a graph module and its children, which PyTorch may defer."""
    for module in graph_modules(gm):
        assert module.code
    return gm


def stale(gm: GraphModule) -> str:
    """Return which module's code differs from its graph, "the graph" or "a child graph"; empty if none."""
    for module in graph_modules(gm):
        if module.code != module.graph.python_code("self").src:
            return "the graph" if module is gm else "a child graph"
    return ""


# ---- Helpers of checks ---------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    """Return [rows, 6] normal numbers of a dtype; of integers, from -9 to 9."""
    generator = torch.Generator().manual_seed(26)
    if dtype.is_floating_point:
        return torch.randn(rows, 6, generator=generator).to(dtype)
    return torch.randint(-9, 10, (rows, 6), generator=generator).to(dtype)


def special(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros of both signs, numbers near both ends of float32, infinities and NaN."""
    return torch.tensor(SPECIAL, dtype=dtype)


X = numbers()
"""The default inputs."""


def expect(got: object, expected: object, what: str, kind: str = "value") -> None:
    """Raise a Fault if two things are not equal."""
    if got != expected:
        raise Fault(kind, f"{what} is {got!r}, expected {expected!r}"[:300])


def tries(name: str, listed: tuple[Try, ...]) -> Check:
    """Return a check that runs a pass of the file on every function of a table."""

    def check(m: Module) -> None:
        for one in listed:
            counts: list[object] = []
            attempt(one, run_pass(lambda gm, counts=counts: counts.append(m[name](gm))))
            if one.count is not None:
                expect(counts[0], one.count, f"{one.words}: {name}(gm)", "count")

    check.__name__ = name
    return check
