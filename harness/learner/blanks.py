"""Parse blanks, the regions of a solution that a learner fills in, and generate problem files from them.

A blank is enclosed by two comment lines in any file under `solutions/`:

    # BLANK-START dx: the task in a line
    ...
    # BLANK-END dx

`skeleton` replaces the enclosed lines by a FILL IN line; everything outside is copied, except the suffix
`_solution` of book anchors. `workbook dev generate` writes `problems/` from `solutions/`: these files, and
links to files without blanks.

A blank may contain wrong code for the learner to repair. The solution has it as comments after the correct
code:

    # BLANK-GIVEN dx
    # dx = 2 * dy
    # BLANK-END dx

`# BLANK-GIVEN dx as once` starts with the correct code of another blank of the file. In the problem file the
end marker has a hash of the code and says why, `# BLANK-END dx (unsolved while it reads as given: 0f3a92c1)`:
as long as the blank holds exactly that, it is untouched. Files of older versions have it in the start marker.
"""

import codecs
import difflib
import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import DamagedFile
from harness.invocation import command
from harness.learner.layout import faults, is_link_to, layout, put_link

START = re.compile(
    r"^(?P<indent>[ \t]*)# BLANK-START (?P<id>\w+)(?: \(given (?P<mark>[0-9a-f]{8})\))?: (?P<task>.+)$"
)
GIVEN = re.compile(r"^[ \t]*# BLANK-GIVEN (?P<id>\w+)(?: as (?P<other>\w+))?$")
AS_GIVEN = "unsolved while it reads as given"
END = re.compile(rf"^[ \t]*# BLANK-END (?P<id>\w+)(?: \({AS_GIVEN}: (?P<mark>[0-9a-f]{{8}})\))?$")
MARKED = re.compile(rf" \((?:given|{AS_GIVEN}:) [0-9a-f]{{8}}\)")
MARKER = re.compile(r"^[ \t]*#\s*BLANK-(START|GIVEN|END)")
LARGEST = 2**22
"""Bytes of a source file, at most."""


def repair(path: Path | str) -> str:
    """Return the end of a message about an unusable file; `reset` needs the puzzle of the file."""
    puzzle = next((part for part in reversed(Path(path).parts) if re.fullmatch(r"p\d+", part)), "pNN")
    return f"`{command(f'reset {puzzle}')}` puts the file back and keeps a copy of yours"


@dataclass(frozen=True)
class Blank:
    """One region: its id, its task, the lines between the markers, and the number of the first (from 1).

    `given` is the provided wrong code in a solution's file; `mark` its hash in a learner's file.
    """

    id: str
    task: str
    indent: str
    body: tuple[str, ...]
    line: int
    given: tuple[str, ...] = ()
    mark: str = ""

    @property
    def size(self) -> int:
        """Return the number of lines of code written by the learner, without comments and empty lines; 0 for
        provided code."""
        return 0 if self.is_provided else len(code_lines(self.body))

    @property
    def is_provided(self) -> bool:
        """Check whether the blank holds exactly the provided wrong code."""
        return bool(self.mark) and mark_of(self.body) == self.mark


def code_lines(body: Iterable[str]) -> list[str]:
    """Return the lines that hold code, without spaces at their ends."""
    return [line.rstrip() for line in body if line.strip() and not line.strip().startswith("#")]


def mark_of(code: Iterable[str]) -> str:
    """Return the hash of provided code."""
    return hashlib.sha256("\n".join(code_lines(code)).encode()).hexdigest()[:8]


