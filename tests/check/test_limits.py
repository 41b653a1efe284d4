"""Limits on counters: results show the counter, the limit, the initial cost and the costliest line."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from harness.check.accesses import Source
from harness.check.limits import format_amount, measure_costs
from harness.check.results import GateResult, VariantResult
from harness.spec.limits import Limit, divide_amounts
from harness.spec.ops import Argument, Call, OpSpec
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.vgpu import Counters
from harness.vgpu.checks.counters import Site, Traffic
from harness.vgpu.ptx.parser import Instr, Location


def count_loads(counts) -> Any:
    """Return the bytes of x loaded by launches named "rows", relative to the matrix size."""
    sites = counts.select_launches("rows").select_sites("global", ("x",), "load")
    size = counts.sizes["rows"] * counts.sizes["columns"] * counts.itemsize
    return divide_amounts([(site.instr, site.traffic.bytes) for site in sites], size)


LIMIT = Limit("read-again", "read", "bytes read of x, over its size", count_loads, 1.05, {"float32": 3})
GATE = Gate("once", "plain", ("y",), limits=(LIMIT,))
OP = OpSpec("toy", {"y": Argument(("rows", "columns"))}, {"x": Argument(("rows", "columns"))})
PUZZLE = Puzzle(name="p99", title="toy", gates=(GATE,), rungs=(), dim_names=("rows", "columns"),
             variants={"plain": (Call(OP),)})  # fmt: skip
CASE = Case("counted", "", (4, 8), "plain", checks_limits=True)


def make_launch(*loads: tuple[int, int], name: str = "rows") -> Any:
    """Create a launch that loads x, from (line, bytes) pairs."""
    counters = Counters(cast("Any", None))
    for number, (line, nbytes) in enumerate(loads):
        instr = Instr("ld", (), (), None, number, Location("/reader/kernel.mojo", line, 1))
        counters.sites[number, "global", "x"] = Site(instr, "global", "R", "x", 4, Traffic(1, nbytes, 4))
    return SimpleNamespace(name=name, counters=counters)


def measure_cost(*launches) -> Any:
    (cost,) = measure_costs(
        PUZZLE, GATE, CASE, launches, "float32", Source(cast("Any", "/reader/kernel.mojo"))
    )
    return cost


def test_costliest_line_is_reported():
    cost = measure_cost(make_launch((7, 128), (9, 128), (9, 128)), make_launch((3, 4096), name="other"))
    assert cost.value == 3 and not cost.ok
    words, line = cost.lines
    assert words == "bytes read of x, over its size: 3, at most 1.05; the initial code has 3"
    assert line == "/reader/kernel.mojo:9: 67% of it"


def test_cost_within_the_limit_passes():
    assert measure_cost(make_launch((7, 128))).ok
    assert measure_cost().ok  # a missing launch costs nothing; its values are wrong


def test_gate_over_its_limit_makes_its_variant_wrong():
    result = GateResult(GATE, "wrong", costs=[measure_cost(make_launch((7, 512)))])
    variant = VariantResult("plain", gates=[result])
    assert variant.get_state(["y"]) == "wrong" and variant.get_state(["z"]) == "correct"


@pytest.mark.parametrize(
    ("number", "text"), [(3.0, "3"), (98304, "98,304"), (0.0625, "0.0625"), (4.125, "4.12")]
)
def test_costs_are_rounded(number, text):
    assert format_amount(np.float64(number)) == text
