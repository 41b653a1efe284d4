"""Checker of puzzle 20's last rung: an operator around raw kernels, tested as real models use it.

Like GPU kernels, the stand-in kernels here read [rows, columns] from the first element on and ignore strides.
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
from harness.check.python_files import PythonChecker, describe_exception, run_source
from harness.check.results import GateResult
from harness.learner import blanks
from harness.learner.exercise import read_rung_blanks
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

_op_numbers = itertools.count(1)


def view_raw_memory(tensor: Tensor, columns: int) -> Tensor:
    """View memory as a kernel reads it, contiguous [rows, columns]; raise IndexError if it is too short."""
    available = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if available < tensor.numel():
        raise IndexError(f"the kernel reads {tensor.numel()} numbers from memory that holds {available}")
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(-1, columns)


@dataclass
class RawKernels:
    """Softmax and its backward pass on raw memory; records its launches."""

    launches: list[str] = field(default_factory=list)

    def softmax(self, y: Tensor, x: Tensor) -> None:
        self.launches.append("softmax")
        if x.numel():
            view_raw_memory(y, y.shape[-1]).copy_(view_raw_memory(x, x.shape[-1]).softmax(-1))

    def softmax_backward(self, dx: Tensor, dy: Tensor, y: Tensor) -> None:
        self.launches.append("softmax_backward")
        if y.numel():
            P, dP = view_raw_memory(y, y.shape[-1]), view_raw_memory(dy, y.shape[-1])
            view_raw_memory(dx, y.shape[-1]).copy_(P * (dP - (dP * P).sum(-1, keepdim=True)))


@dataclass
class RegisteredOp:
    """An operator that the learner's file registered, with its kernels."""

    op: Any
    kernels: RawKernels


def register_op(module: dict) -> RegisteredOp:
    kernels = RawKernels()
    op = module["register"](f"workbook_p20_{next(_op_numbers)}", kernels)
    if not callable(op):
        raise TypeError(f"register() returns {type(op).__name__}, expected the operator")
    return RegisteredOp(op, kernels)


