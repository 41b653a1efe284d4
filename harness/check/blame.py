"""Find the thread and the source line that cause a wrong element, and what the thread should have read.

The learner's run is compared with the solution's, access by access, backwards from the wrong element. Each
thread that writes the element is compared with its counterpart: it may write elsewhere, not at all, or a
different value. In the last case its reads are compared: it may read different elements, or wrong values from
the same ones. A wrong value that it reads is traced to the thread that wrote it. The search ends at the first
thread that reads correct values and still writes a wrong one. Launch geometries are equal, so each thread of
one run has a counterpart in the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from harness.check.accesses import Access, Accesses, Element, Line, Thread

RELATIVE_TOLERANCE = 1e-5
"""Values with a smaller relative difference are equal up to rounding."""
ABSOLUTE_TOLERANCE = 2e-7
"""Tolerance in addition to RELATIVE_TOLERANCE, as a fraction of the tensor's largest value."""
MAX_CHAIN_LENGTH = 24

DESCRIPTIONS = {
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
class CauseLink:
    """A write of a wrong value, and the read of a wrong value that caused it."""

    write: Access
    expected: float
    read: Access


@dataclass(frozen=True)
class RootCause:
    """The result of a search: the bug of one thread that makes `element` wrong.

    `kind` is a key of DESCRIPTIONS. `extra` are reads of elements that the solution's thread does not read,
    `missing` the elements that only the solution's thread reads, `chain` the links from the wrong element to
    this thread. `got` is NaN if nothing was written.
    """

    kind: str
    element: Element
    thread: Thread
    step: int | None = None
    line: Line | None = None
    got: float = float("nan")
    expected: float = float("nan")
    extra: tuple[Access, ...] = ()
    missing: tuple[Element, ...] = ()
    chain: tuple[CauseLink, ...] = ()

    @property
    def description(self) -> str:
        return DESCRIPTIONS[self.kind]


@dataclass
class Search:
    """A search through two runs; `chain` has the links followed so far."""

    learner: Accesses
    solution: Accesses
    chain: list[CauseLink] = field(default_factory=list)
    scales: dict[tuple[int, str], float] = field(default_factory=dict)

    # -- the search -----------------------------------------------------------------------------------------
    def run(self, element: Element) -> RootCause | None:
        """Return a wrong element's root cause; None if neither run writes it or the chain is too long."""
        learner_end = len(self.learner.steps)
        solution_end = len(self.solution.steps)
        while len(self.chain) < MAX_CHAIN_LENGTH:  # an element may occur again, but only at an earlier step
            cause, link, read_step = self.compare_writes(element, learner_end, solution_end)
            if link is None:
                return cause
            self.chain.append(link)
            element, learner_end, solution_end = link.read.element, link.read.step, read_step
        return None

    def compare_writes(
        self, element: Element, learner_end: int, solution_end: int
    ) -> tuple[RootCause | None, CauseLink | None, int]:
        """Compare the writes to an element before a step of each run.

        Return the root cause, or the next link and the step of its read in the solution's run.
        """
        learner_writes = self.group_writes(self.learner, element, learner_end)
        solution_writes = self.group_writes(self.solution, element, solution_end)
        for thread in sorted({*learner_writes, *solution_writes}):
            actual, expected = learner_writes.get(thread, []), solution_writes.get(thread, [])
            if not expected and solution_writes and all(self.is_harmless(a, solution_writes) for a in actual):
                continue
            if not actual or not expected:
                return self.make_one_sided_cause(element, thread, actual, expected), None, 0
            kind = self.compare_kinds(actual, expected)
            if kind:
                return self.make_cause(kind, element, thread, actual[0], expected[0].value), None, 0
            if not self.are_different(combine_writes(actual), combine_writes(expected), element):
                continue
            if len(actual) != len(expected):
                last = actual[len(expected)] if len(actual) > len(expected) else actual[-1]
                return self.make_cause("count", element, thread, last, float("nan")), None, 0
            pairs = list(zip(actual, expected, strict=True))
            mismatches = [(a, b) for a, b in pairs if self.are_different(a.value, b.value, element)]
            return self.explain_write(element, thread, *(mismatches or pairs[-1:])[0])
        if not learner_writes:
            return None, None, 0
        thread = min(learner_writes)
        last = learner_writes[thread][-1]
        return self.make_cause("same", element, thread, last, last.value), None, 0

    def is_harmless(self, access: Access, solution_writes: dict[Thread, list[Access]]) -> bool:
        """Check whether an extra store writes the same value as other threads of the solution."""
        stores = (a for writes in solution_writes.values() for a in writes if a.kind == access.kind == "W")
        return any(not self.are_different(a.value, access.value, access.element) for a in stores)

    def explain_write(
        self, element: Element, thread: Thread, actual: Access, expected: Access
    ) -> tuple[RootCause | None, CauseLink | None, int]:
        """Explain a thread's wrong value by comparing its reads with those of the solution's thread."""
        cause, read, solution_end = self.compare_reads(thread, actual, expected)
        if cause or read:
            return cause, CauseLink(actual, expected.value, read) if read else None, solution_end
        # The value may come from a shuffle, and another thread of the block may have read the wrong element.
        if self.learner.launches[thread.launch].shuffles:
            for peer in self.list_peers(thread):
                cause, read, solution_end = self.compare_reads(peer, actual, expected)
                if cause or read:
                    return cause, CauseLink(actual, expected.value, read) if read else None, solution_end
        return self.make_cause("value", element, thread, actual, expected.value), None, 0

    def compare_reads(
        self, thread: Thread, actual: Access, expected: Access
    ) -> tuple[RootCause | None, Access | None, int]:
        """Compare a thread's reads in both runs; return the root cause or the first read of a wrong value."""
        blank = self.learner.get_blank(actual.step)
        learner_reads = self.find_first_reads(self.learner, thread, blank)
        solution_reads = self.find_first_reads(self.solution, thread, blank)
        extra = [access for element, access in learner_reads.items() if element not in solution_reads]
        missing = [element for element in solution_reads if element not in learner_reads]
        if extra or missing:
            step = self.find_read_step(extra, missing, actual, thread)
            cause = self.make_cause("element", actual.element, thread, actual, expected.value)
            line = self.learner.get_line(step)
            return replace(cause, step=step, line=line, extra=tuple(extra), missing=tuple(missing)), None, 0
        for element, access in learner_reads.items():
            reference = solution_reads[element]
            if access.step < actual.step and self.are_different(access.value, reference.value, element):
                return None, access, reference.step
        if intended := self.find_intended_element(thread, actual):
            cause = self.make_cause("place", actual.element, thread, actual, expected.value)
            return replace(cause, missing=(intended,)), None, 0
        last_reads = self.compare_last_reads(thread, actual, expected, blank)
        if last_reads:
            access, element = last_reads
            cause = self.make_cause("order", actual.element, thread, actual, expected.value)
            line = self.learner.get_line(access.step)
            return replace(cause, step=access.step, line=line, extra=(access,), missing=(element,)), None, 0
        return None, None, 0

    def find_read_step(
        self, extra: list[Access], missing: list[Element], actual: Access, thread: Thread
    ) -> int:
        """Return the step of the first extra read, else of a read from the first missing read's tensor."""
        if extra:
            return extra[0].step
        run = self.learner
        mask = (run.tensor == self.get_tensor_code(run, missing[0])) & (run.kind == "R")
        mask &= (run.launch == thread.launch) & self.select_blank(run, run.get_blank(actual.step))
        in_block = np.flatnonzero(mask & (run.block == thread.block))
        rows = in_block if len(in_block) else np.flatnonzero(mask)
        return int(run.step[rows[0]]) if len(rows) else actual.step

    def compare_last_reads(
        self, thread: Thread, actual: Access, expected: Access, blank: str
    ) -> tuple[Access, Element] | None:
        """Return a tensor's last read before a write, and the element that the solution reads, if different."""
        learner_reads = self.find_last_reads(self.learner, thread, actual.step, blank)
        solution_reads = self.find_last_reads(self.solution, thread, expected.step, blank)
        for key, access in learner_reads.items():
            if key in solution_reads and solution_reads[key].element != access.element:
                return access, solution_reads[key].element
        return None

    def find_intended_element(self, thread: Thread, actual: Access) -> Element | None:
        """Return the one other element to which the solution's thread writes this value, or None."""
        run = self.solution
        close = np.abs(run.value - actual.value) <= RELATIVE_TOLERANCE * abs(actual.value)
        rows = np.flatnonzero(run.select_thread(thread) & (run.kind == actual.kind) & close)
        elements = {run.get_element(row) for row in rows.tolist()} - {actual.element}
        return elements.pop() if len(elements) == 1 and actual.value else None

    def make_one_sided_cause(
        self, element: Element, thread: Thread, actual: list[Access], expected: list[Access]
    ) -> RootCause:
        """Return the root cause if a thread writes an element in only one of the two runs."""
        if actual:
            return self.make_cause("extra write", element, thread, actual[0], float("nan"))
        same_tensor = self.learner.tensor == self.get_tensor_code(self.learner, element)
        same_tensor &= self.learner.kind != "R"
        rows = np.flatnonzero(same_tensor & (self.learner.launch == thread.launch))
        nearest_rows = rows[np.argsort(self.learner.block[rows] != thread.block, kind="stable")]
        step = int(self.learner.step[nearest_rows[0]]) if len(nearest_rows) else None
        return RootCause(
            "missing write", element, thread, step, self.learner.get_line(step) if step is not None else None,
            expected=expected[0].value, chain=tuple(self.chain),
        )  # fmt: skip

    def make_cause(
        self, kind: str, element: Element, thread: Thread, actual: Access, expected: float
    ) -> RootCause:
        line = self.learner.get_line(actual.step)
        chain = tuple(self.chain)
        return RootCause(kind, element, thread, actual.step, line, actual.value, expected, chain=chain)

    # -- both runs ------------------------------------------------------------------------------------------
    def group_writes(self, run: Accesses, element: Element, end: int) -> dict[Thread, list[Access]]:
        rows = np.flatnonzero(run.select_element(element) & (run.kind != "R") & (run.step < end))
        by_thread: dict[Thread, list[Access]] = {}
        for row in rows.tolist():
            access = run.get_access(row)
            by_thread.setdefault(access.thread, []).append(access)
        return by_thread

    def find_first_reads(self, run: Accesses, thread: Thread, blank: str) -> dict[Element, Access]:
        """Return a thread's first read of each element, in one blank or, for "", anywhere."""
        rows = np.flatnonzero(run.select_thread(thread) & (run.kind == "R") & self.select_blank(run, blank))
        by_element: dict[Element, Access] = {}
        for row in rows.tolist():
            access = run.get_access(row)
            by_element.setdefault(access.element, access)
        return by_element

    def find_last_reads(
        self, run: Accesses, thread: Thread, end: int, blank: str
    ) -> dict[tuple[int, str], Access]:
        mask = run.select_thread(thread) & (run.kind == "R") & self.select_blank(run, blank)
        mask &= run.step < end
        accesses = (run.get_access(row) for row in np.flatnonzero(mask).tolist())
        return {(access.element.launch, access.element.tensor): access for access in accesses}

    def list_peers(self, thread: Thread) -> Iterator[Thread]:
        """Yield the other threads of a thread's block that access memory in either run."""
        thread_indices: set[int] = set()
        for run in (self.learner, self.solution):
            mask = (run.launch == thread.launch) & (run.block == thread.block)
            thread_indices |= set(np.unique(run.thread[mask]).tolist())
        for thread_index in sorted(thread_indices - {thread.thread}):
            yield Thread(thread.launch, thread.block, thread_index)

    @staticmethod
    def select_blank(run: Accesses, blank: str) -> np.ndarray:
        if not blank or blank not in run.regions:
            return np.ones(len(run.step), bool)
        return run.region == run.regions.index(blank)

    @staticmethod
    def get_tensor_code(run: Accesses, element: Element) -> int:
        key = (element.launch, element.tensor)
        return run.tensor_keys.index(key) if key in run.tensor_keys else -1

    @staticmethod
    def compare_kinds(actual: list[Access], expected: list[Access]) -> str:
        kinds = {access.kind for access in actual}, {access.kind for access in expected}
        if kinds[0] == kinds[1]:
            return ""
        return "kind" if "A" in kinds[1] else "atomic"

    def are_different(self, a: float, b: float, element: Element) -> bool:
        if (np.isnan(a) and np.isnan(b)) or a == b:
            return False
        if not (np.isfinite(a) and np.isfinite(b)):
            return True
        limit = RELATIVE_TOLERANCE * max(abs(a), abs(b)) + ABSOLUTE_TOLERANCE * self.get_scale(element)
        return abs(a - b) > limit

    def get_scale(self, element: Element) -> float:
        key = element.launch, element.tensor
        if key not in self.scales:
            same_tensor = self.solution.tensor == self.get_tensor_code(self.solution, element)
            values = np.abs(self.solution.value[same_tensor])
            self.scales[key] = float(values[np.isfinite(values)].max(initial=0.0))
        return self.scales[key]


def combine_writes(writes: list[Access]) -> float:
    """Return the effect of one thread's writes to an element: the sum of its atomics, or the last store."""
    if all(write.kind == "A" for write in writes):
        return sum(write.value for write in writes)
    return writes[-1].value


def find_root_cause(learner: Accesses, solution: Accesses, element: Element) -> RootCause | None:
    return Search(learner, solution).run(element)
