"""Parse blanks, the regions of a solution that a learner fills in, and generate problem files from them.

A blank is enclosed by two comment lines in any file under `solutions/`:

    # BLANK-START dx: the task in a line
    ...
    # BLANK-END dx

`make_skeleton` replaces the enclosed lines with a FILL IN line and copies everything else, except the suffix
`_solution` of book anchors. `workbook dev generate` writes these skeletons to `problems/`, and links to the
files without blanks.

A blank may provide wrong code for the learner to correct. In the solution this code is in comments after the
correct code:

    # BLANK-GIVEN dx
    # dx = 2 * dy
    # BLANK-END dx

`# BLANK-GIVEN dx as once` provides the correct code of another blank of the file, `once`. In the problem file
the end marker contains a hash of the provided code, `# BLANK-END dx (unsolved while it reads as given:
0f3a92c1)`; a blank with this hash is unsolved. Older versions wrote the hash to the start marker.
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
from harness.learner.layout import create_link, find_errors, find_layout, is_link_to

START_MARKER = re.compile(
    r"^(?P<indent>[ \t]*)# BLANK-START (?P<id>\w+)(?: \(given (?P<hash>[0-9a-f]{8})\))?: (?P<task>.+)$"
)
PROVIDED_MARKER = re.compile(r"^[ \t]*# BLANK-GIVEN (?P<id>\w+)(?: as (?P<source>\w+))?$")
HASH_LABEL = "unsolved while it reads as given"
END_MARKER = re.compile(rf"^[ \t]*# BLANK-END (?P<id>\w+)(?: \({HASH_LABEL}: (?P<hash>[0-9a-f]{{8}})\))?$")
PROVIDED_HASH = re.compile(rf" \((?:given|{HASH_LABEL}:) [0-9a-f]{{8}}\)")
ANY_MARKER = re.compile(r"^[ \t]*#\s*BLANK-(START|GIVEN|END)")
MAX_SOURCE_BYTES = 2**22
"""Size limit of a source file, in bytes."""


def describe_repair(path: Path | str) -> str:
    """Return the advice to repair an unusable file with its puzzle's `reset` command."""
    puzzle = next((part for part in reversed(Path(path).parts) if re.fullmatch(r"p\d+", part)), "pNN")
    return f"`{format_command(f'reset {puzzle}')}` puts the file back and keeps a copy of yours"


