"""Find the source names of a kernel's shared arrays, which are only numbered in PTX.

An array gets the name of the one shared array of the enclosing function that occurs in the source lines of
all instructions that access it. If no such name exists, or several do, the array stays unnamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from .locations import is_in_library, is_library_algorithm, read_source_lines
from .parser import Instr, Mem, Sym
from .program import Program, get_reads_and_writes

MEMORY_OPCODES = ("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix")
DECLARATION = re.compile(r"\bvar (\w+) = stack_allocation\[[^\]]*\bSHARED\b")
FUNCTION = re.compile(r"\s*def \w")
IDENTIFIER = re.compile(r"\w+")


def find_shared_names(program: Program, variables: Iterable[str]) -> dict[str, str]:
    """Map PTX variables to their source names; omit ambiguous ones."""
    find_shared_names_at.cache_clear()  # the file may have changed since
    read_source_lines.cache_clear()
    variable_names = set(variables)
    variables_of_register = find_address_registers(program.instrs, variable_names)
    candidates: dict[str, set[str]] = {}
    for i in program.instrs:
        if i.op not in MEMORY_OPCODES or is_library_algorithm(i.loc):
            continue
        for base in (a.base for a in i.args if isinstance(a, Mem) and a.base is not None):
            accessed = (
                {base.name} & variable_names
                if isinstance(base, Sym)
                else variables_of_register.get(base.name, set())
            )
            names = find_names_in_source(i)
            for variable in accessed if names else ():
                candidates[variable] = candidates.get(variable, names) & names
    resolved = {variable: min(names) for variable, names in candidates.items() if len(names) == 1}
    for variable, names in candidates.items():
        remaining = names - set(resolved.values())
        if len(remaining) == 1:
            resolved.setdefault(variable, min(remaining))
    return resolved


def find_address_registers(instrs: list[Instr], variables: set[str]) -> dict[str, set[str]]:
    """Map each register to the variables whose addresses may contribute to its value."""
    variables_of_register: dict[str, set[str]] = {}
    computing = [i for i in instrs if i.op not in MEMORY_OPCODES]
    changed = True
    while changed:
        changed = False
        for i in computing:
            reads, writes = get_reads_and_writes(i)
            accessed = {a.name for a in i.args if isinstance(a, Sym)} & variables
            accessed = accessed.union(*(variables_of_register.get(name, ()) for name in reads))
            for name in writes if accessed else ():
                if not accessed <= variables_of_register.get(name, set()):
                    variables_of_register[name] = variables_of_register.get(name, set()) | accessed
                    changed = True
    return variables_of_register


def find_names_in_source(i: Instr) -> set[str]:
    """Return the shared arrays named in an instruction's source line.

    For inlined code, use the innermost line that contains any.
    """
    for frame in i.loc.list_frames() if i.loc else ():
        if frame.line and not is_in_library(frame):
            names = find_shared_names_at(frame.file, frame.line)
            if names:
                return set(names)
    return set()


@lru_cache(maxsize=4096)
def find_shared_names_at(file: str, number: int) -> frozenset[str]:
    """Return the shared arrays that are used in a line and declared above it in the same function."""
    lines = read_source_lines(file)
    if number > len(lines):
        return frozenset()
    above = "\n".join(reversed(list(iterate_lines_above(lines, number))))
    return frozenset(DECLARATION.findall(above)) & frozenset(IDENTIFIER.findall(lines[number - 1]))


def iterate_lines_above(lines: tuple[str, ...], number: int) -> Iterator[str]:
    """Yield the lines above line `number`, bottom up, to the `def` of the enclosing function."""
    for line in lines[number - 2 :: -1] if number > 1 else ():
        if FUNCTION.match(line):
            return
        yield line
