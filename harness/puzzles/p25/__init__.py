"""Puzzle 25: its spec, known mistakes, checkers and commands."""

from harness.puzzles.p25.spec import PUZZLE

__all__ = ["PUZZLE"]
