"""Puzzle 25, ring attention."""

from harness.puzzles.p25.spec import PUZZLE

__all__ = ["PUZZLE"]
