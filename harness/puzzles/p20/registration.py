"""Checker of puzzle 20's last rung: an operator registered around raw kernels, tested as real models use it.

The kernels here stand in for a GPU's: they read memory as [rows, columns] from the first element on and
ignore strides. So a transposed or expanded tensor gives silently wrong numbers, as it would on a GPU.
"""

import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from harness.check import gradient_checks
from harness.check.python_files import PythonChecker, describe, run
from harness.check.results import GateResult
from harness.learner import blanks
from harness.learner.work import rung_blanks
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

_numbers = itertools.count(1)


def raw_memory(tensor: Tensor, columns: int) -> Tensor:
    """Return memory as a kernel reads it, [rows, columns], regardless of strides. Raise IndexError if it ends
    before."""
    there = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if there < tensor.numel():
        raise IndexError(f"the kernel reads {tensor.numel()} numbers from memory that holds {there}")
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(-1, columns)


@dataclass
class RawKernels:
    """Softmax and its backward pass on raw memory; counts its launches."""

    launched: list[str] = field(default_factory=list)

    def softmax(self, y: Tensor, x: Tensor) -> None:
        """Write softmax over the last axis of x into y."""
        self.launched.append("softmax")
        if x.numel():
            raw_memory(y, y.shape[-1]).copy_(raw_memory(x, x.shape[-1]).softmax(-1))

    def softmax_backward(self, dx: Tensor, dy: Tensor, y: Tensor) -> None:
        self.launched.append("softmax_backward")
        if y.numel():
            P, dP = raw_memory(y, y.shape[-1]), raw_memory(dy, y.shape[-1])
            raw_memory(dx, y.shape[-1]).copy_(P * (dP - (dP * P).sum(-1, keepdim=True)))


@dataclass
class Registered:
    """One registration by the learner's file, with its kernels."""

    op: Any
    kernels: RawKernels
    library: str


def register_op(module: dict) -> Registered:
    """Call the learner's `register` with a new library name."""
    kernels = RawKernels()
    library = f"workbook_p20_{next(_numbers)}"
    op = module["register"](library, kernels)
    if not callable(op):
        raise TypeError(f"register() returns {type(op).__name__}, expected the operator")
    return Registered(op, kernels, library)


