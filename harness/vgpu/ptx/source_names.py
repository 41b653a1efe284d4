"""Source names of a kernel's shared arrays, which PTX only numbers.

The instructions that access an array have source lines; the name of the array is the one that all of these
lines use, out of those that the enclosing function declares in shared memory. If none or several remain, the
array has no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from .parser import Instr, Mem, Sym
from .places import in_library, is_library_algorithm, source_lines
from .program import Program, reads_and_writes

ACCESSES = ("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix")
DECLARED = re.compile(r"\bvar (\w+) = stack_allocation\[[^\]]*\bSHARED\b")
FUNCTION = re.compile(r"\s*def \w")
WORD = re.compile(r"\w+")


def shared_names(program: Program, variables: Iterable[str]) -> dict[str, str]:
    """Map PTX variables to their source names, where these are unambiguous."""
    shared_names_at.cache_clear()  # the file may have changed since
    source_lines.cache_clear()
    requested = set(variables)
    held = holders(program.instrs, requested)
    choices: dict[str, set[str]] = {}
    for i in program.instrs:
        if i.op not in ACCESSES or is_library_algorithm(i.loc):
            continue
        for base in (a.base for a in i.args if isinstance(a, Mem) and a.base is not None):
            touched = {base.name} & requested if isinstance(base, Sym) else held.get(base.name, set())
            names = used_names(i)
            for variable in touched if names else ():
                choices[variable] = choices.get(variable, names) & names
    sure = {variable: min(names) for variable, names in choices.items() if len(names) == 1}
    for variable, names in choices.items():
        left = names - set(sure.values())
        if len(left) == 1:
            sure.setdefault(variable, min(left))
    return sure


def holders(instrs: list[Instr], variables: set[str]) -> dict[str, set[str]]:
    """Map each register to the variables whose address it may be computed from."""
    held: dict[str, set[str]] = {}
    computing = [i for i in instrs if i.op not in ACCESSES]
    changed = True
    while changed:
        changed = False
        for i in computing:
            reads, writes = reads_and_writes(i)
            touched = {a.name for a in i.args if isinstance(a, Sym)} & variables
            touched = touched.union(*(held.get(name, ()) for name in reads))
            for name in writes if touched else ():
                if not touched <= held.get(name, set()):
                    held[name] = held.get(name, set()) | touched
                    changed = True
    return held


def used_names(i: Instr) -> set[str]:
    """Return the shared arrays used in an instruction's source line; of inlined code the innermost line with
    one."""
    for frame in i.loc.chain() if i.loc else ():
        if frame.line and not in_library(frame):
            names = shared_names_at(frame.file, frame.line)
            if names:
                return set(names)
    return set()


@lru_cache(maxsize=4096)
def shared_names_at(file: str, number: int) -> frozenset[str]:
    """Return the shared arrays of the enclosing function that are declared above a line and used in it."""
    lines = source_lines(file)
    if number > len(lines):
        return frozenset()
    above = "\n".join(reversed(list(function_above(lines, number))))
    return frozenset(DECLARED.findall(above)) & frozenset(WORD.findall(lines[number - 1]))


def function_above(lines: tuple[str, ...], number: int) -> Iterator[str]:
    """Yield the lines above one, upwards to the head of its function."""
    for line in lines[number - 2 :: -1] if number > 1 else ():
        if FUNCTION.match(line):
            return
        yield line
