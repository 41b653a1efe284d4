"""Puzzle 26, a torch.compile backend."""

from harness.puzzles.p26.spec import PUZZLE

__all__ = ["PUZZLE"]