@dataclass(frozen=True)
class Blank:
    """A blank: its id, task, indentation, the lines between the markers, and the first one's number (from 1).

    `provided` is the provided code in a solution, `provided_hash` its hash in a learner's file.
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
        """Number of lines of code, without comments; 0 for provided code."""
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
    segments: list[str | Blank] = []
    ids: set[str] = set()
    open_marker: re.Match[str] | None = None
    open_line = 0
    body: list[str] = []
    provided: list[str] | None = None
    provided_from: dict[str, str | None] = {}

    def make_error(number: int, problem: str) -> DamagedFile:
        return DamagedFile(f"{name}:{number}: {problem}")

    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        start, provided_start, end = (
            pattern.match(line.rstrip()) for pattern in (START_MARKER, PROVIDED_MARKER, END_MARKER)
        )
        if ANY_MARKER.match(line) and not (start or provided_start or end):
            raise make_error(number, f"damaged blank marker {line.strip()!r}")
        if start and open_marker:
            raise make_error(number, f"blank {start['id']} starts inside blank {open_marker['id']}")
        if start and start["id"] in ids:
            raise make_error(number, f"blank {start['id']} occurs twice")
        if end and (not open_marker or end["id"] != open_marker["id"]):
            raise make_error(number, f"BLANK-END {end['id']} without its BLANK-START")
        if provided_start and (
            not open_marker or provided_start["id"] != open_marker["id"] or provided is not None
        ):
            raise make_error(number, f"BLANK-GIVEN {provided_start['id']} without its BLANK-START")
        if start:
            open_marker, open_line, body, provided = start, number, [], None
            ids.add(start["id"])
            segments.append(line)
        elif end and open_marker:
            id, task, indent = open_marker["id"], open_marker["task"], open_marker["indent"]
            code, digest = tuple(provided or ()), end["hash"] or open_marker["hash"] or ""
            segments += [Blank(id, task, indent, tuple(body), open_line + 1, code, digest), line]
            open_marker, provided = None, None
        elif provided_start:
            provided, provided_from[provided_start["id"]] = [], provided_start["source"]
        elif open_marker and provided is not None:
            if not line.startswith(f"{open_marker['indent']}#"):
                raise make_error(
                    number, f"the provided code of blank {open_marker['id']} must be in comments"
                )
            code_line = line[len(open_marker["indent"]) + 1 :].removeprefix(" ")
            provided.append(f"{open_marker['indent']}{code_line}" if code_line else "")
        elif open_marker:
            body.append(line)
        else:
            segments.append(line)
    if open_marker:
        raise make_error(open_line, f"blank {open_marker['id']} has no BLANK-END")
    bodies = {segment.id: segment.body for segment in segments if isinstance(segment, Blank)}
    for position, segment in enumerate(segments):
        if isinstance(segment, Blank) and (source_id := provided_from.get(segment.id)):
            if source_id not in bodies:
                raise make_error(
                    segment.line - 1, f"blank {segment.id} is given as {source_id}, which is not a blank here"
                )
            segments[position] = replace(segment, provided=bodies[source_id])
    return segments


def read_source(path: Path) -> str:
    """Return the text of a file. Raises DamagedFile unless it is readable UTF-8 text."""
    try:
        if problem := find_read_problem(path):
            raise DamagedFile(f"{path}: {problem}; {describe_repair(path)}")
        data = path.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            problem = "begins with a byte order mark, which Mojo does not take: save it as UTF-8 without BOM"
            raise DamagedFile(f"{path}:1: {problem}")
        text = data.decode()
        if "\0" in text:  # Mojo stops reading a file there
            raise DamagedFile(
                f"{path}: byte {data.index(0)} is NUL, so this is not text; {describe_repair(path)}"
            )
        return text
    except FileNotFoundError:
        problem = "the file is missing"
        if path.is_symlink():
            problem = f"links to {os.readlink(path)}, which is not there"
    except IsADirectoryError:
        problem = "there is a folder in place of the file"
    except UnicodeDecodeError as error:
        valid_bytes = error.object[: error.start]
        column = len(valid_bytes.rpartition(b"\n")[2].decode(errors="replace")) + 1
        problem = f"line {valid_bytes.count(10) + 1}, column {column}: the byte {error.object[error.start]:#04x} is not UTF-8 text"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise DamagedFile(f"{path}: {problem}; {describe_repair(path)}")


def find_read_problem(path: Path) -> str:
    """Return the reason not to open an existing path (a pipe would block), or ""."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is not a regular file"
    if status.st_size > MAX_SOURCE_BYTES:
        return f"has {status.st_size:,} bytes, which no source file needs"
    return ""


def require_blanks(blanks: dict[str, Blank], expected: Iterable[str], name: str) -> dict[str, Blank]:
    """Return the blanks. Raises DamagedFile, which lists them, if expected blanks are missing."""
    missing = [id for id in expected if id not in blanks]
    if missing:
        raise DamagedFile(
            f"{name}: the markers of blank {', '.join(missing)} are gone (# BLANK-START {missing[0]}: ... and "
            f"# BLANK-END {missing[0]}); {describe_repair(name)}"
        )
    return blanks


def find_blanks(text: str, name: str = "the file") -> dict[str, Blank]:
    return {segment.id: segment for segment in split_blanks(text, name) if isinstance(segment, Blank)}


