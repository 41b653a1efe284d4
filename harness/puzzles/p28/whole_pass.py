"""The lines after puzzle 28's counters: the whole pass's counters, then the recorded times.

Nothing runs again; the counters of the initial code are computed from shapes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.puzzles.p28 import recorded
from harness.puzzles.p28.limits import SLAB, TILE, WARP
from harness.puzzles.p28.spec import COUNTED_DIMS, PUZZLE, TENSOR_CORE_DIMS
from harness.spec.ops import get_itemsize
from harness.spec.puzzle import Dims

if TYPE_CHECKING:
    from harness.vgpu import Launch

ROW_STEPS = ("shuffles", "dx", "dgamma")
ROW_FACTOR = TENSOR_CORE_DIMS[0] // COUNTED_DIMS[0]
"""Factor for the row steps' counters, since the tensor-core steps are counted with more rows."""


class CostTotal(NamedTuple):
    """Launches, bytes that threads load from and store to global memory, and floating-point operations."""

    launches: int
    bytes: int
    flops: int


def count_costs(launches: "Sequence[Launch]") -> CostTotal:
    sites = [site for launch in launches for site in launch.counters.sites.values()]
    num_bytes = sum(site.traffic.bytes for site in sites if site.space == "global")
    return CostTotal(len(launches), num_bytes, sum(launch.counters.flops for launch in launches))


def sum_totals(totals: Sequence[CostTotal]) -> CostTotal:
    return CostTotal(*(sum(column) for column in zip(*totals, strict=True)))


def compute_initial_costs(dims: Dims, itemsize: int) -> dict[str, CostTotal]:
    """Return the initial code's costs by launch; LayerNorm's elements have `itemsize` bytes, a matmul's two."""
    rows, hidden, outputs = dims
    x, slabs = rows * hidden, -(-rows // SLAB)

    def compute_matmul_costs(height: int, width: int, depth: int) -> CostTotal:
        return CostTotal(1, 2 * height * width * (2 * depth + 1), 2 * height * width * depth)

    return {
        "rows": CostTotal(1, 6 * itemsize * x, 8 * x + 4 * rows),
        "output": compute_matmul_costs(rows, outputs, hidden),
        "bias": CostTotal(1, 6 * rows * outputs, rows * outputs),
        "transpose": CostTotal(3, 4 * (x + rows * outputs + outputs * hidden), 0),
        "dln": compute_matmul_costs(rows, hidden, outputs),
        "dweight": compute_matmul_costs(outputs, hidden, rows),
        "column_sums": CostTotal(1, 2 * (rows + 1) * outputs, (rows + TILE) * outputs),
        "dx": CostTotal(1, 7 * itemsize * x + 8 * (x + WARP * rows), 14 * (x + WARP * rows)),
        "clear": CostTotal(1, 8 * slabs * hidden, 0),
        "dgamma": CostTotal(1, (5 * itemsize // 2 + 8) * x, 5 * x),
        "second_stage": CostTotal(1, (8 * slabs + 2 * itemsize) * hidden, 2 * (slabs + TILE) * hidden),
    }


def count_learner_costs(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]") -> CostTotal | None:
    """Return the learner's costs, or None unless all steps of the pass have been counted."""
    if not {*ROW_STEPS, "layouts", "epilogue"} <= {*launches}:
        return None
    row_costs = sum_totals([count_costs(launches[step]["counted"]) for step in ROW_STEPS])
    row_costs = CostTotal(row_costs.launches, ROW_FACTOR * row_costs.bytes, ROW_FACTOR * row_costs.flops)
    layouts = launches["layouts"]["counted in layouts"]
    end = 1 + [launch.name for launch in layouts].index("dln")  # dW follows, which the epilogue computes too
    products = (layouts[:end], launches["epilogue"]["counted in epilogue"])
    return sum_totals([row_costs, *map(count_costs, products)])


def format_lines(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]", dtype: str) -> Iterator[str]:
    """Yield both tables; `launches` has the counted cases' launches, by step and case."""
    row = "   {:10} {:>8} {:>14} {:>14}".format
    yield ""
    yield f"The whole pass, forward and backward ({PUZZLE.format_dims(TENSOR_CORE_DIMS)}):"
    yield row("form", "launches", "global bytes", "flops")
    initial = sum_totals([*compute_initial_costs(TENSOR_CORE_DIMS, get_itemsize(dtype)).values()])
    for form, total in (("given", initial), ("yours", count_learner_costs(launches))):
        yield row(form, *(f"{number:,}" for number in total)) if total else row(form, "-", "-", "-")
    yield f"   LayerNorm in {dtype}, products in bfloat16; bytes are what threads load and store"
    steps = ", ".join(ROW_STEPS)
    yield f"   yours: {steps} (counted with {COUNTED_DIMS[0]} rows, times {ROW_FACTOR}), dln of layouts, epilogue"
    yield from recorded.format_times()
