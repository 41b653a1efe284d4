"""What judges the last gates of puzzle 27: clipping, AdamW and the step, beside PyTorch's own; and their known mistakes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.puzzles.p27.autograd import Model, Tensors, parameters
from harness.puzzles.p27.running import Fault, Module, leaves, no_autograd, one_wrong, wrong_values

RATE, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
"""The rate of the checks, and the rest as the learner's file has it."""
OTHER_BETAS, OTHER_DECAY, LIMIT = (0.8, 0.97), 0.2, 0.7
"""What AdamW and clipping are asked with: nothing that the learner's file has, so that an argument that is not used shows."""
Known = Mapping[str, tuple[str, Callable[[], Tensors]]]
"""Known mistake -> words that end "these are the values ...", and the values."""


def compare(got: Tensors, right: Tensors, known: Known) -> None:
    """Raises Fault where a value is wrong, with the first one and the known mistake that gives all."""
    wrong = [*wrong_values(got, right)]
    if not wrong:
        return
    lines = [one_wrong(got, right, wrong[0])]
    for id, (words, values) in known.items():
        if not [*wrong_values(got, values())]:
            raise Fault("\n".join([*lines, f"these are the values {words}"]), id)
    raise Fault("\n".join(lines), "wrong-values")


# ---- Clipping -----------------------------------------------------------------------------------------------


def check_clip(gate: str, module: Module) -> str:
    """Norms above and below the limit, beside `clip_grad_norm_`. Raises Fault."""
    generator = torch.Generator().manual_seed(27)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
    for size in (5.0, 0.01):
        first = {
            n: size * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()
        }
        norm = torch.stack([each.norm() for each in first.values()]).norm()
        held = leaves(first)
        for name, leaf in held.items():
            leaf.grad = first[name].clone()
        right = {"the norm": torch.nn.utils.clip_grad_norm_(held.values(), LIMIT)}
        right |= {f"gradient {name}": leaf.grad for name, leaf in held.items() if leaf.grad is not None}
        mine = {name: each.clone() for name, each in first.items()}
        with no_autograd():
            returned = module["clip"](mine, LIMIT)
        if not isinstance(returned, Tensor):
            raise Fault("clip() returns no tensor: the norm is wanted, as it was before", "wrong-values")

        def scaled(
            factor: Callable[[Tensor], Tensor], said: Tensor = norm, first: Tensors = first
        ) -> Tensors:
            return {"the norm": said} | {f"gradient {name}": factor(g) * g for name, g in first.items()}

        known: Known = {
            "each-by-itself": (
                "where each gradient is clipped by a norm of its own",
                lambda scaled=scaled: scaled(lambda g: (LIMIT / (g.norm() + 1e-6)).clamp(max=1)),
            ),
            "scaled-up": (
                "of gradients that are scaled up to the limit too",
                lambda scaled=scaled, norm=norm: scaled(lambda g: LIMIT / (norm + 1e-6)),
            ),
            "not-rooted": (
                "of the sum of squares, without its root",
                lambda scaled=scaled, norm=norm: scaled(
                    lambda g: (LIMIT / (norm**2 + 1e-6)).clamp(max=1), norm**2
                ),
            ),
        }
        compare(
            {"the norm": returned} | {f"gradient {name}": each for name, each in mine.items()}, right, known
        )
    return "norms above and below the limit"


# ---- AdamW --------------------------------------------------------------------------------------------------


def adamw_of(
    p: Tensors,
    decay: float = OTHER_DECAY,
    everywhere: bool = False,
    eps: float = EPS,
    betas: tuple[float, float] = OTHER_BETAS,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """PyTorch's, with decay for matrices alone unless it is `everywhere`; Adam adds the decay to the gradient."""
    groups = [
        {
            "params": [t for t in p.values() if (t.dim() > 1) is matrices],
            "weight_decay": decay * (matrices or everywhere),
        }
        for matrices in (True, False)
    ]
    return make(groups, lr=RATE, betas=betas, eps=eps)


def updated(
    p: Tensors, gradients: list[Tensors], make: Callable[[Tensors], torch.optim.Optimizer]
) -> Tensors:
    """The parameters after an update for each entry of `gradients`."""
    held = leaves(p)
    optimizer = make(held)
    for each in gradients:
        for name, leaf in held.items():
            leaf.grad = each[name].clone()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in held.items()}


def by_formula(
    p: Tensors, gradients: list[Tensors], eps: float, late: int, corrected: bool, inside: bool
) -> Tensors:
    """AdamW with the bias corrected for another step, not at all, or with eps under the root."""
    updated = {}
    for name, tensor in p.items():
        w, mean, square = tensor.clone(), torch.zeros_like(tensor), torch.zeros_like(tensor)
        for number, g in enumerate((each[name] for each in gradients), 1 + late):
            first, second = (1 - beta**number if corrected else 1.0 for beta in OTHER_BETAS)
            mean = OTHER_BETAS[0] * mean + (1 - OTHER_BETAS[0]) * g
            square = OTHER_BETAS[1] * square + (1 - OTHER_BETAS[1]) * g * g
            root = (square / second + eps).sqrt() if inside else (square / second).sqrt() + eps
            w = w * (1 - RATE * OTHER_DECAY * (w.dim() > 1)) - RATE * mean / first / root
        updated[name] = w
    return updated


