"""A gather that reads two cells twice: the gradient by a plain scatter, and by sums in a fixed order."""

from itertools import pairwise

import numpy as np

x = np.array([1.0, 2.0, 3.0, 4.0])
order = np.array([1, 0, 1, 2, 3, 2])  # a row of four cells, mirrored at its edges
dy = np.array([10.0, 1.0, 2.0, 3.0, 4.0, 40.0])

exact = np.array([dy[order == cell].sum() for cell in range(len(x))])
for name, steps in (("first to last", range(6)), ("last to first", range(5, -1, -1))):
    dx = np.zeros_like(x)
    for step in steps:
        dx[order[step]] = dy[step]
    print(f"scatter, {name}:", dx)

# A reader for each cell, not for each step: the steps sorted by cell, and where each cell's stretch begins.
by_cell = np.argsort(order, kind="stable")
starts = np.searchsorted(order[by_cell], np.arange(len(x) + 1))
dx = np.array([dy[by_cell[a:b]].sum() for a, b in pairwise(starts)])
print("steps by cell:", by_cell, " stretches begin at:", starts)
print("sums of stretches:", dx, " exact:", exact)
assert np.array_equal(dx, exact)
