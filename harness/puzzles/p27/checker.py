"""Checker of puzzle 27's tape: each part against autograd in float64, then the model, optimizer and step.

Checks also cover what each part saves, whether it releases it, and whether it writes to its inputs.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from harness.check.compare import Evidence
from harness.check.diagnose import diagnose
from harness.check.python_files import PythonChecker, describe_exception
from harness.check.results import Diagnosis, GateResult
from harness.puzzles.p27 import optimizing
from harness.puzzles.p27.autograd import KNOWN_CHANGES, Tensors, init_parameters, make_changed_model
from harness.puzzles.p27.bytes_live import draw_live_bytes
from harness.puzzles.p27.part_formulas import FORMULAS, UNUSED_POSITIONS
from harness.puzzles.p27.running import (
    CheckError,
    Module,
    PartResults,
    collect_values,
    compute_with_autograd,
    count_saved_bytes,
    describe_wrong,
    find_wrong_values,
    is_close,
    make_evidence,
    make_excerpt,
    make_leaves,
    no_autograd,
    record_parts,
)
from harness.spec.puzzle import Case, Gate

PART_CLASSES = {
    "embedding": "Embedding",
    "layernorm": "LayerNorm",
    "attention": "Attention",
    "gelu": "Gelu",
    "cross_entropy": "CrossEntropy",
}
"""Gate of a part -> the class of the part."""
SEED = 27
"""Base seed of the checks, to which --seed is added."""
COMBINED_PARTS = {"block": ("residual", "fork"), "model": ("head", "embedding")}
"""Gate that combines parts -> the parts whose known mistakes the gate's code can make."""


@dataclass(frozen=True)
class Trial:
    """One set of sizes, with its name and a scale factor for the inputs."""

    label: str
    B: int
    T: int
    C: int
    V: int
    scale: float = 1.0


TRIALS = (
    Trial("two sequences", 2, 5, 8, 7),
    Trial("one sequence", 1, 6, 12, 5),
    Trial("one token", 3, 1, 8, 4),
    Trial("few words", 4, 7, 8, 3),
    Trial("large values", 2, 4, 8, 6, 400.0),
)


@dataclass
class TrialResult:
    """The inputs and values of one trial, with the correct values and those of a known mistake."""

    trial: Trial
    inputs: Mapping[str, Tensor]
    got: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    compute_with_mistake: Callable[[str], Mapping[str, Tensor]]


