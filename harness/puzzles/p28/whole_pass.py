"""The lines after puzzle 28's counters: the whole pass's counters, then the recorded times.

Nothing runs again; the counters of the initial code are computed from shapes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.puzzles.p28 import recorded
from harness.puzzles.p28.limits import SLAB, TILE, WARP
from harness.puzzles.p28.spec import COUNTED, LARGE, PUZZLE
from harness.spec.ops import get_itemsize
from harness.spec.puzzle import Dims

if TYPE_CHECKING:
    from harness.vgpu import Launch

ROW_STEPS = ("shuffles", "dx", "dgamma")
TIMES_ROWS = LARGE[0] // COUNTED[0]
"""Factor for the row steps' counters, since the tensor-core steps are counted with more rows."""


class Total(NamedTuple):
    """Launches, bytes that threads load from and store to global memory, and floating-point operations."""

    launches: int
    bytes: int
    flops: int


def count_costs(launches: "Sequence[Launch]") -> Total:
    sites = [site for launch in launches for site in launch.counters.sites.values()]
    num_bytes = sum(site.traffic.bytes for site in sites if site.space == "global")
    return Total(len(launches), num_bytes, sum(launch.counters.flops for launch in launches))


def add_up(totals: Sequence[Total]) -> Total:
    return Total(*(sum(column) for column in zip(*totals, strict=True)))


def compute_initial_costs(dims: Dims, element: int) -> dict[str, Total]:
    """Return the initial code's costs by launch; LayerNorm's elements have `element` bytes, products' two."""
    rows, hidden, outputs = dims
    x, slabs = rows * hidden, -(-rows // SLAB)

    def product(height: int, width: int, depth: int) -> Total:
        return Total(1, 2 * height * width * (2 * depth + 1), 2 * height * width * depth)

    return {
        "rows": Total(1, 6 * element * x, 8 * x + 4 * rows),
        "output": product(rows, outputs, hidden),
        "bias": Total(1, 6 * rows * outputs, rows * outputs),
        "transpose": Total(3, 4 * (x + rows * outputs + outputs * hidden), 0),
        "dln": product(rows, hidden, outputs),
        "dweight": product(outputs, hidden, rows),
        "column_sums": Total(1, 2 * (rows + 1) * outputs, (rows + TILE) * outputs),
        "dx": Total(1, 7 * element * x + 8 * (x + WARP * rows), 14 * (x + WARP * rows)),
        "clear": Total(1, 8 * slabs * hidden, 0),
        "dgamma": Total(1, (5 * element // 2 + 8) * x, 5 * x),
        "second_stage": Total(1, (8 * slabs + 2 * element) * hidden, 2 * (slabs + TILE) * hidden),
    }


def count_learner_costs(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]") -> Total | None:
    """Return the learner's costs, or None unless all steps of the pass have been counted."""
    if not {*ROW_STEPS, "layouts", "epilogue"} <= {*launches}:
        return None
    row_costs = add_up([count_costs(launches[step]["counted"]) for step in ROW_STEPS])
    row_costs = Total(row_costs.launches, TIMES_ROWS * row_costs.bytes, TIMES_ROWS * row_costs.flops)
    layouts = launches["layouts"]["counted in layouts"]
    end = 1 + [launch.name for launch in layouts].index("dln")  # dW follows, which the epilogue computes too
    products = (layouts[:end], launches["epilogue"]["counted in epilogue"])
    return add_up([row_costs, *map(count_costs, products)])


def lines(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]", dtype: str) -> Iterator[str]:
    """Yield both tables; `launches` has the counted cases' launches, by step and case."""
    row = "   {:10} {:>8} {:>14} {:>14}".format
    yield ""
    yield f"The whole pass, forward and backward ({PUZZLE.format_dims(LARGE)}):"
    yield row("form", "launches", "global bytes", "flops")
    initial = add_up([*compute_initial_costs(LARGE, get_itemsize(dtype)).values()])
    for form, total in (("given", initial), ("yours", count_learner_costs(launches))):
        yield row(form, *(f"{number:,}" for number in total)) if total else row(form, "-", "-", "-")
    yield f"   LayerNorm in {dtype}, products in bfloat16; bytes are what threads load and store"
    steps = ", ".join(ROW_STEPS)
    yield f"   yours: {steps} (counted with {COUNTED[0]} rows, times {TIMES_ROWS}), dln of layouts, epilogue"
    yield from recorded.format_times()
