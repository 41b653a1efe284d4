"""Puzzle 25: its spec, known mistakes, and what else only it knows."""

from harness.puzzles.p25.spec import PUZZLE

__all__ = ["PUZZLE"]
