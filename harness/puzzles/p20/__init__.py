"""Puzzle 20, the first custom backward pass."""

from harness.puzzles.p20.spec import PUZZLE

__all__ = ["PUZZLE"]
