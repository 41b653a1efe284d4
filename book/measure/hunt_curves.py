"""Trains a tiny model with a wrong backward pass beside the same one with the right one: `python -m book.measure hunt_curves`.

A sequence of symbols and the number of a place come in; the symbol at that place is wanted. The model attends to it: an
adapter of low rank on frozen one-hot vectors, attention, a loss, all by the classes of the hunt. Both models begin with the
same parameters and see the same batches; one class differs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from book.measure.shared import write
from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.p21.subjects import WANTED
from harness.toolchain import roots

BUGS = ("softmax_probabilities_twice", "attention_query_scale", "lowrank_none_for_all")
"""The wrong backward passes that are trained with."""
SYMBOLS, LENGTH, WIDTH, RANK, BATCH = 8, 12, 16, 8, 64
RATE = 0.01
"""Learning rate of Adam."""
STEPS = 300


def parameters(seed: int) -> dict[str, Tensor]:
    """The model's parameters, as leaves in float32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "frozen": (WIDTH, SYMBOLS + LENGTH),
        "a": (RANK, SYMBOLS + LENGTH),
        "b": (WIDTH, RANK),
        "query": (WIDTH, LENGTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "out": (SYMBOLS, WIDTH),
    }
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    return {name: tensor.requires_grad_(name != "frozen") for name, tensor in tensors.items()}


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One-hot symbols and places [BATCH, LENGTH, SYMBOLS + LENGTH], the place asked for [BATCH, 1, LENGTH], its symbol."""
    symbols = torch.randint(SYMBOLS, (BATCH, LENGTH), generator=generator)
    place = torch.randint(LENGTH, (BATCH,), generator=generator)
    tokens = torch.eye(SYMBOLS)[symbols]
    places = torch.eye(LENGTH).expand(BATCH, LENGTH, LENGTH)
    wanted = symbols.gather(1, place[:, None])
    return torch.cat([tokens, places], -1), torch.eye(LENGTH)[place][:, None], wanted


class Applied(Protocol):
    """A function of the hunt, as the model calls it: the class of an `autograd.Function`, or what stands for one."""

    @property
    def apply(self) -> Callable[..., Tensor]: ...


def loss_of(
    functions: Mapping[str, Applied], p: Mapping[str, Tensor], tokens: Tensor, asked: Tensor, wanted: Tensor
):
    """The model: its loss on a batch."""
    h = tokens @ p["frozen"].T + functions["LowRank"].apply(tokens, p["a"], p["b"])
    q, k, v = asked @ p["query"].T, h @ p["key"].T, h @ p["value"].T
    if functions["Softmax"] is functions["right Softmax"]:
        attended = functions["Attention"].apply(q, k, v)
    else:  # attention step by step, so that softmax has a backward pass of its own
        attended = functions["Softmax"].apply(q @ k.mT * WIDTH**-0.5) @ v
    return functions["CrossEntropy"].apply(attended @ p["out"].T, wanted)


def train(functions: Mapping[str, Applied], steps: int, seed: int) -> list[float]:
    """The losses of a training run; the same seed means the same start and the same batches."""
    p = parameters(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.Adam([t for t in p.values() if t.requires_grad], lr=RATE)
    losses = []
    for _ in range(steps):
        loss = loss_of(functions, p, *batch(generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pairs(steps: int, seed: int = 21) -> dict[str, tuple[list[float], list[float]]]:
    """Wrong backward pass -> the losses of every step, with the right ones and with it."""
    classes = [wanted.name for wanted in WANTED.values()]
    solution = load(roots.solutions() / "p21" / "hunt.py")
    right = {name: solution[name] for name in classes} | {"right Softmax": solution["Softmax"]}
    bugs = {bug.name: bug for bug in zoo.load("p21") if bug.name in BUGS}
    baseline = train(right, steps, seed)
    curves = {}
    for name in BUGS:
        changed = WANTED[bugs[name].gate].name
        wrong = {**right, changed: load(bugs[name].target())[changed]}
        curves[name] = baseline, train(wrong, steps, seed)
    return curves


def rows(steps: int = STEPS) -> Iterator[dict[str, object]]:
    """The losses of every step, with a wrong backward pass and with the right ones."""
    for name, (right, wrong) in pairs(steps).items():
        for step, (a, b) in enumerate(zip(right, wrong, strict=True)):
            yield {"bug": name, "step": step, "right": f"{a:.6f}", "wrong": f"{b:.6f}"}


if __name__ == "__main__":
    write(rows())
