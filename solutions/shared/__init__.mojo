"""Code of several puzzles: the launcher, reductions, matrix products. Every op package holds a link to this folder.

A puzzle's files import it as a part of their own package, `from .shared.launcher import Launcher`.
"""
