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
from harness.puzzles.p27.autograd import CHANGES, Tensors, change_model, parameters
from harness.puzzles.p27.bytes_live import draw_live_bytes
from harness.puzzles.p27.part_formulas import FORMULAS, SPARE
from harness.puzzles.p27.running import (
    Fault,
    Module,
    PartResults,
    collect_values,
    compute_with_autograd,
    count_saved_bytes,
    describe_wrong,
    excerpt,
    find_wrong_values,
    is_close,
    leaves,
    make_evidence,
    no_autograd,
    record_parts,
)
from harness.spec.puzzle import Case, Gate

KINDS = {
    "embedding": "Embedding",
    "layernorm": "LayerNorm",
    "attention": "Attention",
    "gelu": "Gelu",
    "cross_entropy": "CrossEntropy",
}
"""Gate of a part -> the class of the part."""
SEED = 27
"""Base seed of the checks, to which --seed is added."""
CONCERN = {"block": ("residual", "fork"), "model": ("head", "embedding")}
"""Gate that combines parts -> the parts whose known mistakes the gate's code can make."""


@dataclass(frozen=True)
class Trial:
    """One set of sizes, with its name and a scale factor for the inputs."""

    words: str
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
    given: Mapping[str, Tensor]
    got: Mapping[str, Tensor]
    right: Mapping[str, Tensor]
    compute_mistaken: Callable[[str], Mapping[str, Tensor]]


