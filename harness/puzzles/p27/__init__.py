"""Puzzle 27, a GPT trained without autograd: its spec, derivations and checkers."""

from harness.puzzles.p27.spec import PUZZLE

__all__ = ["PUZZLE"]
