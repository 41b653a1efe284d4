"""Checker of puzzle 20's PyTorch rung: named checks of each autograd.Function, and the bytes that it saves."""

import inspect
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check import gradient_checks as checks
from harness.check.compare import Evidence, compare, got_and_expected
from harness.check.diagnose import explanation
from harness.check.gradients import TOLERANCE, Subject, gradients, random_like
from harness.check.python_files import PythonChecker, describe
from harness.check.results import GateResult
from harness.puzzles.formulas import EPS
from harness.puzzles.p20.mistakes import WORD
from harness.spec.puzzle import Case, Gate, Puzzle

LEADING = {"odd": (3, 5), "square": (4, 4), "row": (), "deep": (2, 3, 2), "tall": (4096,)}
"""Sizes in front of the last axis, by kind."""
LAST = {"odd": 7, "square": 4, "row": 6, "deep": 5, "tall": 8}

CLASSES = {
    "relu_input": "ReluFromInput",
    "relu_output": "ReluFromOutput",
    "relu_mask": "ReluFromMask",
    "relu_bits": "ReluFromBits",
    "layernorm": "LayerNorm",
}
COMMON = (
    checks.forward, checks.against_autograd, checks.gradcheck_float64, checks.expanded_gradient,
    checks.strided_gradient, checks.two_calls, checks.under_checkpoint, checks.inputs_unchanged,
    checks.held_by_ctx, checks.memory_saved,
)  # fmt: skip
"""Checks of every function, the most informative first."""
RELU = (*COMMON, checks.at_zero, checks.at_no_numbers)
"""Further checks: at a kink, and of a mask with values that are not finite."""