def example(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a leaf of an odd shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def small() -> Tensor:
    """Return a contiguous leaf of a few elements, for finite differences."""
    return example()[:2, :2, :3].detach().contiguous().requires_grad_()


def differs(got: Tensor, expected: Tensor) -> bool:
    """Return whether shapes or values differ by more than rounding."""
    return got.shape != expected.shape or not torch.allclose(got, expected.to(got.dtype))


# ---- The checks, each with its effect on a model ------------------------------------------------------------


def forward(it: Registered) -> str | None:
    x = example()
    return "the operator does not return softmax(x)" if differs(it.op(x.detach()), x.softmax(-1)) else None


def strided_input(it: Registered) -> str | None:
    x = example().detach()
    for what in (x.mT, x[:, :1].expand(3, 5, 7)):
        if differs(it.op(what), what.softmax(-1)):
            return "a tensor that is not contiguous reaches the kernel as it is, and nothing says so"
    return None


def schema(it: Registered) -> str | None:
    """Run torch.library.opcheck: the schema, and the fake result's shape, dtype and strides, also for a
    transposed input."""
    for x in (example(), example().detach().mT):
        torch.library.opcheck(it.op, (x,), test_utils=("test_schema", "test_faketensor"))
    return None


def compiled(it: Registered) -> str | None:
    torch._dynamo.reset()
    x = example().detach()
    got = torch.compile(lambda x: it.op(x * 2) + 1, fullgraph=True, backend="aot_eager")(x)
    return "under torch.compile the result is wrong" if differs(got, (x * 2).softmax(-1) + 1) else None


def gradient(it: Registered) -> str | None:
    """Run gradcheck in float64; report exchanged kernel arguments if the values show it."""
    try:
        torch.autograd.gradcheck(it.op, (small(),))
    except GradcheckError as error:
        x, dy = small(), 1 + small().detach().square()
        (got,) = torch.autograd.grad(it.op(x), x, dy)
        P = x.detach().softmax(-1)
        if not differs(got, dy * (P - (P * dy).sum(-1, keepdim=True))):
            return "the gradient is dy * (y - sum(dy * y)): y and dy are handed to the kernel in each other's place"
        return f"gradcheck in float64: {str(error).splitlines()[0].rstrip(',')}"
    return None


def compiled_gradient(it: Registered) -> str | None:
    torch._dynamo.reset()
    x = example()
    model = torch.compile(lambda x: it.op(x * 2).square().sum(), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(model(x), x)
    (expected,) = torch.autograd.grad((x * 2).softmax(-1).square().sum(), x)
    return "under torch.compile the gradient is wrong" if differs(got, expected) else None


def expanded_gradient(it: Registered) -> str | None:
    """Check a gradient with stride 0, and a transposed one."""
    for weight in (
        torch.tensor(1.5, dtype=torch.float64).expand(3, 5, 7),
        example().detach().mT.contiguous().mT,
    ):
        x = example()
        (got,) = torch.autograd.grad(it.op(x), x, weight)
        (expected,) = torch.autograd.grad(x.softmax(-1), x, weight)
        if differs(got, expected):
            return "a gradient that is not contiguous reaches the kernel as it is, and nothing says so"
    return None


def memory(it: Registered) -> str | None:
    """Check that only the output is saved for the backward pass."""
    x = example(torch.float32)
    kept, lines = gradient_checks.saved_bytes(it.op, [x])
    if kept == 4 * x.numel():
        return None
    return f"{kept} bytes are kept ({'; '.join(lines) or 'nothing'}); the backward pass needs the output alone, {4 * x.numel()}"


def second_derivative(it: Registered) -> str | None:
    """Check that a second derivative is correct or refused, for losses whose dy does and does not depend on
    x."""
    x = small()
    for loss in (lambda y: y.square().sum(), lambda y: (y * torch.arange(y.numel()).view(y.shape)).sum()):
        try:
            got = penalty(it.op, loss, x)
        except RuntimeError as error:
            words = " ".join(str(error).split())[:160]
            if not raised_by_learner(error):
                return f"a second derivative ends in torch's words, not in yours: {words}"
            if not words:
                return "a second derivative is refused, and no word says what is refused"
            continue
        expected = penalty(lambda x: x.softmax(-1), loss, x)
        if differs(got, expected):
            at = torch.unravel_index((got - expected).abs().argmax(), got.shape)
            number, right = f"{got[at].item():.2g}", f"{expected[at].item():.2g}"
            return f"the gradient of a gradient penalty is {number} where it should be {right}, and nothing says so"
    return None


def raised_by_learner(error: RuntimeError) -> bool:
    """Return whether the last line that ran is a `raise` outside of torch."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise") and "torch" not in Path(last.filename).parts


def penalty(function: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Return the gradient of a gradient penalty: the squared length of a loss's gradient. (Softmax's gradient
    always sums to 0.)"""
    x = point.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(function(x)), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


def autocast(it: Registered) -> str | None:
    """Check that bfloat16 autocast computes in float32, like PyTorch's softmax on a GPU."""
    x = example(torch.bfloat16).detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = it.op(x)
    if out.dtype == torch.float32:
        return None
    return f"under autocast it computes in {out.dtype}: probabilities lose 16 of 24 bits where PyTorch's own keep them"


def batched(it: Registered) -> str | None:
    """Check torch.func.vmap over each axis but the last."""
    x = example().detach()
    for axis in (0, 1):
        it.kernels.launched.clear()
        got = torch.func.vmap(it.op, in_dims=axis)(x)
        if differs(got, x.movedim(axis, 0).softmax(-1)):
            return f"vmap over axis {axis} gives wrong values"
        if (count := len(it.kernels.launched)) > 1:
            return f"vmap over axis {axis} launches the kernel {count} times, once for each sample"
    inner = torch.func.vmap(it.op, in_dims=2)(x)
    if differs(inner, x.movedim(2, 0).softmax(-1)):
        return "vmap over the last axis gives wrong values: the batch axis must move to the front first"
    return None


CHECKS: dict[str, tuple[Callable[[Registered], str | None], ...]] = {
    "define": (forward, strided_input),
    "fake": (schema, compiled),
    "save": (memory,),
    "gradient": (gradient, expanded_gradient, compiled_gradient),
    "second": (second_derivative,),
    "autocast": (autocast,),
    "vmap": (batched,),
}
"""Gate -> its checks, by which a line that is left out is named."""
IN_A_MODEL = {
    "forward": "every layer after it sees wrong numbers",
    "strided_input": "attention hands in transposed tensors all the time",
    "schema": "the compiler plans memory by what it is told, and code compiled for other shapes or strides reads wrongly",
    "compiled": "torch.compile stops at this operator, or the model computes otherwise than in eager mode",
    "memory": "the batch size is what memory leaves: bytes kept are samples lost, and what no hook sees no tool can save",
    "gradient": "the loss may still go down, along another direction than its gradient",
    "expanded_gradient": "`loss = out.sum()` hands in a single number with stride 0, which a kernel walks past",
    "compiled_gradient": "a model that trains in eager mode stops, or trains otherwise, once somebody compiles it",
    "second_derivative": "a gradient penalty ends in words that say nothing of it, or trains on wrong numbers",
    "autocast": "mixed precision makes of float32 logits 16-bit ones before the exponential",
    "batched": "per-sample gradients and ensembles go through vmap",
}
"""Check -> the effect of its failure on training."""


TAKES_EFFECT_BY = {"save": "gradient"}
"""Gate -> the later gate whose blank registers its lines."""


class RegistrationChecker(PythonChecker):
    """Checks the registration, a fresh one for every check."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        wrong, first = [], None
        module = self._load_effective(gate, module, path)
        for check in CHECKS[gate.id]:
            means = [f"   in a model: {IN_A_MODEL[check.__name__]}"]
            try:
                line = check(register_op(module))
            except Exception as error:  # an exception of the learner's code is a result
                line = describe(error, path, longest=400)
                means = [] if check is forward else means  # it computes nothing, and so no wrong numbers
            if line:
                first = first or check.__name__
                wrong += [f"{check.__name__}: {line}", *means]
            if line and check in (forward, gradient):  # the later checks would only repeat it
                break
        if wrong and (waiting := self._missing_parts(gate, path)):
            wrong.append(
                f"it may be waiting for {', '.join(waiting)}, which {'is' if len(waiting) == 1 else 'are'} not written yet"
            )
        if wrong:
            return self.wrong(gate, wrong, first)
        return GateResult(gate, "correct", summary=", ".join(check.__name__ for check in CHECKS[gate.id]))

    def _load_effective(self, gate: Gate, module: dict, path: Path) -> dict:
        """Load the file with the solution's code in the later blank that registers a gate's lines, if that is
        untouched."""
        later = TAKES_EFFECT_BY.get(gate.id)
        if later is None or rung_blanks(path, self.rung)[later].size:
            return module
        solution = blanks.find(blanks.read(roots.solutions() / self.puzzle.name / self.rung.file))
        return run(blanks.join(blanks.split(blanks.read(path)), {later: solution[later].body}), path)

    def _missing_parts(self, gate: Gate, path: Path) -> list[str]:
        """Return the earlier parts that are not written yet."""
        by_id = rung_blanks(path, self.rung)
        return [id for id in self.rung.gates[: self.rung.gates.index(gate.id)] if by_id[id].size == 0]
