"""Parse blanks, the regions of a solution that a learner fills in, and generate problem files from them.

A blank is enclosed by two comment lines in any file under `solutions/`:

    # BLANK-START dx: the task in a line
    ...
    # BLANK-END dx

`make_skeleton` replaces the enclosed lines with a FILL IN line and copies everything else, except the suffix
`_solution` of book anchors. `workbook dev generate` writes `problems/` from `solutions/`: the skeletons, and
links to files without blanks.

A blank may start with wrong code for the learner to repair, which the solution contains as comments after the
correct code:

    # BLANK-GIVEN dx
    # dx = 2 * dy
    # BLANK-END dx

`# BLANK-GIVEN dx as once` provides the correct code of the file's blank `once`. In the problem file the end
marker contains a hash of the provided code, `# BLANK-END dx (unsolved while it reads as given: 0f3a92c1)`: a
blank with exactly this code is untouched. Files of older versions have the hash in the start marker.
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
from harness.invocation import format_command
from harness.learner.layout import find_faults, find_layout, is_link_to, put_link

START = re.compile(
    r"^(?P<indent>[ \t]*)# BLANK-START (?P<id>\w+)(?: \(given (?P<mark>[0-9a-f]{8})\))?: (?P<task>.+)$"
)
GIVEN = re.compile(r"^[ \t]*# BLANK-GIVEN (?P<id>\w+)(?: as (?P<other>\w+))?$")
AS_GIVEN = "unsolved while it reads as given"
END = re.compile(rf"^[ \t]*# BLANK-END (?P<id>\w+)(?: \({AS_GIVEN}: (?P<mark>[0-9a-f]{{8}})\))?$")
MARKED = re.compile(rf" \((?:given|{AS_GIVEN}:) [0-9a-f]{{8}}\)")
MARKER = re.compile(r"^[ \t]*#\s*BLANK-(START|GIVEN|END)")
MAX_BYTES = 2**22
"""Size limit of a source file, in bytes."""


def describe_repair(path: Path | str) -> str:
    """Return the advice to repair an unusable file with its puzzle's `reset` command."""
    puzzle = next((part for part in reversed(Path(path).parts) if re.fullmatch(r"p\d+", part)), "pNN")
    return f"`{format_command(f'reset {puzzle}')}` puts the file back and keeps a copy of yours"


@dataclass(frozen=True)
class Blank:
    """A blank: its id, its task, the lines between the markers, and the line number of the first (from 1).

    `provided` is the provided code of a solution's file, `provided_hash` its hash in a learner's file.
    """

    id: str
    task: str
    indent: str
    body: tuple[str, ...]
    line: int
    provided: tuple[str, ...] = ()
    provided_hash: str = ""

    @property
    def size(self) -> int:
        """The number of the learner's lines of code, without comments; 0 for provided code."""
        return 0 if self.is_provided else len(list_code_lines(self.body))

    @property
    def is_provided(self) -> bool:
        return bool(self.provided_hash) and hash_code(self.body) == self.provided_hash


def list_code_lines(body: Iterable[str]) -> list[str]:
    return [line.rstrip() for line in body if line.strip() and not line.strip().startswith("#")]


def hash_code(code: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(list_code_lines(code)).encode()).hexdigest()[:8]


