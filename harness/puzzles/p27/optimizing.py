"""Checks of puzzle 27's last gates, clipping, AdamW and the step, against PyTorch, with known mistakes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.check.compare import Evidence
from harness.check.diagnose import diagnose
from harness.puzzles.p27 import kernels
from harness.puzzles.p27.autograd import Model, Tensors, init_parameters
from harness.puzzles.p27.running import (
    CheckError,
    Module,
    describe_wrong,
    find_wrong_values,
    make_evidence,
    make_leaves,
    no_autograd,
)
from harness.spec.catalogue import find_puzzle
from harness.spec.derivation import Derivation, Mistake
from harness.spec.puzzle import Case

RATE, BETAS, EPS, DECAY, LIMIT = 0.01, (0.9, 0.95), 1e-8, 0.1, 0.7
"""Constants for the check of a step: the defaults of the learner's file, except rate and limit. AdamW and clipping
are checked with the kernels' constants, so that code which ignores its arguments fails."""


def raise_diagnosis(
    gate: str, evidence: Mapping[str, list[Evidence]], extra_mistakes: tuple[Mistake, ...] = ()
) -> None:
    """Raise CheckError for the first wrong quantity, diagnosed by the puzzle's formulas and `extra_mistakes`."""
    puzzle = find_puzzle("p27")
    puzzle = replace(puzzle, mistakes=(*extra_mistakes, *puzzle.mistakes))
    for quantity, cases in evidence.items():
        if cases:
            correct = [name for name, evidence_list in evidence.items() if not evidence_list]
            raise CheckError.from_diagnosis(
                diagnose(puzzle, quantity, cases, name=QUANTITY_LABELS[quantity], gate=gate, correct=correct)
            )


IN_PLACE = "change it in place (`{0} {1}`), since `{0} = ...` makes a new tensor"
QUANTITY_LABELS = {
    "norm": "norm",
    "clipped": "gradient",
    "new_mean": "mean of g",
    "new_square": "mean of g^2",
    "new_x": "parameter",
}
"""Quantity -> its name in reports."""


# ---- Clipping -----------------------------------------------------------------------------------------------


