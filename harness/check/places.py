"""Where a finding of the virtual GPU lies in a learner's file: which blank it comes from, and its words with that place."""

import re
from pathlib import Path

from harness.check.source_faults import arguments_of
from harness.devices.recorder import Recording
from harness.learner.blanks import Blank
from harness.toolchain.mojo_items import Items
from harness.vgpu import Finding
from harness.vgpu.ptx.parser import Location


def in_the_kernels_words(finding: Finding, recording: Recording, source: Path) -> Finding:
    """A finding that calls a tensor what the kernel's argument is called: the launch may have another name for it."""
    arguments = recording.arguments(finding.kernel)
    chain = finding.instr.loc.chain() if finding.instr and finding.instr.loc else ()
    lines = [at.line for at in chain if Path(at.file) == source]
    if not lines:
        return finding
    kernel = Items({source.name: source.read_text("utf-8", "replace")}).enclosing(source.name, lines[-1])
    pairs = zip(arguments, arguments_of(kernel), strict=False) if kernel else ()
    names = {tensor: name for tensor, name in pairs if tensor}
    return finding.renamed(lambda tensor: names.get(tensor, tensor))


def touches(finding: Finding, source: Path, blank: Blank) -> bool:
    """Whether a finding, or the other place of a race, comes from a blank, be it through a helper."""
    for instr in (finding.instr, finding.other_instr):
        for at in instr.loc.chain() if instr and instr.loc else ():
            if within(at, source, blank):
                return True
    return False


def finding_lines(finding: Finding, source: Path, blank: Blank | None) -> list[str]:
    """A finding in lines, at the places in the blank that it comes from, be it through a helper."""
    lines = finding.text().splitlines()
    for before, there, instr in (
        ("at ", finding.where, finding.instr),
        ("the other place: ", finding.other, finding.other_instr),
    ):
        chain = instr.loc.chain() if instr and instr.loc else ()
        own = next((at for at in chain if blank and within(at, source, blank)), None)
        if own and there and not there.startswith(f"{own.file}:{own.line}:"):
            place = f"{own.file}:{own.line}:{own.column}"
            words = f"{before}{place} (in a helper, {there})"
            lines = [
                line.replace(f"{before}{there}", words) for line in lines if line != f"  called from {place}"
            ]
    if blank and (line := used_in_the_loop(finding, source)):
        lines.insert(1, f"  the compiler has moved it out of the loop: it stands in line {line}")
    return [line.replace(f"{Path.cwd()}/", "") for line in lines]


def used_in_the_loop(finding: Finding, source: Path) -> int | None:
    """The line that uses the tensor of a finding, where the place is the head of a loop and only one line in that does."""
    chain = finding.instr.loc.chain() if finding.instr and finding.instr.loc else ()
    number = next((at.line for at in chain if Path(at.file) == source), 0)
    text = source.read_text("utf-8", "replace").split("\n") if number and source.is_file() else []
    if (
        number > len(text)
        or not text
        or not re.match(r"\s*for \w+ in ", text[number - 1])
        or not finding.tensor
    ):
        return None
    uses = re.compile(rf"\b{re.escape(finding.tensor)}\[")
    depth = len(text[number - 1]) - len(text[number - 1].lstrip())
    using: list[int] = []
    for line, code in enumerate(text[number:], start=number + 1):
        if code.strip() and len(code) - len(code.lstrip()) <= depth:
            break
        using += [line] if uses.search(code) else []
    return using[0] if len(using) == 1 and not uses.search(text[number - 1]) else None


def within(at: Location, source: Path, blank: Blank) -> bool:
    """Whether a place in the sources lies in a blank of a file."""
    return blank.line <= at.line < blank.line + len(blank.body) and Path(at.file) == source


def has_merged_line(finding: Finding) -> bool:
    """Whether the compiler has merged the finding's instruction out of several places: it says line 0."""
    at = finding.instr.loc if finding.instr else None
    return any(frame.line == 0 for frame in (at.chain() if at else ()))
