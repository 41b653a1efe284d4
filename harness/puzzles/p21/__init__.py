"""Puzzle 21, the bug hunt."""

from harness.puzzles.p21.spec import PUZZLE

__all__ = ["PUZZLE"]
