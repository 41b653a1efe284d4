"""Find mistakes in the source of a blank that compile but cannot be identified from values.

An error quotes its line, and is reported only for a wrong gate. The names of tensor axes and loop bounds are
read from the code around the blank: `var W = TileTensor(weight, row_major(O, H))` has the axes O and H, and
`h` runs over H in the body of `for h in range(H)`. Uncertain cases are skipped.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.learner.blanks import Blank
from harness.toolchain.mojo_items import NOT_CODE, Item, Items, split_arguments

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
class SourceError:
    """A mistake in the source: its id, its line in the file, and a sentence."""

    mistake: str
    line: int
    message: str


def find_source_errors(path: Path, blank: Blank) -> list[SourceError]:
    """Return the errors in a blank of a Mojo file, in the order of its lines."""
    try:
        items = Items({path.name: path.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError):
        return []
    scopes: dict[int, Scope] = {}
    located_errors: list[SourceError] = []
    for number, line in enumerate(blank.body, start=blank.line):
        item = items.find_enclosing(path.name, number)  # a blank may contain several
        if item is None:
            continue
        scope = scopes.setdefault(item.line, Scope(item))
        code = NOT_CODE.sub("", line)
        bounds = scope.find_bounds(number - item.line)
        for faults in (
            scope.find_double_index(code),
            scope.find_axis_mismatch(code, bounds),
            find_exchanged_arguments(code, items, scope),
        ):
            located_errors += [SourceError(mistake, number, message) for mistake, message in faults]
    return located_errors


class Scope:
    """The names in a kernel's code: the axes of tensors, the bounds of loops, the sources of sizes."""

    def __init__(self, item: Item):
        text = NOT_CODE.sub(keep_newlines, item.text)
        self.lines = text.split("\n")
        self.tensors = {
            match[1]: split_arguments(find_bracketed(text, text.find("(", match.end() - 1)))
            for match in TENSOR.finditer(text)
        }
        self.sizes = dict(SIZE.findall(text))
        # Bounds that are not the size of a tensor's axis, such as the end of a chunk, are not checked.
        self.axis_sizes = {axis for axes in self.tensors.values() for axis in axes} | {*self.sizes}

    def find_bounds(self, line_index: int) -> dict[str, str]:
        """Map the index of each loop around a line to its bound; "" if uncertain.

        An `if` in the loop may lower the bound.
        """
        bounds: dict[str, str] = {}
        indent = count_indent(self.lines[line_index])
        for number in range(line_index - 1, -1, -1):
            line = self.lines[number]
            if not line.strip() or count_indent(line) >= indent:
                continue
            indent = count_indent(line)
            loop = LOOP.search(line)
            if loop and loop[1] not in bounds:
                arguments = split_arguments(find_bracketed("\n".join(self.lines[number:]), loop.end() - 1))
                bound = arguments[0] if len(arguments) == 1 else arguments[1] if len(arguments) > 1 else ""
                guarded = re.search(
                    rf"\bif [^:]*\b{loop[1]}\b", "\n".join(self.lines[number + 1 : line_index + 1])
                )
                bounds[loop[1]] = "" if guarded else bound
        return bounds

    def find_double_index(self, code: str) -> Iterator[tuple[str, str]]:
        """Yield errors such as `x[row][h]` instead of `x[row, h]`."""
        for match in ACCESS.finditer(code):
            first = find_bracketed(code, match.end() - 1)
            end = match.end() + len(first) + 1
            if (
                len(self.tensors.get(match[1], ())) > len(split_arguments(first))
                and code[end : end + 1] == "["
            ):
                second = find_bracketed(code, end)
                message = (
                    f"`{match[1]}[{first}][{second}]` takes element {first} and then a part of that one value: a tensor of "
                    f"two axes takes both indices at once, `{match[1]}[{first}, {second}]`"
                )
                yield "double-index", message

    def find_axis_mismatch(self, code: str, bounds: dict[str, str]) -> Iterator[tuple[str, str]]:
        """Yield indices whose loop bound differs from the size of their axis."""
        for match in ACCESS.finditer(code):
            axes = self.tensors.get(match[1], [])
            indices = split_arguments(find_bracketed(code, match.end() - 1))
            index_bounds = [bounds.get(index, "") for index in indices]
            if len(axes) != len(indices):
                continue
            access = f"`{match[1]}[{', '.join(indices)}]`"
            if len(axes) == 2 and axes[0] != axes[1] and index_bounds == axes[::-1]:
                message = (
                    f"{access}: the indices are exchanged, {match[1]} is [{', '.join(axes)}] and "
                    f"`{indices[0]}` runs over {index_bounds[0]}: `{match[1]}[{', '.join(indices[::-1])}]`"
                )
                yield "indices-exchanged", message
                continue
            for index, bound, axis in zip(indices, index_bounds, axes, strict=True):
                if bound in self.axis_sizes and NAME.search(axis) and bound != axis:
                    is_part = bound in NAME.findall(axis)
                    message = f"{access}: `{index}` runs over {bound}, and this axis of {match[1]} is {axis}"
                    message += ": it needs an index of its own" if is_part else ""
                    yield "part-of-an-axis" if is_part else "other-axis", message


