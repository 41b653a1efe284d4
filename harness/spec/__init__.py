"""Describe a puzzle as data: ops, cases, gates, derivations, and which puzzles there are."""
