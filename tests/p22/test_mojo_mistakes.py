"""Plausible Mojo mistakes that no wrong solution of the zoo shows: each is named.

All that compile are recorded together, as the zoo's wrong kernels are.
"""

import tomllib
from pathlib import Path

import pytest
from marks import chosen

from harness.check.checker import Checker
from harness.check.zoo import WrongKernel
from harness.devices.recorder import Order, record_many

LIST = tomllib.loads(Path(__file__).with_name("mojo_mistakes.toml").read_text(encoding="utf-8"))
KERNELS = [
    WrongKernel("p22", name, e["gate"], e["mistake"], "layernorm_linear.mojo", e["old"], e["new"])
    for name, e in LIST.items()
]
CASES = ("hard values", "odd sizes", "wide", "wide output")


@pytest.fixture(scope="module")
def cases(puzzle):
    """Few, and enough to tell the mistakes of the list apart."""
    return [case for case in puzzle.cases(None) if case.name in CASES]


@pytest.fixture(scope="module")
def checker(puzzle, cases, request):
    """One warm checker; what it records is in the cache."""
    variants = {gate.id: gate.variant for gate in puzzle.kernel_gates}
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    orders = [
        Order(k.package(), dims, (variants[k.gate],), small_grid=True) for k in chosen(request, "kernel")
    ]
    record_many(orders, "p22", "float32")
    return Checker(puzzle)


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_mistake_is_named_and_by_no_wrong_name(kernel, checker, cases):
    (result,) = checker.check(kernel.package(), [kernel.gate], cases)
    assert result.state == "wrong"
    assert (result.mistake or "") == kernel.mistake, "\n".join(result.diagnosis)
