"""Puzzle 20, the first custom backward: its spec, known mistakes, and the checkers of its rungs in Python."""

from harness.puzzles.p20.spec import PUZZLE

__all__ = ["PUZZLE"]