def join_segments(segments: list[str | Blank], bodies: dict[str, tuple[str, ...]]) -> str:
    lines: list[str] = []
    for segment in segments:
        lines += bodies.get(segment.id, segment.body) if isinstance(segment, Blank) else [segment]
    return "\n".join(lines)


def make_skeleton(solution: str, name: str = "the file") -> str:
    """Return the problem file of a solution: with empty blanks, and without `_solution` in book anchors."""
    segments = split_blanks(solution, name)
    bodies: dict[str, tuple[str, ...]] = {}
    for position, segment in enumerate(segments):
        if isinstance(segment, Blank):
            fill_in = f"{segment.indent}# FILL IN (about {segment.size} line{'s' * (segment.size != 1)})"
            bodies[segment.id] = segment.provided or (fill_in,)
            if segment.provided:
                label = f"{segment.id} ({HASH_LABEL}: {hash_code(segment.provided)})"
                segments[position + 1] = f"{segment.indent}# BLANK-END {label}"
    return re.sub(r"(# ANCHOR(?:_END)?: *\w+?)_solution\b", r"\1", join_segments(segments, bodies))


def fill_blanks(problem: str, solution: str, name: str = "the file") -> str:
    """Return the problem file with its blanks filled from the solution."""
    bodies = {id: blank.body for id, blank in find_blanks(solution).items()}
    return join_segments(split_blanks(problem, name), bodies)


def remove_blanks(text: str, name: str = "the file") -> str:
    """Return the file without its blanks' bodies and the hashes of provided code."""
    segments = split_blanks(text, name)
    return PROVIDED_HASH.sub(
        "", join_segments(segments, {segment.id: () for segment in segments if isinstance(segment, Blank)})
    )


def generate_problems(solutions: Path, problems: Path, *, force: bool = False) -> list[Path]:
    """Write each outdated problem file and link; return the changed paths.

    Unless `force`, raises DamagedFile instead of overwriting code in a blank or a file in place of a link.
    """
    changed_paths: list[Path] = []
    layout = find_layout(solutions)
    for relative in layout.problem_files:
        solution, target = solutions / relative, problems / relative
        expected = make_skeleton(solution.read_text(encoding="utf-8"), str(solution))
        # Writing through a link would overwrite the solution.
        current = target.read_text(encoding="utf-8") if target.is_file() and not target.is_symlink() else None
        if current == expected:
            continue
        current_blanks = {} if current is None or force else find_blanks(current, str(target))
        if any(blank.size for blank in current_blanks.values()):
            raise DamagedFile(f"{target}: a blank holds work; --force overwrites it")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(expected, encoding="utf-8")
        changed_paths.append(target)
    for relative in layout.links:
        solution, target = solutions / relative, problems / relative
        if is_link_to(target, solution):
            continue
        if target.is_dir() and not target.is_symlink():
            raise DamagedFile(f"{target}: there is a folder in place of the link; move it away")
        is_learner_file = target.is_file() and not target.is_symlink() and not force
        if is_learner_file and not (solution.is_file() and target.read_bytes() == solution.read_bytes()):
            message = "there is a file of your own in place of the link; --force overwrites it"
            raise DamagedFile(f"{target}: {message}")
        create_link(solution, target)
        changed_paths.append(target)
    return changed_paths


def check_problems(solutions: Path, problems: Path) -> int:
    """Print the diffs between problem files and skeletons, and layout errors; return 1 if there are any."""
    has_differences = False
    for relative in find_layout(solutions).problem_files:
        expected = make_skeleton((solutions / relative).read_text(encoding="utf-8"))
        target = problems / relative
        current = target.read_text(encoding="utf-8") if target.is_file() else ""
        texts = current.splitlines(), expected.splitlines()
        diff = list(difflib.unified_diff(*texts, str(target), "generated", n=1))
        has_differences |= bool(diff)
        print(*diff, sep="\n", end="\n" if diff else "")
    for error in find_errors(solutions, problems):
        has_differences = True
        print(error)
    return int(has_differences)
