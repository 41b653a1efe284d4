"""Puzzle 24, Hilbert-ordered attention."""

from harness.puzzles.p24.spec import PUZZLE

__all__ = ["PUZZLE"]
