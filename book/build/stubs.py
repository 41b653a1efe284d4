"""The task above a hint ladder: the definition with the hole in it, as the learner's file has it."""

import re

from harness.learner import blanks
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

LONGEST, AROUND = 32, 3
"""Lines of a definition that is shown whole, and lines shown on each side of the hole in a longer one."""
HEAD = re.compile(r"(?:def|class|struct) .*?:\n(?: +\"\"\".*?\"\"\"\n)?(?=\s)", re.DOTALL)
"""A signature, which may take several lines, and the docstring."""


def stub(puzzle: str, ladder: str) -> str | None:
    """The code of the task that a ladder helps with; None where no hole has its name."""
    spec = find_puzzle(puzzle)
    for rung in spec.rungs:
        for gate in rung.gates:
            if spec.get_ladder_name(rung, gate) == ladder:
                file = roots.get_solutions() / puzzle / rung.file
                return get_definition(blanks.make_skeleton(file.read_text(encoding="utf-8"), str(file)), gate)
    return None


def get_definition(text: str, blank: str) -> str:
    """The top-level definition that holds a blank, the hole alone where none does."""
    lines = text.split("\n")
    first, last = (
        next(i for i, line in enumerate(lines) if re.search(rf"# BLANK-{end} {blank}\b", line))
        for end in ("START", "END")
    )
    top = [i for i, line in enumerate(lines) if re.match(r"[^\s)\]]", line)]
    start = max((i for i in top if i <= first), default=first)
    if not re.match("def |class |struct ", lines[start]):
        return "\n".join(lines[first : last + 1])
    end = min((i for i in top if i > last), default=len(lines))
    whole = "\n".join(lines[start:end]).rstrip()
    if whole.count("\n") < LONGEST:
        return whole
    head = HEAD.match(whole + "\n")
    after = min(last + 1 + AROUND, end)
    before = max(first - AROUND, start + 1)
    while indent(lines[before]) > indent(lines[first]):  # the middle of an `if` says nothing
        before -= 1
    while lines[after - 1].endswith(":"):
        after += 1
    hole = lines[before:after]
    more = ["    ..."] if any(line.strip() for line in lines[after:end]) else []
    shown = "\n".join([head[0].rstrip() if head else lines[start], "    ...", *hole]).rstrip()
    return "\n".join([shown, *more])


def indent(line: str) -> int:
    """The spaces that a line begins with."""
    return len(line) - len(line.lstrip())
