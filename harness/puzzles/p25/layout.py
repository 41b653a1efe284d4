"""The layout of a sequence over the ranks of a ring, for puzzle 25's checkers."""

from itertools import pairwise

import numpy as np


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Split `length` positions into `parts` ranges (start, stop) whose lengths differ by at most one."""
    edges = [length * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def held(rank: int, size: int, length: int, balanced: bool) -> list[tuple[int, int]]:
    """Return the ranges of a rank: one, or a range from the front and its mirror image (zig-zag)."""
    if not balanced:
        return [cut(length, size)[rank]]
    pieces = cut(length, 2 * size)
    return [pieces[rank], pieces[-1 - rank]]


def places(rank: int, size: int, length: int, balanced: bool) -> np.ndarray:
    """Return the positions of a rank in the sequence, in the order of its tensors."""
    return np.concatenate([np.arange(*each) for each in held(rank, size, length, balanced)])


def homes(size: int, length: int, balanced: bool) -> np.ndarray:
    """Return the rank of each position, and its index in that rank's tensors, [2, length]."""
    home = np.zeros((2, length), int)
    for rank in range(size):
        own = places(rank, size, length, balanced)
        home[:, own] = np.full(len(own), rank), np.arange(len(own))
    return home


def split(array: np.ndarray, size: int, balanced: bool) -> list[np.ndarray]:
    """Split an array [B, N, S, d] into the ranks' parts."""
    length = array.shape[2]
    return [array[:, :, places(rank, size, length, balanced)] for rank in range(size)]


def join_parts(parts: list[np.ndarray], balanced: bool) -> np.ndarray:
    """Join the ranks' parts, the inverse of `split`."""
    length = sum(part.shape[2] for part in parts)
    B, N, _, d = parts[0].shape
    whole = np.empty((B, N, length, d), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[:, :, places(rank, len(parts), length, balanced)] = part
    return whole


def tiles(rank: int, size: int, length: int, balanced: bool, tile: int, causal: bool = True) -> list[int]:
    """Return how many tiles of tile x tile scores a rank computes at each step of the ring.

    A tile counts if one of its keys is visible to one of its queries; tiles are cut within each range.
    """

    def starts(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(at, min(at + tile, stop)) for start, stop in ranges for at in range(start, stop, tile)]

    rows = starts(held(rank, size, length, balanced))
    counts = []
    for step in range(size):
        columns = starts(held((rank - step) % size, size, length, balanced))
        counts.append(sum(not causal or first < stop for _, stop in rows for first, _ in columns))
    return counts
