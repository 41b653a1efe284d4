"""Describe a picture in words: the wrong element, the path to its cause, the cause, findings and costs.

The terminal and the page tell the same story; every sentence refers to a step of the run.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.check.accesses import Accesses, Line, Place, Thread, bank_conflicts, index3, sectors
from harness.check.blame import Fault
from harness.check.compare import distinct_digits
from harness.check.picture import Picture, Wrong
from harness.vgpu import Finding
from harness.vgpu.checks.findings import index_text

SHOWN = 4
"""Elements that a sentence names."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of the story: its kind ("wrong", "way", "fault", "instead", "finding", "right"), and a
    step or None."""

    kind: str
    text: str
    step: int | None = None
    line: Line | None = None


def tell(picture: Picture) -> list[Sentence]:
    """Return the story of a picture, in the order in which it is read."""
    if picture.right:
        return [Sentence("right", f"{picture.gate.id} is correct: this is what your kernel does")]
    out = [Sentence("wrong", wrong_text(picture, wrong)) for wrong in picture.wrong]
    if picture.mine.failure:
        out.append(Sentence("finding", picture.mine.failure))
    if picture.finding:
        out += finding_sentences(picture, picture.finding)
    elif picture.fault:
        out += path_sentences(picture, picture.fault)
        out += cause(picture, picture.fault)
    return out


def wrong_text(picture: Picture, wrong: Wrong) -> str:
    """Return the first wrong element of a quantity."""
    printed = picture.puzzle.printed_name(wrong.quantity)
    name = f"{wrong.quantity}{index_text(wrong.index)}{f' ({printed})' * (printed != wrong.quantity)}"
    is_now, right = distinct_digits(wrong.got, wrong.expected, 6)
    got = "was never written" if wrong.unwritten else f"is {is_now}"
    count = (
        f"the first of {len(wrong.elements)} wrong elements" if len(wrong.elements) > 1 else "the only one"
    )
    return f"{name} {got}, right is {right}; {count} of {wrong.size}"


def finding_sentences(picture: Picture, finding: Finding) -> Iterator[Sentence]:
    """Yield the finding that is the cause; the step is the one at which it shows."""
    source = picture.mine.accesses.source
    text = f"{finding.kind}: {finding.message}"
    yield Sentence("finding", text, finding_step(picture, finding), source.line(finding.instr))
    if finding.other_instr is not None:
        yield Sentence("instead", "the other access of the two", None, source.line(finding.other_instr))


def finding_step(picture: Picture, finding: Finding) -> int | None:
    """Return the first step of a finding's instruction on its element."""
    run = picture.mine.accesses
    launch = picture.launch_of(finding)
    if launch is None:
        return None
    first = run.launches[launch].first_step
    steps = [
        first + n for n, step in enumerate(run.launches[launch].events.steps) if step.instr is finding.instr
    ]
    for step in steps:
        rows = range(run.steps[step].first, run.steps[step].last)
        events = run.launches[launch].events
        if any(
            picture.index(finding.tensor, int(events.element[r])) == as_tuple(finding.index) for r in rows
        ):
            return step
    return steps[0] if steps else None


def as_tuple(index) -> tuple:
    """Format an index as a tuple, as the virtual GPU does."""
    return index if isinstance(index, tuple) else (index,)


def path_sentences(picture: Picture, fault: Fault) -> Iterator[Sentence]:
    """Yield the path from the wrong element to the fault: the threads that passed a wrong value on."""
    for hop in fault.hops:
        write, read = hop.write, hop.read
        yield Sentence(
            "way",
            f"{name_thread(picture, write.who)} writes {element(picture, write.place)} from "
            f"{element(picture, read.place)}, which is wrong already",
            write.step,
            picture.mine.accesses.line(write.step),
        )


