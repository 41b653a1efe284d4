"""Load the known-bad solutions, each a small edit of a correct one: they test the checkers.

A wrong solution is a file `solutions/pNN/wrong/NAME.toml` with the keys gate, mistake (its name, "" if the
diagnosis has none), file, old, new, and optionally `story` (one line), `effect` (its effect on the numbers,
for the museum), `rung` (default: the puzzle's last), `also` (further gates that it breaks), `cases` (the only
cases that show it) and `source` (where such a bug was reported). For a blank with provided wrong code, `old`
and `new` may be omitted.
"""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import DamagedFile
from harness.learner import blanks
from harness.spec.catalogue import find_puzzle
from harness.spec.rungs import MojoRung, Rung
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import OpPackage

KEYS = {"gate", "mistake", "file"}
MORE = {"old", "new", "story", "effect", "rung", "also", "cases", "source", "dtype"}


@dataclass(frozen=True)
class WrongKernel:
    """One edit of a puzzle's solution: in `file`, `old` becomes `new`, or the gate's blank gets the provided
    code.

    `file` is relative to the op package; for a Python rung it is the rung's file. `gate` must report it,
    `also` are gates that cannot be correct either; `mistake` is its expected name. `cases` are the only ones
    that show it.
    """

    puzzle: str
    name: str
    gate: str
    mistake: str
    file: str
    old: str = ""
    new: str = ""
    story: str = ""
    effect: str = ""
    rung: str = ""
    also: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    source: str = ""
    dtype: str = "float32"

    @property
    def of_rung(self) -> Rung:
        """The rung whose solution is edited."""
        puzzle = find_puzzle(self.puzzle)
        return puzzle.rung(self.rung) if self.rung else puzzle.main_rung

    @property
    def solution(self) -> Path:
        """The file of the solution that is edited."""
        folder = roots.solutions() / self.puzzle
        return folder / "op" / self.file if isinstance(self.of_rung, MojoRung) else folder / self.of_rung.file

    @property
    def in_a_blank(self) -> bool:
        """Check whether a learner can make the mistake: it is in a blank, not in provided code."""
        return blanks.outside(self.solution.read_text()) == blanks.outside(self.apply_edits(self.solution))

    def target(self) -> Path:
        """Return the checker's input: the op package or the file, cached."""
        if isinstance(self.of_rung, MojoRung):
            return self.package().path
        text = self.apply_edits(self.solution)
        target = cache_folder("zoo", digest([text])) / self.solution.name
        return keep(target, lambda staged: staged.write_text(text), "a wrong solution")

    def package(self) -> OpPackage:
        """Return the wrong kernel's package, cached so that its compiled kernels can be cached too."""
        solution = roots.op_package(roots.solutions(), self.puzzle)
        key = digest([solution.digest, self.file, self.gate, self.old, self.new])
        target = cache_folder("zoo", key) / self.name
        return OpPackage(keep(target, lambda staged: self.apply(staged, solution), "a wrong kernel"))

    def apply(self, folder: Path, package: OpPackage | None = None) -> OpPackage:
        """Copy the solution's package, or another one, to `folder`, which must not exist, with the edit.

        Raises DamagedFile unless the file contains the old text exactly once.
        """
        source = package or roots.op_package(roots.solutions(), self.puzzle)
        text = self.apply_edits(source.path / self.file)
        shutil.copytree(source.path, folder)
        (folder / self.file).write_text(text)
        return OpPackage(folder)

    def apply_edits(self, path: Path) -> str:
        """Return the text of a file with the edit. Raises DamagedFile unless it contains the old text
        exactly once."""
        text = path.read_text(encoding="utf-8")
        if not self.old:
            blank = blanks.find(text).get(self.gate)
            if not (blank and blank.given):
                raise DamagedFile(
                    f"{self.name} has no old and no new, and no blank {self.gate} that is given wrong"
                )
            return blanks.join(blanks.split(text), {self.gate: blank.given})
        if text.count(self.old) != 1:
            raise DamagedFile(
                f"wrong kernel {self.name} no longer applies: its old text occurs {text.count(self.old)} times "
                f"in {self.file}"
            )
        return text.replace(self.old, self.new)


def load(puzzle: str) -> list[WrongKernel]:
    """Return every wrong solution of a puzzle, by name. Raises DamagedFile for a file with a missing or
    unknown key."""
    return [read(path, puzzle) for path in sorted((roots.solutions() / puzzle / "wrong").glob("*.toml"))]


def read(path: Path, puzzle: str) -> WrongKernel:
    """Return one wrong solution of a puzzle."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}") from error
    edit = {"old", "new"} if {"old", "new"} & entries.keys() else set[str]()
    missing, unknown = (KEYS | edit) - entries.keys(), entries.keys() - KEYS - MORE
    if missing or unknown:
        what = [f"has no {', '.join(sorted(missing))}"] if missing else []
        what += [f"has an unknown key {', '.join(sorted(unknown))}"] if unknown else []
        raise DamagedFile(f"{path} {' and '.join(what)}")
    also, cases = (tuple(entries.pop(key, ())) for key in ("also", "cases"))
    return WrongKernel(puzzle, path.stem, also=also, cases=cases, **entries)
