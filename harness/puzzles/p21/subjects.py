"""Reference of each backward pass in the hunt: PyTorch's function, and the inputs to compare on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check.gradients import Function, Subject
from harness.puzzles.formulas import EPS

KEEP_FRACTION = 0.75
"""The fraction of elements that dropout keeps."""
IGNORE_INDEX = -100
"""The target of rows that the loss ignores."""
LEADING_SIZES = {"odd": (3, 5), "square": (4,), "row": (), "deep": (2, 3, 2), "tall": (5003,)}
"""Kind of sizes -> the sizes of the leading axes, all but the last."""
LAST_SIZES = {"odd": 7, "square": 4, "row": 6, "deep": 5, "tall": 8}
OUTPUT_SIZES = {"odd": 6, "square": 4, "row": 3, "deep": 4, "tall": 5}
"""Kind of sizes -> the last axis of a matrix product's result."""
ATTENTION_SIZES = {
    "odd": ((2,), 3, 5, 6, 4),
    "square": ((4,), 4, 4, 4, 4),
    "row": ((), 3, 5, 6, 4),
    "deep": ((2, 3), 2, 3, 4, 5),
}
"""Kind of sizes -> leading sizes, S, T, d and e of attention."""
ALL_SIZES = ("odd", "square", "row", "deep")


class RandomInputs:
    """Draws random float64 tensors from a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, sizes: str) -> Tensor:
        """Return x, [..., H], with a nonzero mean, so that sums over rows do not cancel."""
        return 0.5 + self.normal(*LEADING_SIZES[sizes], LAST_SIZES[sizes])


def make_rows(sizes: str, seed: int) -> tuple[Tensor, ...]:
    return (RandomInputs(seed).rows(sizes),)


def make_rows_and_weight(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = RandomInputs(seed)
    return random.rows(sizes), 1 + 0.5 * random.normal(LAST_SIZES[sizes])


def make_logits_and_target(sizes: str, seed: int) -> tuple[Tensor, ...]:
    """Return logits and a target class per row; some rows of "odd" and "deep" sizes are ignored."""
    random = RandomInputs(seed)
    classes = torch.randint(LAST_SIZES[sizes], LEADING_SIZES[sizes], generator=random.generator)
    if sizes in ("odd", "deep"):
        classes.view(-1)[::3] = IGNORE_INDEX
    return random.rows(sizes), classes


def make_rows_and_mask(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = RandomInputs(seed)
    x = random.rows(sizes)
    return x, torch.rand(x.shape, generator=random.generator) < KEEP_FRACTION


def make_attention_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = RandomInputs(seed)
    leading, S, T, d, e = ATTENTION_SIZES[sizes]
    return random.normal(*leading, S, d), random.normal(*leading, T, d), random.normal(*leading, T, e)


def make_linear_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = RandomInputs(seed)
    return random.rows(sizes), random.normal(OUTPUT_SIZES[sizes], LAST_SIZES[sizes])


def make_low_rank_inputs(sizes: str, seed: int) -> tuple[Tensor, ...]:
    random = RandomInputs(seed)
    return random.rows(sizes), random.normal(2, LAST_SIZES[sizes]), random.normal(OUTPUT_SIZES[sizes], 2)


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return RMSNorm and its divisor, which is detached."""
    rms = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return x / rms * weight, rms.detach()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss over the rows that are not ignored."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


@dataclass(frozen=True)
class Reference:
    """PyTorch's function for the class `name`; one with `sums_rows` is also tested on thousands of rows."""

    name: str
    function: Function
    make_inputs: Callable[[str, int], tuple[Tensor, ...]]
    sums_rows: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        return (*ALL_SIZES, "tall") if self.sums_rows else ALL_SIZES

    def make_subject(self, function: Function) -> Subject:
        return Subject(function, self.function, self.make_inputs, sizes=self.sizes)


REFERENCES = {
    "softmax": Reference("Softmax", lambda x: torch.softmax(x, -1), make_rows),
    "logsoftmax": Reference("LogSoftmax", lambda x: torch.log_softmax(x, -1), make_rows),
    "crossentropy": Reference("CrossEntropy", cross_entropy, make_logits_and_target),
    "attention": Reference("Attention", F.scaled_dot_product_attention, make_attention_inputs),
    "silu": Reference("SiLU", F.silu, make_rows),
    "sigmoid": Reference("Sigmoid", torch.sigmoid, make_rows),
    "dropout": Reference(
        "Dropout", lambda x, keep: torch.where(keep, x / KEEP_FRACTION, 0.0), make_rows_and_mask
    ),
    "rmsnorm": Reference("RMSNorm", rms_norm, make_rows_and_weight),
    "standardise": Reference("Standardise", lambda x: F.layer_norm(x, x.shape[-1:], eps=EPS), make_rows),
    "addbias": Reference("AddBias", lambda x, bias: x + bias, make_rows_and_weight, sums_rows=True),
    "scale": Reference("Scale", lambda x, weight: x * weight, make_rows_and_weight, sums_rows=True),
    "linear": Reference("Linear", F.linear, make_linear_inputs, sums_rows=True),
    "lowrank": Reference("LowRank", lambda x, a, b: x @ a.T @ b.T, make_low_rank_inputs),
}
"""Gate -> the reference of its class."""