def split_blanks(text: str, name: str = "the file") -> list[str | Blank]:
    r"""Split a file into its blanks and the lines outside them, including markers, in order.

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

    def make_error(number: int, what: str) -> DamagedFile:
        return DamagedFile(f"{name}:{number}: {what}")

    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        start, middle, end = (form.match(line.rstrip()) for form in (START, GIVEN, END))
        if MARKER.match(line) and not (start or middle or end):
            raise make_error(number, f"damaged blank marker {line.strip()!r}")
        if start and opened:
            raise make_error(number, f"blank {start['id']} starts inside blank {opened['id']}")
        if start and start["id"] in ids:
            raise make_error(number, f"blank {start['id']} occurs twice")
        if end and (not opened or end["id"] != opened["id"]):
            raise make_error(number, f"BLANK-END {end['id']} without its BLANK-START")
        if middle and (not opened or middle["id"] != opened["id"] or provided is not None):
            raise make_error(number, f"BLANK-GIVEN {middle['id']} without its BLANK-START")
        if start:
            opened, opened_at, body, provided = start, number, [], None
            ids.add(start["id"])
            pieces.append(line)
        elif end and opened:
            id, task, indent = opened["id"], opened["task"], opened["indent"]
            code, mark = tuple(provided or ()), end["mark"] or opened["mark"] or ""
            pieces += [Blank(id, task, indent, tuple(body), opened_at + 1, code, mark), line]
            opened, provided = None, None
        elif middle:
            provided, others[middle["id"]] = [], middle["other"]
        elif opened and provided is not None:
            if not line.startswith(f"{opened['indent']}#"):
                raise make_error(number, f"the provided code of blank {opened['id']} must be in comments")
            rest = line[len(opened["indent"]) + 1 :].removeprefix(" ")
            provided.append(f"{opened['indent']}{rest}" if rest else "")
        elif opened:
            body.append(line)
        else:
            pieces.append(line)
    if opened:
        raise make_error(opened_at, f"blank {opened['id']} has no BLANK-END")
    bodies = {piece.id: piece.body for piece in pieces if isinstance(piece, Blank)}
    for position, piece in enumerate(pieces):
        if isinstance(piece, Blank) and (other := others.get(piece.id)):
            if other not in bodies:
                raise make_error(
                    piece.line - 1, f"blank {piece.id} is given as {other}, which is not a blank here"
                )
            pieces[position] = replace(piece, provided=bodies[other])
    return pieces


def read_source(path: Path) -> str:
    """Return the text of a file. Raises DamagedFile unless it is a readable text file."""
    try:
        if what := find_read_problem(path):
            raise DamagedFile(f"{path}: {what}; {describe_repair(path)}")
        data = path.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            what = "begins with a byte order mark, which Mojo does not take: save it as UTF-8 without BOM"
            raise DamagedFile(f"{path}:1: {what}")
        text = data.decode()
        if "\0" in text:  # Mojo stops reading a file there
            raise DamagedFile(
                f"{path}: byte {data.index(0)} is NUL, so this is not text; {describe_repair(path)}"
            )
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
    raise DamagedFile(f"{path}: {what}; {describe_repair(path)}")


def find_read_problem(path: Path) -> str:
    """Return why an existing path must not be opened (a pipe would block), or "" if it may be."""
    facts = path.stat()
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        return "is not a regular file"
    if facts.st_size > MAX_BYTES:
        return f"has {facts.st_size:,} bytes, which no source file needs"
    return ""


def require_blanks(blanks: dict[str, Blank], expected: Iterable[str], name: str) -> dict[str, Blank]:
    """Return the blanks unchanged. Raises DamagedFile, listing them, if expected blanks are missing."""
    missing = [id for id in expected if id not in blanks]
    if missing:
        raise DamagedFile(
            f"{name}: the markers of blank {', '.join(missing)} are gone (# BLANK-START {missing[0]}: ... and "
            f"# BLANK-END {missing[0]}); {describe_repair(name)}"
        )
    return blanks


def find_blanks(text: str, name: str = "the file") -> dict[str, Blank]:
    return {piece.id: piece for piece in split_blanks(text, name) if isinstance(piece, Blank)}


def join_pieces(pieces: list[str | Blank], bodies: dict[str, tuple[str, ...]]) -> str:
    lines: list[str] = []
    for piece in pieces:
        lines += bodies.get(piece.id, piece.body) if isinstance(piece, Blank) else [piece]
    return "\n".join(lines)


def make_skeleton(solution: str, name: str = "the file") -> str:
    """Return the problem file of a solution file: blanks emptied, book anchors without `_solution`."""
    pieces = split_blanks(solution, name)
    bodies: dict[str, tuple[str, ...]] = {}
    for position, piece in enumerate(pieces):
        if isinstance(piece, Blank):
            fill_in = f"{piece.indent}# FILL IN (about {piece.size} line{'s' * (piece.size != 1)})"
            bodies[piece.id] = piece.provided or (fill_in,)
            if piece.provided:
                marked = f"{piece.id} ({AS_GIVEN}: {hash_code(piece.provided)})"
                pieces[position + 1] = f"{piece.indent}# BLANK-END {marked}"
    return re.sub(r"(# ANCHOR(?:_END)?: *\w+?)_solution\b", r"\1", join_pieces(pieces, bodies))


def fill_blanks(problem: str, solution: str, name: str = "the file") -> str:
    """Return the problem file with its blanks filled from the solution."""
    bodies = {id: blank.body for id, blank in find_blanks(solution).items()}
    return join_pieces(split_blanks(problem, name), bodies)


def remove_blanks(text: str, name: str = "the file") -> str:
    """Return the file without its blanks' bodies and the hashes of provided code."""
    pieces = split_blanks(text, name)
    return MARKED.sub("", join_pieces(pieces, {piece.id: () for piece in pieces if isinstance(piece, Blank)}))


def generate_problems(solutions: Path, problems: Path, *, force: bool = False) -> list[Path]:
    """Write every problem file that differs from its skeleton, and every link; return the changed paths.

    Raises DamagedFile rather than overwrite work in a blank, or a file in place of a link, unless `force`.
    """
    written: list[Path] = []
    parts = find_layout(solutions)
    for relative in parts.edited:
        solution, target = solutions / relative, problems / relative
        expected = make_skeleton(solution.read_text(encoding="utf-8"), str(solution))
        # Writing through a link would overwrite the solution.
        present = target.read_text(encoding="utf-8") if target.is_file() and not target.is_symlink() else None
        if present == expected:
            continue
        present_blanks = {} if present is None or force else find_blanks(present, str(target))
        if any(blank.size for blank in present_blanks.values()):
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
        is_own = target.is_file() and not target.is_symlink() and not force
        if is_own and not (solution.is_file() and target.read_bytes() == solution.read_bytes()):
            message = "there is a file of your own in place of the link; --force overwrites it"
            raise DamagedFile(f"{target}: {message}")
        put_link(solution, target)
        written.append(target)
    return written


def check_problems(solutions: Path, problems: Path) -> int:
    """Print diffs of problem files from their skeletons, and layout errors; return 1 if there are any."""
    different = False
    for relative in find_layout(solutions).edited:
        expected = make_skeleton((solutions / relative).read_text(encoding="utf-8"))
        target = problems / relative
        present = target.read_text(encoding="utf-8") if target.is_file() else ""
        texts = present.splitlines(), expected.splitlines()
        diff = list(difflib.unified_diff(*texts, str(target), "generated", n=1))
        different |= bool(diff)
        print(*diff, sep="\n", end="\n" if diff else "")
    for fault in find_faults(solutions, problems):
        different = True
        print(fault)
    return int(different)
