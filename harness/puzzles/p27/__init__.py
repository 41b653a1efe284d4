"""Puzzle 27, a GPT trained without autograd: its spec, its mathematics, and what judges the tape."""

from harness.puzzles.p27.spec import PUZZLE

__all__ = ["PUZZLE"]
