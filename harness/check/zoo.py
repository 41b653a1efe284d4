"""The bug zoo: wrong kernels, each one small edit of a puzzle's solution, by which the checker itself is checked.

A wrong kernel is a file `solutions/pNN/wrong/NAME.toml` with the keys story (a line), gate, mistake, file, old, new, and
maybe `also` (further gates that it gets wrong), `cases` (those that alone show it) and `source` (where such a bug was
reported).
"""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import DamagedFile
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import OpPackage

KEYS = {"story", "gate", "mistake", "file", "old", "new"}
MORE = {"also", "cases", "source"}


@dataclass(frozen=True)
class WrongKernel:
    """One edit: in `file`, `old` becomes `new`.

    `gate` is the gate that must name it, `also` are gates that cannot be right either; `mistake` is what the diagnosis
    must call it. `cases` are those that alone show it.
    """

    name: str
    story: str
    gate: str
    mistake: str
    file: str
    old: str
    new: str
    also: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    source: str = ""

    def package(self) -> OpPackage:
        """The wrong kernel's package, kept in the cache so that what is compiled of it can be kept too."""
        solution = roots.op_package(roots.solutions(), "p22")
        key = digest([solution.digest, self.file, self.old, self.new])
        target = cache_folder("zoo", key) / self.name
        return OpPackage(keep(target, lambda staged: self.apply(staged, solution), "a wrong kernel"))

    def apply(self, folder: Path, package: OpPackage | None = None) -> OpPackage:
        """A copy of the solution's package (or of another one) in `folder`, which must not exist, with the edit.

        Raises DamagedFile where the old text does not stand in the file exactly once.
        """
        source = package or roots.op_package(roots.solutions(), "p22")
        text = (source.path / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise DamagedFile(
                f"wrong kernel {self.name} no longer applies: its old text stands {text.count(self.old)} times "
                f"in {self.file}"
            )
        shutil.copytree(source.path, folder)
        (folder / self.file).write_text(text.replace(self.old, self.new))
        return OpPackage(folder)


def load(puzzle: str = "p22") -> list[WrongKernel]:
    """Every wrong kernel of a puzzle, by name. Raises DamagedFile for a file with a missing or unknown key."""
    return [read(path) for path in sorted((roots.solutions() / puzzle / "wrong").glob("*.toml"))]


def read(path: Path) -> WrongKernel:
    """One wrong kernel."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}") from error
    missing, unknown = KEYS - entries.keys(), entries.keys() - KEYS - MORE
    if missing or unknown:
        what = [f"has no {', '.join(sorted(missing))}"] if missing else []
        what += [f"has an unknown key {', '.join(sorted(unknown))}"] if unknown else []
        raise DamagedFile(f"{path} {' and '.join(what)}")
    lists = {key: tuple(entries.get(key, ())) for key in ("also", "cases")}
    return WrongKernel(path.stem, **{**entries, **lists})