def make_input(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def make_small_input() -> Tensor:
    return make_input()[:2, :2, :3].detach().contiguous().requires_grad_()


def differs(got: Tensor, expected: Tensor) -> bool:
    return got.shape != expected.shape or not torch.allclose(got, expected.to(got.dtype))


# ---- The checks, each with its effect on a model ------------------------------------------------------------


def forward(registered: RegisteredOp) -> str | None:
    x = make_input().detach()
    return "the operator does not return softmax(x)" if differs(registered.op(x), x.softmax(-1)) else None


def strided_input(registered: RegisteredOp) -> str | None:
    x = make_input().detach()
    for strided in (x.mT, x[:, :1].expand(3, 5, 7)):
        if differs(registered.op(strided), strided.softmax(-1)):
            return "a non-contiguous tensor reaches the kernel without a copy or an error"
    return None


def schema(registered: RegisteredOp) -> str | None:
    """Run torch.library.opcheck on the schema and the fake result, also for a transposed input."""
    for x in (make_input(), make_input().detach().mT):
        torch.library.opcheck(registered.op, (x,), test_utils=("test_schema", "test_faketensor"))
    return None


def compiled(registered: RegisteredOp) -> str | None:
    torch._dynamo.reset()
    x = make_input().detach()
    got = torch.compile(lambda x: registered.op(x * 2) + 1, fullgraph=True, backend="aot_eager")(x)
    return "under torch.compile the result is wrong" if differs(got, (x * 2).softmax(-1) + 1) else None


def gradient(registered: RegisteredOp) -> str | None:
    """Run gradcheck in float64; if it fails, check whether y and dy are swapped in the kernel call."""
    try:
        torch.autograd.gradcheck(registered.op, (make_small_input(),))
    except GradcheckError as error:
        x, dy = make_small_input(), 1 + make_small_input().detach().square()
        (got,) = torch.autograd.grad(registered.op(x), x, dy)
        P = x.detach().softmax(-1)
        if not differs(got, dy * (P - (P * dy).sum(-1, keepdim=True))):
            return "the gradient is dy * (y - sum(dy * y)): y and dy are swapped in the call of the kernel"
        return f"gradcheck in float64: {str(error).splitlines()[0].rstrip(',')}"
    return None


def compiled_gradient(registered: RegisteredOp) -> str | None:
    torch._dynamo.reset()
    x = make_input()
    model = torch.compile(lambda x: registered.op(x * 2).square().sum(), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(model(x), x)
    (expected,) = torch.autograd.grad((x * 2).softmax(-1).square().sum(), x)
    return "under torch.compile the gradient is wrong" if differs(got, expected) else None


def expanded_gradient(registered: RegisteredOp) -> str | None:
    """Check a gradient with stride 0, and a transposed one."""
    stride_0 = torch.tensor(1.5, dtype=torch.float64).expand(3, 5, 7)
    for weight in (stride_0, make_input().detach().mT.contiguous().mT):
        x = make_input()
        (got,) = torch.autograd.grad(registered.op(x), x, weight)
        (expected,) = torch.autograd.grad(x.softmax(-1), x, weight)
        if differs(got, expected):
            return "a non-contiguous gradient reaches the kernel without a copy or an error"
    return None


def memory(registered: RegisteredOp) -> str | None:
    """Check that only the output is saved for the backward pass."""
    x = make_input(torch.float32)
    saved, lines = gradient_checks.count_saved_bytes(registered.op, [x])
    if saved == 4 * x.numel():
        return None
    return f"{saved} bytes are saved ({'; '.join(lines) or 'nothing'}); the backward pass needs only the output, {4 * x.numel()}"


def second_derivative(registered: RegisteredOp) -> str | None:
    """Check that a second derivative is correct or raises an error, whether or not the loss's dy depends on x."""
    x = make_small_input()
    for loss in (lambda y: y.square().sum(), lambda y: (y * torch.arange(y.numel()).view(y.shape)).sum()):
        try:
            got = differentiate_penalty(registered.op, loss, x)
        except RuntimeError as error:
            message = " ".join(str(error).split())[:160]
            if not is_raised_by_learner(error):
                return f"a second derivative raises torch's error, not yours: {message}"
            if not message:
                return "a second derivative raises an error without a message"
            continue
        expected = differentiate_penalty(lambda x: x.softmax(-1), loss, x)
        if differs(got, expected):
            index = torch.unravel_index((got - expected).abs().argmax(), got.shape)
            numbers = f"{got[index].item():.2g}, expected {expected[index].item():.2g}"
            return f"the gradient of a gradient penalty is {numbers}, and there is no error"
    return None


def is_raised_by_learner(error: RuntimeError) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise") and "torch" not in Path(last.filename).parts


def differentiate_penalty(
    function: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], point: Tensor
) -> Tensor:
    """Return the gradient of a gradient penalty, the squared norm of a loss's gradient."""
    x = point.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(function(x)), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


def autocast(registered: RegisteredOp) -> str | None:
    """Check that bfloat16 autocast computes in float32, like PyTorch's softmax on a GPU."""
    x = make_input(torch.bfloat16).detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = registered.op(x)
    if out.dtype == torch.float32:
        return None
    return f"under autocast it computes in {out.dtype}: probabilities lose 16 of 24 bits, which PyTorch's softmax keeps"


def batched(registered: RegisteredOp) -> str | None:
    """Check torch.func.vmap over each axis but the last."""
    x = make_input().detach()
    for axis in (0, 1):
        registered.kernels.launches.clear()
        got = torch.func.vmap(registered.op, in_dims=axis)(x)
        if differs(got, x.movedim(axis, 0).softmax(-1)):
            return f"vmap over axis {axis} gives wrong values"
        if (count := len(registered.kernels.launches)) > 1:
            return f"vmap over axis {axis} launches the kernel {count} times, once per sample"
    got = torch.func.vmap(registered.op, in_dims=2)(x)
    if differs(got, x.movedim(2, 0).softmax(-1)):
        return "vmap over the last axis gives wrong values: move the batch axis to the front first"
    return None


CHECKS: dict[str, tuple[Callable[[RegisteredOp], str | None], ...]] = {
    "define": (forward, strided_input),
    "fake": (schema, compiled),
    "save": (memory,),
    "gradient": (gradient, expanded_gradient, compiled_gradient),
    "second": (second_derivative,),
    "autocast": (autocast,),
    "vmap": (batched,),
}
"""Gate -> its checks, which fail if any line of its blank is missing."""
EFFECT_ON_MODEL = {
    "forward": "every layer after it sees wrong numbers",
    "strided_input": "attention passes transposed tensors all the time",
    "schema": "the compiler plans memory from the schema and the fake result; if they are wrong, compiled code reads wrong memory",
    "compiled": "torch.compile fails at this operator, or the compiled model computes something else than in eager mode",
    "memory": "saved bytes limit the batch size, and offloading tools see only tensors passed to save_for_backward",
    "gradient": "the loss may still go down, but not along its gradient",
    "expanded_gradient": "`loss = out.sum()` passes a single number with stride 0, and a kernel reads past its end",
    "compiled_gradient": "a model that trains in eager mode fails, or trains differently, when compiled",
    "second_derivative": "a gradient penalty fails with an unrelated error, or trains on wrong numbers",
    "autocast": "mixed precision rounds float32 logits to 16 bits before the exponential",
    "batched": "per-sample gradients and ensembles use vmap",
}
"""Check -> the effect of its failure on a real model."""


REGISTERING_GATE = {"save": "gradient"}
"""Gate -> the later gate whose blank registers this gate's code."""


class RegistrationChecker(PythonChecker):
    """Checks the learner's operator, which each check registers again."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        failures, first_failed = [], None
        module = self._load_with_registration(gate, module, path)
        for check in CHECKS[gate.id]:
            effect = [f"   in a model: {EFFECT_ON_MODEL[check.__name__]}"]
            try:
                line = check(register_op(module))
            except Exception as error:  # an exception in the learner's code is a result
                line = describe_exception(error, path, max_length=400)
                effect = [] if check is forward else effect  # an operator that raises gives no wrong numbers
            if line:
                first_failed = first_failed or check.__name__
                failures += [f"{check.__name__}: {line}", *effect]
            if line and check in (forward, gradient):  # later checks would only repeat the failure
                break
        if failures and (missing := self._list_empty_earlier_blanks(gate, path)):
            verb = "is" if len(missing) == 1 else "are"
            failures.append(f"it may need {', '.join(missing)}, which {verb} not written yet")
        if failures:
            return self.make_wrong_result(gate, failures, first_failed)
        return GateResult(gate, "correct", summary=", ".join(check.__name__ for check in CHECKS[gate.id]))

    def _load_with_registration(self, gate: Gate, module: dict, path: Path) -> dict:
        """Load the file; if the later blank that registers the gate's code is empty, use the solution's."""
        later_gate = REGISTERING_GATE.get(gate.id)
        if later_gate is None or read_rung_blanks(path, self.rung)[later_gate].size:
            return module
        solution = blanks.read_source(roots.get_solutions() / self.puzzle.name / self.rung.file)
        bodies = {later_gate: blanks.find_blanks(solution)[later_gate].body}
        return run_source(blanks.join_segments(blanks.split_blanks(blanks.read_source(path)), bodies), path)

    def _list_empty_earlier_blanks(self, gate: Gate, path: Path) -> list[str]:
        by_id = read_rung_blanks(path, self.rung)
        return [id for id in self.rung.gates[: self.rung.gates.index(gate.id)] if by_id[id].size == 0]
