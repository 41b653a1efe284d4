"""Versions of backward passes as text, without torch: those of puzzle 21 with `edits.toml`, and the bugs of public reports."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.check import zoo
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

EDITS = Path(__file__).with_name("edits.toml")
FAULTS = roots.CHECKOUT / "tests" / "testing" / "faults.py"


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
        text = re.sub(
            r'(def .*:\n +)"""[^"\n]*"""(?=\n\n)', r"\1pass", self.text
        )  # a function without a body
        (own,) = (part for part in text.split("\n\n\n") if f"# BLANK-START {self.gate}:" in part)
        lines = own.splitlines()[1:]
        return "\n".join(line for line in lines if not line.lstrip().startswith(("# BLANK", '"""'))).strip(
            "\n"
        )


def edited(text: str, old: str, new: str) -> str:
    """The text with one place changed. Raises ValueError where the old text does not stand in it exactly once."""
    if text.count(old) != 1:
        raise ValueError(f"`{old}` stands {text.count(old)} times in the text")
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
    path = roots.get_solutions() / "p21" / "hunt.py"
    gates = find_puzzle("p21").find_rung("torch").gates
    solution = without_given(path.read_text(encoding="utf-8"))
    found = [Version(gate, "solution", "solution", solution) for gate in gates]
    for bug in zoo.load_wrong_solutions("p21"):
        if bug.rung == "torch":
            found.append(Version(bug.gate, bug.name, "bug", without_given(bug.edit_text(path))))
    for gate, edits in tomllib.loads(EDITS.read_text(encoding="utf-8")).items():
        for name, edit in edits.items():
            found.append(Version(gate, name, "edit", edited(solution, edit["old"], edit["new"])))
    return sorted(found, key=lambda version: gates.index(version.gate))


def reports() -> dict[str, dict[str, Any]]:
    """The entries of `faults.toml`, with the class without and with the bug, what that calls, and the module with the bug."""
    text = FAULTS.read_text(encoding="utf-8")
    parts = {part.partition("(")[0].split()[-1]: part for part in text.split("\n\n\n")}
    setup, backward = parts["KeepsInputs"].partition("\n\n")[2], "    @staticmethod\n    def backward"
    entries = tomllib.loads(FAULTS.with_suffix(".toml").read_text(encoding="utf-8"))
    for entry in entries.values():
        own = parts[entry["operation"]]
        right = wrong = own.replace("KeepsInputs", "Function").replace(backward, f"{setup}\n\n{backward}")
        for old, new in entry["edits"]:
            wrong = edited(wrong, old, new)
        called = [part for name, part in parts.items() if part.startswith("def ") and f"{name}(" in wrong]
        entry |= {"right": right, "wrong": wrong, "called": called, "text": text.replace(own, wrong)}
    return entries
