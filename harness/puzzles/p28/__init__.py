"""Puzzle 28: its spec, known mistakes, and what else only it knows."""

from harness.puzzles.p28.spec import PUZZLE

__all__ = ["PUZZLE"]