class TapeChecker(PythonChecker):
    """Checks the gates of one file."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result, hint = GateResult(gate, "correct"), 2
        try:
            with torch.random.fork_rng(devices=[]):
                result.summary = CHECKS.get(gate.id, check_part)(gate.id, module, SEED + self.seed)
        except CheckError as fault:
            result.state, result.diagnosis, result.mistake = "wrong", str(fault).split("\n"), fault.mistake
            hint = fault.hint or hint
        except Exception as error:  # an exception in the learner's code is a result
            called_autograd = "autograd is called" in str(error)
            result.state, result.diagnosis = "wrong", [describe_exception(error, path)]
            result.mistake = "autograd-called" if called_autograd else "raises"
        if result.state == "wrong":
            result.hint = f"{self.puzzle.get_ladder_name(self.rung, gate.id)}-{hint}"
        elif gate.id == "model":
            result.picture = draw_live_bytes(module)
        return result


# ---- Values -------------------------------------------------------------------------------------------------


def compare(gate: str, results: list[TrialResult]) -> None:
    """Raise CheckError for the first wrong value with a known cause, else for the first wrong value."""
    failing = [(item, names) for item in results if (names := [*find_wrong_values(item.got, item.expected)])]
    if not failing:
        return
    (first, names), *_ = failing
    order = ", from the loss backwards" if len(first.expected) > 6 else ""
    wrong = {name for _, names in failing for name in names}
    correct = {name for item in results for name in item.expected} - wrong
    if diagnosis := diagnose_with_formula(gate, failing, correct):
        other_errors = (
            f"wrong: {' and '.join(names)}, of {', '.join(first.expected)}" if len(first.expected) > 2 else ""
        )
        raise CheckError.from_diagnosis(diagnosis, other_errors)
    lines = [f"with {first.trial.label}{order}: {describe_wrong(first.got, first.expected, names[0])}"]
    if len(names) > 1:
        lines.append(f"{len(names)} of {len(first.expected)} tensors are wrong; this is the first")
    ids = [
        id for id, changed_part in KNOWN_CHANGES.items() if changed_part.part in COMBINED_PARTS.get(gate, ())
    ]
    for id in ids:
        if not any(any(find_wrong_values(item.got, item.compute_with_mistake(id))) for item, _ in failing):
            raise CheckError("\n".join([*lines, f"these are the values {KNOWN_CHANGES[id].description}"]), id)
    nonfinite = any(not torch.isfinite(item.got[wrong[0]]).all() for item, wrong in failing)
    if nonfinite:
        causes = "an exponential overflows, a division or logarithm is of 0, or a whole row is -inf"
        lines.append(f"some values are NaN or infinite: {causes}")
    raise CheckError("\n".join(lines), "overflows" if nonfinite else "wrong-values")


def diagnose_with_formula(
    gate: str, failing: Sequence[tuple[TrialResult, Sequence[str]]], correct_names: Collection[str]
) -> Diagnosis | None:
    """Diagnose the first wrong value that a known mistake in the part's formula explains, or return None."""
    if gate not in FORMULAS:
        return None
    formula = FORMULAS[gate]()
    diagnoses: list[Diagnosis] = []
    correct = [quantity for quantity, (name, _, _) in formula.quantities.items() if name in correct_names]
    for quantity, (name, label, view) in formula.quantities.items():
        wrong = [item for item, names in failing if name in names]
        if any(item.got[name].shape != item.expected[name].shape for item in wrong):
            return None
        evidence: list[Evidence] = []
        for item in wrong:
            dims = item.trial.B, item.trial.T, item.trial.C, item.trial.V
            case = Case(item.trial.label, "", formula.convert_dims(dims), "plain")
            pair = (view(values[name]) for values in (item.got, item.expected))
            evidence += make_evidence(case, formula.make_arrays(item.inputs, dims), *pair)
        if evidence:
            diagnoses.append(
                diagnose(formula.puzzle, quantity, evidence, name=label, gate=gate, correct=correct)
            )
    return next((item for item in diagnoses if item.mistake), diagnoses[0] if diagnoses else None)


# ---- Parts --------------------------------------------------------------------------------------------------


def check_part(gate: str, module: Module, seed: int) -> str:
    trials = [trial for trial in TRIALS if trial.scale == 1 or gate == "cross_entropy"]
    results = [run_part(gate, module, trial, seed) for trial in trials]
    compare(gate, results)
    memory = {"block": "its parts give back what they keep", "model": "the tape is empty at the end"}
    return f"values and gradients of {len(results)} sizes; {memory.get(gate, 'keeps what it needs')}"


def make_inputs(gate: str, trial: Trial, seed: int) -> tuple[Tensor, Tensors, Tensor]:
    """Return a gate's input, its parameters by name, "part.NAME" for a single part, and the targets."""
    generator = torch.Generator().manual_seed(seed)
    p = init_parameters(
        layers=2, width=trial.C, vocabulary=trial.V, context=trial.T + UNUSED_POSITIONS, seed=seed
    )
    tokens, targets = make_excerpt(trial.B, trial.T, trial.V, seed)

    def normal(width: int) -> Tensor:
        shape = trial.B, trial.T, width
        return trial.scale * (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.25)

    if gate == "embedding":
        return tokens, {name: p[name] for name in ("token", "position")}, targets
    if gate == "model":
        return tokens, p, targets
    prefix = {"layernorm": "ln_f.", "block": "block0."}.get(gate, "")
    names = [name for name in p if prefix and name.startswith(prefix)]
    params = {f"part.{name.removeprefix(prefix)}": p[name] for name in names}
    widths = {"attention": 3 * trial.C, "cross_entropy": trial.V}
    return normal(widths.get(gate, trial.C)), params, targets


