"""Describe a picture in sentences: the wrong element, how the error reached it, its cause, and findings."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.check.accesses import (
    Accesses,
    Element,
    Line,
    Thread,
    count_bank_conflicts,
    count_sectors,
    unflatten_index,
)
from harness.check.blame import RootCause
from harness.check.compare import format_distinct
from harness.check.picture import Picture, WrongElements
from harness.vgpu import Finding
from harness.vgpu.checks.findings import format_index

MAX_SHOWN = 4
"""Maximum number of elements listed in a sentence."""


@dataclass(frozen=True)
class Sentence:
    """A sentence; `kind` is a key of `STYLES` in show.py, `step` a step of the learner's run."""

    kind: str
    text: str
    step: int | None = None
    line: Line | None = None


def tell_story(picture: Picture) -> list[Sentence]:
    if picture.is_correct:
        return [Sentence("right", f"{picture.gate.id} is correct: this is what your kernel does")]
    sentences = [Sentence("wrong", describe_wrong(picture, wrong)) for wrong in picture.wrong]
    if picture.learner.failure:
        sentences.append(Sentence("finding", picture.learner.failure))
    if picture.finding:
        sentences += describe_finding(picture, picture.finding)
    elif picture.root_cause:
        sentences += describe_path(picture, picture.root_cause)
        sentences += describe_cause(picture, picture.root_cause)
    return sentences


def describe_wrong(picture: Picture, wrong: WrongElements) -> str:
    printed = picture.puzzle.get_printed_name(wrong.quantity)
    name = f"{wrong.quantity}{format_index(wrong.index)}{f' ({printed})' * (printed != wrong.quantity)}"
    actual, expected = format_distinct(wrong.got, wrong.expected, 6)
    got = "was never written" if wrong.unwritten else f"is {actual}"
    several = f"the first of {len(wrong.elements)} wrong elements"
    count = several if len(wrong.elements) > 1 else "the only one"
    return f"{name} {got}, expected {expected}; {count} of {wrong.size}"


def describe_finding(picture: Picture, finding: Finding) -> Iterator[Sentence]:
    """Yield a finding that caused the error, with its step."""
    source = picture.learner.accesses.source
    text = f"{finding.kind}: {finding.message}"
    yield Sentence("finding", text, find_step(picture, finding), source.find_line(finding.instr))
    if finding.other_instr is not None:
        yield Sentence("instead", "the other access of the two", None, source.find_line(finding.other_instr))


def find_step(picture: Picture, finding: Finding) -> int | None:
    """Return the first step at which a finding's instruction accesses its element."""
    run = picture.learner.accesses
    launch = picture.find_launch(finding)
    if launch is None:
        return None
    first, events = run.launches[launch].first_step, run.launches[launch].events
    index = finding.index if isinstance(finding.index, tuple) else (finding.index,)
    steps = [first + n for n, step in enumerate(events.steps) if step.instr is finding.instr]
    for step in steps:
        elements = events.element[run.steps[step].first : run.steps[step].last]
        if any(picture.unflatten(finding.tensor, int(element)) == index for element in elements):
            return step
    return steps[0] if steps else None


def describe_path(picture: Picture, error: RootCause) -> Iterator[Sentence]:
    """Yield the path from the wrong element to the cause: the threads that propagated a wrong value."""
    for link in error.chain:
        write, read = link.write, link.read
        yield Sentence(
            "way",
            f"{format_thread(picture, write.thread)} writes {format_element(picture, write.element)} from "
            f"{format_element(picture, read.element)}, which is wrong already",
            write.step,
            picture.learner.accesses.get_line(write.step),
        )


