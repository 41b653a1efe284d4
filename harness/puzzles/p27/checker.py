"""Checker of puzzle 27's tape: each part against autograd in float64, then the whole, the optimizer and the
step.

The report names the first wrong tensor in the order from the loss backwards, and the known mistake that gives
all values. Each part is also checked for what it saves, whether it releases that, and whether it writes to
its inputs.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.check.compare import Evidence
from harness.check.diagnose import diagnose
from harness.check.python_files import PythonChecker, describe
from harness.check.results import Diagnosis, GateResult
from harness.puzzles.p27 import optimizing
from harness.puzzles.p27.autograd import CHANGES, Tensors, change_model, parameters
from harness.puzzles.p27.bytes_live import picture
from harness.puzzles.p27.part_formulas import SPARE, Formula, formula_of
from harness.puzzles.p27.running import (
    Fault,
    Module,
    Watched,
    by_autograd,
    by_hand,
    describe_wrong,
    evidence_of,
    excerpt,
    held,
    leaves,
    near,
    no_autograd,
    watching,
    wrong_values,
)
from harness.spec.puzzle import Case, Gate

KINDS = {
    "embedding": "Embedding",
    "layernorm": "LayerNorm",
    "attention": "Attention",
    "gelu": "Gelu",
    "cross_entropy": "CrossEntropy",
}
"""Gate of a part -> its class."""
SEED = 27
"""Seed of the checks; --seed is added."""
CONCERN = {"block": ("residual", "fork"), "model": ("head", "embedding")}
"""Gate of several parts -> the parts whose known mistakes its own code can make."""


@dataclass(frozen=True)
class Try:
    """One set of sizes: its name, B, T, C, V, and a factor of the inputs."""

    words: str
    B: int
    T: int
    C: int
    V: int
    scale: float = 1.0


TRIES = (
    Try("two sequences", 2, 5, 8, 7),
    Try("one sequence", 1, 6, 12, 5),
    Try("one token", 3, 1, 8, 4),
    Try("few words", 4, 7, 8, 3),
    Try("large values", 2, 4, 8, 6, 400.0),
)


@dataclass
class TryResult:
    """The results of one try: the part's inputs, values by name, and those of each known mistake of several
    parts."""

    one: Try
    given: Mapping[str, Tensor]
    got: Mapping[str, Tensor]
    right: Mapping[str, Tensor]
    mistaken: Callable[[str], Mapping[str, Tensor]]


class TapeChecker(PythonChecker):
    """Checks the gates of one file."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result = GateResult(gate, "correct")
        try:
            with torch.random.fork_rng(devices=[]):
                result.summary = CHECKS.get(gate.id, check_part)(gate.id, module, SEED + self.seed)
        except Fault as fault:
            result.state, result.diagnosis, result.mistake = "wrong", str(fault).split("\n"), fault.mistake
            result.hint = f"{self.puzzle.ladder(self.rung, gate.id)}-{fault.hint}" if fault.hint else None
        except Exception as error:  # an exception of the learner's code is a result
            by_autograd = "autograd is called" in str(error)
            result.state, result.diagnosis = "wrong", [describe(error, path)]
            result.mistake = "autograd-called" if by_autograd else "raises"
        if result.state == "wrong":
            result.hint = result.hint or f"{self.puzzle.ladder(self.rung, gate.id)}-2"
        elif gate.id == "model":
            result.picture = picture(module)
        return result


# ---- Values -------------------------------------------------------------------------------------------------