def split(text: str, name: str = "the file") -> list[str | Blank]:
    r"""Cut a file into the lines outside blanks (markers included) and the blanks, in order.

    Line endings are normalised to "\n". Raises DamagedFile, naming file and line, for a marker that is
    malformed, unpaired, nested or repeated.
    """
    pieces: list[str | Blank] = []
    ids: set[str] = set()
    opened: re.Match[str] | None = None
    opened_at = 0
    body: list[str] = []
    provided: list[str] | None = None
    others: dict[str, str | None] = {}

    def damage_error(number: int, what: str) -> DamagedFile:
        return DamagedFile(f"{name}:{number}: {what}")

    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        start, middle, end = (form.match(line.rstrip()) for form in (START, GIVEN, END))
        if MARKER.match(line) and not (start or middle or end):
            raise damage_error(number, f"damaged blank marker {line.strip()!r}")
        if start and opened:
            raise damage_error(number, f"blank {start['id']} starts inside blank {opened['id']}")
        if start and start["id"] in ids:
            raise damage_error(number, f"blank {start['id']} occurs twice")
        if end and (not opened or end["id"] != opened["id"]):
            raise damage_error(number, f"BLANK-END {end['id']} without its BLANK-START")
        if middle and (not opened or middle["id"] != opened["id"] or provided is not None):
            raise damage_error(number, f"BLANK-GIVEN {middle['id']} without its BLANK-START")
        if start:
            opened, opened_at, body, provided = start, number, [], None
            ids.add(start["id"])
            pieces.append(line)
        elif end and opened:
            pieces.append(
                Blank(
                    opened["id"],
                    opened["task"],
                    opened["indent"],
                    tuple(body),
                    opened_at + 1,
                    tuple(provided or ()),
                    end["mark"] or opened["mark"] or "",
                )
            )
            pieces.append(line)
            opened, provided = None, None
        elif middle:
            provided, others[middle["id"]] = [], middle["other"]
        elif opened and provided is not None:
            if not line.startswith(f"{opened['indent']}#"):
                raise damage_error(number, f"the provided code of blank {opened['id']} must be in comments")
            rest = line[len(opened["indent"]) + 1 :].removeprefix(" ")
            provided.append(f"{opened['indent']}{rest}" if rest else "")
        elif opened:
            body.append(line)
        else:
            pieces.append(line)
    if opened:
        raise damage_error(opened_at, f"blank {opened['id']} has no BLANK-END")
    bodies = {piece.id: piece.body for piece in pieces if isinstance(piece, Blank)}
    for at, piece in enumerate(pieces):
        if isinstance(piece, Blank) and (other := others.get(piece.id)):
            if other not in bodies:
                raise damage_error(
                    piece.line - 1, f"blank {piece.id} is given as {other}, which is not a blank here"
                )
            pieces[at] = replace(piece, given=bodies[other])
    return pieces


def read(path: Path) -> str:
    """Return the text of a file. Raises DamagedFile, in a line, unless it is a readable text file."""
    try:
        if what := unreadable(path):
            raise DamagedFile(f"{path}: {what}; {repair(path)}")
        data = path.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            what = "begins with a byte order mark, which Mojo does not take: save it as UTF-8 without BOM"
            raise DamagedFile(f"{path}:1: {what}")
        text = data.decode()
        if "\0" in text:  # Mojo reads a file only to there
            raise DamagedFile(f"{path}: byte {data.index(0)} is NUL, so this is not text; {repair(path)}")
        return text
    except FileNotFoundError:
        what = "the file is missing"
        if path.is_symlink():
            what = f"links to {os.readlink(path)}, which is not there"
    except IsADirectoryError:
        what = "there is a folder in place of the file"
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        column = len(before.rpartition(b"\n")[2].decode(errors="replace")) + 1
        what = f"line {before.count(10) + 1}, column {column}: the byte {error.object[error.start]:#04x} is not UTF-8 text"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise DamagedFile(f"{path}: {what}; {repair(path)}")


def unreadable(path: Path) -> str:
    """Return why an existing path must not be opened: a pipe would block, a device may be endless. "" if it
    may be."""
    facts = path.stat()
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        return "is not a regular file"
    if facts.st_size > LARGEST:
        return f"has {facts.st_size:,} bytes, which no source file needs"
    return ""


def complete(blanks: dict[str, Blank], expected: Iterable[str], name: str) -> dict[str, Blank]:
    """Return the blanks. Raises DamagedFile, naming required blanks whose markers are missing."""
    missing = [id for id in expected if id not in blanks]
    if missing:
        raise DamagedFile(
            f"{name}: the markers of blank {', '.join(missing)} are gone (# BLANK-START {missing[0]}: ... and "
            f"# BLANK-END {missing[0]}); {repair(name)}"
        )
    return blanks


