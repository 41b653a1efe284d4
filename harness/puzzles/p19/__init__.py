"""Puzzle 19, the ramp: eight small kernels."""

from harness.puzzles.p19.spec import PUZZLE

__all__ = ["PUZZLE"]
