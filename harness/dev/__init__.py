"""Tools for developers of puzzles: skeletons, file checks, mutants, formatting."""