def compare(gate: str, ran: list[TryResult]) -> None:
    """Raise Fault for a wrong value: the first, or one that can be explained, with the known mistake that
    gives the values of all tries."""
    failing = [(each, names) for each in ran if (names := [*wrong_values(each.got, each.right)])]
    if not failing:
        return
    (first, names), *_ = failing
    order = ", from the loss backwards" if len(first.right) > 6 else ""
    if reports := explained_by_formula(gate, failing, correct_values(ran)):
        others = (
            f"wrong are {' and '.join(names)}, of {', '.join(first.right)}" if len(first.right) > 2 else ""
        )
        raise Fault.of(reports, others)
    lines = [f"with {first.one.words}{order}: {describe_wrong(first.got, first.right, names[0])}"]
    if len(names) > 1:
        lines.append(f"{len(names)} of {len(first.right)} tensors are wrong, of which it is the first")
    ids = [id for id, change in CHANGES.items() if change.part in CONCERN.get(gate, ())]
    known = next((id for id in ids if all(explains(each, id) for each, _ in failing)), None)
    if known:
        raise Fault("\n".join([*lines, f"these are the values {CHANGES[known].words}"]), known)
    nonfinite = not torch.isfinite(first.got[names[0]]).all() or any(
        not torch.isfinite(each.got[wrong[0]]).all() for each, wrong in failing
    )
    if nonfinite:
        lines.append(
            "some are no numbers: an exponential overflows, a division is by 0, a logarithm is of 0, or all of a row is -inf"
        )
    raise Fault("\n".join(lines), "overflows" if nonfinite else "wrong-values")


def explained_by_formula(
    gate: str, failing: Sequence[tuple[TryResult, Sequence[str]]], right: Collection[str]
) -> Diagnosis | None:
    """Diagnose the first wrong value that the formula of a gate's part explains; None if a part has no
    formula, or a shape is wrong."""
    if not (formula := formula_of(gate)):
        return None
    reports: list[Diagnosis] = []
    correct = [quantity for quantity, (name, _, _) in formula.quantities.items() if name in right]
    for quantity, (name, words, view) in formula.quantities.items():
        wrong = [each for each, names in failing if name in names]
        if any(each.got[name].shape != each.right[name].shape for each in wrong):
            return None
        pairs = [(each, *(view(values[name]) for values in (each.got, each.right))) for each in wrong]
        evidence = [e for each, *pair in pairs for e in evidence_in(formula, each, *pair)]
        if evidence:
            reports.append(diagnose(formula.puzzle, quantity, evidence, name=words, gate=gate, right=correct))
    return next((each for each in reports if each.mistake), reports[0] if reports else None)


def evidence_in(formula: Formula, ran: TryResult, got: np.ndarray, right: np.ndarray) -> list[Evidence]:
    """Return a quantity of a try as evidence; nothing if it is correct."""
    dims = ran.one.B, ran.one.T, ran.one.C, ran.one.V
    case = Case(ran.one.words, "", formula.dims(dims), "plain")
    return evidence_of(case, formula.arrays(ran.given, dims), got, right)


def correct_values(ran: Sequence[TryResult]) -> set[str]:
    """Return the values that are correct in every try."""
    wrong = {name for each in ran for name in wrong_values(each.got, each.right)}
    return {name for each in ran for name in each.right} - wrong


def explains(ran: TryResult, id: str) -> bool:
    """Return whether a known mistake gives every value of a try."""
    mistaken = ran.mistaken(id)
    return not [*wrong_values(ran.got, mistaken)]


# ---- Parts --------------------------------------------------------------------------------------------------


def check_part(gate: str, module: Module, seed: int) -> str:
    """Check a part on every try; return a note for a correct one. Raise Fault."""
    results = [
        run_part(gate, module, one, seed) for one in TRIES if one.scale == 1 or gate == "cross_entropy"
    ]
    compare(gate, results)
    kept = {"block": "its parts give back what they keep", "model": "the tape is empty at the end"}
    return f"values and gradients of {len(results)} sizes; {kept.get(gate, 'keeps what it needs')}"


