"""Limits by counters: the verdict has the counter, the limit, what came before, and the line that costs most."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from harness.check.accesses import Source
from harness.check.limits import amount, measure
from harness.check.results import GateResult, VariantResult
from harness.spec.limits import Limit, shared_out
from harness.spec.ops import Argument, Call, OpSpec
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.vgpu import Counters
from harness.vgpu.checks.counters import Site, Traffic
from harness.vgpu.ptx.parser import Instr, Location


def loads_of(counts) -> Any:
    """Bytes loaded of x in launches called "rows", an element of the matrix."""
    sites = counts.of("rows").sites("global", ("x",), "load")
    size = counts.sizes["rows"] * counts.sizes["columns"] * counts.element
    return shared_out([(site.instr, site.traffic.bytes) for site in sites], size)


LIMIT = Limit("read-again", "read", "bytes read of x, over its size", loads_of, 1.05, {"float32": 3})
GATE = Gate("once", "plain", ("y",), limits=(LIMIT,))
OP = OpSpec("toy", {"y": Argument(("rows", "columns"))}, {"x": Argument(("rows", "columns"))})
TOY = Puzzle(name="p99", title="toy", gates=(GATE,), rungs=(), dim_names=("rows", "columns"),
             variants={"plain": (Call(OP),)})  # fmt: skip
CASE = Case("counted", "", (4, 8), "plain", counted=True)


def launch(*loads: tuple[int, int], name: str = "rows") -> Any:
    """A launch with (line, bytes) loaded of x."""
    counters = Counters(cast("Any", None))
    for number, (line, nbytes) in enumerate(loads):
        instr = Instr("ld", (), (), None, number, Location("/reader/kernel.mojo", line, 1))
        counters.sites[number, "global", "x"] = Site(instr, "global", "R", "x", 4, Traffic(1, nbytes, 4))
    return SimpleNamespace(name=name, counters=counters)


def cost_of(*launches) -> Any:
    (cost,) = measure(TOY, GATE, CASE, launches, "float32", Source(cast("Any", "/reader/kernel.mojo")))
    return cost


def test_the_line_that_costs_most_is_named():
    cost = cost_of(launch((7, 128), (9, 128), (9, 128)), launch((3, 4096), name="other"))
    assert cost.value == 3 and not cost.ok
    words, line = cost.lines
    assert words == "bytes read of x, over its size: 3, at most 1.05; the initial code has 3"
    assert line == "/reader/kernel.mojo:9: 67% of it"


def test_a_cost_within_the_limit_is_ok():
    assert cost_of(launch((7, 128))).ok
    assert cost_of().ok  # a launch that is missing costs nothing; its values are wrong


def test_a_gate_over_its_limit_makes_its_variant_wrong():
    result = GateResult(GATE, "wrong", costs=[cost_of(launch((7, 512)))])
    variant = VariantResult("plain", gates=[result])
    assert variant.state(["y"]) == "wrong" and variant.state(["z"]) == "correct"


@pytest.mark.parametrize(
    ("number", "text"), [(3.0, "3"), (98304, "98,304"), (0.0625, "0.0625"), (4.125, "4.12")]
)
def test_costs_are_said_in_few_digits(number, text):
    assert amount(np.float64(number)) == text