def find(text: str, name: str = "the file") -> dict[str, Blank]:
    """Return the blanks of a file by id, in the order of the file."""
    return {piece.id: piece for piece in split(text, name) if isinstance(piece, Blank)}


def join(pieces: list[str | Blank], bodies: dict[str, tuple[str, ...]]) -> str:
    """Return the file again, with the bodies of some blanks replaced."""
    lines: list[str] = []
    for piece in pieces:
        lines += bodies.get(piece.id, piece.body) if isinstance(piece, Blank) else [piece]
    return "\n".join(lines)


def skeleton(solution: str, name: str = "the file") -> str:
    """Return the problem file of a solution file: blanks emptied or with provided code, book anchors without
    `_solution`."""
    pieces = split(solution, name)
    bodies: dict[str, tuple[str, ...]] = {}
    for at, piece in enumerate(pieces):
        if isinstance(piece, Blank):
            fill_in = f"{piece.indent}# FILL IN (about {piece.size} line{'s' * (piece.size != 1)})"
            bodies[piece.id] = piece.given or (fill_in,)
            if piece.given:
                marked = f"{piece.id} ({AS_GIVEN}: {mark_of(piece.given)})"
                pieces[at + 1] = f"{piece.indent}# BLANK-END {marked}"
    return re.sub(r"(# ANCHOR(?:_END)?: *\w+?)_solution\b", r"\1", join(pieces, bodies))


def fill(problem: str, solution: str, name: str = "the file") -> str:
    """Return the problem file with the solution's blanks pasted in."""
    return join(split(problem, name), {id: blank.body for id, blank in find(solution).items()})


def outside(text: str, name: str = "the file") -> str:
    """Return the file without the bodies of the blanks and the hashes of provided code."""
    pieces = split(text, name)
    return MARKED.sub("", join(pieces, {piece.id: () for piece in pieces if isinstance(piece, Blank)}))


def generate(solutions: Path, problems: Path, *, force: bool = False) -> list[Path]:
    """Write every problem file that differs from the skeleton of its solution, and every link; returns the
    changed paths.

    A file with work in a blank, or one that replaces a link, is left unchanged and raises DamagedFile, unless
    `force`.
    """
    written: list[Path] = []
    parts = layout(solutions)
    for relative in parts.edited:
        expected = skeleton((solutions / relative).read_text(encoding="utf-8"), str(solutions / relative))
        target = problems / relative
        # A link is not written through: its target is the solution.
        present = target.read_text(encoding="utf-8") if target.is_file() and not target.is_symlink() else None
        if present == expected:
            continue
        if present is not None and not force and any(b.size for b in find(present, str(target)).values()):
            raise DamagedFile(f"{target}: a blank holds work; --force overwrites it")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(expected, encoding="utf-8")
        written.append(target)
    for relative in parts.linked:
        solution, target = solutions / relative, problems / relative
        if is_link_to(target, solution):
            continue
        if target.is_dir() and not target.is_symlink():
            raise DamagedFile(f"{target}: there is a folder in place of the link; move it away")
        if target.is_file() and not target.is_symlink() and not force and differs(target, solution):
            raise DamagedFile(
                f"{target}: there is a file of your own in place of the link; --force overwrites it"
            )
        put_link(solution, target)
        written.append(target)
    return written


def differs(file: Path, other: Path) -> bool:
    """Check whether two files differ; a file and a folder do."""
    return not other.is_file() or file.read_bytes() != other.read_bytes()


def check(solutions: Path, problems: Path) -> int:
    """Print how the problem files differ from the skeletons of their solutions, and each wrong or unexpected
    path; 0 if there is nothing to print."""
    different = False
    for relative in layout(solutions).edited:
        expected = skeleton((solutions / relative).read_text(encoding="utf-8"))
        target = problems / relative
        present = target.read_text(encoding="utf-8") if target.is_file() else ""
        diff = list(
            difflib.unified_diff(present.splitlines(), expected.splitlines(), str(target), "generated", n=1)
        )
        different |= bool(diff)
        print(*diff, sep="\n", end="\n" if diff else "")
    for fault in faults(solutions, problems):
        different = True
        print(fault)
    return int(different)
