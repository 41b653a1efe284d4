"""Compare the counters of a gate's kernels with its limits, and report the costliest line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.check.accesses import Source
from harness.spec.limits import Counts, Limit
from harness.spec.ops import get_itemsize
from harness.spec.puzzle import Case, Gate, Puzzle

if TYPE_CHECKING:
    from harness.vgpu import Launch


@dataclass(frozen=True)
class MeasuredCost:
    """A gate's cost under one limit in a case, and the costliest line, "FILE:LINE", with its share."""

    limit: Limit
    dtype: str
    value: float
    line: str
    share: float

    @property
    def ok(self) -> bool:
        return self.value <= self.limit.maximum

    @property
    def lines(self) -> list[str]:
        initial_cost = self.limit.initial_costs.get(self.dtype)
        initial_note = (
            f"; the initial code has {format_amount(initial_cost)}" if initial_cost is not None else ""
        )
        lines = [
            f"{self.limit.label}: {format_amount(self.value)}, at most {format_amount(self.limit.maximum)}{initial_note}"
        ]
        return [*lines, *([f"{self.line}: {self.share:.0%} of it"] if self.line else [])]


def measure_costs(
    puzzle: Puzzle, gate: Gate, case: Case, launches: "Sequence[Launch]", dtype: str, source: Source
) -> list[MeasuredCost]:
    sizes = {
        **dict(zip(puzzle.dim_names, case.dims, strict=False)),
        **puzzle.compute_derived_sizes(case.dims),
    }
    counts = Counts(launches, sizes, get_itemsize(dtype))
    results: list[MeasuredCost] = []
    for limit in gate.limits:
        cost = limit.compute_cost(counts)
        by_line: dict[str, float] = {}
        for instr, share in cost.shares:
            line = source.find_line(instr)
            location = f"{line.file}:{line.number}" if line else ""
            by_line[location] = by_line.get(location, 0.0) + share
        costliest = max(by_line, key=lambda place: by_line[place], default="")
        total = sum(max(share, 0.0) for share in by_line.values())
        share_of_total = by_line[costliest] / total if costliest and total else 0.0
        results.append(MeasuredCost(limit, dtype, cost.value, costliest, share_of_total))
    return results


def format_amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.3g}"
