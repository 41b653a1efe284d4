"""What a puzzle is, as data: ops, cases, gates, derivations, and which puzzles there are."""
