"""Compare the counters of a gate's kernels with its limits, and name the line that costs most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.check.accesses import Source
from harness.spec.limits import Counts, Limit
from harness.spec.ops import bytes_of
from harness.spec.puzzle import Case, Gate, Puzzle

if TYPE_CHECKING:
    from harness.vgpu import Launch


@dataclass(frozen=True)
class Measured:
    """The cost of a case of a gate by one limit, and the line that adds most to it, "FILE:LINE", with its part of the whole."""

    limit: Limit
    dtype: str
    value: float
    line: str
    part: float

    @property
    def ok(self) -> bool:
        """Check whether the cost is within the limit."""
        return self.value <= self.limit.most

    @property
    def lines(self) -> list[str]:
        """Describe a cost above its limit."""
        first = self.limit.first.get(self.dtype)
        before = f"; the initial code has {amount(first)}" if first is not None else ""
        words = [f"{self.limit.counter}: {amount(self.value)}, at most {amount(self.limit.most)}{before}"]
        return [*words, *([f"{self.line}: {self.part:.0%} of it"] if self.line else [])]


def measure(
    puzzle: Puzzle, gate: Gate, case: Case, launches: "Sequence[Launch]", dtype: str, source: Source
) -> list[Measured]:
    """Return the cost of a gate's launches in a case, for each of the gate's limits."""
    sizes = {**dict(zip(puzzle.dim_names, case.dims, strict=False)), **puzzle.derived_sizes(case.dims)}
    counts = Counts(launches, sizes, bytes_of(dtype))
    results: list[Measured] = []
    for limit in gate.limits:
        cost = limit.cost(counts)
        by_line: dict[str, float] = {}
        for instr, share in cost.shares:
            line = source.line(instr)
            place = f"{line.file}:{line.number}" if line else ""
            by_line[place] = by_line.get(place, 0.0) + share
        worst = max(by_line, key=lambda place: by_line[place], default="")
        total = sum(max(share, 0.0) for share in by_line.values())
        part = by_line[worst] / total if worst and total else 0.0
        results.append(Measured(limit, dtype, cost.value, worst, part))
    return results


def amount(number: float) -> str:
    """Return a cost in few digits."""
    return f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.3g}"
