"""The puzzles' incorrect backward passes as arguments of `check_backward`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.check import zoo
from harness.check.python_files import load_module
from harness.puzzles.formulas import EPS
from harness.puzzles.p20.functions import CLASS_NAMES, count_packed_mask_bytes
from harness.puzzles.p20.registration import register_op
from harness.puzzles.p21.subjects import IGNORE_INDEX, REFERENCES
from harness.toolchain import roots


@dataclass(frozen=True)
class Arguments:
    """Arguments of a `check_backward` call."""

    name: str
    make: Callable[[], Callable[..., object]]
    reference: Callable[..., object]
    inputs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


ROWS = (..., "H")


def make_targets(sizes, generator: torch.Generator) -> Tensor:
    """Return target classes; every third row is ignored."""
    classes = torch.randint(sizes["C"], (sizes["N"], sizes["T"]), generator=generator)
    classes.view(-1)[::3] = IGNORE_INDEX
    return classes


def make_mask(sizes, generator: torch.Generator) -> Tensor:
    """Return a mask that is True for about three quarters of the elements."""
    return torch.rand(sizes["N"], sizes["H"], generator=generator) < 0.75


def make_order(sizes, generator: torch.Generator) -> Tensor:
    """Return a random permutation of the positions."""
    return torch.randperm(sizes["L"], generator=generator).int()


P21: dict[str, dict[str, Any]] = {
    "softmax": {"x": ROWS},
    "logsoftmax": {"x": ROWS},
    "crossentropy": {"logits": ("N", "T", "C"), "target": make_targets},
    "attention": {"q": (..., "S", "d"), "k": (..., "T", "d"), "v": (..., "T", "e")},
    "silu": {"x": ROWS},
    "sigmoid": {"x": ROWS},
    "dropout": {"x": ("N", "H"), "keep": make_mask},
    "rmsnorm": {"x": ROWS, "weight": ("H",)},
    "standardise": {"x": ROWS},
    "addbias": {"x": ROWS, "bias": ("H",)},
    "scale": {"x": ROWS, "weight": ("H",)},
    "linear": {"x": ROWS, "weight": ("O", "H")},
    "lowrank": {"x": ROWS, "a": ("r", "H"), "b": ("O", "r")},
}


def make_p21(gate: str, name: str, path) -> Arguments:
    """Create arguments for a class of puzzle 21's first rung."""
    reference = REFERENCES[gate]
    return Arguments(name, lambda: load_module(path)[reference.name].apply, reference.function, P21[gate])


def list_p21_solutions() -> list[Arguments]:
    """List arguments for the solution's classes."""
    path = roots.get_solutions() / "p21" / "hunt.py"
    return [make_p21(gate, f"p21 {gate}", path) for gate in P21]


def list_p21() -> Iterator[Arguments]:
    for bug in zoo.load_wrong_solutions("p21"):
        if bug.rung == "torch":
            yield make_p21(bug.gate, bug.name, bug.build_target())


def bind_constants(function: Any, *constants: object) -> Callable[..., object]:
    """Bind the last arguments of an autograd.Function's `apply`."""
    return lambda *tensors: function.apply(*tensors, *constants)


def list_p20() -> Iterator[Arguments]:
    """Yield the incorrect classes of functions.py with their limits on saved bytes."""
    for bug in zoo.load_wrong_solutions("p20"):
        if bug.rung != "torch":
            continue
        name, path = CLASS_NAMES[bug.gate], bug.build_target()
        if bug.gate == "layernorm":
            yield Arguments(
                bug.name,
                lambda path=path: bind_constants(load_module(path)["LayerNorm"], EPS),
                lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
                {"x": ROWS, "weight": ("H",), "bias": ("H",)},
            )
            continue
        ledger = {"relu_mask": lambda x: x.numel(), "relu_bits": count_packed_mask_bytes}.get(
            bug.gate, lambda x: 4 * x.numel()
        )
        make = lambda path=path, name=name: load_module(path)[name].apply  # noqa: E731
        yield Arguments(bug.name, make, F.relu, {"x": ROWS}, {"saved": ledger, "subgradients": False})


def list_registrations() -> Iterator[Arguments]:
    """Yield the incorrect registrations that affect a gradient."""
    for bug in zoo.load_wrong_solutions("p20"):
        if bug.rung == "register" and bug.gate in ("gradient", "save", "second") and bug.name not in REFUSED:
            path = bug.build_target()
            saved = {"saved": lambda x: 4 * x.numel()}
            make = lambda path=path: register_op(load_module(path)).op  # noqa: E731
            yield Arguments(bug.name, make, lambda x: x.softmax(-1), {"x": ROWS}, saved)


REFUSED = ("register_backward_not_refused", "register_second_without_words")
"""Registrations whose only error is the message for a second derivative."""


def list_p23() -> Iterator[Arguments]:
    """Yield puzzle 23's incorrect attention functions, with a mask."""

    def reference(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask)

    shapes = {
        "query": ("B", "N", "S", "d"),
        "key": ("B", "N", "T", "d"),
        "value": ("B", "N", "T", "d"),
        "mask": ("S", "T"),
    }
    for bug in zoo.load_wrong_solutions("p23"):
        if bug.rung == "torch":
            path = bug.build_target()
            yield Arguments(
                bug.name, lambda path=path: load_module(path)["Attention"].apply, reference, shapes
            )


def list_p24() -> Iterator[Arguments]:
    """Yield puzzle 24's incorrect gather, and attention on gathered rows."""
    module = load_module(roots.get_solutions() / "p24" / "in_torch.py")

    def window(query, key, value, order):
        near = module["near"](order, 2, 1)
        index = order.long()
        inverse = index.argsort()
        visible = near[inverse][:, inverse]
        return F.scaled_dot_product_attention(query, key, value, visible)

    rows = ("B", "N", "L", "d")
    for bug in zoo.load_wrong_solutions("p24"):
        if bug.rung != "torch":
            continue
        path = bug.build_target()
        if bug.gate == "dgather":
            yield Arguments(
                bug.name,
                lambda path=path: load_module(path)["Gather"].apply,
                lambda tensor, order: tensor[:, :, order.long()],
                {"tensor": rows, "order": make_order},
            )
        else:
            yield Arguments(
                bug.name,
                lambda path=path: bind_constants(load_module(path)["WindowAttention"], 2, 1),
                window,
                {"query": rows, "key": rows, "value": rows, "order": make_order},
            )


def list_wrong_ops() -> list[Arguments]:
    return [*list_p21(), *list_p20(), *list_registrations(), *list_p23(), *list_p24()]
