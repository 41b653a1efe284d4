"""Puzzle 24, Hilbert-ordered attention: its spec, derivation and known mistakes, and the commands that draw
and count."""

from harness.puzzles.p24.spec import PUZZLE

__all__ = ["PUZZLE"]