class TapeChecker(PythonChecker):
    """Checks the gates of one file."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result, hint = GateResult(gate, "correct"), 2
        try:
            with torch.random.fork_rng(devices=[]):
                result.summary = CHECKS.get(gate.id, check_part)(gate.id, module, SEED + self.seed)
        except Fault as fault:
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
    """Raise Fault for the first wrong value with a known cause, else for the first wrong value."""
    failing = [(item, names) for item in results if (names := [*find_wrong_values(item.got, item.right)])]
    if not failing:
        return
    (first, names), *_ = failing
    order = ", from the loss backwards" if len(first.right) > 6 else ""
    wrong = {name for _, names in failing for name in names}
    correct = {name for item in results for name in item.right} - wrong
    if diagnosis := diagnose_with_formula(gate, failing, correct):
        others = f"wrong: {' and '.join(names)}, of {', '.join(first.right)}" if len(first.right) > 2 else ""
        raise Fault.of(diagnosis, others)
    lines = [f"with {first.trial.words}{order}: {describe_wrong(first.got, first.right, names[0])}"]
    if len(names) > 1:
        lines.append(f"{len(names)} of {len(first.right)} tensors are wrong; this is the first")
    ids = [id for id, change in CHANGES.items() if change.part in CONCERN.get(gate, ())]
    for id in ids:
        if not any(any(find_wrong_values(item.got, item.compute_mistaken(id))) for item, _ in failing):
            raise Fault("\n".join([*lines, f"these are the values {CHANGES[id].words}"]), id)
    nonfinite = any(not torch.isfinite(item.got[wrong[0]]).all() for item, wrong in failing)
    if nonfinite:
        causes = "an exponential overflows, a division or logarithm is of 0, or a whole row is -inf"
        lines.append(f"some values are NaN or infinite: {causes}")
    raise Fault("\n".join(lines), "overflows" if nonfinite else "wrong-values")


def diagnose_with_formula(
    gate: str, failing: Sequence[tuple[TrialResult, Sequence[str]]], right: Collection[str]
) -> Diagnosis | None:
    """Diagnose the first wrong value that a known mistake in the part's formula explains, or return None."""
    if gate not in FORMULAS:
        return None
    formula = FORMULAS[gate]()
    diagnoses: list[Diagnosis] = []
    correct = [quantity for quantity, (name, _, _) in formula.quantities.items() if name in right]
    for quantity, (name, label, view) in formula.quantities.items():
        wrong = [item for item, names in failing if name in names]
        if any(item.got[name].shape != item.right[name].shape for item in wrong):
            return None
        evidence: list[Evidence] = []
        for item in wrong:
            dims = item.trial.B, item.trial.T, item.trial.C, item.trial.V
            case = Case(item.trial.words, "", formula.dims(dims), "plain")
            pair = (view(values[name]) for values in (item.got, item.right))
            evidence += make_evidence(case, formula.arrays(item.given, dims), *pair)
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
    p = parameters(layers=2, width=trial.C, vocabulary=trial.V, context=trial.T + SPARE, seed=seed)
    tokens, targets = excerpt(trial.B, trial.T, trial.V, seed)

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
    """Run one trial of a part, by hand and with autograd. Raises Fault for any error but wrong values."""
    x, p, targets = make_inputs(gate, trial, seed)

    def truth(id: str | None = None) -> Mapping[str, Tensor]:
        model, q = change_model(id), leaves(p)
        start = x.clone().requires_grad_(x.is_floating_point())
        if gate == "model":
            output = model.loss(x, targets, q)
        elif gate == "block":
            output = model.block(start, "part", q)
        else:
            output = model.run("part", gate, start, *([targets] if gate == "cross_entropy" else q.values()))
        dy = None if output.dim() == 0 else incoming_gradient(output.detach())
        return compute_with_autograd(model, output, dy, q)

    tensors = {**p, "its input": x, "the targets": targets}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    grads = {name: torch.full_like(tensor, 0.5) for name, tensor in p.items()}
    start = {name: grad.clone() for name, grad in grads.items()}
    tape, dy = module["Tape"](), torch.ones(())
    with no_autograd(), record_parts(module) as results:
        if gate == "model":
            output = tensor(module["forward"](x, targets, tape, p))
            module["backward"](tape, p, grads)
        elif gate == "cross_entropy":
            output = tensor(module["CrossEntropy"].forward(x, targets, tape, "part"))
            check_saved(gate, tape, x)
            check_returned(module["CrossEntropy"].backward(tape, "part"))
        else:
            kind = module[KINDS.get(gate, "Block")]
            output = tensor(kind.forward(x, tape, "part", p))
            check_saved(gate, tape, x)
            dy = incoming_gradient(output)
            returned = kind.backward(dy, tape, "part", p, grads)
            if gate != "embedding":
                check_returned(returned)
            if not torch.equal(dy, incoming_gradient(output)):
                error = "backward has changed the incoming gradient, which other parts may still need"
                raise Fault(error, "input-written")
    if gate in CONCERN:
        check_order(results)
    reference = truth()
    changed_inputs = [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]
    if changed_inputs:
        raise Fault(f"the pass has changed {changed_inputs[0]}", "input-written")
    if tape.kept:
        error = f"the tape still holds {', '.join(map(repr, tape.kept))} after the backward pass: take() gives it back"
        raise Fault(error, "not-given-back")
    for name, grad in grads.items():
        expected = reference[f"the gradient of {name}"]
        untouched = (grad == start[name]) & (expected == 0)  # for a table, the rows without a gradient
        replaced = is_close(torch.where(untouched, expected, grad), expected)
        if replaced and not is_close(grad - start[name], expected):
            raise Fault(f"the gradient of {name} replaces what was there: add to it", "overwritten")
    part_inputs = {"x": x, "dy": dy, "targets": targets, **p}
    return TrialResult(trial, part_inputs, collect_values(output, results, grads, start), reference, truth)


def level(name: str) -> tuple[int, str]:
    return name.count("."), name.rpartition(".")[0]


def check_order(watched: PartResults) -> None:
    """Raise Fault if a part's backward is not called, or runs before the backward of a later part."""
    forward_order, order_back = [*watched.outputs], watched.backward_order
    if missing := [name for name in forward_order if name not in order_back]:
        raise Fault(f"the backward() of {' and '.join(missing[-2:])} is never called", "not-walked-back")
    # The blocks, then each block's parts.
    levels = itertools.groupby(sorted(forward_order, key=level), key=level)
    for earlier, later in [pair for _, names in levels for pair in itertools.pairwise(names)]:
        if order_back.index(earlier) < order_back.index(later):
            error = f"{earlier}'s backward runs before {later}'s, which the gradient reaches first"
            raise Fault(error, "forwards")


