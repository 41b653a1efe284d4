"""Puzzle 22, LayerNorm + Linear: its spec, known mistakes, bench candidates and demos."""

from harness.puzzles.p22.spec import PUZZLE

__all__ = ["PUZZLE"]