def run_part(gate: str, module: Module, trial: Trial, seed: int) -> TrialResult:
    """Run one trial of a part, by hand and with autograd. Raises CheckError for any error but wrong values."""
    x, p, targets = make_inputs(gate, trial, seed)

    def compute_expected(mistake_id: str | None = None) -> Mapping[str, Tensor]:
        model, q = make_changed_model(mistake_id), make_leaves(p)
        part_input = x.clone().requires_grad_(x.is_floating_point())
        if gate == "model":
            output = model.loss(x, targets, q)
        elif gate == "block":
            output = model.block(part_input, "part", q)
        else:
            output = model.run(
                "part", gate, part_input, *([targets] if gate == "cross_entropy" else q.values())
            )
        dy = None if output.dim() == 0 else make_incoming_gradient(output.detach())
        return compute_with_autograd(model, output, dy, q)

    tensors = {**p, "its input": x, "the targets": targets}
    originals = {name: tensor.clone() for name, tensor in tensors.items()}
    grads = {name: torch.full_like(tensor, 0.5) for name, tensor in p.items()}
    initial_grads = {name: grad.clone() for name, grad in grads.items()}
    tape, dy = module["Tape"](), torch.ones(())
    with no_autograd(), record_parts(module) as results:
        if gate == "model":
            output = copy_output(module["forward"](x, targets, tape, p))
            module["backward"](tape, p, grads)
        elif gate == "cross_entropy":
            output = copy_output(module["CrossEntropy"].forward(x, targets, tape, "part"))
            check_saved(gate, tape, x)
            check_returned(module["CrossEntropy"].backward(tape, "part"))
        else:
            part_class = module[PART_CLASSES.get(gate, "Block")]
            output = copy_output(part_class.forward(x, tape, "part", p))
            check_saved(gate, tape, x)
            dy = make_incoming_gradient(output)
            returned = part_class.backward(dy, tape, "part", p, grads)
            if gate != "embedding":
                check_returned(returned)
            if not torch.equal(dy, make_incoming_gradient(output)):
                error = "backward has changed the incoming gradient, which other parts may still need"
                raise CheckError(error, "input-written")
    if gate in COMBINED_PARTS:
        check_order(results)
    reference = compute_expected()
    changed_inputs = [name for name, tensor in tensors.items() if not torch.equal(tensor, originals[name])]
    if changed_inputs:
        raise CheckError(f"the pass has changed {changed_inputs[0]}", "input-written")
    if tape.kept:
        error = f"the tape still holds {', '.join(map(repr, tape.kept))} after the backward pass: take() gives it back"
        raise CheckError(error, "not-given-back")
    for name, grad in grads.items():
        expected = reference[f"the gradient of {name}"]
        untouched = (grad == initial_grads[name]) & (
            expected == 0
        )  # for a table, the rows without a gradient
        replaced = is_close(torch.where(untouched, expected, grad), expected)
        if replaced and not is_close(grad - initial_grads[name], expected):
            raise CheckError(f"the gradient of {name} replaces what was there: add to it", "overwritten")
    part_inputs = {"x": x, "dy": dy, "targets": targets, **p}
    return TrialResult(
        trial, part_inputs, collect_values(output, results, grads, initial_grads), reference, compute_expected
    )


def get_level(name: str) -> tuple[int, str]:
    return name.count("."), name.rpartition(".")[0]


def check_order(results: PartResults) -> None:
    """Raise CheckError if a part's backward is not called, or runs before the backward of a later part."""
    forward_order, backward_order = [*results.outputs], results.backward_order
    if missing := [name for name in forward_order if name not in backward_order]:
        raise CheckError(f"the backward() of {' and '.join(missing[-2:])} is never called", "not-walked-back")
    # The blocks, then each block's parts.
    levels = itertools.groupby(sorted(forward_order, key=get_level), key=get_level)
    for earlier, later in [pair for _, names in levels for pair in itertools.pairwise(names)]:
        if backward_order.index(earlier) < backward_order.index(later):
            error = f"{earlier}'s backward runs before {later}'s, which the gradient reaches first"
            raise CheckError(error, "forwards")