def find_exchanged_arguments(code: str, items: Items, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield pairs of sizes passed to a function of this file in swapped positions."""
    for match in CALL.finditer(code):
        callee = next((item for item in items.by_name.get(match[1], ())), None)
        if callee is None:
            continue
        parameters = list_arguments(callee)
        arguments = split_arguments(find_bracketed(code, match.end() - 1))
        resolved = [scope.sizes.get(argument, argument) for argument in arguments]
        for k, (name, passed) in enumerate(zip(parameters, resolved, strict=False)):
            position = parameters.index(passed) if passed in parameters and passed != name else -1
            if position > k and position < len(resolved) and resolved[position] == name:
                message = (
                    f"`{match[1]}(... {', '.join(arguments[k : position + 1])})`: `{arguments[k]}` is in place of {name} and "
                    f"`{arguments[position]}` in place of {passed}"
                )
                yield "arguments-exchanged", message


def list_arguments(function: Item) -> list[str]:
    text = NOT_CODE.sub(" ", function.text)
    head = re.search(r"def \w+\s*(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?\s*\(", text)
    arguments = split_arguments(find_bracketed(text, head.end() - 1)) if head else []
    return [part.partition(":")[0].strip() for part in arguments]


def keep_newlines(match: re.Match[str]) -> str:
    return " " + "\n" * match[0].count("\n")


def count_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def find_bracketed(text: str, start: int) -> str:
    """Return the text inside the bracket that opens at `at`, or "" if there is none or it is not closed."""
    depth = 0
    for end in range(start, len(text)) if start >= 0 else ():
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if depth == 0:
            return text[start + 1 : end] if end > start else ""
    return ""


# ---- Source lines of the virtual GPU's findings --------------------------------------------------------------


def use_kernel_names(finding: "Finding", recording: "Recording", source: Path) -> "Finding":
    """Return a finding with the kernel's argument names instead of the launch's tensor names."""
    arguments = recording.list_argument_names(finding.kernel)
    chain = finding.instr.loc.list_frames() if finding.instr and finding.instr.loc else ()
    lines = [frame.line for frame in chain if Path(frame.file) == source]
    if not lines:
        return finding
    kernel = Items({source.name: source.read_text("utf-8", "replace")}).find_enclosing(source.name, lines[-1])
    pairs = zip(arguments, list_arguments(kernel), strict=False) if kernel else ()
    names = {tensor: name for tensor, name in pairs if tensor}
    return finding.rename_tensors(lambda tensor: names.get(tensor, tensor))


def involves_blank(finding: "Finding", source: Path, blank: Blank) -> bool:
    """Check whether a finding, or the other access of a race, is in a blank, directly or through a helper."""
    locations = (instr.loc for instr in (finding.instr, finding.other_instr) if instr)
    return any(is_in_blank(frame, source, blank) for loc in locations if loc for frame in loc.list_frames())


def format_finding(finding: "Finding", source: Path, blank: Blank | None) -> list[str]:
    """Format a finding with its lines in the blank, even if these only call a helper."""
    lines = finding.format().splitlines()
    for prefix, site, instr in (
        ("at ", finding.location, finding.instr),
        ("the other place: ", finding.other_location, finding.other_instr),
    ):
        chain = instr.loc.list_frames() if instr and instr.loc else ()
        in_blank = next((frame for frame in chain if blank and is_in_blank(frame, source, blank)), None)
        if in_blank and site and not site.startswith(f"{in_blank.file}:{in_blank.line}:"):
            own_site = f"{in_blank.file}:{in_blank.line}:{in_blank.column}"
            new = f"{prefix}{own_site} (in a helper, {site})"
            lines = [
                line.replace(f"{prefix}{site}", new) for line in lines if line != f"  called from {own_site}"
            ]
    if blank and (line := find_use_in_loop(finding, source)):
        lines.insert(1, f"  the compiler has moved it out of the loop: it is in line {line}")
    return [line.replace(f"{Path.cwd()}/", "") for line in lines]


def find_use_in_loop(finding: "Finding", source: Path) -> int | None:
    """Return the only line of a loop that uses a finding's tensor, if the finding is at the loop's head."""
    chain = finding.instr.loc.list_frames() if finding.instr and finding.instr.loc else ()
    number = next((frame.line for frame in chain if Path(frame.file) == source), 0)
    text = source.read_text("utf-8", "replace").split("\n") if number and source.is_file() else []
    if (
        number > len(text)
        or not text
        or not re.match(r"\s*for \w+ in ", text[number - 1])
        or not finding.tensor
    ):
        return None
    uses = re.compile(rf"\b{re.escape(finding.tensor)}\[")
    depth = count_indent(text[number - 1])
    using_lines: list[int] = []
    for line, code in enumerate(text[number:], start=number + 1):
        if code.strip() and count_indent(code) <= depth:
            break
        using_lines += [line] if uses.search(code) else []
    return using_lines[0] if len(using_lines) == 1 and not uses.search(text[number - 1]) else None


def is_in_blank(frame: "Location", source: Path, blank: Blank) -> bool:
    return blank.line <= frame.line < blank.line + len(blank.body) and Path(frame.file) == source


def has_merged_line(finding: "Finding") -> bool:
    """Check whether the compiler merged the instruction from several lines, which it marks as line 0."""
    location = finding.instr.loc if finding.instr else None
    return any(frame.line == 0 for frame in (location.list_frames() if location else ()))
