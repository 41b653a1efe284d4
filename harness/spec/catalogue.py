"""List the puzzles: every package `harness/puzzles/pNN`."""

import importlib
import pkgutil

from harness.errors import UsageError
from harness.spec.puzzle import Puzzle

PUZZLES = "harness.puzzles"


def list_puzzle_names() -> list[str]:
    modules = pkgutil.iter_modules(importlib.import_module(PUZZLES).__path__)
    return sorted(module.name for module in modules if module.name.startswith("p"))


def find_puzzle(name: str) -> Puzzle:
    """Return a puzzle's spec. Raises UsageError, listing the puzzles, for an unknown name."""
    if name not in list_puzzle_names():
        raise UsageError(f"unknown puzzle {name!r}; there is {', '.join(list_puzzle_names())}")
    return importlib.import_module(f"{PUZZLES}.{name}").PUZZLE
