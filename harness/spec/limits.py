"""Limits: the most that a gate's kernels may cost, by counters of the virtual GPU. A correct kernel above a
limit is wrong: the gate is about the cost.

A limit is computed from shapes and the bytes of an element, not from the cost of a solution, and a cost is a
sum over instructions, so that a message can name the line that costs most.
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
    """A cost, and the part of each instruction; if less is worse, its distance from the best possible."""

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
        requested = set(tensors)
        return [
            site
            for launch in self.launches
            for site in launch.counters.sites.values()
            if site.space == space
            and (not requested or site.tensor in requested)
            and (not verb or site.verb == verb)
        ]

    def count_issued(self, op: str) -> "list[Issued]":
        """Count instructions that warps issue together, or barriers of blocks, by instruction."""
        return [
            each
            for launch in self.launches
            for each in launch.counters.issued.values()
            if each.instr.op == op
        ]


@dataclass(frozen=True)
class Limit:
    """The largest cost allowed.

    Attributes:
        id: The id of the mistake of exceeding it, "not-coalesced".
        short: The unit in a table.
        counter: The unit in a message.
        cost: Cost of the launches of the gate's variant.
        most: The limit.
        first: Dtype -> the cost of the blank's initial code.
        hint: The hint of the gate's ladder that helps.
    """

    id: str
    short: str
    counter: str
    cost: Callable[[Counts], Cost]
    most: float
    first: Mapping[str, float]
    hint: int = 1


def shared_out(amounts: "Iterable[tuple[Instr, float]]", over: float) -> Cost:
    """Return the sum of the costs of instructions, over a number."""
    amounts = [(instr, amount / over) for instr, amount in amounts]
    return Cost(sum(amount for _, amount in amounts), amounts)