def make_inputs(gate: str, one: Try, seed: int) -> tuple[Tensor, Tensors, Tensor]:
    """Return the inputs of a gate: x, the parameters by the names of the part (called "part"), the targets."""
    generator = torch.Generator().manual_seed(seed)
    p = parameters(layers=2, width=one.C, vocabulary=one.V, context=one.T + SPARE, seed=seed)
    tokens, targets = excerpt(one.B, one.T, one.V, seed)

    def normal(width: int) -> Tensor:
        shape = one.B, one.T, width
        return one.scale * (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.25)

    if gate == "embedding":
        return tokens, {name: p[name] for name in ("token", "position")}, targets
    if gate == "model":
        return tokens, p, targets
    prefix = {"layernorm": "ln_f.", "block": "block0."}.get(gate)
    of_part = {
        f"part.{name.removeprefix(prefix)}": t for name, t in p.items() if prefix and name.startswith(prefix)
    }
    widths = {"attention": 3 * one.C, "cross_entropy": one.V}
    return normal(widths.get(gate, one.C)), of_part, targets


def run_part(gate: str, module: Module, one: Try, seed: int) -> TryResult:
    """Run one try of one part, by hand and by autograd. Raise Fault for anything but wrong values."""
    x, p, targets = make_inputs(gate, one, seed)

    def truth(id: str | None = None) -> Mapping[str, Tensor]:
        model, q = change_model(id), leaves(p)
        start = x.clone().requires_grad_(x.is_floating_point())
        if gate == "model":
            output = model.loss(x, targets, q)
        elif gate == "block":
            output = model.block(start, "part", q)
        else:
            output = model.run("part", gate, start, *([targets] if gate == "cross_entropy" else q.values()))
        return by_autograd(model, output, None if output.dim() == 0 else following(output.detach()), q)

    before = {
        name: tensor.clone() for name, tensor in [*p.items(), ("its input", x), ("the targets", targets)]
    }
    grads = {name: torch.full_like(tensor, 0.5) for name, tensor in p.items()}
    start = {name: grad.clone() for name, grad in grads.items()}
    tape, dy = module["Tape"](), torch.ones(())
    with no_autograd(), watching(module) as watched:
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
            dy = following(output)
            returned = kind.backward(dy, tape, "part", p, grads)
            if gate != "embedding":
                check_returned(returned)
            if not torch.equal(dy, following(output)):
                raise Fault(
                    "the gradient that comes in is another after backward: others may add it up",
                    "input-written",
                )
    if gate in CONCERN:
        check_order(watched)
    right = truth()
    changed_inputs = [
        n
        for n, t in [*p.items(), ("its input", x), ("the targets", targets)]
        if not torch.equal(t, before[n])
    ]
    if changed_inputs:
        raise Fault(f"the pass has changed {changed_inputs[0]}", "input-written")
    if tape.kept:
        words = f"the tape still holds {', '.join(map(repr, tape.kept))} after the backward pass: take() gives it back"
        raise Fault(words, "not-given-back")
    for name, grad in grads.items():
        expected = right[f"the gradient of {name}"]
        kept = (grad == start[name]) & (expected == 0)  # of a table, the rows that nothing was written to
        if near(torch.where(kept, expected, grad), expected) and not near(grad - start[name], expected):
            raise Fault(f"the gradient of {name} replaces what was there: add to it", "overwritten")
    given_part = {"x": x, "dy": dy, "targets": targets, **p}
    return TryResult(one, given_part, by_hand(output, watched, grads, start), right, truth)


def level(name: str) -> tuple[int, str]:
    """Return what a part belongs to, outermost first."""
    return name.count("."), name.rpartition(".")[0]


def check_order(watched: Watched) -> None:
    """Raise Fault if a part is not walked back, or before one that comes after it in the forward pass."""
    way_up, way_back = [*watched.outputs], watched.walked_back
    if missing := [name for name in way_up if name not in way_back]:
        words = "is" if len(missing) == 1 else "are"
        raise Fault(
            f"{' and '.join(missing[-2:])} {words} never walked back: backward() is not called",
            "not-walked-back",
        )
    levels = itertools.groupby(sorted(way_up, key=level), key=level)  # the blocks, then the parts of each
    for earlier, later in [pair for _, names in levels for pair in itertools.pairwise(names)]:
        if way_back.index(earlier) < way_back.index(later):
            raise Fault(
                f"{earlier} is walked back before {later}: the gradient comes to {later} first", "forwards"
            )


