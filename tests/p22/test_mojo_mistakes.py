"""Plausible mistakes in Mojo that are not in the zoo: the diagnosis names each."""

import tomllib
from pathlib import Path

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import Checker
from harness.check.zoo import WrongSolution
from harness.puzzles.p22.spec import PUZZLE

MISTAKES = tomllib.loads(Path(__file__).with_name("mojo_mistakes.toml").read_text(encoding="utf-8"))
KERNELS = [
    WrongSolution("p22", name, e["gate"], e["mistake"], "layernorm_linear.mojo", e["old"], e["new"])
    for name, e in MISTAKES.items()
]
CASES = ("hard values", "odd sizes", "wide", "wide output")
"""Cases that distinguish all listed mistakes."""
FIRST_BY_GATE = list({kernel.gate: kernel for kernel in reversed(KERNELS)}.values())
"""The first mistake of each gate."""
OTHERS = [kernel for kernel in KERNELS if kernel not in FIRST_BY_GATE]


def list_cases():
    return [case for case in PUZZLE.list_cases(None) if case.name in CASES]


def list_orders(folder, tests):
    variants = {gate.id: gate.variant for gate in PUZZLE.kernel_gates}
    return {
        kernel.name: make_order("p22", list_cases(), [variants[kernel.gate]], kernel.build_package())
        for kernels in list_values(tests, "kernels")
        for kernel in kernels
    }


@pytest.mark.compiles
@pytest.mark.parametrize(
    "kernels", [FIRST_BY_GATE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["one a gate", "others"]
)
@pytest.mark.usefixtures("recorded")
def test_mistake_is_named_correctly(kernels):
    checker, mistakes_by_gate = Checker(PUZZLE), {}
    for kernel in kernels:
        (result,) = checker.check(kernel.build_package(), [kernel.gate], list_cases())
        mistakes_by_gate[kernel.name] = result.state, result.mistake or ""
    assert mistakes_by_gate == {kernel.name: ("wrong", kernel.mistake) for kernel in kernels}