def check_adamw(gate: str, module: Module) -> str:
    """Three updates beside PyTorch's, with an eps that shows. Raises Fault."""
    generator, eps = torch.Generator().manual_seed(27), 1e-2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    p = {"weight": normal(4, 3), "bias": normal(4), "table": normal(5, 3)}
    gradients = [{name: 0.1 * normal(*t.shape) for name, t in p.items()} for _ in range(3)]
    mine = {name: t.clone() for name, t in p.items()}
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in p.items()}
    with no_autograd():
        for number, each in enumerate(gradients, 1):
            grads = {name: g.clone() for name, g in each.items()}
            module["adamw"](mine, grads, moments, number, RATE, OTHER_BETAS, eps, OTHER_DECAY)
    known: Known = {
        "decay-everywhere": (
            "with decay on vectors too: a bias and LayerNorm's weight are not to be drawn to 0",
            lambda: updated(p, gradients, lambda q: adamw_of(q, everywhere=True, eps=eps)),
        ),
        "decay-forgotten": (
            "without decay",
            lambda: updated(p, gradients, lambda q: adamw_of(q, 0.0, eps=eps)),
        ),
        "decay-in-gradient": (
            "with decay added to the gradient, where both means see it",
            lambda: updated(p, gradients, lambda q: adamw_of(q, eps=eps, make=torch.optim.Adam)),
        ),
        "eps-inside-root": (
            "with eps under the root: it stands beside it",
            lambda: by_formula(p, gradients, eps, 0, True, True),
        ),
        "correction-late": (
            "with the bias corrected for the step after this one",
            lambda: by_formula(p, gradients, eps, 1, True, False),
        ),
        "not-corrected": (
            "without the correction of the bias: both means begin at 0",
            lambda: by_formula(p, gradients, eps, 0, False, False),
        ),
    }
    compare(mine, updated(p, gradients, lambda q: adamw_of(q, eps=eps)), known)
    return "three updates"


# ---- The step -----------------------------------------------------------------------------------------------


def trained(
    p: Tensors,
    excerpts: list[Tensor],
    junk: Tensors,
    zeroed: bool = True,
    shifted: bool = True,
    clipped: bool = True,
) -> Tensors:
    """Losses and parameters of a training run by autograd and PyTorch's optimizer; `junk` are the gradients that it begins with."""
    held, values = leaves(p), {}
    optimizer = adamw_of(held, DECAY, betas=BETAS)
    for name, leaf in held.items():
        leaf.grad = junk[name].clone()
    for number, excerpt in enumerate(excerpts, 1):
        for group in optimizer.param_groups:
            group["lr"] = number * RATE
        if zeroed:
            optimizer.zero_grad()
        loss = Model().loss(excerpt[:, :-1], excerpt[:, 1:] if shifted else excerpt[:, :-1], held)
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(held.values(), LIMIT)
        optimizer.step()
        values[f"the loss of step {number}"] = loss.detach()
        values |= {f"{name} after step {number}": leaf.detach().clone() for name, leaf in held.items()}
    return values


def check_step(gate: str, module: Module) -> str:
    """Three steps beside autograd with PyTorch's AdamW. Raises Fault."""
    generator = torch.Generator().manual_seed(27)
    p = parameters(layers=1, width=8, vocabulary=9, context=8, seed=27)
    excerpts = [torch.randint(9, (3, 6), generator=generator) for _ in range(3)]
    junk = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in p.items()}
    mine, grads = ({n: t.clone() for n, t in each.items()} for each in (p, junk))
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in p.items()}
    got: Tensors = {}
    with no_autograd():
        for number, excerpt in enumerate(excerpts, 1):
            loss = module["step"](excerpt, mine, grads, moments, number, number * RATE, LIMIT)
            if not isinstance(loss, Tensor):
                raise Fault("step() returns no tensor: the loss is wanted", "wrong-values")
            got[f"the loss of step {number}"] = loss.clone()
            got |= {f"{name} after step {number}": t.clone() for name, t in mine.items()}
    known: Known = {
        "not-zeroed": (
            "where the gradients of the step before are still there",
            lambda: trained(p, excerpts, junk, zeroed=False),
        ),
        "not-shifted": (
            "where every place is to predict itself, which is no task: the loss falls to 0",
            lambda: trained(p, excerpts, junk, shifted=False),
        ),
        "not-clipped": (
            "without clipping before the update: afterwards it is too late",
            lambda: trained(p, excerpts, junk, clipped=False),
        ),
    }
    compare(got, trained(p, excerpts, junk), known)
    return "three steps, loss and every parameter"
