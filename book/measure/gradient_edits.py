"""Check every version of puzzle 21's backward passes: the solution, the 46 wrong ones, and the edits of `edits.toml`.

`python -m book.measure gradient_edits`; a CPU is enough. A row says which common checks object to a version, the first try of
`check_backward` that does, and what that says. The page "What gradcheck misses" takes its matrix and its verdicts from here.
"""

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from book.measure.shared import write
from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.p21.hunt import USUAL, detections, function_of
from harness.puzzles.p21.subjects import WANTED
from harness.testing import check_backward
from harness.toolchain import roots

sys.path.insert(0, str(roots.CHECKOUT / "tests" / "testing"))
EDITS = Path(__file__).with_name("edits.toml")
NOT_ASKED = ("compile", "autocast", "size 0", "infinity", "negative infinity")
"""Tries that the puzzle does not ask for."""


@dataclass(frozen=True)
class Version:
    """One text of hunt.py, in which the class of a gate is right, wrong or edited."""

    gate: str
    name: str
    kind: str
    text: str

    @property
    def code(self) -> str:
        """The class without the puzzle's markers and documentation."""
        text = self.text.replace('"""Keeps nothing."""', "pass  # nothing is kept")
        lines = text.split(f"class {WANTED[self.gate].name}(Function):")[1].split("\n\n\n")[0].splitlines()
        return "\n".join(
            line for line in lines[1:] if not line.lstrip().startswith(("# BLANK", '"""'))
        ).strip("\n")


def edited(text: str, old: str, new: str) -> str:
    """The text with one place changed. Raises ValueError where the old text does not stand in it exactly once."""
    if text.count(old) != 1:
        raise ValueError(f"`{old}` stands {text.count(old)} times in hunt.py")
    return text.replace(old, new)


def without_given(text: str) -> str:
    """The solution without the wrong code that learners are given, which stands in it as comments."""
    kept, given = [], False
    for line in text.splitlines():
        given = line.lstrip().startswith("# BLANK-GIVEN") or (given and "# BLANK-END" not in line)
        if not given:
            kept.append(line)
    return "\n".join(kept) + "\n"


def versions() -> list[Version]:
    """All of them, by gate."""
    path = roots.solutions() / "p21" / "hunt.py"
    solution = without_given(path.read_text(encoding="utf-8"))
    found = [Version(gate, "solution", "solution", solution) for gate in WANTED]
    for bug in zoo.load("p21"):
        if bug.rung == "torch":
            found.append(Version(bug.gate, bug.name, "bug", without_given(bug.edited(path))))
    for gate, edits in tomllib.loads(EDITS.read_text(encoding="utf-8")).items():
        for name, edit in edits.items():
            found.append(Version(gate, name, "edit", edited(solution, edit["old"], edit["new"])))
    return sorted(found, key=lambda version: list(WANTED).index(version.gate))


def row(version: Version, folder: Path) -> dict:
    """What the checks make of a version."""
    path = folder / f"{version.gate}_{version.name}.py"
    path.write_text(version.text, encoding="utf-8")
    function = function_of(version.gate, load(path)).apply
    usual = detections(WANTED[version.gate].subject(function))
    reference, inputs = WANTED[version.gate].reference, import_module("zoo_cases").P21[version.gate]
    report = check_backward(function, reference=reference, inputs=inputs, leave_out=NOT_ASKED)
    first = report.wrong[0] if report.wrong else None
    return {
        "gate": version.gate,
        "version": version.name,
        "kind": version.kind,
        **{name: int(usual[name]) for name in USUAL},
        "check_backward": int(first is not None),
        "try": first.name if first else "",
        "said": " ".join(first.said.split()) if first else "",
        "named": report.mistake,
    }


def rows() -> Iterator[dict]:
    """A row for each version."""
    with tempfile.TemporaryDirectory() as folder:
        for version in versions():
            yield row(version, Path(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(rows())
