"""The layout of a sequence over the ranks of a ring."""

from itertools import pairwise

import numpy as np


def split_range(length: int, parts: int) -> list[tuple[int, int]]:
    """Split `length` positions into `parts` ranges (start, stop) whose lengths differ by at most one."""
    edges = [length * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def get_ranges(rank: int, size: int, length: int, balanced: bool) -> list[tuple[int, int]]:
    """Return a rank's ranges: one or, if balanced, one from the front and its mirror image (zig-zag)."""
    if not balanced:
        return [split_range(length, size)[rank]]
    ranges = split_range(length, 2 * size)
    return [ranges[rank], ranges[-1 - rank]]


def get_positions(rank: int, size: int, length: int, balanced: bool) -> np.ndarray:
    """Return a rank's positions in the sequence, in the order of its tensors."""
    return np.concatenate([np.arange(*bounds) for bounds in get_ranges(rank, size, length, balanced)])


def locate_positions(size: int, length: int, balanced: bool) -> np.ndarray:
    """Return each position's rank and its index in that rank's tensors, [2, length]."""
    owner_and_index = np.zeros((2, length), int)
    for rank in range(size):
        positions = get_positions(rank, size, length, balanced)
        owner_and_index[:, positions] = np.full(len(positions), rank), np.arange(len(positions))
    return owner_and_index


def split_array(array: np.ndarray, size: int, balanced: bool) -> list[np.ndarray]:
    length = array.shape[2]
    return [array[:, :, get_positions(rank, size, length, balanced)] for rank in range(size)]


def join_parts(parts: list[np.ndarray], balanced: bool) -> np.ndarray:
    """Join the ranks' parts, the inverse of `split_array`."""
    length = sum(part.shape[2] for part in parts)
    B, N, _, d = parts[0].shape
    array = np.empty((B, N, length, d), parts[0].dtype)
    for rank, part in enumerate(parts):
        array[:, :, get_positions(rank, len(parts), length, balanced)] = part
    return array


def count_tiles(
    rank: int, size: int, length: int, balanced: bool, tile: int, causal: bool = True
) -> list[int]:
    """Return the number of tile x tile tiles of scores that a rank computes at each step of the ring.

    A tile is computed if any of its keys is visible to any of its queries; tiles do not cross ranges.
    """

    def split_into_tiles(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [
            (tile_start, min(tile_start + tile, stop))
            for start, stop in ranges
            for tile_start in range(start, stop, tile)
        ]

    rows = split_into_tiles(get_ranges(rank, size, length, balanced))
    counts = []
    for step in range(size):
        columns = split_into_tiles(get_ranges((rank - step) % size, size, length, balanced))
        counts.append(sum(not causal or first < stop for _, stop in rows for first, _ in columns))
    return counts
