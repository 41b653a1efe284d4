"""Load the known-bad solutions, each a small edit of a correct one, which test the checkers.

A wrong solution is a file `solutions/pNN/wrong/NAME.toml` with the keys gate, mistake (its id, "" if the
diagnosis has none), file, old, new, and optionally `story` (one line), `effect` (its effect on the numbers,
for the museum), `rung` (default: the main rung), `also` (further gates that it breaks), `cases` (the only
cases that show it), `source` (where such a bug was reported) and `dtype`. For a blank with provided wrong
code, `old` and `new` may be omitted.
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
from harness.toolchain.cache import cache_file, compute_digest, get_cache_folder
from harness.toolchain.packages import OpPackage

REQUIRED_KEYS = {"gate", "mistake", "file"}
OPTIONAL_KEYS = {"old", "new", "story", "effect", "rung", "also", "cases", "source", "dtype"}


@dataclass(frozen=True)
class WrongSolution:
    """One edit of a puzzle's solution: in `file`, `old` becomes `new`, or the blank gets the provided code.

    A check must report its gate as wrong, with `mistake`, and no gate in `also` as correct. If `cases` is not
    empty, other cases do not reveal it.
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
    def target_rung(self) -> Rung:
        puzzle = find_puzzle(self.puzzle)
        return puzzle.find_rung(self.rung) if self.rung else puzzle.main_rung

    @property
    def solution(self) -> Path:
        folder = roots.get_solutions() / self.puzzle
        rung = self.target_rung
        return folder / "op" / self.file if isinstance(rung, MojoRung) else folder / rung.file

    @property
    def is_in_blank(self) -> bool:
        """True if the edit is inside a blank, so that a learner can make the mistake."""
        original, edited = self.solution.read_text(), self.edit_text(self.solution)
        return blanks.remove_blanks(original) == blanks.remove_blanks(edited)

    def build_target(self) -> Path:
        """Return the checker's input: the op package or the file, cached."""
        if isinstance(self.target_rung, MojoRung):
            return self.build_package().path
        text = self.edit_text(self.solution)
        target = get_cache_folder("zoo", compute_digest([text])) / self.solution.name
        return cache_file(target, lambda staged: staged.write_text(text), "a wrong solution")

    def build_package(self) -> OpPackage:
        """Return the wrong kernel's package, at a cached path so that its compiled kernels are cached too."""
        solution = roots.make_op_package(roots.get_solutions(), self.puzzle)
        key = compute_digest([solution.digest, self.file, self.gate, self.old, self.new])
        target = get_cache_folder("zoo", key) / self.name
        return OpPackage(cache_file(target, self.copy_package, "a wrong kernel"))

    def copy_package(self, folder: Path) -> OpPackage:
        """Copy the package, with the edit, to `folder`, which must not exist.

        Raises DamagedFile unless the file contains the old text exactly once.
        """
        source = roots.make_op_package(roots.get_solutions(), self.puzzle).path
        text = self.edit_text(source / self.file)
        shutil.copytree(source, folder)
        (folder / self.file).write_text(text)
        return OpPackage(folder)

    def edit_text(self, path: Path) -> str:
        """Return a file's text with the edit. Raises DamagedFile unless the old text occurs exactly once."""
        text = path.read_text(encoding="utf-8")
        if not self.old:
            blank = blanks.find_blanks(text).get(self.gate)
            if not (blank and blank.provided):
                raise DamagedFile(
                    f"{self.name} has no old and no new, and no blank {self.gate} that is given wrong"
                )
            return blanks.join_segments(blanks.split_blanks(text), {self.gate: blank.provided})
        if text.count(self.old) != 1:
            raise DamagedFile(
                f"wrong kernel {self.name} no longer applies: its old text occurs {text.count(self.old)} times "
                f"in {self.file}"
            )
        return text.replace(self.old, self.new)


def load_wrong_solutions(puzzle: str) -> list[WrongSolution]:
    """Return every wrong solution of a puzzle, by name. Raises DamagedFile."""
    entries = sorted((roots.get_solutions() / puzzle / "wrong").glob("*.toml"))
    return [read_entry(path, puzzle) for path in entries]


def read_entry(path: Path, puzzle: str) -> WrongSolution:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}") from error
    edit = {"old", "new"} if {"old", "new"} & entries.keys() else set[str]()
    missing, unknown = (REQUIRED_KEYS | edit) - entries.keys(), entries.keys() - REQUIRED_KEYS - OPTIONAL_KEYS
    if missing or unknown:
        problems = [f"has no {', '.join(sorted(missing))}"] if missing else []
        problems += [f"has an unknown key {', '.join(sorted(unknown))}"] if unknown else []
        raise DamagedFile(f"{path} {' and '.join(problems)}")
    also, cases = (tuple(entries.pop(key, ())) for key in ("also", "cases"))
    return WrongSolution(puzzle, path.stem, also=also, cases=cases, **entries)
