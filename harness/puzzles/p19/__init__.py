"""Puzzle 19, the ramp: its spec and known mistakes."""

from harness.puzzles.p19.spec import PUZZLE

__all__ = ["PUZZLE"]
