"""Puzzle 26, a torch.compile backend: its spec, the graphs that its gates try, and what judges its rungs."""

from harness.puzzles.p26.spec import PUZZLE

__all__ = ["PUZZLE"]
