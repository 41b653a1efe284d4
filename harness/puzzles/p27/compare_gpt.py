"""`p27 --compare --size`: compare every activation and gradient of a step by the workbook's layers and one by
autograd.

The truth is autograd in float64 on the same parameters and tokens; a value is ok if its error is at most
twice that of autograd in the step's own dtype, or below a minimum (`harness.check.compare`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.check.compare import FLOOR
from harness.nn.arguments import plain
from harness.puzzles.p27.autograd import Model, Tensors, parts_with_heads
from harness.puzzles.p27.gpt import Sizes, State
from harness.puzzles.p27.gpt_step import ByHand, Pass
from harness.puzzles.p27.running import by_autograd, no_autograd

BATCH = 4
"""Excerpts that are compared: float64 takes four times the memory."""
MOVED = 0.1
"""Offset of biases and LayerNorms from 0 and 1, which would hide mistakes."""


@dataclass(frozen=True)
class Compared:
    """One value: its error and that of PyTorch in the same dtype, relative to the truth's largest element."""

    name: str
    error: float
    baseline: float
    ok: bool


def problem(sizes: Sizes, seed: int, device: torch.device, state: State | None) -> tuple[ByHand, Tensor]:
    """Return the trained model, from a state or from GPT-2's initial parameters with their vectors moved; and
    random tokens."""
    generator = torch.Generator().manual_seed(seed)
    excerpt = torch.randint(
        sizes.vocabulary, (min(BATCH, sizes.batch), sizes.context + 1), generator=generator
    )
    if state is None:
        state = State.begin(sizes, seed, device)
        vectors = state.master[state.pieces.decayed :]
        vectors += MOVED * torch.randn(vectors.shape, generator=generator).to(device)
    return ByHand(state), excerpt.to(device)


def by_the_step(trained: ByHand, excerpt: Tensor) -> Tensors:
    """Return every value of the step by hand, by name."""
    noted: Tensors = {}

    def note(name: str, value: Tensor) -> None:
        noted[name] = value.clone()

    with no_autograd():
        model = Pass(trained.state.sizes, trained.p, note)
        loss = model.forward(excerpt[:, :-1], excerpt[:, 1:])
        grads = model.backward()
    return noted | {"the output": loss} | {f"the gradient of {name}": grad for name, grad in grads.items()}


def by_torch(trained: ByHand, excerpt: Tensor, dtype: torch.dtype) -> Tensors:
    """Return the same by autograd in a dtype: activations in forward order, gradients from the loss
    backwards."""
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in trained.p.items()}
    model = Model(parts_with_heads(trained.state.sizes.heads))
    output = model.loss(excerpt[:, :-1], excerpt[:, 1:], p)
    outputs = {f"{name}, its output": t.detach() for name, t in model.outputs.items() if name != "loss"}
    return outputs | by_autograd(model, output, None, p)


def compare_values(
    got: Tensors, truth: Tensors, baseline: Tensors, dtype: torch.dtype
) -> Iterator[Compared | str]:
    """Yield each value of the truth; only the name of those that the step does not compute."""
    floor = FLOOR[plain(dtype)]
    for name, right in truth.items():
        if name not in got:
            yield name
            continue
        scale = right.abs().max().item() or 1.0
        error, own = (
            ((each.double().view(right.shape) - right).abs().max() / scale).item()
            for each in (got[name], baseline[name])
        )
        yield Compared(name, error, own, error <= 2 * own + floor)


def lines_of(values: list[Compared | str]) -> list[str]:
    width = max(len(each if isinstance(each, str) else each.name) for each in values)
    lines = [f"{'':<{width}}  error    PyTorch's"]
    for each in values:
        if isinstance(each, str):
            lines.append(f"{each:<{width}}  not computed by itself")
        else:
            text = "ok" if each.ok else "NOT OK"
            lines.append(f"{each.name:<{width}}  {each.error:.1e}  {each.baseline:.1e}  {text}")
    wrong = wrong_of(values)
    first = f"❌ {len(wrong)} wrong, the first is {wrong[0]}" if wrong else "✅ every value is autograd's"
    return [*lines, first]


def wrong_of(values: list[Compared | str]) -> list[str]:
    return [each.name for each in values if isinstance(each, Compared) and not each.ok]


def compare(
    sizes: Sizes, seed: int, device: torch.device, state: State | None = None
) -> list[Compared | str]:
    """Compare every value of one step by hand with autograd's."""
    trained, excerpt = problem(sizes, seed, device, state)
    got = by_the_step(trained, excerpt)
    truth = by_torch(trained, excerpt, torch.float64)
    baseline = by_torch(trained, excerpt, trained.working.dtype)
    return [*compare_values(got, truth, baseline, trained.working.dtype)]
