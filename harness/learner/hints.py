"""Load the hint ladders of a puzzle from `solutions/pNN/hints.toml`.

A ladder has at least three hints, GATE-1, GATE-2, ... A gate of two rungs has two ladders; the hints of the
earlier rung are numpy-GATE-1, ..., in a table `numpy`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.toolchain import roots


@dataclass(frozen=True)
class Hint:
    """One rung of a ladder: its id, a paragraph of Markdown, and lines of code, if any."""

    id: str
    text: str
    code: str = ""


def load_ladders(puzzle: str, solutions: Path | None = None) -> dict[str, list[Hint]]:
    """Return every ladder of a puzzle by name, "dx" or "numpy-dx". Raises UsageError."""
    path = (solutions or roots.get_solutions()) / puzzle / "hints.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        entries: dict[str, list[dict[str, str]]] = {
            name: steps for name, steps in data.items() if isinstance(steps, list)
        }
        for rung, table in ((name, table) for name, table in data.items() if name not in entries):
            entries |= {f"{rung}-{name}": steps for name, steps in table.items()}
        return {
            name: [make_hint(f"{name}-{number}", rung) for number, rung in enumerate(rungs, start=1)]
            for name, rungs in entries.items()
        }
    except OSError as error:
        raise UsageError(f"no hints for {puzzle}: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def make_hint(id: str, rung: dict[str, str]) -> Hint:
    return Hint(id, " ".join(rung["text"].split()), rung.get("code", "").strip("\n"))


def load_ladder(puzzle: str, name: str) -> list[Hint]:
    """Return one ladder. Raises UsageError, listing the ladders, for an unknown name."""
    by_name = load_ladders(puzzle)
    if name not in by_name:
        raise UsageError(f"no hints for {name!r}; there is {', '.join(by_name)}")
    return by_name[name]
