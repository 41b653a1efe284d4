"""A list of plausible Mojo mistakes: nine of ten are named, and none by a wrong name. Each variant is one Mojo program."""

import tomllib
from pathlib import Path

import pytest

from harness.check.gates import Checker
from harness.check.zoo import WrongKernel
from harness.devices.recorder import Order, record_many

ENTRIES = tomllib.loads(Path(__file__).with_name("mojo_mistakes.toml").read_text())
KERNELS = [
    WrongKernel("p22", name, e["gate"], e["mistake"], "layernorm_linear.mojo", e["old"], e["new"])
    for name, e in ENTRIES.items()
]
CASES = ("hard values", "odd sizes", "wide", "wide output")
REFUSED_BY_THE_COMPILER = 21
"""Slips of the same list that do not compile, each explained: tests/toolchain/test_translate.py."""
NAMED = 0.9


@pytest.fixture(scope="module")
def checker(puzzle):
    """One warm checker, and everything recorded that this run tests."""
    made = Checker(puzzle)
    variants = {gate.id: gate.variant for gate in puzzle.gates}
    dims = tuple(dict.fromkeys(case.dims for case in puzzle.cases(None) if case.name in CASES))
    for variant in sorted(set(variants.values())):
        own = [kernel for kernel in KERNELS if variants[kernel.gate] == variant]
        record_many([Order(k.package(), dims, (variant,), small_grid=True) for k in own], "p22", "float32")
    return made


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_mistake_is_named_and_by_no_wrong_name(kernel, checker, puzzle):
    cases = [case for case in puzzle.cases(None) if case.name in CASES]
    (result,) = checker.check(kernel.package(), [kernel.gate], cases)
    assert result.state == "wrong"
    assert (result.mistake or "") == kernel.mistake, "\n".join(result.diagnosis)


def test_nine_of_ten_have_a_name():
    total = len(KERNELS) + REFUSED_BY_THE_COMPILER
    named = sum(bool(kernel.mistake) for kernel in KERNELS) + REFUSED_BY_THE_COMPILER
    assert total >= 40 and named >= NAMED * total
