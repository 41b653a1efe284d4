"""Puzzle 27, a GPT trained without autograd."""

from harness.puzzles.p27.spec import PUZZLE

__all__ = ["PUZZLE"]
