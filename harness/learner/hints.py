"""Load the hint ladders of a puzzle from `solutions/pNN/hints.toml`.

A ladder belongs to a blank and has at least three hints, named GATE-1, GATE-2, ... A gate that is solved
twice, in NumPy before Mojo, has two ladders: that of the earlier rung is named numpy-GATE-1 and so on, in a
table `numpy`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import BadUse
from harness.toolchain import roots


@dataclass(frozen=True)
class Hint:
    """One rung: its id, a paragraph of Markdown, and lines of code or none."""

    id: str
    text: str
    code: str = ""


def ladders(puzzle: str, solutions: Path | None = None) -> dict[str, list[Hint]]:
    """Return every ladder of a puzzle by the name of its blank, "dx" or "numpy-dx", in the order of the
    file.

    Raises BadUse if the file is missing or not in the form that its head describes.
    """
    path = (solutions or roots.solutions()) / puzzle / "hints.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        entries: dict[str, list[dict[str, str]]] = {
            name: steps for name, steps in data.items() if isinstance(steps, list)
        }
        for rung, own in ((name, own) for name, own in data.items() if name not in entries):
            entries |= {f"{rung}-{name}": steps for name, steps in own.items()}
        return {
            name: [make(f"{name}-{number}", rung) for number, rung in enumerate(rungs, start=1)]
            for name, rungs in entries.items()
        }
    except OSError as error:
        raise BadUse(f"no hints for {puzzle}: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadUse(f"{path} is damaged: {error}") from error


def make(id: str, rung: dict[str, str]) -> Hint:
    """Return a rung from its table; the paragraph's lines are joined."""
    return Hint(id, " ".join(rung["text"].split()), rung.get("code", "").strip("\n"))


def ladder(puzzle: str, name: str) -> list[Hint]:
    """Return one ladder. Raises BadUse, naming those there are."""
    by_name = ladders(puzzle)
    if name not in by_name:
        raise BadUse(f"no hints for {name!r}; there is {', '.join(by_name)}")
    return by_name[name]
