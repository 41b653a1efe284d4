"""The lines after puzzle 28's counters: the whole pass by its counters, then the recorded times.

The learner's launches are those that the steps' counted cases have made: nothing runs again. The initial code's are computed
from shapes; a test compares them with its counters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.puzzles.p28 import recorded
from harness.puzzles.p28.limits import SLAB, WARP
from harness.puzzles.p28.spec import COUNTED, LARGE, PUZZLE
from harness.spec.ops import bytes_of
from harness.spec.puzzle import Dims

if TYPE_CHECKING:
    from harness.vgpu import Launch

ROW_STEPS = ("shuffles", "dx", "dgamma")
TIMES_ROWS = LARGE[0] // COUNTED[0]
"""Factor of the row steps' counters: the tensor cores' steps are counted with more rows."""


class Total(NamedTuple):
    """Launches, the bytes that threads load and store in global memory, floating-point operations."""

    launches: int
    bytes: int
    flops: int


def count_costs(launches: "Sequence[Launch]") -> Total:
    """Add up the counters of some launches."""
    sites = [site for launch in launches for site in launch.counters.sites.values()]
    moved = sum(site.traffic.bytes for site in sites if site.space == "global")
    return Total(len(launches), moved, sum(launch.counters.flops for launch in launches))


def add_up(totals: Sequence[Total]) -> Total:
    return Total(*(sum(column) for column in zip(*totals, strict=True)))


def costs_of_first_forms(dims: Dims, element: int) -> dict[str, Total]:
    """Return the costs of the initial code by launch; LayerNorm's elements have `element` bytes, the products' two."""
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
        "column_sums": Total(1, 2 * (rows + 1) * outputs, rows * outputs),
        "dx": Total(1, 7 * element * x + 8 * (x + WARP * rows), 14 * (x + WARP * rows)),
        "clear": Total(1, 8 * slabs * hidden, 0),
        "dgamma": Total(1, (2 * element + 16) * x, 5 * x),
        "second_stage": Total(1, (8 * slabs + 2 * element) * hidden, (2 * slabs + 64) * hidden),
    }


def costs_of_learner(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]") -> Total | None:
    """Return the learner's costs; None unless all of the steps that make up the pass have been counted."""
    if not {*ROW_STEPS, "layouts", "epilogue"} <= {*launches}:
        return None
    of_rows = add_up([count_costs(launches[step]["counted"]) for step in ROW_STEPS])
    of_rows = Total(of_rows.launches, TIMES_ROWS * of_rows.bytes, TIMES_ROWS * of_rows.flops)
    layouts = launches["layouts"]["counted in layouts"]
    end = 1 + [launch.name for launch in layouts].index(
        "dln"
    )  # after it comes dW, which the epilogue has too
    return add_up(
        [of_rows, count_costs(layouts[:end]), count_costs(launches["epilogue"]["counted in epilogue"])]
    )


def lines(launches: "Mapping[str, Mapping[str, Sequence[Launch]]]", dtype: str) -> Iterator[str]:
    """Yield both tables. `launches` are those of the counted cases, by step and case."""
    row = "   {:10} {:>8} {:>14} {:>14}".format
    yield ""
    yield f"The whole pass, forward and backward ({PUZZLE.say_dims(LARGE)}):"
    yield row("form", "launches", "global bytes", "flops")
    given = add_up([*costs_of_first_forms(LARGE, bytes_of(dtype)).values()])
    for form, total in (("given", given), ("yours", costs_of_learner(launches))):
        yield row(form, *(f"{number:,}" for number in total)) if total else row(form, "-", "-", "-")
    yield f"   LayerNorm in {dtype}, products in bfloat16; bytes are what threads load and store"
    steps = ", ".join(ROW_STEPS)
    yield f"   yours: {steps} (counted with {COUNTED[0]} rows, times {TIMES_ROWS}), dln of layouts, epilogue"
    yield from recorded.lines()