def copy_output(output: object) -> Tensor:
    """Copy the output of a forward pass. Raises CheckError if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise CheckError("forward() must return a tensor", "nothing-returned")
    return output.clone()


def check_returned(gradient: object) -> None:
    if not isinstance(gradient, Tensor):
        raise CheckError("backward() must return a tensor, the gradient of its input", "nothing-returned")


def make_incoming_gradient(output: Tensor) -> Tensor:
    """Return an incoming gradient with a nonzero mean and distinct rows."""
    return torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output) + 0.5


def check_saved(gate: str, tape, x: Tensor) -> None:
    """Raise CheckError if a part saves more bytes than it needs."""
    rows, element = x.numel() // x.shape[-1], x.element_size()
    T = x.shape[1]
    extra_elements = {
        "embedding": 0,
        "layernorm": 2 * rows,
        "attention": 4 * rows * T,
        "gelu": 0,
        "cross_entropy": rows,
    }
    if gate not in extra_elements:
        return
    allowed, saved = (x.numel() + extra_elements[gate]) * element, count_saved_bytes(tape.kept)
    if saved > allowed:
        error = f"{saved} bytes are saved for an input of {list(x.shape)}; {allowed} are enough"
        raise CheckError(error, "keeps-too-much")


# ---- The tape -----------------------------------------------------------------------------------------------


def make_wrong_count(
    size: Callable[[Tensor], int], by_address: bool
) -> Callable[[Sequence[Sequence[Tensor]]], int]:
    """Return an incorrect byte counter: it adds up `size` per tensor or, if `by_address`, per address."""
    return lambda saved: sum(
        {t.data_ptr() if by_address else -i: size(t) for i, t in enumerate(chain(*saved), 1)}.values()
    )


WRONG_COUNTERS = {
    "each-view-counted": make_wrong_count(lambda t: t.nbytes, False),
    "elements-counted": make_wrong_count(lambda t: t.numel(), False),
    "view-alone": make_wrong_count(lambda t: t.nbytes, True),
}
"""Known mistake of the tape -> its incorrect byte counter."""


def check_tape(gate: str, module: Module, seed: int) -> str:
    """Check the bytes that the tape reports for tensors with and without shared memory. Raises CheckError if wrong."""
    matrix, vector = torch.zeros(4, 6), torch.zeros(3, dtype=torch.float64)
    tapes = (
        ("nothing", {}, 0),
        ("a tensor of 24 floats", {"a": (matrix,)}, 96),
        ("two tensors", {"a": (matrix, vector)}, 120),
        ("a tensor under two names", {"a": (matrix,), "b": (matrix,)}, 96),
        ("three views of one tensor", {"a": matrix.chunk(3, 1)}, 96),
        ("a row, which keeps the whole tensor alive", {"a": (matrix[1],)}, 96),
        ("two tensors of one size", {"a": (matrix, torch.ones(4, 6))}, 192),
        ("an expanded tensor", {"a": (vector[:1].expand(1000),)}, 24),
    )
    got_bytes = []
    for _, saved, _ in tapes:
        tape = module["Tape"]()
        tape.kept = saved
        got_bytes.append(tape.bytes())
    for (label, _, expected), got in zip(tapes, got_bytes, strict=True):
        if got != expected:
            known = {
                id: [count([*saved.values()]) for _, saved, _ in tapes]
                for id, count in WRONG_COUNTERS.items()
            }
            mistake = next((id for id, counts in known.items() if counts == got_bytes), "wrong-values")
            raise CheckError(f"for {label} the tape reports {got} bytes, but holds {expected}", mistake)
    return f"{len(tapes)} tapes, to the byte"


CHECKS = {
    "tape": check_tape,
    "clip": optimizing.check_clip,
    "adamw": optimizing.check_adamw,
    "step": optimizing.check_step,
}