def tensor(output: object) -> Tensor:
    """Copy the output of a forward pass. Raises Fault if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise Fault("forward() must return a tensor", "nothing-returned")
    return output.clone()


def check_returned(gradient: object) -> None:
    if not isinstance(gradient, Tensor):
        raise Fault("backward() must return a tensor, the gradient of its input", "nothing-returned")


def incoming_gradient(output: Tensor) -> Tensor:
    """Return an incoming gradient with a nonzero mean and distinct rows."""
    return torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output) + 0.5


def check_saved(gate: str, tape, x: Tensor) -> None:
    """Raise Fault if a part saves more bytes than it needs."""
    rows, element = x.numel() // x.shape[-1], x.element_size()
    T = x.shape[1]
    beyond_input = {
        "embedding": 0,
        "layernorm": 2 * rows,
        "attention": 4 * rows * T,
        "gelu": 0,
        "cross_entropy": rows,
    }
    if gate not in beyond_input:
        return
    allowed, saved = (x.numel() + beyond_input[gate]) * element, count_saved_bytes(tape.kept)
    if saved > allowed:
        error = f"{saved} bytes are saved for an input of {list(x.shape)}; {allowed} are enough"
        raise Fault(error, "keeps-too-much")


# ---- The tape -----------------------------------------------------------------------------------------------


def make_wrong_count(
    size: Callable[[Tensor], int], once: bool
) -> Callable[[Sequence[Sequence[Tensor]]], int]:
    """Return an incorrect byte counter: it adds up `size` per tensor or, if `once`, per address."""
    return lambda kept: sum(
        {t.data_ptr() if once else -i: size(t) for i, t in enumerate(chain(*kept), 1)}.values()
    )


COUNTS = {
    "each-view-counted": make_wrong_count(lambda t: t.nbytes, False),
    "elements-counted": make_wrong_count(lambda t: t.numel(), False),
    "view-alone": make_wrong_count(lambda t: t.nbytes, True),
}
"""Known mistake of the tape -> its incorrect byte counter."""


def check_tape(gate: str, module: Module, seed: int) -> str:
    """Check the bytes that the tape reports for tensors with and without shared memory. Raises Fault if wrong."""
    matrix, other = torch.zeros(4, 6), torch.zeros(3, dtype=torch.float64)
    tapes = (
        ("nothing", {}, 0),
        ("a tensor of 24 floats", {"a": (matrix,)}, 96),
        ("two tensors", {"a": (matrix, other)}, 120),
        ("a tensor under two names", {"a": (matrix,), "b": (matrix,)}, 96),
        ("three views of one tensor", {"a": matrix.chunk(3, 1)}, 96),
        ("a row, which keeps the whole tensor alive", {"a": (matrix[1],)}, 96),
        ("two tensors of one size", {"a": (matrix, torch.ones(4, 6))}, 192),
        ("an expanded tensor", {"a": (other[:1].expand(1000),)}, 24),
    )
    got_bytes = []
    for _, saved, _ in tapes:
        tape = module["Tape"]()
        tape.kept = saved
        got_bytes.append(tape.bytes())
    for (label, _, expected), got in zip(tapes, got_bytes, strict=True):
        if got != expected:
            known = {id: [count([*saved.values()]) for _, saved, _ in tapes] for id, count in COUNTS.items()}
            mistake = next((id for id, counts in known.items() if counts == got_bytes), "wrong-values")
            raise Fault(f"for {label} the tape reports {got} bytes, but holds {expected}", mistake)
    return f"{len(tapes)} tapes, to the byte"


CHECKS = {
    "tape": check_tape,
    "clip": optimizing.check_clip,
    "adamw": optimizing.check_adamw,
    "step": optimizing.check_step,
}
