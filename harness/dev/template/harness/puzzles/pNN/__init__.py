"""Puzzle NN: its spec, known mistakes, and what else only it knows."""

from harness.puzzles.pNN.spec import PUZZLE

__all__ = ["PUZZLE"]
