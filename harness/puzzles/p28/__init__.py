"""Puzzle 28: its spec, limits and known mistakes."""

from harness.puzzles.p28.spec import PUZZLE

__all__ = ["PUZZLE"]
