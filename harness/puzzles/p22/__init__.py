"""Puzzle 22, LayerNorm + Linear."""

from harness.puzzles.p22.spec import PUZZLE

__all__ = ["PUZZLE"]
