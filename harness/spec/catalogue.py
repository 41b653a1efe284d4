"""Which puzzles there are: every package `harness/puzzles/pNN`, found by its folder."""

import importlib
import pkgutil
from pathlib import Path

from harness.errors import BadUse
from harness.spec.puzzle import Puzzle

FOLDER = Path(__file__).resolve().parents[1] / "puzzles"


def puzzle_names() -> list[str]:
    """Every puzzle that the harness knows, in order."""
    return sorted(
        module.name for module in pkgutil.iter_modules([str(FOLDER)]) if module.name.startswith("p")
    )


def find_puzzle(name: str) -> Puzzle:
    """The spec of a puzzle. Raises BadUse, naming those there are."""
    if name not in puzzle_names():
        raise BadUse(f"unknown puzzle {name!r}; there is {', '.join(puzzle_names())}")
    return importlib.import_module(f"harness.puzzles.{name}").PUZZLE
