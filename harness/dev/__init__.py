"""Tools for developers of puzzles: skeletons, checks of files, mutants, formatting."""