def list_clipping_mistakes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Mistake, ...]:
    """Return the mistakes that need several tensors, which are concatenated in `dx`."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]

    def compute_norms(v: Derivation) -> list[np.ndarray]:
        return [np.sqrt((part**2).sum()) for part in np.split(v.dx.reshape(-1), ends)]

    def clip_each(v: Derivation) -> np.ndarray:
        parts = zip(np.split(v.dx.reshape(-1), ends), compute_norms(v), strict=True)
        clipped = [g * min(1, kernels.LIMIT / (n + kernels.NORM_EPS)) for g, n in parts]
        return np.concatenate(clipped).reshape(v.dx.shape)

    def compute_clipped_norm(v: Derivation) -> np.ndarray:
        return np.sqrt((v.clipped**2).sum()).reshape(1)

    return (
        Mistake("each-by-itself", "with each gradient clipped by its own norm", {"clipped": clip_each}),
        Mistake("norms-added", "with the norms added: the norm is the root of the sum of all squares", {"norm": lambda v: np.sum(compute_norms(v)).reshape(1)}),
        Mistake("norm-afterwards", "of the clipped gradients: return the norm before clipping",
                {"norm": lambda v: compute_clipped_norm(kernels.derive({"dx": v.dx}))}),
        Mistake("limit-for-factor", "times the limit, not times the limit over the norm", {"clipped": lambda v: v.dx * kernels.LIMIT}),
        Mistake("norm-eps-forgotten", "without the 1e-6 that is added to the norm", {"factor": lambda v: np.minimum(1, kernels.LIMIT / v.norm)}),
    )  # fmt: skip


def check_clip(gate: str, module: Module, seed: int) -> str:
    """Check norms above and below the limit against `clip_grad_norm_`. Raises CheckError if wrong."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
    evidence: dict[str, list[Evidence]] = {"norm": [], "clipped": []}
    for label, scale in (("above the limit", 5.0), ("below the limit", 0.01)):
        grads = {
            n: scale * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()
        }
        tensors = make_leaves(grads)
        for name, leaf in tensors.items():
            leaf.grad = grads[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(tensors.values(), kernels.LIMIT)
        clipped = {name: t.clone() for name, t in grads.items()}
        with no_autograd():
            returned = module["clip"](clipped, kernels.LIMIT)
        if not isinstance(returned, Tensor):
            raise CheckError("clip() must return a tensor, the norm before clipping", "wrong-values")
        expected = {f"gradient {name}": leaf.grad for name, leaf in tensors.items() if leaf.grad is not None}
        got = {f"gradient {name}": t for name, t in clipped.items()}
        if not [*find_wrong_values({"the norm": returned} | got, {"the norm": norm} | expected)]:
            continue
        if scale > 1 and all(torch.equal(clipped[name], grads[name]) for name in grads):
            advice = IN_PLACE.format("grad", "*= factor")
            raise CheckError(f"the gradients have not changed: {advice}", "not-in-place")
        case, arrays = Case(label, "", (1, 1, 1, 1), "plain"), {"dx": concatenate(grads)}
        pairs = {
            "norm": (returned.reshape(1).numpy(), norm.reshape(1).numpy()),
            "clipped": (concatenate(clipped), concatenate(expected)),
        }
        for quantity, pair in pairs.items():
            evidence[quantity] += make_evidence(case, arrays, *pair)
    raise_diagnosis(gate, evidence, list_clipping_mistakes(shapes))
    return "norms above and below the limit"


def concatenate(tensors: Mapping[str, Tensor]) -> np.ndarray:
    return torch.cat([t.flatten() for t in tensors.values()]).reshape(1, 1, -1).numpy()


# ---- AdamW --------------------------------------------------------------------------------------------------


def make_adamw(p: Tensors, decay: float, **options) -> torch.optim.Optimizer:
    groups = [
        {"params": [t for t in p.values() if (t.dim() > 1) is matrices], "weight_decay": decay * matrices}
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(groups, **options)


@dataclass
class AdamWState:
    """Parameters and both running means after an update."""

    p: Tensors
    moments: dict[str, tuple[Tensor, Tensor]]

    def copy(self) -> "AdamWState":
        moments = {name: (mean.clone(), square.clone()) for name, (mean, square) in self.moments.items()}
        return AdamWState({name: t.clone() for name, t in self.p.items()}, moments)

    def update(self, module: Module, grads: Tensors, step: int) -> None:
        betas = kernels.BETA1, kernels.BETA2
        grads_copy = {name: g.clone() for name, g in grads.items()}
        constants = kernels.RATE, betas, kernels.EPS, kernels.DECAY
        with no_autograd():
            module["adamw"](self.p, grads_copy, self.moments, step, *constants)


def compute_reference_states(p: Tensors, gradients: list[Tensors]) -> list[AdamWState]:
    tensors = make_leaves(p)
    betas = kernels.BETA1, kernels.BETA2
    optimizer = make_adamw(tensors, kernels.DECAY, lr=kernels.RATE, betas=betas, eps=kernels.EPS)
    states = [
        AdamWState(p, {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in p.items()}).copy()
    ]
    for grads in gradients:
        for name, leaf in tensors.items():
            leaf.grad = grads[name].clone()
        optimizer.step()
        adam = {name: optimizer.state[leaf] for name, leaf in tensors.items()}
        moments = {name: (s["exp_avg"], s["exp_avg_sq"]) for name, s in adam.items()}
        states.append(AdamWState({name: leaf.detach() for name, leaf in tensors.items()}, moments).copy())
    return states


LOOP_MISTAKES = (
    Mistake("decay-everywhere", "with decay on vectors too: biases and LayerNorm's weights do not decay",
            {"decay": lambda v: np.asarray(kernels.DECAY)}),
    Mistake("not-in-place", f"of decay alone: {IN_PLACE.format('tensor', '-= ...')}", {"new_x": lambda v: kernels.update_parameter(v, 0 * v.x)}),
)  # fmt: skip
"""AdamW's mistakes in the loop over parameter tensors."""


def check_adamw(gate: str, module: Module, seed: int) -> str:
    """Check three updates against PyTorch's; if any is wrong, check each from a correct state. Raises CheckError."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    p = {"weight": normal(4, 3), "bias": normal(4), "table": normal(5, 3)}
    gradients = [{name: 0.1 * normal(*t.shape) for name, t in p.items()} for _ in range(3)]
    states = compute_reference_states(p, gradients)
    final = states[0].copy()
    for step, grads in enumerate(gradients, 1):
        final.update(module, grads, step)
    if not [*find_wrong_values(final.p, states[-1].p)]:
        return "three updates"
    evidence: dict[str, list[Evidence]] = {"new_mean": [], "new_square": [], "new_x": []}
    for step, grads in enumerate(gradients, 1):
        previous, expected = states[step - 1], states[step]
        got = previous.copy()
        got.update(module, grads, step)
        check_in_place(got, previous)
        for name, x in previous.p.items():
            tensors = zip(
                ("x", "dx", "mean", "square"), (x, grads[name], *previous.moments[name]), strict=True
            )
            arrays = {n: t.numpy() for n, t in tensors}
            arrays |= {"step": np.asarray(step), "decay": np.asarray(kernels.DECAY * (x.dim() > 1))}
            case = Case(f"{name}, update {step}", "", (1, 1, 1, 1), "plain")
            pairs = zip(
                (*got.moments[name], got.p[name]), (*expected.moments[name], expected.p[name]), strict=True
            )
            for quantity, (got_value, expected_value) in zip(evidence, pairs, strict=True):
                evidence[quantity] += make_evidence(case, arrays, got_value.numpy(), expected_value.numpy())
    raise_diagnosis(gate, evidence, LOOP_MISTAKES)
    wrong = next(find_wrong_values(final.p, states[-1].p))
    raise CheckError(describe_wrong(final.p, states[-1].p, wrong), "wrong-values")


def check_in_place(got: AdamWState, previous: AdamWState) -> None:
    """Raise CheckError if an update leaves either of the means unchanged."""
    for i, (name, label) in enumerate((("mean", "g"), ("square", "g * g"))):
        if all(torch.equal(got.moments[n][i], previous.moments[n][i]) for n in got.p):
            advice = IN_PLACE.format(name, f"*= beta; {name} += ...")
            raise CheckError(f"an update has not changed the mean of {label}: {advice}", "not-in-place")


# ---- The step -----------------------------------------------------------------------------------------------


def train_reference(
    p: Tensors,
    excerpts: list[Tensor],
    initial_grads: Tensors,
    zero_grads: str = "before",
    slices: tuple[slice, slice] = (slice(None, -1), slice(1, None)),
    clip: bool = True,
    always_first_step: bool = False,
    update: bool = True,
) -> Tensors:
    """Return losses and parameters of a run with autograd and PyTorch's AdamW, starting from `initial_grads`.

    `zero_grads` is when gradients are cleared: "before" or "after" a step, "too late" (before the update), or
    "never"; `slices` split an excerpt into tokens and targets. With `always_first_step`, every step uses the
    first step's bias corrections.
    """
    tensors, values = make_leaves(p), {}
    optimizer = make_adamw(tensors, DECAY, lr=RATE, betas=BETAS, eps=EPS)
    for name, leaf in tensors.items():
        leaf.grad = initial_grads[name].clone()
    for step, excerpt in enumerate(excerpts, 1):
        for group in optimizer.param_groups:
            group["lr"] = step * RATE
        if zero_grads == "before":
            optimizer.zero_grad()
        tokens, targets = (excerpt[:, end] for end in slices)
        loss = Model().loss(tokens, targets, tensors)
        loss.backward()
        if zero_grads == "too late":
            for leaf in tensors.values():
                leaf.grad = torch.zeros_like(leaf)
        if clip:
            torch.nn.utils.clip_grad_norm_(tensors.values(), LIMIT)
        for state in optimizer.state.values() if always_first_step else ():
            state["step"].zero_()
        if update:
            optimizer.step()
        if zero_grads == "after":
            optimizer.zero_grad()
        values[f"the loss of step {step}"] = loss.detach()
        values |= {f"{name} after step {step}": leaf.detach().clone() for name, leaf in tensors.items()}
    return values


STEP_MISTAKES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "not-zeroed": ("where the previous step's gradients are still there", {"zero_grads": "never"}),
    "zeroed-at-the-end": (
        "of gradients that are cleared at the end: what was there before the first step is added",
        {"zero_grads": "after"},
    ),
    "cleared-before-update": (
        "of gradients that are cleared between the backward pass and the update",
        {"zero_grads": "too late"},
    ),
    "not-updated": ("of parameters without an update", {"update": False}),
    "number-not-used": (
        "where the bias of both means is corrected as if each step were the first",
        {"always_first_step": True},
    ),
    "two-on": (
        "where every place predicts the token after the next",
        {"slices": (slice(None, -2), slice(2, None))},
    ),
    "past": ("where every place predicts the token before it", {"slices": (slice(1, None), slice(None, -1))}),
    "not-shifted": (
        "where every place predicts itself, which is trivial: the loss falls to 0",
        {"slices": (slice(None, -1), slice(None, -1))},
    ),
    "not-clipped": ("without clipping before the update: afterwards it is too late", {"clip": False}),
}
"""Known mistake -> the end of "these are the values ...", and the arguments of `train_reference` for it."""


def check_step(gate: str, module: Module, seed: int) -> str:
    """Check three steps against autograd with PyTorch's AdamW. Raises CheckError if any is wrong."""
    generator = torch.Generator().manual_seed(seed)
    p = init_parameters(layers=1, width=8, vocabulary=9, context=8, seed=seed)
    excerpts = [torch.randint(9, (3, 6), generator=generator) for _ in range(3)]
    initial_grads = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in p.items()}
    params, grads = ({n: t.clone() for n, t in source.items()} for source in (p, initial_grads))
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in p.items()}
    got: Tensors = {}
    with no_autograd():
        for step, excerpt in enumerate(excerpts, 1):
            loss = module["step"](excerpt, params, grads, moments, step, step * RATE, LIMIT)
            if not isinstance(loss, Tensor):
                raise CheckError("step() must return a tensor, the loss", "wrong-values")
            got[f"the loss of step {step}"] = loss.clone()
            got |= {f"{name} after step {step}": t.clone() for name, t in params.items()}
    expected = train_reference(p, excerpts, initial_grads)
    wrong = next(find_wrong_values(got, expected), None)
    if wrong is None:
        return "three steps, loss and every parameter"
    error = describe_wrong(got, expected, wrong)
    for id, (ending, arguments) in STEP_MISTAKES.items():
        if not [*find_wrong_values(got, train_reference(p, excerpts, initial_grads, **arguments))]:
            raise CheckError(f"{error}\nthese are the values {ending}", id)
    raise CheckError(error, "wrong-values")
