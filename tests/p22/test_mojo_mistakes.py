"""Plausible mistakes in Mojo that are not in the zoo: the diagnosis names each."""

import tomllib
from pathlib import Path

import pytest

from harness.check.checker import Checker
from harness.check.zoo import WrongKernel
from harness.devices.recorder import Order, record_many

MISTAKES = tomllib.loads(Path(__file__).with_name("mojo_mistakes.toml").read_text(encoding="utf-8"))
KERNELS = [
    WrongKernel("p22", name, e["gate"], e["mistake"], "layernorm_linear.mojo", e["old"], e["new"])
    for name, e in MISTAKES.items()
]
CASES = ("hard values", "odd sizes", "wide", "wide output")
"""Cases that distinguish all listed mistakes."""
FIRST_BY_GATE = list({kernel.gate: kernel for kernel in reversed(KERNELS)}.values())
"""The first mistake of each gate."""
OTHERS = [kernel for kernel in KERNELS if kernel not in FIRST_BY_GATE]


@pytest.mark.compiles
@pytest.mark.parametrize(
    "kernels", [FIRST_BY_GATE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["one a gate", "others"]
)
def test_mistake_is_named_correctly(kernels, puzzle):
    cases = [case for case in puzzle.cases(None) if case.name in CASES]
    variants = {gate.id: gate.variant for gate in puzzle.kernel_gates}
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    orders = [Order(k.build_package(), "p22", dims, (variants[k.gate],), small_grid=True) for k in kernels]
    record_many(orders)
    checker, named = Checker(puzzle), {}
    for kernel in kernels:
        (result,) = checker.check(kernel.build_package(), [kernel.gate], cases)
        named[kernel.name] = result.state, result.mistake or ""
    assert named == {kernel.name: ("wrong", kernel.mistake) for kernel in kernels}
