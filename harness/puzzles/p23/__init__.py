"""Puzzle 23, self-attention: its spec, derivation and known mistakes."""

from harness.puzzles.p23.spec import PUZZLE

__all__ = ["PUZZLE"]
