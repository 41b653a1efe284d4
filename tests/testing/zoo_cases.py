"""Every wrong backward pass of the puzzles as arguments of `check_backward`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.formulas import EPS
from harness.puzzles.p20.functions import CLASSES, words
from harness.puzzles.p20.registration import register_op
from harness.puzzles.p21.subjects import IGNORED, WANTED
from harness.toolchain import roots


@dataclass(frozen=True)
class Asked:
    """The arguments of one call."""

    name: str
    make: Callable[[], Callable[..., object]]
    reference: Callable[..., object]
    inputs: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


ROWS = (..., "H")


def targets(sizes, generator: torch.Generator) -> Tensor:
    """A class for each row, or none."""
    classes = torch.randint(sizes["C"], (sizes["N"], sizes["T"]), generator=generator)
    classes.view(-1)[::3] = IGNORED
    return classes


def mask(sizes, generator: torch.Generator) -> Tensor:
    """Three of four elements."""
    return torch.rand(sizes["N"], sizes["H"], generator=generator) < 0.75


def order(sizes, generator: torch.Generator) -> Tensor:
    """A permutation of the positions."""
    return torch.randperm(sizes["L"], generator=generator).int()


P21: dict[str, dict[str, Any]] = {
    "softmax": {"x": ROWS},
    "logsoftmax": {"x": ROWS},
    "crossentropy": {"logits": ("N", "T", "C"), "target": targets},
    "attention": {"q": (..., "S", "d"), "k": (..., "T", "d"), "v": (..., "T", "e")},
    "silu": {"x": ROWS},
    "sigmoid": {"x": ROWS},
    "dropout": {"x": ("N", "H"), "keep": mask},
    "rmsnorm": {"x": ROWS, "weight": ("H",)},
    "standardise": {"x": ROWS},
    "addbias": {"x": ROWS, "bias": ("H",)},
    "scale": {"x": ROWS, "weight": ("H",)},
    "linear": {"x": ROWS, "weight": ("O", "H")},
    "lowrank": {"x": ROWS, "a": ("r", "H"), "b": ("O", "r")},
}


def hunted(gate: str, name: str, path) -> Asked:
    """A class of puzzle 21's first rung."""
    wanted = WANTED[gate]
    return Asked(name, lambda: load(path)[wanted.name].apply, wanted.reference, P21[gate])


def right_of_p21() -> list[Asked]:
    """The solution's classes, at all sizes."""
    path = roots.solutions() / "p21" / "hunt.py"
    return [hunted(gate, f"p21 {gate}", path) for gate in P21]


def of_p21() -> Iterator[Asked]:
    """The wrong ones of the bug hunt."""
    for bug in zoo.load("p21"):
        if bug.rung == "torch":
            yield hunted(bug.gate, bug.name, bug.target())


def of_p20() -> Iterator[Asked]:
    """The wrong classes of functions.py, with the ledger of what each may keep."""
    for bug in zoo.load("p20"):
        if bug.rung != "torch":
            continue
        name, path = CLASSES[bug.gate], bug.target()
        if bug.gate == "layernorm":
            yield Asked(
                bug.name,
                lambda path=path: lambda x, w, b: load(path)["LayerNorm"].apply(x, w, b, EPS),
                lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
                {"x": ROWS, "weight": ("H",), "bias": ("H",)},
            )
            continue
        ledger = {"relu_mask": lambda x: x.numel(), "relu_bits": words}.get(bug.gate, lambda x: 4 * x.numel())
        yield Asked(
            bug.name,
            lambda path=path, name=name: load(path)[name].apply,
            F.relu,
            {"x": ROWS},
            {"saved": ledger, "subgradients": False},
        )


def of_register() -> Iterator[Asked]:
    """The wrong registrations that make a gradient wrong."""
    for bug in zoo.load("p20"):
        if bug.rung == "register" and bug.gate in ("gradient", "save", "second") and bug.name not in REFUSED:
            path = bug.target()
            saved = {"saved": lambda x: 4 * x.numel()}
            yield Asked(
                bug.name,
                lambda path=path: register_op(load(path)).op,
                lambda x: x.softmax(-1),
                {"x": ROWS},
                saved,
            )


REFUSED = ("register_backward_not_refused", "register_second_without_words")
"""Registrations whose second derivative raises, in words that puzzle 20 does not accept: no number is wrong."""


def of_p23() -> Iterator[Asked]:
    """Attention with a mask of its own."""

    def reference(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask)

    shapes = {
        "query": ("B", "N", "S", "d"),
        "key": ("B", "N", "T", "d"),
        "value": ("B", "N", "T", "d"),
        "mask": ("S", "T"),
    }
    for bug in zoo.load("p23"):
        if bug.rung == "torch":
            path = bug.target()
            yield Asked(bug.name, lambda path=path: load(path)["Attention"].apply, reference, shapes)


def of_p24() -> Iterator[Asked]:
    """Gathered rows, and attention on them."""
    module = load(roots.solutions() / "p24" / "in_torch.py")

    def window(query, key, value, order):
        near = module["near"](order, 2, 1)
        index = order.long()
        inverse = index.argsort()
        seen = near[inverse][:, inverse]
        return F.scaled_dot_product_attention(query, key, value, seen)

    rows = ("B", "N", "L", "d")
    for bug in zoo.load("p24"):
        if bug.rung != "torch":
            continue
        path = bug.target()
        if bug.gate == "dgather":
            yield Asked(
                bug.name,
                lambda path=path: load(path)["Gather"].apply,
                lambda tensor, order: tensor[:, :, order.long()],
                {"tensor": rows, "order": order},
            )
        else:
            yield Asked(
                bug.name,
                lambda path=path: lambda q, k, v, o: load(path)["WindowAttention"].apply(q, k, v, o, 2, 1),
                window,
                {"query": rows, "key": rows, "value": rows, "order": order},
            )


def wrong_ops() -> list[Asked]:
    """All of them."""
    return [*of_p21(), *of_p20(), *of_register(), *of_p23(), *of_p24()]