def describe_cause(picture: Picture, error: RootCause) -> Iterator[Sentence]:
    """Yield the write that caused the error, and the reads that the thread should have made."""
    name, element = format_thread(picture, error.thread), format_element(picture, error.element)
    run = picture.learner.accesses
    write_line = run.get_line(error.step) if error.step is not None else None
    if error.kind in ("element", "order", "place", "value"):
        is_sum = (run.select_element(error.element) & (run.kind == "A")).any()
        verb = "adds" if is_sum else "writes"
        into = "to" if verb == "adds" else "into"
        got, expected = format_distinct(error.got, error.expected, 6)
        text = f"{name} {verb} {got} {into} {element}; the solution's same thread {verb} {expected}"
        if error.kind == "value":
            text += ". It reads the same elements and values: what it computes from them is wrong"
        yield Sentence("fault", text, error.step, error.line)
        yield from describe_difference(picture, error)
        return
    texts = {
        "missing write": f"{name} never writes {element}; the solution's same thread does ({error.expected:.6g})",
        "extra write": f"{name} writes {error.got:.6g} into {element}; the solution's same thread does not",
        "kind": f"{name} stores {error.got:.6g} into {element}, which many threads add to; the solution adds it with an atomic",
        "atomic": f"{name} adds {error.got:.6g} to {element} with an atomic; the solution stores it",
        "count": f"{name} writes {element} another number of times than the solution's same thread",
        "same": f"{name} writes {element} as the solution's thread does: the difference is rounding, or the order of the threads",
    }
    yield Sentence("fault", texts[error.kind], error.step, error.line or write_line)


def describe_difference(picture: Picture, error: RootCause) -> Iterator[Sentence]:
    """Yield how the reads, or the target of the write, differ from those of the solution's thread."""
    if error.kind == "place":
        element = format_element(picture, error.missing[0])
        yield Sentence("instead", f"the solution's thread puts this value into {element}")
        return
    if error.kind == "order":
        step, learner_element = error.extra[0].step, format_element(picture, error.extra[0].element)
        text = f"last before that, it reads {learner_element}; the solution's thread reads {format_element(picture, error.missing[0])}"
        yield Sentence("instead", text, step, picture.learner.accesses.get_line(step))
        return
    if error.extra:
        step, elements = error.extra[0].step, format_elements(picture, [a.element for a in error.extra])
        text = f"it reads {elements}, which the solution's thread does not"
        yield Sentence("instead", text, step, picture.learner.accesses.get_line(step))
    if error.missing:
        elements = format_elements(picture, error.missing)
        yield Sentence("instead", f"it never reads {elements}, which the solution's thread does")


# ---- Names --------------------------------------------------------------------------------------------------


def format_thread(picture: Picture, thread: Thread) -> str:
    """Return a name such as `minimal_kernel, block (0, 1), thread 3`."""
    launch = picture.learner.accesses.launches[thread.launch]
    return ", ".join([launch.name, *describe_thread(launch, thread.block, thread.thread)])


def describe_thread(launch, block: int, thread: int) -> list[str]:
    """Return ["block (0, 1)", "thread 3"]; the index is omitted if there is only one block or thread."""
    parts = []
    for label, number, sizes in (("block", block, launch.grid), ("thread", thread, launch.block)):
        if math.prod(sizes) > 1:
            parts.append(f"{label} {drop_unit_axes(unflatten_index(number, sizes), sizes)}")
    return parts or ["the only thread"]


def drop_unit_axes(index: tuple[int, int, int], sizes: tuple[int, int, int]) -> str:
    """Return an index without its trailing axes of size 1, such as "3" or "(0, 1)"."""
    axes = max((axis for axis in range(3) if sizes[axis] > 1), default=0) + 1
    return str(index[0]) if axes == 1 else str(index[:axes])


def format_element(picture: Picture, element: Element) -> str:
    return f"{element.tensor}{format_index(picture.unflatten(element.tensor, element.index))}"


def format_elements(picture: Picture, elements: Iterable[Element]) -> str:
    elements = list(elements)
    names = [format_element(picture, element) for element in elements[:MAX_SHOWN]]
    rest = f" and {len(elements) - MAX_SHOWN} more" if len(elements) > MAX_SHOWN else ""
    return ", ".join(names) + rest


def read_line(line: Line | None) -> str:
    """Return the text of a source line, or "" if it cannot be read."""
    if line is None:
        return ""
    try:
        return Path(line.file).read_text(encoding="utf-8").splitlines()[line.number - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


# ---- Costs --------------------------------------------------------------------------------------------------


def compute_step_cost(run: Accesses, step: int) -> tuple[int, int, int]:
    """Return (bank conflicts, sectors, minimum number of sectors) of a step."""
    traced_step = run.steps[step]
    if traced_step.kind == "barrier":
        return 0, 0, 0
    events = run.launches[run.find_launch(step)].events
    if events.tensors[traced_step.tensor].space == "shared":
        return count_bank_conflicts(events, traced_step), 0, 0
    return (0, *count_sectors(events, traced_step))
