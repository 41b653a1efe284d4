"""What the text of a blank shows by itself: slips that compile and that the values of a result do not tell.

Each fault states what stands there, with the line, and is only looked for where a gate is wrong. What a tensor's axes and a
loop's bounds are called is read off the code around the blank: `var W = TileTensor(weight, row_major(O, H))` has the axes O
and H, `for h in range(H)` runs over H in the lines below it. What cannot be read for sure is passed over.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.learner.blanks import Blank
from harness.toolchain.mojo_items import NOT_CODE, Item, Items, parts

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
    """What is to be seen in a blank of a Mojo file, in the order of its lines."""
    try:
        items = Items({path.name: path.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError):
        return []
    item = items.enclosing(path.name, blank.line)
    if item is None:
        return []
    scope = Scope(item)
    located: list[Fault] = []
    for number, line in enumerate(blank.body, start=blank.line):
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
    """What the code of an item says of its names: the axes of tensors, the bounds of loops, where a size comes from."""

    def __init__(self, item: Item):
        text = NOT_CODE.sub(blanked, item.text)
        self.lines = text.split("\n")
        self.tensors = {
            match[1]: parts(bracketed(text, text.find("(", match.end() - 1)))
            for match in TENSOR.finditer(text)
        }
        self.sizes = dict(SIZE.findall(text))
        # A bound that measures no tensor, as the end of a block's part, may be anything.
        self.measures = {axis for axes in self.tensors.values() for axis in axes} | {*self.sizes}

    def bounds(self, at: int) -> dict[str, str]:
        """What the loops around a line of the item run over, by the name that each gives its index; "" for what is not sure.

        A name that an `if` of its loop guards may stop earlier.
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
                arguments = parts(bracketed("\n".join(self.lines[number:]), loop.end() - 1))
                bound = arguments[0] if len(arguments) == 1 else arguments[1] if len(arguments) > 1 else ""
                guarded = re.search(rf"\bif [^:]*\b{loop[1]}\b", "\n".join(self.lines[number + 1 : at + 1]))
                bound_of[loop[1]] = "" if guarded else bound
        return bound_of

    def double_index(self, code: str) -> Iterator[tuple[str, str]]:
        """`x[row][h]` where `x[row, h]` is meant."""
        for match in ACCESS.finditer(code):
            first = bracketed(code, match.end() - 1)
            end = match.end() + len(first) + 1
            if len(self.tensors.get(match[1], ())) > len(parts(first)) and code[end : end + 1] == "[":
                second = bracketed(code, end)
                yield (
                    "double-index",
                    (
                        f"`{match[1]}[{first}][{second}]` takes element {first} and then a part of that one value: a tensor of "
                        f"two axes takes both indices at once, `{match[1]}[{first}, {second}]`"
                    ),
                )

    def axes(self, code: str, bounds: dict[str, str]) -> Iterator[tuple[str, str]]:
        """An index whose loop runs over another size than its axis has."""
        for match in ACCESS.finditer(code):
            axes, indices = self.tensors.get(match[1], []), parts(bracketed(code, match.end() - 1))
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
                            + (": an index of its own goes there" if part else "")
                        ),
                    )


def exchanged_arguments(code: str, items: Items, scope: Scope) -> Iterator[tuple[str, str]]:
    """Two sizes given to a function of this file in each other's place."""
    for match in CALL.finditer(code):
        callee = next((item for item in items.by_name.get(match[1], ())), None)
        if callee is None:
            continue
        declared = arguments_of(callee)
        given = parts(bracketed(code, match.end() - 1))
        meant = [scope.sizes.get(argument, argument) for argument in given]
        for k, (name, other) in enumerate(zip(declared, meant, strict=False)):
            at = declared.index(other) if other in declared and other != name else -1
            if at > k and at < len(meant) and meant[at] == name:
                yield (
                    "arguments-exchanged",
                    (
                        f"`{match[1]}(... {', '.join(given[k : at + 1])})`: `{given[k]}` stands where {name} belongs and "
                        f"`{given[at]}` where {other} does"
                    ),
                )


def arguments_of(function: Item) -> list[str]:
    """The names of a function's arguments, in order."""
    text = NOT_CODE.sub(" ", function.text)
    head = re.search(r"def \w+\s*(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?\s*\(", text)
    return [part.partition(":")[0].strip() for part in parts(bracketed(text, head.end() - 1))] if head else []


def blanked(match: re.Match[str]) -> str:
    """What stands for text or a comment: nothing, in as many lines."""
    return " " + "\n" * match[0].count("\n")


def indentation(line: str) -> int:
    """The spaces in front of a line."""
    return len(line) - len(line.lstrip())


def bracketed(text: str, at: int) -> str:
    """What stands inside the bracket that opens at a place; "" where none does or it does not close."""
    depth = 0
    for end in range(at, len(text)) if at >= 0 else ():
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if depth == 0:
            return text[at + 1 : end] if end > at else ""
    return ""
