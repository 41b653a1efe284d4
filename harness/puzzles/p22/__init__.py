"""Puzzle 22, LayerNorm + Linear: its spec, known mistakes and bench candidates."""

from harness.puzzles.p22.spec import PUZZLE

__all__ = ["PUZZLE"]
