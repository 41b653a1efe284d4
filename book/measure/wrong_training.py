"""Trains a small model with each wrong kernel of puzzle 22: `python -m book.measure museum_curves`, a minute.

A student learns what a teacher of the same form makes of random numbers: a matrix, then LayerNorm + Linear, by Adam in
float64. All students begin alike and see the same batches. A wrong one has the mistake's formula, which the diagnosis
finds equal to the wrong kernel, in the place of what its gate checks; everything else stays right. The losses go to
the record `museum_curves`, means of so many steps: whole curves of the first seed, first and last means of the others.
"""

from collections.abc import Iterator, Set

import numpy as np

from book.measure.shared import write
from harness.check import zoo
from harness.puzzles.p22.mistakes import derive
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.derivation import Mistake

B, S, D, H, O = 4, 9, 12, 24, 10
"""Batch, sequence, width of the input of the matrix, of LayerNorm, of the output."""
STEPS, WINDOW = 300, 10
SEEDS = (22, 23, 24, 25, 26)
RATE, KEEP, KEEP_SQUARES, TINY = 0.01, 0.9, 0.999, 1e-8
"""Adam's, at the values that everybody begins with but for the rate."""
GRADIENT_OF = {
    "ln_weight": "grad_ln_weight",
    "ln_bias": "grad_ln_bias",
    "linear_weight": "grad_weight",
    "linear_bias": "grad_bias",
}

Arrays = dict[str, np.ndarray]


def start(random: np.random.Generator) -> Arrays:
    """Parameters as layers begin: gamma = 1, beta = 0, b = 0, random matrices."""
    return {
        "matrix": random.standard_normal((H, D)),
        "ln_weight": np.ones(H),
        "ln_bias": np.zeros(H),
        "linear_weight": random.standard_normal((O, H)) / np.sqrt(H),
        "linear_bias": np.zeros(O),
    }


def teacher(random: np.random.Generator) -> Arrays:
    """What is to be learned: like the start, with a gamma, a beta and a bias of its own."""
    known = start(random)
    for name in ("ln_weight", "ln_bias", "linear_bias"):
        known[name] = known[name] + 0.5 * random.standard_normal(known[name].shape)
    return known


def quantities(p: Arrays, u: np.ndarray, dy: np.ndarray, changes=None):
    """The derivation of the layer behind the matrix, for inputs u [B, S, D] and a gradient dy [B, S, O]."""
    x = u @ p["matrix"].T
    layer = {name: p[name] for name in GRADIENT_OF}
    return derive({"input": x, **layer, "grad_output": dy, "dln": np.zeros_like(x)}, changes)


def chosen(wrong: zoo.WrongSolution) -> tuple[Mistake, set[str]] | None:
    """The formula of a wrong kernel and the quantities that it spoils; None where training has no place for it.

    A kernel that single cases show is one that the formula fits there alone.
    """
    known = next((mistake for mistake in PUZZLE.mistakes if mistake.id == wrong.mistake), None)
    if known is None or wrong.rung or wrong.cases or wrong.gate == "transfer":
        return None
    gates = {wrong.gate, *wrong.also}
    spoiled = {name for gate in PUZZLE.gates if gate.id in gates for name in gate.quantities}
    return known, spoiled & {"output", "grad_input", *GRADIENT_OF.values()}


def with_mistake(name: str, right, wrong, spoiled: Set[str]) -> np.ndarray:
    """A quantity as the run has it; of alternatives, what the last of them leaves."""
    if name not in spoiled:
        return getattr(right, name)
    got = np.asarray(getattr(wrong, name), np.float64)
    return got[-1] if got.ndim > getattr(right, name).ndim else got


def losses(
    mistake: Mistake | None = None,
    spoiled: Set[str] = frozenset(),
    steps: int = STEPS,
    seed: int = SEEDS[0],
) -> list[float]:
    """The loss of every step, half the mean square of what the student is off."""
    random = np.random.default_rng(seed)
    wanted, p = teacher(random), start(random)
    moments = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in p.items()}
    changes = mistake.changes if mistake else None
    zero, curve = np.zeros((B, S, O)), []
    with np.errstate(all="ignore"):
        for step in range(1, steps + 1):
            u = 1 + random.standard_normal((B, S, D))
            y = with_mistake("output", quantities(p, u, zero), quantities(p, u, zero, changes), spoiled)
            apart = y - quantities(wanted, u, zero).output
            curve.append(float((apart**2).mean() / 2))
            dy = apart / apart.size
            right, wrong = quantities(p, u, dy), quantities(p, u, dy, changes)
            gradients = {p_name: with_mistake(q, right, wrong, spoiled) for p_name, q in GRADIENT_OF.items()}
            dx = with_mistake("grad_input", right, wrong, spoiled)
            gradients["matrix"] = np.einsum("bsh,bsd->hd", dx, u)
            for name, gradient in gradients.items():
                first, second = moments[name]
                first += (1 - KEEP) * (gradient - first)
                second += (1 - KEEP_SQUARES) * (gradient**2 - second)
                root = np.sqrt(second / (1 - KEEP_SQUARES**step)) + TINY
                p[name] = p[name] - RATE * first / (1 - KEEP**step) / root
    return curve


def windows(curve: list[float]) -> list[float]:
    """The means of WINDOW steps each."""
    return [float(np.mean(curve[first : first + WINDOW])) for first in range(0, len(curve), WINDOW)]


def curves(seed: int) -> dict[str, tuple[list[float], list[float]]]:
    """Wrong kernel -> the windows of the right run and of its own; those left out that these sizes do not show."""
    right, by_mistake = losses(seed=seed), {}
    for wrong in zoo.load_wrong_solutions("p22"):
        if pair := chosen(wrong):
            short = losses(*pair, steps=3, seed=seed)
            if short != right[:3]:
                by_mistake[wrong.name] = windows(right), windows(losses(*pair, seed=seed))
    return by_mistake


def rows() -> Iterator[dict]:
    """A row for each window of each wrong kernel; of later seeds the first and the last window alone."""
    for seed in SEEDS:
        for name, pair in curves(seed).items():
            for window, (right, wrong) in enumerate(zip(*pair, strict=True), start=1):
                step = window * WINDOW
                if seed == SEEDS[0] or step in (WINDOW, STEPS):
                    losses_ = {"right": f"{right:.4g}", "wrong": f"{wrong:.4g}"}
                    yield {"seed": seed, "bug": name, "step": step, **losses_}


if __name__ == "__main__":
    write(rows())
