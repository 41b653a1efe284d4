"""Source locations of instructions: the user's line, or the Mojo library's.

The place of an instruction is its innermost source line outside of the Mojo library; the library's files have
relative paths. The library's own algorithms (block and warp primitives and the like) are distinguished from
accessors that are inlined into the user's code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .parser import Instr, Location

_LIBRARY = ("Mojo/", "max/", "oss/", "open-source/", "mojo/")
_ALGORITHMS = ("/gpu/primitives/", "/algorithm/", "/linalg/", "/nn/", "/format/")


def in_library(at: Location) -> bool:
    """Return whether a source location is in the Mojo library (its files have relative paths)."""
    return at.file.startswith(_LIBRARY)


def user_location(at: Location | None) -> Location | None:
    """Return the innermost location outside the library, or the outermost location.

    Line 0 is no location: the compiler writes it for an instruction merged from several lines.
    """
    if at is None:
        return None
    frames = at.chain()
    return next((f for f in frames if f.line and not in_library(f)), frames[-1])


def callers(instr: Instr | None) -> list[str]:
    """Return the places outside the library that the code of an instruction was inlined into, innermost
    first.

    The compiler inlines a kernel's body into the kernel itself: that place, its own `def`, is not a call.
    """
    at = user_location(instr.loc) if instr is not None else None
    frames = at.chain()[1:] if at else []
    source_lines.cache_clear()  # the file may have changed since
    return [
        f"{f.file}:{f.line}:{f.column}"
        for f in frames
        if f.line and not in_library(f) and not is_definition(f)
    ]


def is_definition(at: Location) -> bool:
    """Return whether a location is the name in a `def`, as far as the source can be read."""
    lines = source_lines(at.file)
    return 0 < at.line <= len(lines) and lines[at.line - 1][: at.column - 1].strip() == "def"


@lru_cache(maxsize=64)
def source_lines(file: str) -> tuple[str, ...]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return tuple(Path(file).read_text("utf-8", "replace").split("\n"))
    except OSError:
        return ()


def is_library_algorithm(at: Location | None) -> bool:
    """Return whether the code belongs to a library algorithm, rather than to an accessor inlined into user
    code."""
    if at is None:
        return False
    for frame in at.chain():
        if not in_library(frame):
            return False
        if any(part in frame.file for part in _ALGORITHMS):
            return True
    return True


def place(instr: Instr | None) -> str:
    """Return `file:line:column` of an instruction, or its PTX line without a line table."""
    if instr is None:
        return "?"
    at = user_location(instr.loc)
    return f"{at.file}:{at.line}:{at.column}" if at else f"PTX line {instr.line} ({instr.name})"