def away_from_zero(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return a tensor whose elements are at least 0.1 away from ReLU's kink."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*LEADING[sizes], LAST[sizes], generator=generator, dtype=torch.float64)
    return (x + 0.1 * x.sign(),)


def layernorm_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return x with a mean far from 0, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    H = LAST[sizes]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return 3 + normal(*LEADING[sizes], H), 1 + 0.5 * normal(H), normal(H)


def words(x: Tensor) -> int:
    """Return the bytes of a mask with a bit per element, in words of 32."""
    return math.ceil(x.numel() / WORD) * 4


def subject(gate: str, function: type[torch.autograd.Function]) -> Subject:
    """Return what a gate's class is checked against, with the ledger of what it may save in float32."""
    if gate == "layernorm":
        return Subject(
            lambda x, weight, bias: function.apply(x, weight, bias, EPS),
            lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
            layernorm_inputs,
            # x, the weight, and two numbers for each row.
            saved=lambda x, weight, bias: 4 * (x.numel() + weight.numel() + 2 * x.numel() // x.shape[-1]),
        )
    ledger = {
        "relu_input": lambda x: 4 * x.numel(),
        "relu_output": lambda x: 4 * x.numel(),
        "relu_mask": lambda x: x.numel(),
        "relu_bits": words,
    }
    return Subject(function.apply, F.relu, away_from_zero, saved=ledger[gate])


class FunctionsChecker(PythonChecker):
    """Checks each class of the PyTorch rung separately."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        """Run the checks of one class; stop after wrong results or gradients, which the later checks would
        repeat."""
        function = module.get(CLASSES[gate.id])
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            words = f"the file defines no class {CLASSES[gate.id]}(torch.autograd.Function)"
            return self.wrong(gate, [words], hint=2)
        what = subject(gate.id, function)
        requested = RELU if gate.id.startswith("relu") else COMMON
        lines: dict[str, str] = {}
        for check in requested:
            if line := check(what):
                lines[check.__name__] = line
                if check in (checks.forward, checks.against_autograd):
                    break
        lines = checks.without_echoes(lines)
        wrong = [f"{name}: {line}" for name, line in lines.items()]
        if checks.against_autograd.__name__ in lines:
            wrong[-1:] = wrong_gradients(self.puzzle, what, function, path) or wrong[-1:]
        if wrong:
            return self.wrong(gate, wrong, next(iter(lines)), hint=2)
        return GateResult(gate, "correct", summary=f"{len(requested)} checks; keeps {describe_saved(what)}")


# ---- Diagnosis of a wrong gradient -------------------------------------------------------------------------


def wrong_gradients(
    puzzle: Puzzle, what: Subject, function: type[torch.autograd.Function], path: Path
) -> list[str]:
    """Describe the first wrong gradients (sizes, position, known mistake), or the exception raised there."""
    names = [name for name in inspect.signature(function.forward).parameters if name != "ctx"]
    for sizes in what.sizes:
        inputs = what.inputs(sizes)
        expected = gradients(what.reference, what.inputs(sizes), random_like)
        try:
            got = gradients(what.function, inputs, random_like)
        except Exception as error:  # an exception of the learner's code is a result
            over_all = "got [] but expected shape" in str(error) and sizes == "row"
            more = (
                "; `.sum(())` adds up everything: without leading axes there is nothing to add up" * over_all
            )
            return [f"{describe(error, path)}{more} ({sizes} sizes, {shapes(names, inputs)})"]
        ones = gradients(what.reference, what.inputs(sizes), lambda out: [torch.ones_like(t) for t in out])
        lines = [
            line
            for name, g, e, of_sum in zip(names, got, expected, ones, strict=False)
            if (line := describe_wrong(name, g, e, of_sum, inputs))
        ]
        if lines:
            lines += known_mistakes(puzzle, what, names)
            return [f"at {sizes} sizes, {shapes(names, inputs)}:", *(f"   {line}" for line in lines)]
    return []


QUANTITIES = {
    ("x",): {"x": "grad_relu"},
    ("x", "weight", "bias", "eps"): {"x": "grad_input", "weight": "grad_weight", "bias": "grad_bias"},
}
"""Arguments of a class -> input -> the quantity of the derivation that its gradient is."""


def known_mistakes(puzzle: Puzzle, what: Subject, names: list[str]) -> list[str]:
    """Return for each wrong gradient the known mistake that gives its values at all sizes."""
    by_quantity: dict[str, list[Evidence]] = {}
    for sizes in what.sizes:
        inputs = what.inputs(sizes)
        try:
            got = gradients(what.function, inputs, random_like)
        except Exception:  # sizes that the learner's code does not take are another mistake
            return []
        expected = gradients(what.reference, what.inputs(sizes), random_like)
        arrays = matrices(names, [*inputs, *random_like((inputs[0],))])
        for name, mine, right in zip(names, got, expected, strict=False):
            quantity = QUANTITIES.get(tuple(names), {}).get(name)
            if quantity is None or mine.shape != right.shape:
                continue
            shape = (-1, mine.shape[-1]) if name == "x" else mine.shape
            ours, theirs = (t.detach().numpy().reshape(shape) for t in (mine, right))
            result = compare(ours, theirs, theirs, "float64")
            if not result.ok:
                case, nothing = Case(sizes, "", ours.shape, ""), np.zeros(ours.shape, bool)
                one = Evidence(case, arrays, ours, theirs, nothing, result, "float64")
                by_quantity.setdefault(quantity, []).append(one)
    known = {quantity: explanation(puzzle, quantity, each) for quantity, each in by_quantity.items()}
    return [
        f"your {puzzle.printed_name(q)} equals the reference {mistake.words}"
        for q, mistake in known.items()
        if mistake
    ]


def matrices(names: list[str], tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Name the tensors as the derivation's inputs, with elements as matrices of rows; the last is dy."""
    arrays = [t.detach().numpy() for t in tensors]
    x, dy = (array.reshape(-1, array.shape[-1]) for array in (arrays[0], arrays[-1]))
    arguments = {"input": x, "logits": x, "grad_output": dy}
    return arguments | {name: array for name, array in zip(names[1:], arrays[1:-1], strict=False)}


def describe_wrong(
    name: str, got: Tensor, expected: Tensor, of_sum: Tensor, inputs: list[Tensor]
) -> str | None:
    """Describe the first wrong element of a gradient; None if it is correct."""
    apart = (got - expected).abs()
    if apart.max() <= TOLERANCE * expected.abs().max():
        return None
    place = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    limit = TOLERANCE * expected.abs().max().item()
    reports = got_and_expected(got[place].item(), expected[place].item(), limit, 6)
    words = f"the gradient of {name} is wrong: {list(place)} {reports}"
    if torch.allclose(got, of_sum):
        return f"{words}; it is what the sum of the output would have: dy is not used"
    factor = checks.constant_factor(got, expected, inputs)
    return f"{words}; {factor}" if factor else words


def shapes(names: list[str], inputs: list[Tensor]) -> str:
    """Format as "x [3, 5, 7], weight [7]"."""
    return ", ".join(f"{name} {list(t.shape)}" for name, t in zip(names, inputs, strict=False))


def describe_saved(what: Subject) -> str:
    """Describe how much a function saves for an example."""
    inputs = what.inputs("deep", dtype=torch.float32)
    kept, _ = checks.saved_bytes(what.function, inputs)
    bits = 8 * kept / inputs[0].numel()
    return f"{kept} bytes of a float32 input of {inputs[0].numel()} elements ({bits:.3g} bits each)"
