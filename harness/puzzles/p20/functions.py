"""Checker of puzzle 20's PyTorch rung, which checks each autograd.Function and the bytes it saves."""

import inspect
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check import gradient_checks as checks
from harness.check.compare import Evidence, compare, format_got_and_expected
from harness.check.diagnose import find_explanation
from harness.check.gradients import TOLERANCE, Subject, compute_gradients, random_like
from harness.check.python_files import PythonChecker, describe_exception
from harness.check.results import GateResult
from harness.puzzles.formulas import EPS
from harness.puzzles.p20.mistakes import WORD_BITS
from harness.spec.puzzle import Case, Gate, Puzzle

LEADING_SIZES = {"odd": (3, 5), "square": (4, 4), "row": (), "deep": (2, 3, 2), "tall": (4096,)}
"""Kind of sizes -> the sizes of the leading axes, all but the last."""
LAST_SIZES = {"odd": 7, "square": 4, "row": 6, "deep": 5, "tall": 8}

CLASS_NAMES = {
    "relu_input": "ReluFromInput",
    "relu_output": "ReluFromOutput",
    "relu_mask": "ReluFromMask",
    "relu_bits": "ReluFromBits",
    "layernorm": "LayerNorm",
}
COMMON_CHECKS = (
    checks.forward, checks.against_autograd, checks.gradcheck_float64, checks.expanded_gradient,
    checks.strided_gradient, checks.two_calls, checks.under_checkpoint, checks.inputs_unchanged,
    checks.held_by_ctx, checks.memory_saved,
)  # fmt: skip
"""Checks of every class, the most informative first."""
RELU_CHECKS = (*COMMON_CHECKS, checks.at_zero, checks.at_no_numbers)
"""Checks of the ReLU classes, also at the kink and on non-finite values."""


def make_relu_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return a tensor whose elements are at least 0.1 away from ReLU's kink."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*LEADING_SIZES[sizes], LAST_SIZES[sizes], generator=generator, dtype=torch.float64)
    return (x + 0.1 * x.sign(),)


def make_layernorm_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    H = LAST_SIZES[sizes]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return 3 + normal(*LEADING_SIZES[sizes], H), 1 + 0.5 * normal(H), normal(H)


def count_packed_mask_bytes(x: Tensor) -> int:
    """Return the size in bytes of a mask with one bit per element, packed into 32-bit words."""
    return math.ceil(x.numel() / WORD_BITS) * 4


