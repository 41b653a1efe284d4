"""Limits: what a gate's kernels may cost at most, by counters of the virtual GPU. A kernel that is right and exceeds one is
wrong: the gate is about the cost.

A limit is a number that follows from shapes and the bytes of an element, never from what some solution needs, and a cost is
made of what single instructions add to it, so that a result can name the line that costs most.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # counters load NumPy, and a list of puzzles needs none
    from harness.vgpu.checks.counters import Issued, Site
    from harness.vgpu.machine import Launch
    from harness.vgpu.ptx.parser import Instr


@dataclass(frozen=True)
class Cost:
    """A cost, and what each instruction adds to it; where less is worse, what it takes from the best there could be."""

    value: float
    shares: "Sequence[tuple[Instr, float]]" = ()


@dataclass(frozen=True)
class Counts:
    """Counters of the launches of a variant in one case.

    Attributes:
        launches: In order, with their counters.
        sizes: The sizes of the case by name.
        element: The bytes of an element in the dtype of the run.
    """

    launches: "Sequence[Launch]"
    sizes: Mapping[str, int]
    element: int

    def of(self, name: str) -> "Counts":
        """Return the same of the launches that have a name."""
        launches = [launch for launch in self.launches if launch.name == name]
        return Counts(launches, self.sizes, self.element)

    def sites(self, space: str, tensors: Iterable[str] = (), verb: str = "") -> "list[Site]":
        """Return the memory instructions on some tensors in a space, on all of them without names."""
        wanted = set(tensors)
        return [
            site
            for launch in self.launches
            for site in launch.counters.sites.values()
            if site.space == space
            and (not wanted or site.tensor in wanted)
            and (not verb or site.verb == verb)
        ]

    def count_issued(self, op: str) -> "list[Issued]":
        """Count what warps issue together, or the barriers that blocks pass, by instruction."""
        return [
            each
            for launch in self.launches
            for each in launch.counters.issued.values()
            if each.instr.op == op
        ]


@dataclass(frozen=True)
class Limit:
    """The most that something may cost.

    Attributes:
        id: What the mistake of exceeding it is called, "not-coalesced".
        short: What is counted, in a table.
        counter: The same as a result says it.
        cost: What the launches of the gate's variant cost.
        most: The limit.
        first: Dtype -> the cost of the form that the blank is given with.
        hint: Which rung of the gate's ladder helps.
    """

    id: str
    short: str
    counter: str
    cost: Callable[[Counts], Cost]
    most: float
    first: Mapping[str, float]
    hint: int = 1


def shared_out(amounts: "Iterable[tuple[Instr, float]]", over: float) -> Cost:
    """Return the sum of what instructions add, over a number."""
    amounts = [(instr, amount / over) for instr, amount in amounts]
    return Cost(sum(amount for _, amount in amounts), amounts)
