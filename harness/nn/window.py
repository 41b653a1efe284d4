"""Attention within a window of a grid: each position sees those that are near it, and tiles that nobody needs are left out.

Positions may come in any order of the grid's cells; which tiles are left depends on it, the result does not. On an NVIDIA GPU,
in 16-bit types, puzzle 23's kernels on tensor cores compute it, which read a window in place of a mask. Everywhere else it is
`attention` with the window as a mask of all pairs.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from harness.nn import orders
from harness.nn.arguments import check_attended
from harness.nn.attention_arguments import factor
from harness.nn.attention_autograd import attention
from harness.nn.attention_direct import AttentionKernels, aligned, narrow_kernels, sizes
from harness.nn.attention_ops import EVERY_KEY
from harness.nn.derivatives import FirstOnly
from harness.nn.orders import whole

Tensor = torch.Tensor
TILE = 64
"""Positions in a tile of the kernels."""
FIRST_ONLY = FirstOnly(
    "window_attention", "torch.nn.functional.scaled_dot_product_attention with window.mask"
)


class GridWindow:
    """Which positions of a grid see each other: those whose rows and whose columns are at most `radius` apart.

    Args:
        order: Of the cells, integers [L]: position i is the cell order[i], row * width + column. Each cell once.
        width: Columns of the grid; L is a multiple of it.
        radius: At least 0.

    Raises ValueError for an order that is no order of such a grid, TypeError for what is no whole number.
    """

    def __init__(self, order: Tensor | np.ndarray, width: int, radius: int):
        width, radius = whole("width", width, 1), whole("radius", radius, 0)
        if not isinstance(order, Tensor | np.ndarray):
            raise TypeError(f"order: expected a tensor or an array, got {type(order).__name__}")
        self.order = order.cpu().numpy() if isinstance(order, Tensor) else order
        if self.order.dtype.kind not in "iu":
            raise TypeError(f"order: expected whole numbers, got {self.order.dtype}")
        length = len(self.order) if self.order.ndim == 1 else 0
        if length == 0 or length % width or (np.sort(self.order) != np.arange(length)).any():
            raise ValueError(f"order: expected every cell of a grid of {width} columns once")
        self.width, self.rows = width, length // width
        self.radius = min(radius, max(width, self.rows) - 1)
        self._words_on: dict[tuple[torch.device, int], Tensor] = {}

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        """Which tiles of TILE positions need which: bool [tiles, tiles], symmetric."""
        return orders.window_tiles(self.order, self.width, self.radius, TILE)

    @functools.cached_property
    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """Which positions of a tile see which of another, for the pairs of tiles that need each other.

        Returns:
            int64 [tiles, tiles]: the number of each pair's pattern, from 0, -1 where there is none; and uint32 [patterns, 128]
            words, as `fast_window.mojo` says: each pattern is there once, and a grid has few.
        """
        count = len(self.tiles)
        missing = np.full(count * TILE - len(self.order), len(self.order))
        cells = np.concatenate([self.order, missing]).reshape(count, TILE)
        rows, columns = np.divmod(cells, self.width)
        numbers, found = np.full((count, count), -1), {}
        for tile in range(count):
            (others,) = np.nonzero(self.tiles[tile])
            seen = self.near(
                rows[tile][:, None, None], rows[others], columns[tile][:, None, None], columns[others]
            )
            seen &= (cells[tile] < len(self.order))[:, None, None] & (cells[others] < len(self.order))
            for other, bits in zip(others, lanes(seen), strict=True):
                numbers[tile, other] = found.setdefault(bits.tobytes(), len(found))
        return numbers, np.frombuffer(b"".join(found), "<u4").reshape(len(found), -1)

    def words(self, blocks: int) -> np.ndarray:
        """What the kernels read whose blocks own so many tiles, int32 (`fast_window.mojo`)."""
        numbers, patterns = self.patterns
        count = len(numbers)
        numbers = np.pad(numbers, ((0, -count % blocks), (0, 0)), constant_values=-1)
        numbers = numbers.reshape(-1, blocks, count)
        of_block, tile = np.nonzero((numbers >= 0).any(axis=1))
        starts = np.searchsorted(of_block, np.arange(len(numbers) + 1))
        first_entry = len(starts)
        first_pattern = first_entry + len(tile) * (1 + blocks)
        own = numbers[of_block, :, tile]
        places = np.where(own >= 0, first_pattern + own * patterns.shape[1], 0)
        entries = np.column_stack([tile, places])
        parts = (first_entry + starts * (1 + blocks), entries, patterns)
        return np.concatenate([part.ravel().astype(np.uint32) for part in parts]).view(np.int32)

    def on(self, device: torch.device, blocks: int) -> Tensor:
        """The words on a device, copied there once."""
        if (device, blocks) not in self._words_on:
            self._words_on[device, blocks] = torch.from_numpy(self.words(blocks)).to(device)
        return self._words_on[device, blocks]

    def near(self, row, other_row, column, other_column):
        """Whether cells see each other, of rows and columns that are arrays or tensors."""
        return (abs(row - other_row) <= self.radius) & (abs(column - other_column) <= self.radius)

    def mask(self, device: torch.device) -> Tensor:
        """Which pairs see each other: bool [L, L]."""
        rows, columns = (torch.from_numpy(each).to(device) for each in np.divmod(self.order, self.width))
        return self.near(rows[:, None], rows, columns[:, None], columns)


def lanes(seen: np.ndarray) -> np.ndarray:
    """Which pairs see each other, bool [64, tiles, 64], as words of the lanes that hold their scores, uint32 [tiles, 128].

    Lane l of a warp holds of 16 x 8 scores the columns 2 (l % 4) and the next, in the rows l / 4 and, behind them, l / 4 + 8.
    """
    parts = seen.reshape(
        4, 2, 8, -1, 8, 4, 2
    )  # sixteens of rows, half, row, tile, eights of columns, pair, column
    bits = parts.transpose(3, 0, 2, 5, 4, 1, 6).reshape(parts.shape[3], -1)
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, window: GridWindow, scale: float | None = None, blocks: int = 1
) -> Tensor:
    """softmax(query key^T * scale) value, where each position sees those within its window.

    Args:
        query, key, value: Shape [B, N, L, d], one floating dtype, positions in the window's order. Any strides.
        window: Of L positions.
        scale: None for 1 / sqrt(d).
        blocks: Tiles of 64 positions that a block of threads owns, 1 or 2. It changes the time and not the result.

    Returns:
        Shape [B, N, L, d].

    Raises:
        ValueError: Shapes do not go together, or blocks is neither 1 nor 2.
        TypeError: window is no GridWindow, or as `harness.nn.attention`.
        NotImplementedError: As `harness.nn.attention`.
    """
    FIRST_ONLY.refuse(query=query, key=key, value=value)
    check_attended(query, key, value)
    if not isinstance(window, GridWindow):
        raise TypeError(f"window: expected a GridWindow, got {type(window).__name__}")
    if query.dim() != 4 or query.shape[2] != len(window.order):
        raise ValueError(f"query: expected [B, N, {len(window.order)}, d], got {list(query.shape)}")
    if not query.shape == key.shape == value.shape:
        raise ValueError(
            f"query, key, value: expected one shape, got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if whole("blocks", blocks, 1) > 2:
        raise ValueError(f"blocks: expected 1 or 2, got {blocks}")
    multiplier = factor(scale, query)
    kernels = narrow_kernels(query, multiplier) if query.numel() else None
    if kernels is None:
        return attention(query, key, value, window.mask(query.device), scale=multiplier)
    return WindowAttention.apply(query, key, value, window, multiplier, blocks, kernels)


class WindowAttention(torch.autograd.Function):
    """Both passes through the extension module; kept are the tensors, the output and a number for each row."""

    @staticmethod
    def forward(
        ctx, query, key, value, window: GridWindow, scale: float, blocks: int, kernels: AttentionKernels
    ):
        query, key, value = map(aligned, (query, key, value))
        output = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        given = sizes(query, key, EVERY_KEY), scale, (output, lse), (query, key, value)
        words = window.on(query.device, blocks)
        kernels.launch_forward(kernels.module.window_forward, *given, words, choice=blocks)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.rest = window, scale, blocks, kernels
        return output

    @staticmethod
    @FIRST_ONLY.once
    def backward(ctx, grad_output):
        query, key, value, output, lse = ctx.saved_tensors
        window, scale, blocks, kernels = ctx.rest
        gradients = tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))
        tensors = grad_output, query, key, value
        given = sizes(query, key, EVERY_KEY), scale, gradients, tensors, output, lse
        words = window.on(query.device, blocks)
        kernels.launch_aligned_backward(kernels.module.window_backward, *given, words, choice=blocks)
        return *gradients, None, None, None, None