def make_subject(gate: str, function: type[torch.autograd.Function]) -> Subject:
    """Return a gate's class with its reference, its inputs, and the number of bytes it may save in float32."""
    if gate == "layernorm":
        return Subject(
            lambda x, weight, bias: function.apply(x, weight, bias, EPS),
            lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
            make_layernorm_inputs,
            # x, the weight, and mean and rstd of each row.
            expected_saved_bytes=lambda x, weight, bias: (
                4 * (x.numel() + weight.numel() + 2 * x.numel() // x.shape[-1])
            ),
        )
    allowed_bytes = {
        "relu_input": lambda x: 4 * x.numel(),
        "relu_output": lambda x: 4 * x.numel(),
        "relu_mask": lambda x: x.numel(),
        "relu_bits": count_packed_mask_bytes,
    }
    return Subject(function.apply, F.relu, make_relu_inputs, expected_saved_bytes=allowed_bytes[gate])


class FunctionsChecker(PythonChecker):
    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        """Check one class; stop if results or gradients are wrong, as later checks would repeat the failure."""
        function = module.get(CLASS_NAMES[gate.id])
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            message = f"the file defines no class {CLASS_NAMES[gate.id]}(torch.autograd.Function)"
            return self.make_wrong_result(gate, [message], hint=2)
        subject = make_subject(gate.id, function)
        checks_to_run = RELU_CHECKS if gate.id.startswith("relu") else COMMON_CHECKS
        lines: dict[str, str] = {}
        for check in checks_to_run:
            if line := check(subject):
                lines[check.__name__] = line
                if check in (checks.forward, checks.against_autograd):
                    break
        lines = checks.drop_repeated_messages(lines)
        failures = [f"{name}: {line}" for name, line in lines.items()]
        if checks.against_autograd.__name__ in lines:
            failures[-1:] = describe_wrong_gradients(self.puzzle, subject, function, path) or failures[-1:]
        if failures:
            return self.make_wrong_result(gate, failures, next(iter(lines)), hint=2)
        summary = f"{len(checks_to_run)} checks; keeps {describe_saved(subject)}"
        return GateResult(gate, "correct", summary=summary)


# ---- Diagnosis of a wrong gradient -------------------------------------------------------------------------


def describe_wrong_gradients(
    puzzle: Puzzle, subject: Subject, function: type[torch.autograd.Function], path: Path
) -> list[str]:
    """Describe the wrong gradients, or the exception raised, at the first sizes with any."""
    names = [name for name in inspect.signature(function.forward).parameters if name != "ctx"]
    for sizes in subject.sizes:
        inputs = subject.inputs(sizes)
        expected = compute_gradients(subject.reference, subject.inputs(sizes), random_like)
        try:
            got = compute_gradients(subject.function, inputs, random_like)
        except Exception as error:  # an exception in the learner's code is a result
            message = describe_exception(error, path)
            if "got [] but expected shape" in str(error) and sizes == "row":
                message += "; `.sum(())` sums over all axes: without leading axes there is nothing to sum"
            return [f"{message} ({sizes} sizes, {format_shapes(names, inputs)})"]
        ones = compute_gradients(
            subject.reference, subject.inputs(sizes), lambda out: [torch.ones_like(t) for t in out]
        )
        lines = [
            line
            for name, g, e, grad_for_ones in zip(names, got, expected, ones, strict=False)
            if (line := describe_wrong_gradient(name, g, e, grad_for_ones, inputs))
        ]
        if lines:
            lines += describe_known_mistakes(puzzle, subject, names)
            return [f"at {sizes} sizes, {format_shapes(names, inputs)}:", *(f"   {line}" for line in lines)]
    return []


QUANTITIES = {
    ("x",): {"x": "grad_relu"},
    ("x", "weight", "bias", "eps"): {"x": "grad_input", "weight": "grad_weight", "bias": "grad_bias"},
}
"""Arguments of a class -> input -> the derivation's name for its gradient."""


def describe_known_mistakes(puzzle: Puzzle, subject: Subject, names: list[str]) -> list[str]:
    """Describe, for each wrong gradient, the known mistake that reproduces its values at all sizes."""
    by_quantity: dict[str, list[Evidence]] = {}
    for sizes in subject.sizes:
        inputs = subject.inputs(sizes)
        try:
            got = compute_gradients(subject.function, inputs, random_like)
        except Exception:  # code that fails at some sizes has another mistake
            return []
        expected = compute_gradients(subject.reference, subject.inputs(sizes), random_like)
        arrays = collect_derivation_inputs(names, [*inputs, *random_like((inputs[0],))])
        for name, g, e in zip(names, got, expected, strict=False):
            quantity = QUANTITIES.get(tuple(names), {}).get(name)
            if quantity is None or g.shape != e.shape:
                continue
            shape = (-1, g.shape[-1]) if name == "x" else g.shape
            actual, truth = (t.detach().numpy().reshape(shape) for t in (g, e))
            result = compare(actual, truth, truth, "float64")
            if not result.ok:
                case, unwritten = Case(sizes, "", actual.shape, ""), np.zeros(actual.shape, bool)
                evidence = Evidence(case, arrays, actual, truth, unwritten, result, "float64")
                by_quantity.setdefault(quantity, []).append(evidence)
    explanations = {
        quantity: find_explanation(puzzle, quantity, cases) for quantity, cases in by_quantity.items()
    }
    return [
        f"your {puzzle.get_printed_name(q)} equals the reference {mistake.description}"
        for q, mistake in explanations.items()
        if mistake
    ]


def collect_derivation_inputs(names: list[str], tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Return the derivation's inputs by name, x and dy as matrices of rows; the last tensor is dy."""
    arrays = [t.detach().numpy() for t in tensors]
    x, dy = (array.reshape(-1, array.shape[-1]) for array in (arrays[0], arrays[-1]))
    arguments = {"input": x, "logits": x, "grad_output": dy}
    return arguments | {name: array for name, array in zip(names[1:], arrays[1:-1], strict=False)}


def describe_wrong_gradient(
    name: str, got: Tensor, expected: Tensor, grad_for_ones: Tensor, inputs: list[Tensor]
) -> str | None:
    """Describe a gradient's element with the largest error; return None if the gradient is correct.

    `grad_for_ones` is the correct gradient for an incoming gradient of ones.
    """
    errors = (got - expected).abs()
    if errors.max() <= TOLERANCE * expected.abs().max():
        return None
    index = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    limit = TOLERANCE * expected.abs().max().item()
    got_and_expected = format_got_and_expected(got[index].item(), expected[index].item(), limit, 6)
    message = f"the gradient of {name} is wrong: {list(index)} {got_and_expected}"
    if torch.allclose(got, grad_for_ones):
        return f"{message}; it is the gradient of the output's sum: dy is not used"
    factor = checks.describe_constant_factor(got, expected, inputs)
    return f"{message}; {factor}" if factor else message


def format_shapes(names: list[str], inputs: list[Tensor]) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in zip(names, inputs, strict=False))


def describe_saved(subject: Subject) -> str:
    inputs = subject.inputs("deep", dtype=torch.float32)
    saved, _ = checks.count_saved_bytes(subject.function, inputs)
    bits = 8 * saved / inputs[0].numel()
    return f"{saved} bytes of a float32 input of {inputs[0].numel()} elements ({bits:.3g} bits each)"
