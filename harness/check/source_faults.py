"""Find mistakes in the text of a blank that compile and that values do not show.

Each fault quotes its line, and is only searched for in a wrong gate. The names of a tensor's axes and of loop
bounds are read from the code around the blank: `var W = TileTensor(weight, row_major(O, H))` has the axes O
and H, `for h in range(H)` runs over H in the lines below it. Uncertain cases are skipped.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.learner.blanks import Blank
from harness.toolchain.mojo_items import NOT_CODE, Item, Items, parts

if TYPE_CHECKING:
    from harness.devices.recorder import Recording
    from harness.vgpu import Finding
    from harness.vgpu.ptx.parser import Location

TENSOR = re.compile(
    r"\bvar (\w+) = (?:TileTensor\(\w+(?:\.\w+\([^()]*\))?, ?|stack_allocation\[[^\]]*\]\()\s*row_major"
)
LOOP = re.compile(r"\bfor (\w+) in range\(")
SIZE = re.compile(r"\bvar (\w+) = Int\((\w+)\)")
ACCESS = re.compile(r"\b(\w+)\[")
CALL = re.compile(r"\b(\w+)(?:\[[^\[\]]*\])?\(")
NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Fault:
    """A slip: its id, the line of the file, and a sentence."""

    mistake: str
    line: int
    words: str


def faults(path: Path, blank: Blank) -> list[Fault]:
    """Return the faults in a blank of a Mojo file, in the order of its lines."""
    try:
        items = Items({path.name: path.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError):
        return []
    scopes: dict[int, Scope] = {}
    located: list[Fault] = []
    for number, line in enumerate(blank.body, start=blank.line):
        item = items.enclosing(path.name, number)  # a blank may hold several
        if item is None:
            continue
        scope = scopes.setdefault(item.line, Scope(item))
        code = NOT_CODE.sub("", line)
        bounds = scope.bounds(number - item.line)
        for faults in (
            scope.double_index(code),
            scope.axes(code, bounds),
            exchanged_arguments(code, items, scope),
        ):
            located += [Fault(mistake, number, words) for mistake, words in faults]
    return located


class Scope:
    """The names in a kernel's code: the axes of tensors, the bounds of loops, the origin of a size."""

    def __init__(self, item: Item):
        text = NOT_CODE.sub(blank_out, item.text)
        self.lines = text.split("\n")
        self.tensors = {
            match[1]: parts(find_bracketed(text, text.find("(", match.end() - 1)))
            for match in TENSOR.finditer(text)
        }
        self.sizes = dict(SIZE.findall(text))
        # A bound that measures no tensor, as the end of a block's part, may be anything.
        self.measures = {axis for axes in self.tensors.values() for axis in axes} | {*self.sizes}

    def bounds(self, at: int) -> dict[str, str]:
        """Return the bounds of the loops around a line, by the name of the loop index; "" if uncertain.

        An `if` of the loop may stop an index earlier.
        """
        bound_of: dict[str, str] = {}
        indent = indentation(self.lines[at])
        for number in range(at - 1, -1, -1):
            line = self.lines[number]
            if not line.strip() or indentation(line) >= indent:
                continue
            indent = indentation(line)
            loop = LOOP.search(line)
            if loop and loop[1] not in bound_of:
                arguments = parts(find_bracketed("\n".join(self.lines[number:]), loop.end() - 1))
                bound = arguments[0] if len(arguments) == 1 else arguments[1] if len(arguments) > 1 else ""
                guarded = re.search(rf"\bif [^:]*\b{loop[1]}\b", "\n".join(self.lines[number + 1 : at + 1]))
                bound_of[loop[1]] = "" if guarded else bound
        return bound_of

    def double_index(self, code: str) -> Iterator[tuple[str, str]]:
        """Yield `x[row][h]` in place of `x[row, h]`."""
        for match in ACCESS.finditer(code):
            first = find_bracketed(code, match.end() - 1)
            end = match.end() + len(first) + 1
            if len(self.tensors.get(match[1], ())) > len(parts(first)) and code[end : end + 1] == "[":
                second = find_bracketed(code, end)
                yield (
                    "double-index",
                    (
                        f"`{match[1]}[{first}][{second}]` takes element {first} and then a part of that one value: a tensor of "
                        f"two axes takes both indices at once, `{match[1]}[{first}, {second}]`"
                    ),
                )

    def axes(self, code: str, bounds: dict[str, str]) -> Iterator[tuple[str, str]]:
        """Yield an index whose loop runs over another size than its axis has."""
        for match in ACCESS.finditer(code):
            axes, indices = self.tensors.get(match[1], []), parts(find_bracketed(code, match.end() - 1))
            runs = [bounds.get(index, "") for index in indices]
            if len(axes) != len(indices):
                continue
            shown = f"`{match[1]}[{', '.join(indices)}]`"
            if len(axes) == 2 and axes[0] != axes[1] and runs == axes[::-1]:
                yield (
                    "indices-exchanged",
                    (
                        f"{shown}: the indices are exchanged, {match[1]} is [{', '.join(axes)}] and "
                        f"`{indices[0]}` runs over {runs[0]}: `{match[1]}[{', '.join(indices[::-1])}]`"
                    ),
                )
                continue
            for index, bound, axis in zip(indices, runs, axes, strict=True):
                if bound in self.measures and NAME.search(axis) and bound != axis:
                    part = bound in NAME.findall(axis)
                    yield (
                        "part-of-an-axis" if part else "other-axis",
                        (
                            f"{shown}: `{index}` runs over {bound}, and this axis of {match[1]} is {axis}"
                            + (": it needs an index of its own" if part else "")
                        ),
                    )


