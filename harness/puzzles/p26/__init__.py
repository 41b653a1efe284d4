"""Puzzle 26, a torch.compile backend: its spec, the graphs that its gates run on, and the checkers of its
rungs."""

from harness.puzzles.p26.spec import PUZZLE

__all__ = ["PUZZLE"]
