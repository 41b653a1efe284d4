"""Limit the cost of a gate's kernels, by counters of the virtual GPU; a gate above a limit is wrong.

A limit is computed from shapes, not from a solution. A cost is attributed to instructions, so that a message
can report the most expensive line.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # counters load NumPy, which listing puzzles does not need
    from harness.vgpu.checks.counters import IssueCount, Site
    from harness.vgpu.machine import Launch
    from harness.vgpu.ptx.parser import Instr


@dataclass(frozen=True)
class Cost:
    """A cost and the share of each instruction."""

    value: float
    shares: "Sequence[tuple[Instr, float]]" = ()


@dataclass(frozen=True)
class Counts:
    """Counters of a variant's launches in one case; `itemsize` is the size of an element in bytes."""

    launches: "Sequence[Launch]"
    sizes: Mapping[str, int]
    itemsize: int

    def select_launches(self, name: str) -> "Counts":
        launches = [launch for launch in self.launches if launch.name == name]
        return Counts(launches, self.sizes, self.itemsize)

    def select_sites(self, space: str, tensors: Iterable[str] = (), verb: str = "") -> "list[Site]":
        """Return the memory instructions in a state space, by default on any tensor and of any verb."""
        tensor_names = set(tensors)
        sites = [s for launch in self.launches for s in launch.counters.sites.values() if s.space == space]
        return [s for s in sites if (s.tensor in tensor_names or not tensor_names) and verb in ("", s.verb)]

    def select_issued(self, op: str) -> "list[IssueCount]":
        """Return the counts of each collective instruction with opcode `op`, such as barriers ("bar")."""
        issued = (issue for launch in self.launches for issue in launch.counters.issues.values())
        return [issue for issue in issued if issue.instr.op == op]


@dataclass(frozen=True)
class Limit:
    """The largest allowed value of one cost.

    Attributes:
        id: The id of the mistake of exceeding it, such as "not-coalesced".
        table_label: The unit in a table.
        label: The unit in a message.
        compute_cost: Counters of the gate's variant -> their cost.
        maximum: The limit.
        initial_costs: Dtype -> the cost of the blank's initial code.
        hint: Number of the gate's hint that helps.
    """

    id: str
    table_label: str
    label: str
    compute_cost: Callable[[Counts], Cost]
    maximum: float
    initial_costs: Mapping[str, float]
    hint: int = 1


def divide_amounts(amounts: "Iterable[tuple[Instr, float]]", divisor: float) -> Cost:
    """Return the cost whose shares are the instructions' amounts divided by `divisor`."""
    amounts = [(instr, amount / divisor) for instr, amount in amounts]
    return Cost(sum(amount for _, amount in amounts), amounts)
