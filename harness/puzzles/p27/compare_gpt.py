"""`p27 --compare --size`: compare every activation and gradient of a step with autograd's in float64.

A value is ok if its error is at most twice autograd's in the step's dtype, plus a floor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.check.compare import FLOOR
from harness.nn.arguments import get_dtype_name
from harness.puzzles.p27.autograd import Model, Tensors, make_parts
from harness.puzzles.p27.gpt import Sizes, State
from harness.puzzles.p27.gpt_step import ManualPass, ManualTrainer
from harness.puzzles.p27.running import compute_with_autograd, no_autograd

MAX_BATCH = 4
"""Maximum number of excerpts to compare, since float64 takes four times the memory."""
OFFSET_SCALE = 0.1
"""Magnitude of random offsets that move biases and LayerNorm weights from 0 and 1, which would hide mistakes."""


Row = tuple[str, str, bool]
"""A value's name, the text of its row, and whether it is correct."""
NOT_COMPUTED = "not computed by itself"


def make_problem(
    sizes: Sizes, seed: int, device: torch.device, state: State | None
) -> tuple[ManualTrainer, Tensor]:
    """Return random tokens and a model from `state`, or from GPT-2's initial parameters with vectors offset."""
    generator = torch.Generator().manual_seed(seed)
    shape = min(MAX_BATCH, sizes.batch), sizes.context + 1
    excerpt = torch.randint(sizes.vocabulary, shape, generator=generator)
    if state is None:
        state = State.initialize(sizes, seed, device)
        vectors = state.master[state.layout.num_decayed :]
        vectors += OFFSET_SCALE * torch.randn(vectors.shape, generator=generator).to(device)
    return ManualTrainer(state), excerpt.to(device)


def compute_by_hand(trainer: ManualTrainer, excerpt: Tensor) -> Tensors:
    values: Tensors = {}

    def record_value(name: str, value: Tensor) -> None:
        values[name] = value.clone()

    with no_autograd():
        model = ManualPass(trainer.state.sizes, trainer.p, record_value)
        loss = model.forward(excerpt[:, :-1], excerpt[:, 1:])
        grads = model.backward()
    return values | {"the output": loss} | {f"the gradient of {name}": grad for name, grad in grads.items()}


def compute_with_torch(trainer: ManualTrainer, excerpt: Tensor, dtype: torch.dtype) -> Tensors:
    """Return the same values from autograd in `dtype`: activations in order, then gradients in reverse."""
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in trainer.p.items()}
    model = Model(make_parts(trainer.state.sizes.heads))
    output = model.loss(excerpt[:, :-1], excerpt[:, 1:], p)
    outputs = {f"{name}, its output": t.detach() for name, t in model.outputs.items() if name != "loss"}
    return outputs | compute_with_autograd(model, output, None, p)


def compare_values(got: Tensors, truth: Tensors, baseline: Tensors, dtype: torch.dtype) -> Iterator[Row]:
    """Yield a row for each value: its error and PyTorch's, relative to the truth's largest element."""
    yield "", "error    PyTorch's", True
    floor = FLOOR[get_dtype_name(dtype)]
    for name, expected in truth.items():
        if name not in got:
            yield name, NOT_COMPUTED, True
            continue
        scale = expected.abs().max().item() or 1.0
        error, limit = (
            ((t.double().view(expected.shape) - expected).abs().max() / scale).item()
            for t in (got[name], baseline[name])
        )
        ok = error <= 2 * limit + floor
        yield name, f"{error:.1e}  {limit:.1e}  {'ok' if ok else 'NOT OK'}", ok


def compare(sizes: Sizes, seed: int, device: torch.device, state: State | None = None) -> list[Row]:
    trainer, excerpt = make_problem(sizes, seed, device, state)
    got = compute_by_hand(trainer, excerpt)
    truth = compute_with_torch(trainer, excerpt, torch.float64)
    baseline = compute_with_torch(trainer, excerpt, trainer.working.dtype)
    return [*compare_values(got, truth, baseline, trainer.working.dtype)]