def cause(picture: Picture, fault: Fault) -> Iterator[Sentence]:
    """Yield the action of the thread at fault, and what it should have read."""
    name, place = name_thread(picture, fault.who), element(picture, fault.place)
    run = picture.mine.accesses
    write_line = run.line(fault.step) if fault.step is not None else None
    if fault.kind in ("element", "order", "place", "value"):
        verb = "adds" if is_sum(run, fault) else "writes"
        into = "to" if verb == "adds" else "into"
        got, right = distinct_digits(fault.got, fault.expected, 6)
        text = f"{name} {verb} {got} {into} {place}; the solution's same thread {verb} {right}"
        if fault.kind == "value":
            text += ". It reads the same elements and values: what it computes from them is wrong"
        yield Sentence("fault", text, fault.step, fault.line)
        yield from instead(picture, fault)
        return
    words = {
        "missing write": f"{name} never writes {place}; the solution's same thread does ({fault.expected:.6g})",
        "extra write": f"{name} writes {fault.got:.6g} into {place}; the solution's same thread does not",
        "kind": f"{name} stores {fault.got:.6g} into {place}, which many threads add to; the solution adds it with an atomic",
        "atomic": f"{name} adds {fault.got:.6g} to {place} with an atomic; the solution stores it",
        "count": f"{name} writes {place} another number of times than the solution's same thread",
        "same": f"{name} writes {place} as the solution's thread does: the difference is rounding, or the order of the threads",
    }
    yield Sentence("fault", words[fault.kind], fault.step, fault.line or write_line)


def is_sum(run: Accesses, fault: Fault) -> bool:
    """Check whether a fault's place is a target of atomics."""
    return bool((run.at(fault.place) & (run.kind == "A")).any())


def instead(picture: Picture, fault: Fault) -> Iterator[Sentence]:
    """Yield the elements that only one of the two threads reads."""
    if fault.kind == "place":
        yield Sentence(
            "instead", f"the solution's thread puts this value into {element(picture, fault.missing[0])}"
        )
        return
    if fault.kind == "order":
        mine, right = fault.extra[0], fault.missing[0]
        yield Sentence(
            "instead",
            f"last before that, it reads {element(picture, mine.place)}; the solution's thread reads {element(picture, right)}",
            mine.step,
            picture.mine.accesses.line(mine.step),
        )
        return
    if fault.extra:
        first = fault.extra[0]
        yield Sentence(
            "instead",
            f"it reads {elements(picture, [a.place for a in fault.extra])}, which the solution's thread does not",
            first.step,
            picture.mine.accesses.line(first.step),
        )
    if fault.missing:
        yield Sentence(
            "instead", f"it never reads {elements(picture, fault.missing)}, which the solution's thread does"
        )


# ---- Names --------------------------------------------------------------------------------------------------


def name_thread(picture: Picture, thread: Thread) -> str:
    """Return `minimal_kernel, block (0, 1), thread 3`; a single block or thread is omitted."""
    launch = picture.mine.accesses.launches[thread.launch]
    return ", ".join([launch.name, *thread_words(launch, thread.block, thread.thread)])


def thread_words(launch, block: int, thread: int) -> list[str]:
    """Return ["block (0, 1)", "thread 3"]; a single block or thread is omitted."""
    out = []
    for word, number, sizes in (("block", block, launch.grid), ("thread", thread, launch.block)):
        if math.prod(sizes) > 1:
            out.append(f"{word} {trim(index3(number, sizes), sizes)}")
    return out or ["the only thread"]


def trim(index: tuple[int, int, int], sizes: tuple[int, int, int]) -> str:
    """Return (x, y, z) without the axes after the last that has more than one element: "3" or "(0, 1)"."""
    axes = max((axis for axis in range(3) if sizes[axis] > 1), default=0) + 1
    return str(index[0]) if axes == 1 else str(index[:axes])


def element(picture: Picture, place: Place) -> str:
    """Return `grad_weight[0, 1]`."""
    return f"{place.tensor}{index_text(picture.index(place.tensor, place.element))}"


def elements(picture: Picture, places: Iterable[Place]) -> str:
    """Return the first few of some elements, and how many more there are."""
    places = list(places)
    names = [element(picture, place) for place in places[:SHOWN]]
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(names) + more


def code(line: Line | None) -> str:
    """Return the text of a source line, "" if it cannot be read."""
    if line is None:
        return ""
    try:
        return Path(line.file).read_text(encoding="utf-8").splitlines()[line.number - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


# ---- Costs --------------------------------------------------------------------------------------------------


def step_cost(run: Accesses, step: int) -> tuple[int, int, int]:
    """Return (bank conflicts, sectors, least sectors) of a step of a run."""
    it = run.steps[step]
    if it.kind == "barrier":
        return 0, 0, 0
    events = run.launches[run.launch_of(step)].events
    if events.tensors[it.tensor].space == "shared":
        return bank_conflicts(events, it), 0, 0
    return (0, *sectors(events, it))
