"""List the puzzles: every package `harness/puzzles/pNN`."""

import importlib
import pkgutil

from harness.errors import BadUse
from harness.spec.puzzle import Puzzle

PUZZLES = "harness.puzzles"


def puzzle_names() -> list[str]:
    """Return every puzzle that the harness knows, in order."""
    modules = pkgutil.iter_modules(importlib.import_module(PUZZLES).__path__)
    return sorted(module.name for module in modules if module.name.startswith("p"))


def find_puzzle(name: str) -> Puzzle:
    """Return the spec of a puzzle. Raises BadUse, naming those there are."""
    if name not in puzzle_names():
        raise BadUse(f"unknown puzzle {name!r}; there is {', '.join(puzzle_names())}")
    return importlib.import_module(f"{PUZZLES}.{name}").PUZZLE
