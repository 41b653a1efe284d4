"""Find the thread and the source line that cause a wrong element, and what the thread should have read.

The learner's run is compared with the solution's, access by access, backwards from the wrong element. Writers
of the element are compared thread by thread: one may write elsewhere, not at all, or another value. For a
thread that writes another value, its reads are compared: other elements, or the same elements with other
values. Wrong values that were read are followed to the thread that wrote them. The search ends at the first
thread with correct inputs and a wrong action. Launch geometries are equal, so each thread of one run has a
counterpart in the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from harness.check.accesses import Access, Accesses, Line, Place, Thread

RELATIVE = 1e-5
"""Two values that differ by less are the same, up to rounding."""
ABSOLUTE = 2e-7
"""The same, as a share of the largest value in the tensor."""
LONGEST = 24
"""Steps back at most."""

WORDS = {
    "element": "reads other elements",
    "order": "reads the right elements at the wrong time",
    "place": "writes the right value to the wrong place",
    "missing write": "never writes it",
    "extra write": "writes it, and should not",
    "kind": "stores, where the sum needs an atomic addition",
    "atomic": "adds with an atomic, where a store is needed",
    "count": "writes it another number of times",
    "value": "reads the right values and computes another one from them",
    "same": "does what the solution's thread does",
}


@dataclass(frozen=True)
class Hop:
    """One step of the search: a thread's write of a wrong value, and the read of a wrong value that caused
    it."""

    write: Access
    expected: float
    read: Access


@dataclass(frozen=True)
class Fault:
    """The end of the search.

    Attributes:
        kind: A key of WORDS.
        place: The place that the thread writes wrongly, or should write.
        who: The thread.
        step: The step in the learner's run, or None.
        line: Its source line.
        expected: The value that should have been written at `place`.
        got: The value written, NaN if none was.
        extra: The first reads of the thread that the solution's thread does not do.
        missing: The places that only the solution's thread reads.
        hops: The steps from the wrong element, nearest first.
    """

    kind: str
    place: Place
    who: Thread
    step: int | None = None
    line: Line | None = None
    got: float = float("nan")
    expected: float = float("nan")
    extra: tuple[Access, ...] = ()
    missing: tuple[Place, ...] = ()
    hops: tuple[Hop, ...] = ()

    @property
    def words(self) -> str:
        """Return the thread's fault as the end of a sentence."""
        return WORDS[self.kind]


