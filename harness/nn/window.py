"""Attention within a window of a grid: each position sees those that are near it, and tiles that nobody needs are left out.

Positions may come in any order of the grid's cells; which tiles are left depends on it, the result does not. On an NVIDIA GPU,
in 16-bit types, puzzle 23's kernels on tensor cores compute it, which read a window in place of a mask. Everywhere else it is
`attention` with the window as a mask of all pairs.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from harness.nn import attention_direct, orders
from harness.nn.attention_autograd import attention
from harness.nn.attention_direct import CHUNK, Kernels, readable, row_strides

Tensor = torch.Tensor
TILE = 64
"""Positions in a tile of the kernels."""
ROWS = 128
"""What the number of places is a multiple of."""
FAR = 0x3FFF3FFF
"""The place of a position that there is not."""
LONGEST = 0x2000
"""Rows, columns and radius are below it: the kernels keep a place in a word."""
WIDEST = 64
"""The largest head dimension of the kernels."""


class GridWindow:
    """Which positions of a grid see each other: those whose rows and whose columns are at most `radius` apart.

    Args:
        order: Of the cells, integers [L]: position i is the cell order[i], row * width + column. Each cell once.
        width: Columns of the grid; L is a multiple of it.
        radius: At least 0.

    Raises ValueError for an order that is no order of such a grid, or a side of 8,192 or more.
    """

    def __init__(self, order: Tensor | np.ndarray, width: int, radius: int):
        self.order = np.asarray(order.cpu() if isinstance(order, Tensor) else order)
        length = len(self.order) if self.order.ndim == 1 else 0
        if width < 1 or length == 0 or length % width or (np.sort(self.order) != np.arange(length)).any():
            raise ValueError(f"order: expected every cell of a grid of {width} columns once")
        if radius < 0:
            raise ValueError(f"radius: expected at least 0, got {radius}")
        self.width, self.rows = width, length // width
        self.radius = min(radius, max(width, self.rows) - 1)
        if max(width, self.rows) >= LONGEST:
            raise ValueError(f"a side of {max(width, self.rows)} is too long: expected less than {LONGEST}")
        self._words_on: dict[torch.device, Tensor] = {}

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        """Which tiles of TILE positions need which: bool [tiles, tiles], symmetric."""
        return orders.window_tiles(self.order, self.width, self.radius, TILE)

    @functools.cached_property
    def words(self) -> np.ndarray:
        """What the kernels read, int32: a place for each position, then a row of bits for each tile (`fast_window.mojo`)."""
        length = len(self.order)
        places = np.full(-(-length // ROWS) * ROWS, FAR, np.uint32)
        places[:length] = self.order // self.width << 16 | self.order % self.width
        bits = np.packbits(self.tiles, axis=1, bitorder="little")
        bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
        return np.concatenate([places, bits.view("<u4").ravel()]).view(np.int32)

    @property
    def words_of_a_tile(self) -> int:
        """Words of a row of bits."""
        return -(-len(self.tiles) // 32)

    def on(self, device: torch.device) -> Tensor:
        """The words on a device, copied there once."""
        if device not in self._words_on:
            self._words_on[device] = torch.from_numpy(self.words).to(device)
        return self._words_on[device]

    def mask(self, device: torch.device) -> Tensor:
        """Which pairs see each other: bool [L, L]."""
        rows, columns = (torch.from_numpy(each).to(device) for each in np.divmod(self.order, self.width))
        down, right = (each[:, None] - each for each in (rows, columns))
        return (down.abs() <= self.radius) & (right.abs() <= self.radius)


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
        NotImplementedError, TypeError: As `harness.nn.attention`.
        RuntimeError: A second derivative, where the kernels on tensor cores have computed the first.
    """
    if query.dim() != 4 or query.shape[2] != len(window.order):
        raise ValueError(f"query: expected [B, N, {len(window.order)}, d], got {list(query.shape)}")
    if not query.shape == key.shape == value.shape:
        raise ValueError(
            f"query, key, value: expected one shape, got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if blocks not in (1, 2):
        raise ValueError(f"blocks: expected 1 or 2, got {blocks}")
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    kernels = kernels_for(query, key, value) if factor > 0 else None
    if kernels is None:
        return attention(query, key, value, window.mask(query.device), scale=factor)
    return WindowAttention.apply(query, key, value, window, factor, blocks, kernels)


def kernels_for(query: Tensor, key: Tensor, value: Tensor) -> Kernels | None:
    """The kernels on tensor cores, where they take these tensors; None elsewhere."""
    d = query.shape[-1]
    one_kind = query.dtype == key.dtype == value.dtype and query.device == key.device == value.device
    fits = attention_direct.on_tensor_cores(query) and d <= WIDEST and d % CHUNK == 0 and query.numel() > 0
    return attention_direct.kernels(query.device) if one_kind and fits else None


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose rows all begin at multiples of 16 bytes."""
    tensor = readable(tensor, True)
    at_chunks = tensor.data_ptr() % 16 == 0 and all(stride % CHUNK == 0 for stride in row_strides(tensor))
    return tensor if at_chunks else tensor.clone(memory_format=torch.contiguous_format)


class WindowAttention(torch.autograd.Function):
    """Both passes through the extension module; kept are the tensors, the output and a number for each row."""

    @staticmethod
    def forward(ctx, query, key, value, window: GridWindow, scale: float, blocks: int, kernels: Kernels):
        query, key, value = (aligned(tensor) for tensor in (query, key, value))
        output = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        kernels.call(
            kernels.module.window_forward,
            query.dtype,
            *sizes(query, window),
            scale,
            *(tensor.data_ptr() for tensor in (output, lse, query, key, value)),
            window.on(query.device).data_ptr(),
            *(stride for tensor in (query, key, value, output) for stride in row_strides(tensor)),
            choice=blocks,
        )
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.rest = window, scale, blocks, kernels
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        query, key, value, output, lse = ctx.saved_tensors
        window, scale, blocks, kernels = ctx.rest
        grad_output = aligned(grad_output)
        delta = kernels.delta(grad_output, output, None)
        gradients = tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))
        kernels.call(
            kernels.module.window_backward,
            query.dtype,
            *sizes(query, window),
            scale,
            *(tensor.data_ptr() for tensor in (*gradients, grad_output, query, key, value, lse, delta)),
            window.on(query.device).data_ptr(),
            *(stride for t in (query, key, value, grad_output, *gradients) for stride in row_strides(t)),
            choice=blocks,
        )
        return *gradients, None, None, None, None


def sizes(query: Tensor, window: GridWindow) -> tuple[int, ...]:
    """What the module takes as sizes: every key can be seen, and the window in the place of a mask's strides and blocks."""
    B, N, L, d = query.shape
    return (B, N, N, L, L, d, attention_direct.EVERY_KEY, 0, 0, 0, window.words_of_a_tile, window.radius)