def tensor(output: object) -> Tensor:
    """Copy the output of a forward. Raise Fault if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise Fault("forward() returns no tensor", "nothing-returned")
    return output.clone()


def check_returned(gradient: object) -> None:
    """Raise Fault if a backward returns no gradient of its input."""
    if not isinstance(gradient, Tensor):
        raise Fault("backward() returns no tensor: the gradient of its input is wanted", "nothing-returned")


def following(output: Tensor) -> Tensor:
    """Return an incoming gradient with a mean away from 0, different in each row."""
    return torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output) + 0.5


def check_saved(gate: str, tape, x: Tensor) -> None:
    """Compare what a part saves with the minimum. Raise Fault."""
    rows, element = x.numel() // x.shape[-1], x.element_size()
    T = x.shape[1]
    enough = {
        "embedding": x.numel() * element,
        "layernorm": (x.numel() + 2 * rows) * element,
        "attention": (x.numel() + 4 * rows * T) * element,
        "gelu": x.numel() * element,
        "cross_entropy": (x.numel() + rows) * element,
    }.get(gate)
    if enough is not None and (kept := held(tape.kept)) > enough:
        raise Fault(
            f"{kept} bytes are kept of an input of {list(x.shape)}, {enough} are enough", "keeps-too-much"
        )


# ---- The tape -----------------------------------------------------------------------------------------------


def counting(size: Callable[[Tensor], int], once: bool) -> Callable[[Sequence[Sequence[Tensor]]], int]:
    """Return a wrong count: a size for each tensor, or for each address."""
    return lambda kept: sum(
        {t.data_ptr() if once else -i: size(t) for i, t in enumerate(chain(*kept), 1)}.values()
    )


COUNTS = {
    "each-view-counted": counting(lambda t: t.nbytes, False),
    "elements-counted": counting(lambda t: t.numel(), False),
    "view-alone": counting(lambda t: t.nbytes, True),
}
"""Known mistake of the tape -> its count."""


def check_tape(gate: str, module: Module, seed: int) -> str:
    """Check the bytes that the tape reports, for tensors that do and do not share memory. Raise Fault."""
    whole, other = torch.zeros(4, 6), torch.zeros(3, dtype=torch.float64)
    story = (
        ("nothing", {}, 0),
        ("a tensor of 24 floats", {"a": (whole,)}, 96),
        ("two tensors", {"a": (whole, other)}, 120),
        ("a tensor under two names", {"a": (whole,), "b": (whole,)}, 96),
        ("three views of one tensor", {"a": whole.chunk(3, 1)}, 96),
        ("a row of it, for whose sake all of it stays", {"a": (whole[1],)}, 96),
        ("two tensors of one size", {"a": (whole, torch.ones(4, 6))}, 192),
        ("an expanded one", {"a": (other[:1].expand(1000),)}, 24),
    )
    text = []
    for _, kept, _ in story:
        tape = module["Tape"]()
        tape.kept = kept
        text.append(tape.bytes())
    for (words, _, right), got in zip(story, text, strict=True):
        if got != right:
            known = {id: [count([*kept.values()]) for _, kept, _ in story] for id, count in COUNTS.items()}
            mistake = next((id for id, counts in known.items() if counts == text), "wrong-values")
            raise Fault(f"of {words} the tape says {got} bytes, and holds {right}", mistake)
    return f"{len(story)} tapes, to the byte"


CHECKS = {
    "tape": check_tape,
    "clip": optimizing.check_clip,
    "adamw": optimizing.check_adamw,
    "step": optimizing.check_step,
}