@dataclass
class Search:
    """One search through two runs, with the hops so far."""

    mine: Accesses
    theirs: Accesses
    hops: list[Hop] = field(default_factory=list)
    scales: dict[tuple[int, str], float] = field(default_factory=dict)

    # -- the way back ---------------------------------------------------------------------------------------
    def run(self, place: Place) -> Fault | None:
        """Return the fault behind a wrong place. None if neither run writes it, or after LONGEST hops."""
        before = len(self.mine.steps)
        other = len(self.theirs.steps)
        while len(self.hops) < LONGEST:  # it may come back to a place, always at an earlier step
            fault, hop, until = self.writers(place, before, other)
            if hop is None:
                return fault
            self.hops.append(hop)
            place, before, other = hop.read.place, hop.read.step, until
        return None

    def writers(self, place: Place, before: int, other: int) -> tuple[Fault | None, Hop | None, int]:
        """Compare the writers of a place before a step of each run: a fault, and the hop that may lead
        further back."""
        mine, theirs = self.writes(self.mine, place, before), self.writes(self.theirs, place, other)
        for thread in sorted({*mine, *theirs}):
            ours, right = mine.get(thread, []), theirs.get(thread, [])
            if not right and len(theirs) and all(self.harmless(access, theirs) for access in ours):
                continue
            if not ours or not right:
                return self.one_sided(place, thread, ours, right), None, 0
            kind = self.other_kind(ours, right)
            if kind:
                return self.fault(kind, place, thread, ours[0], right[0].value), None, 0
            if not self.differ(amount(ours), amount(right), place):
                continue
            if len(ours) != len(right):
                last = ours[len(right)] if len(ours) > len(right) else ours[-1]
                return self.fault("count", place, thread, last, float("nan")), None, 0
            pairs = list(zip(ours, right, strict=True))
            apart = [(a, b) for a, b in pairs if self.differ(a.value, b.value, place)] or pairs[-1:]
            return self.behind(place, thread, *apart[0])
        thread = next(iter(sorted(mine)), None)
        return (
            (self.fault("same", place, thread, mine[thread][-1], mine[thread][-1].value) if thread else None),
            None,
            0,
        )

    def harmless(self, access: Access, theirs: dict[Thread, list[Access]]) -> bool:
        """Check for a store in one run only, of the value that the others store there too."""
        return access.kind == "W" and any(
            a.kind == "W" and not self.differ(a.value, access.value, access.place)
            for some in theirs.values()
            for a in some
        )

    def behind(
        self, place: Place, who: Thread, ours: Access, right: Access
    ) -> tuple[Fault | None, Hop | None, int]:
        """Explain by its reads why a thread wrote another value than the solution's."""
        fault, read, until = self.reads(who, ours, right)
        if fault or read:
            return fault, Hop(ours, right.value, read) if read else None, until
        # A value may have come through a shuffle from a thread of the block that read something else.
        if self.mine.launches[who.launch].shuffles:
            for peer in self.peers(who):
                fault, read, until = self.reads(peer, ours, right)
                if fault or read:
                    return fault, Hop(ours, right.value, read) if read else None, until
        return self.fault("value", place, who, ours, right.value), None, 0

    def reads(self, who: Thread, ours: Access, right: Access) -> tuple[Fault | None, Access | None, int]:
        """Compare the reads of a thread before a write: a fault, or the first read of a wrong value."""
        blank = self.mine.blank(ours.step)
        mine, theirs = self.read_by(self.mine, who, blank), self.read_by(self.theirs, who, blank)
        extra = [access for place, access in mine.items() if place not in theirs]
        missing = [place for place in theirs if place not in mine]
        if extra or missing:
            step = self.telling(extra, missing, ours, who)
            fault = self.fault("element", ours.place, who, ours, right.value)
            line = self.mine.line(step)
            return replace(fault, step=step, line=line, extra=tuple(extra), missing=tuple(missing)), None, 0
        for place, access in mine.items():
            if access.step < ours.step and self.differ(access.value, theirs[place].value, place):
                return None, access, theirs[place].step
        if belongs := self.belongs(who, ours):
            fault = self.fault("place", ours.place, who, ours, right.value)
            return replace(fault, missing=(belongs,)), None, 0
        late = self.last_read(who, ours, right, blank)
        if late:
            access, place = late
            fault = self.fault("order", ours.place, who, ours, right.value)
            line = self.mine.line(access.step)
            return replace(fault, step=access.step, line=line, extra=(access,), missing=(place,)), None, 0
        return None, None, 0

    def telling(self, extra: list[Access], missing: list[Place], ours: Access, who: Thread) -> int:
        """Return the step that shows a wrong read: the read itself, else another one of the tensor that
        should be read."""
        if extra:
            return extra[0].step
        same = self.mine.tensor == self.code(self.mine, missing[0])
        blank = self.mine.blank(ours.step)
        here = (
            same & (self.mine.launch == who.launch) & (self.mine.kind == "R") & self.within(self.mine, blank)
        )
        own = np.flatnonzero(here & (self.mine.block == who.block))
        rows = own if len(own) else np.flatnonzero(here)
        return int(self.mine.step[rows[0]]) if len(rows) else ours.step

    def last_read(self, who: Thread, ours: Access, right: Access, blank: str) -> tuple[Access, Place] | None:
        """Return the element of a tensor that was read last before a write, if the solution read another."""
        mine = self.latest(self.mine, who, ours.step, blank)
        theirs = self.latest(self.theirs, who, right.step, blank)
        for key, access in mine.items():
            if key in theirs and theirs[key].place != access.place:
                return access, theirs[key].place
        return None

    def belongs(self, who: Thread, ours: Access) -> Place | None:
        """Return the only other place to which the solution's thread writes the value of a write."""
        run = self.theirs
        close = np.abs(run.value - ours.value) <= RELATIVE * abs(ours.value)
        rows = np.flatnonzero(run.by(who) & (run.kind == ours.kind) & close)
        places = {run.place(row) for row in rows.tolist()} - {ours.place}
        return places.pop() if len(places) == 1 and ours.value else None

    def one_sided(self, place: Place, who: Thread, ours: list[Access], right: list[Access]) -> Fault:
        """Return a thread writes a place in one of the runs only."""
        if ours:
            return self.fault("extra write", place, who, ours[0], float("nan"))
        same = (self.mine.tensor == self.code(self.mine, place)) & (self.mine.kind != "R")
        rows = np.flatnonzero(same & (self.mine.launch == who.launch))
        near = rows[np.argsort(self.mine.block[rows] != who.block, kind="stable")]
        step = int(self.mine.step[near[0]]) if len(near) else None
        return Fault(
            "missing write", place, who, step, self.mine.line(step) if step is not None else None,
            expected=right[0].value, hops=tuple(self.hops),
        )  # fmt: skip

    def fault(self, kind: str, place: Place, who: Thread, ours: Access, expected: float) -> Fault:
        """Return a fault that a write shows."""
        line = self.mine.line(ours.step)
        return Fault(kind, place, who, ours.step, line, ours.value, expected, hops=tuple(self.hops))

    # -- both runs ------------------------------------------------------------------------------------------
    def writes(self, run: Accesses, place: Place, before: int) -> dict[Thread, list[Access]]:
        """Return the writes to a place before a step, from the last store by another launch on."""
        rows = np.flatnonzero(run.at(place) & (run.kind != "R") & (run.step < before))
        out: dict[Thread, list[Access]] = {}
        for row in rows.tolist():
            access = run.access(row)
            out.setdefault(access.who, []).append(access)
        return out

    def read_by(self, run: Accesses, who: Thread, blank: str) -> dict[Place, Access]:
        """Return the first read of every place by a thread, in one blank (or anywhere, for "")."""
        rows = np.flatnonzero(run.by(who) & (run.kind == "R") & self.within(run, blank))
        out: dict[Place, Access] = {}
        for row in rows.tolist():
            access = run.access(row)
            out.setdefault(access.place, access)
        return out

    def latest(self, run: Accesses, who: Thread, before: int, blank: str) -> dict[tuple[int, str], Access]:
        """Return the last read of every tensor by a thread before a step."""
        mask = run.by(who) & (run.kind == "R") & (run.step < before) & self.within(run, blank)
        accesses = (run.access(row) for row in np.flatnonzero(mask).tolist())
        return {(access.place.launch, access.place.tensor): access for access in accesses}

    def peers(self, who: Thread) -> Iterator[Thread]:
        """Yield the other threads of a thread's block that touch memory in either run."""
        numbers: set[int] = set()
        for run in (self.mine, self.theirs):
            here = (run.launch == who.launch) & (run.block == who.block)
            numbers |= set(np.unique(run.thread[here]).tolist())
        for thread in sorted(numbers - {who.thread}):
            yield Thread(who.launch, who.block, thread)

    @staticmethod
    def within(run: Accesses, blank: str) -> np.ndarray:
        """Return the rows of a blank; all rows for "" and for a run without such a blank."""
        if not blank or blank not in run.regions:
            return np.ones(len(run.step), bool)
        return run.region == run.regions.index(blank)

    @staticmethod
    def code(run: Accesses, place: Place) -> int:
        """Return the number of a place's tensor in a run, -1 if the run does not access it."""
        key = (place.launch, place.tensor)
        return run.names.index(key) if key in run.names else -1

    @staticmethod
    def other_kind(ours: list[Access], right: list[Access]) -> str:
        """Check whether one of two lists of writes stores and the other adds."""
        kinds = {access.kind for access in ours}, {access.kind for access in right}
        if kinds[0] == kinds[1]:
            return ""
        return "kind" if "A" in kinds[1] else "atomic"

    def differ(self, a: float, b: float, place: Place) -> bool:
        """Check whether two values of a place differ by more than rounding."""
        if (np.isnan(a) and np.isnan(b)) or a == b:
            return False
        if not (np.isfinite(a) and np.isfinite(b)):
            return True
        return abs(a - b) > RELATIVE * max(abs(a), abs(b)) + ABSOLUTE * self.scale(place)

    def scale(self, place: Place) -> float:
        """Return the largest finite value at a place's tensor in the solution's run."""
        key = place.launch, place.tensor
        if key not in self.scales:
            values = np.abs(self.theirs.value[self.theirs.tensor == self.code(self.theirs, place)])
            self.scales[key] = float(values[np.isfinite(values)].max(initial=0.0))
        return self.scales[key]


def amount(writes: list[Access]) -> float:
    """Return the combined effect of one thread's writes to a place: the sum of its atomics, or its last
    store."""
    if all(write.kind == "A" for write in writes):
        return sum(write.value for write in writes)
    return writes[-1].value


def blame(mine: Accesses, theirs: Accesses, place: Place) -> Fault | None:
    """Return the fault behind a wrong place of the learner's run; None if neither run writes it."""
    return Search(mine, theirs).run(place)
