"""Load the hint ladders of a puzzle from `solutions/pNN/hints.toml`.

A ladder has at least three hints, GATE-1, GATE-2, ... A gate that belongs to two rungs has two ladders; the
hints of the earlier rung are numpy-GATE-1, ..., in a table `numpy`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.toolchain import roots


@dataclass(frozen=True)
class Hint:
    """A hint: its id, a paragraph of Markdown, and optional lines of code."""

    id: str
    text: str
    code: str = ""


def load_ladders(puzzle: str, solutions: Path | None = None) -> dict[str, list[Hint]]:
    """Return every ladder of a puzzle by name, "dx" or "numpy-dx". Raises UsageError."""
    path = (solutions or roots.get_solutions()) / puzzle / "hints.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        ladders: dict[str, list[dict[str, str]]] = {}
        for name, value in data.items():
            ladders |= (
                {name: value} if isinstance(value, list) else {f"{name}-{k}": v for k, v in value.items()}
            )
        return {
            name: [make_hint(f"{name}-{number}", entry) for number, entry in enumerate(entries, start=1)]
            for name, entries in ladders.items()
        }
    except OSError as error:
        raise UsageError(f"no hints for {puzzle}: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def make_hint(id: str, entry: dict[str, str]) -> Hint:
    return Hint(id, " ".join(entry["text"].split()), entry.get("code", "").strip("\n"))


def load_ladder(puzzle: str, name: str) -> list[Hint]:
    """Return one ladder. Raises UsageError, listing the ladders, for an unknown name."""
    ladders = load_ladders(puzzle)
    if name not in ladders:
        raise UsageError(f"no hints for {name!r}; there is {', '.join(ladders)}")
    return ladders[name]