def exchanged_arguments(code: str, items: Items, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield pairs of sizes passed to a function of this file in exchanged positions."""
    for match in CALL.finditer(code):
        callee = next((item for item in items.by_name.get(match[1], ())), None)
        if callee is None:
            continue
        declared = arguments_of(callee)
        arguments = parts(find_bracketed(code, match.end() - 1))
        meant = [scope.sizes.get(argument, argument) for argument in arguments]
        for k, (name, other) in enumerate(zip(declared, meant, strict=False)):
            at = declared.index(other) if other in declared and other != name else -1
            if at > k and at < len(meant) and meant[at] == name:
                yield (
                    "arguments-exchanged",
                    (
                        f"`{match[1]}(... {', '.join(arguments[k : at + 1])})`: `{arguments[k]}` is in place of {name} and "
                        f"`{arguments[at]}` in place of {other}"
                    ),
                )


def arguments_of(function: Item) -> list[str]:
    """Return the names of a function's arguments, in order."""
    text = NOT_CODE.sub(" ", function.text)
    head = re.search(r"def \w+\s*(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?\s*\(", text)
    return (
        [part.partition(":")[0].strip() for part in parts(find_bracketed(text, head.end() - 1))]
        if head
        else []
    )


def blank_out(match: re.Match[str]) -> str:
    """Replace text or a comment by as many empty lines."""
    return " " + "\n" * match[0].count("\n")


def indentation(line: str) -> int:
    """Return the spaces in front of a line."""
    return len(line) - len(line.lstrip())


def find_bracketed(text: str, at: int) -> str:
    """Return the text inside the bracket that opens at a place; "" if none does or it does not close."""
    depth = 0
    for end in range(at, len(text)) if at >= 0 else ():
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if depth == 0:
            return text[at + 1 : end] if end > at else ""
    return ""


# ---- Source lines of the virtual GPU's findings --------------------------------------------------------------


def with_kernel_names(finding: "Finding", recording: "Recording", source: Path) -> "Finding":
    """Return a finding with the kernel's argument names; the launch may name tensors differently."""
    arguments = recording.arguments(finding.kernel)
    chain = finding.instr.loc.chain() if finding.instr and finding.instr.loc else ()
    lines = [at.line for at in chain if Path(at.file) == source]
    if not lines:
        return finding
    kernel = Items({source.name: source.read_text("utf-8", "replace")}).enclosing(source.name, lines[-1])
    pairs = zip(arguments, arguments_of(kernel), strict=False) if kernel else ()
    names = {tensor: name for tensor, name in pairs if tensor}
    return finding.rename_tensors(lambda tensor: names.get(tensor, tensor))


def touches(finding: "Finding", source: Path, blank: Blank) -> bool:
    """Check whether a finding, or the other access of a race, is in a blank, directly or through a helper."""
    for instr in (finding.instr, finding.other_instr):
        for at in instr.loc.chain() if instr and instr.loc else ():
            if within(at, source, blank):
                return True
    return False


def finding_lines(finding: "Finding", source: Path, blank: Blank | None) -> list[str]:
    """Format a finding, at its places in the blank, directly or through a helper."""
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
        lines.insert(1, f"  the compiler has moved it out of the loop: it is in line {line}")
    return [line.replace(f"{Path.cwd()}/", "") for line in lines]


def used_in_the_loop(finding: "Finding", source: Path) -> int | None:
    """Return the only line of a loop that uses the tensor of a finding that is reported at the loop's head."""
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


def within(at: "Location", source: Path, blank: Blank) -> bool:
    """Check whether a source place is in a blank of a file."""
    return blank.line <= at.line < blank.line + len(blank.body) and Path(at.file) == source


def has_merged_line(finding: "Finding") -> bool:
    """Check whether the compiler has merged the finding's instruction from several places, which gives line
    0."""
    at = finding.instr.loc if finding.instr else None
    return any(frame.line == 0 for frame in (at.chain() if at else ()))
