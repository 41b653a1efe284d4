"""Puzzle NN: its spec and known mistakes."""

from harness.puzzles.pNN.spec import PUZZLE

__all__ = ["PUZZLE"]
