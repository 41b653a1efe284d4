"""A matrix product of float32 in Triton by three TF32 products (`input_precision="tf32x3"`): a peer of pairs of float16.

Each factor is split into a high and a low TF32 part, and the products high * low, low * high and high * high are added;
see Triton's documentation of `tl.dot`. Triton chooses the tiles of each size by trying them once.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from harness.nn.layernorm_ops import EPS

Tensor = torch.Tensor

TILES = (
    (128, 256, 32, 8, 3),
    (128, 128, 32, 8, 3),
    (128, 128, 16, 8, 4),
    (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4),
)
"""Rows, columns and depth of a tile, warps, and stages of the pipeline."""
SWIZZLE = 8
"""Rows of tiles that are worked on together, for whom the columns stay in the cache."""


@triton.autotune(
    [
        triton.Config(
            {"tile_rows": rows, "tile_columns": columns, "tile_depth": depth},
            num_warps=warps,
            num_stages=stages,
        )
        for rows, columns, depth, warps, stages in TILES
    ],
    key=["rows", "columns", "depth", "a_down", "b_down"],
)
@triton.jit
def product_kernel(
    a,  # [rows, depth]
    b,  # [depth, columns]
    c,  # [rows, columns], contiguous
    rows,
    columns,
    depth,
    a_down,
    a_across,
    b_down,
    b_across,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    swizzle: tl.constexpr,
):
    """A tile of c = a b; the numbers after the sizes are the factors' strides in elements."""
    down, across = tl.cdiv(rows, tile_rows), tl.cdiv(columns, tile_columns)
    first = tl.program_id(0) // (swizzle * across) * swizzle
    height = min(down - first, swizzle)
    place = tl.program_id(0) % (swizzle * across)
    i = (first + place % height) * tile_rows + tl.arange(0, tile_rows)
    j = place // height * tile_columns + tl.arange(0, tile_columns)
    # Behind the last row and column, others are multiplied once more and not stored.
    i_read, j_read, k = i % rows, j % columns, tl.arange(0, tile_depth)
    a_tile = a + i_read[:, None] * a_down + k[None, :] * a_across
    b_tile = b + k[:, None] * b_down + j_read[None, :] * b_across
    sums = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    for start in range(0, depth, tile_depth):
        left = depth - start
        x = tl.load(a_tile, mask=k[None, :] < left, other=0.0)
        y = tl.load(b_tile, mask=k[:, None] < left, other=0.0)
        sums = tl.dot(x, y, sums, input_precision="tf32x3")
        a_tile += tile_depth * a_across
        b_tile += tile_depth * b_down
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    tl.store(c + i[:, None] * columns + j[None, :], sums, mask=inside)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, depth] times b [depth, columns], both float32 in any layout: [rows, columns]."""
    (rows, depth), columns = a.shape, b.shape[1]
    c = a.new_empty((rows, columns))

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(rows, tile["tile_rows"]) * triton.cdiv(columns, tile["tile_columns"]),)

    product_kernel[grid](a, b, c, rows, columns, depth, *a.stride(), *b.stride(), swizzle=SWIZZLE)
    return c


class Linear(torch.autograd.Function):
    """x [rows, H] to x W^T + b, [rows, O], and its gradients, by this product."""

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return product(x, W.T).add_(b)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, ...]:
        (dy,), (x, W) = gradients, ctx.saved_tensors
        return product(dy, W), product(dy.T, x), dy.sum(0)


def layernorm_linear(x: Tensor, gamma: Tensor, beta: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """PyTorch's LayerNorm, then this product: x [rows, H] to [rows, O]."""
    return Linear.apply(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), W, b)
