"""Puzzle 23, self-attention."""

from harness.puzzles.p23.spec import PUZZLE

__all__ = ["PUZZLE"]
