"""Find the source location of an instruction: the innermost one outside the Mojo library, if any."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .parser import Instr, Location

_LIBRARY_FOLDERS = ("Mojo/", "max/", "oss/", "open-source/", "mojo/")
_ALGORITHM_FOLDERS = ("/gpu/primitives/", "/algorithm/", "/linalg/", "/nn/", "/format/")


def is_in_library(location: Location) -> bool:
    """Return whether a source location is in the Mojo library, whose files have relative paths."""
    return location.file.startswith(_LIBRARY_FOLDERS)


def find_user_location(location: Location | None) -> Location | None:
    """Return the innermost location outside the library, else the outermost one.

    Skip line 0, which the compiler writes for an instruction merged from several lines.
    """
    if location is None:
        return None
    frames = location.list_frames()
    return next((f for f in frames if f.line and not is_in_library(f)), frames[-1])


def find_callers(instr: Instr | None) -> list[str]:
    """Return the call sites outside the library that an instruction was inlined into, innermost first.

    Omit a kernel's own `def`: the compiler inlines a kernel's body there, but that is not a call.
    """
    loc = find_user_location(instr.loc) if instr is not None else None
    frames = loc.list_frames()[1:] if loc else []
    read_source_lines.cache_clear()  # the file may have changed since
    return [
        f"{f.file}:{f.line}:{f.column}"
        for f in frames
        if f.line and not is_in_library(f) and not is_definition(f)
    ]


def is_definition(location: Location) -> bool:
    """Return whether a location is the name in a `def`; False if the source cannot be read."""
    lines = read_source_lines(location.file)
    return (
        0 < location.line <= len(lines) and lines[location.line - 1][: location.column - 1].strip() == "def"
    )


@lru_cache(maxsize=64)
def read_source_lines(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text("utf-8", "replace").split("\n"))
    except OSError:
        return ()


def is_library_algorithm(location: Location | None) -> bool:
    """Return whether code belongs to a library algorithm and not to an accessor inlined into user code."""
    if location is None:
        return False
    for frame in location.list_frames():
        if not is_in_library(frame):
            return False
        if any(part in frame.file for part in _ALGORITHM_FOLDERS):
            return True
    return True


def format_location(instr: Instr | None) -> str:
    """Format an instruction's location as `file:line:column`, or without a line table as its PTX line."""
    if instr is None:
        return "?"
    loc = find_user_location(instr.loc)
    return f"{loc.file}:{loc.line}:{loc.column}" if loc else f"PTX line {instr.line} ({instr.name})"
