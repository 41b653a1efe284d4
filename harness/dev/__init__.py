"""Tools for developers of puzzles: the skeleton of a new one, a check of its files, and the lists of tasks."""
