"""Code shared by several puzzles: the launcher, reductions, matrix products. Every op package has a link to
this folder.

A puzzle's files import it as part of their package: `from .shared.launcher import Launcher`.
"""
