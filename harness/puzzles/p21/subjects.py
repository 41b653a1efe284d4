"""The reference of each backward pass of the hunt: PyTorch's own function, and inputs to compare both on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check.gradients import Function, Subject
from harness.puzzles.formulas import EPS

KEPT = 0.75
"""The share of elements that dropout lets through."""
IGNORED = -100
"""The target of a row that does not count in a loss."""
LEADING = {"odd": (3, 5), "square": (4,), "row": (), "deep": (2, 3, 2), "tall": (5003,)}
"""Sizes in front of the last axis, by kind."""
LAST = {"odd": 7, "square": 4, "row": 6, "deep": 5, "tall": 8}
OTHER = {"odd": 6, "square": 4, "row": 3, "deep": 4, "tall": 5}
"""The last axis of a product's result."""
ATTENTION = {
    "odd": ((2,), 3, 5, 6, 4),
    "square": ((4,), 4, 4, 4, 4),
    "row": ((), 3, 5, 6, 4),
    "deep": ((2, 3), 2, 3, 4, 5),
}
"""Leading sizes, S, T, d and e of attention."""
ALL_SIZES = ("odd", "square", "row", "deep")


class Random:
    """Random numbers of a problem, the same for the same seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, sizes: str) -> Tensor:
        """Return x with a mean that no sum over rows cancels, [..., H]."""
        return 0.5 + self.normal(*LEADING[sizes], LAST[sizes])


def one(sizes: str, seed: int) -> tuple[Tensor, ...]:
    return (Random(seed).rows(sizes),)


def with_weight(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = Random(seed)
    return random.rows(sizes), 1 + 0.5 * random.normal(LAST[sizes])


def with_target(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return logits, and a class for each row; some rows have none."""
    random = Random(seed)
    classes = torch.randint(LAST[sizes], LEADING[sizes], generator=random.generator)
    if sizes in ("odd", "deep"):
        classes.view(-1)[::3] = IGNORED
    return random.rows(sizes), classes


def with_mask(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = Random(seed)
    x = random.rows(sizes)
    return x, torch.rand(x.shape, generator=random.generator) < KEPT


def attention(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = Random(seed)
    lead, S, T, d, e = ATTENTION[sizes]
    return random.normal(*lead, S, d), random.normal(*lead, T, d), random.normal(*lead, T, e)


def linear(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = Random(seed)
    return random.rows(sizes), random.normal(OTHER[sizes], LAST[sizes])


def low_rank(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = Random(seed)
    return random.rows(sizes), random.normal(2, LAST[sizes]), random.normal(OTHER[sizes], 2)


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return RMSNorm and its divisor, which has no gradient."""
    rms = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return x / rms * weight, rms.detach()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the rows that have a class."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


@dataclass(frozen=True)
class Reference:
    """The reference of a gate's class.

    Attributes:
        name: The class in the learner's file.
        reference: The same in PyTorch.
        make: Builds the inputs.
        sums: Whether it sums over rows, and is tested with thousands of them.
    """

    name: str
    reference: Function
    make: Callable[[str, int], tuple[Tensor, ...]]
    sums: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        """The kinds of sizes that it is tested at."""
        return (*ALL_SIZES, "tall") if self.sums else ALL_SIZES

    def subject(self, function: Function) -> Subject:
        """Return a function to be checked against this reference."""
        return Subject(function, self.reference, self.make, sizes=self.sizes)


WANTED = {
    "softmax": Reference("Softmax", lambda x: torch.softmax(x, -1), one),
    "logsoftmax": Reference("LogSoftmax", lambda x: torch.log_softmax(x, -1), one),
    "crossentropy": Reference("CrossEntropy", cross_entropy, with_target),
    "attention": Reference("Attention", F.scaled_dot_product_attention, attention),
    "silu": Reference("SiLU", F.silu, one),
    "sigmoid": Reference("Sigmoid", torch.sigmoid, one),
    "dropout": Reference("Dropout", lambda x, keep: torch.where(keep, x / KEPT, 0.0), with_mask),
    "rmsnorm": Reference("RMSNorm", rms_norm, with_weight),
    "standardise": Reference("Standardise", lambda x: F.layer_norm(x, x.shape[-1:], eps=EPS), one),
    "addbias": Reference("AddBias", lambda x, bias: x + bias, with_weight, sums=True),
    "scale": Reference("Scale", lambda x, weight: x * weight, with_weight, sums=True),
    "linear": Reference("Linear", F.linear, linear, sums=True),
    "lowrank": Reference("LowRank", lambda x, a, b: x @ a.T @ b.T, low_rank),
}
"""Gate -> the reference of its class."""
