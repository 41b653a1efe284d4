"""Puzzle 24: a Hilbert curve by bits, rows gathered along an order and put back, and the tiles that a window needs.

A grid of H x W cells is stored row by row: cell = row * W + column, L = H * W cells. An order, [L], is the cell at each step. Of a
tensor [batches, L, d] with a row for each cell, `hilbert_gather_kernel` takes the rows in the order of the steps, and
`hilbert_scatter_kernel` puts them back: each is the other's backward pass. Every size is a run-time argument.

`attention.mojo` holds attention within a window, given: it reads through the order and computes the tiles that
`window_tiles_kernel` names. `launches.mojo` launches all of them.
"""

from std.math import ceildiv
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.primitives import block

from .shared.common import ImmPtr, MutPtr

comptime THREADS = 128
"""Threads of a block."""


# ---- The curve ----------------------------------------------------------------------------------------------


# ANCHOR: hilbert_index_kernel
def hilbert_index_kernel(
    index: MutPtr[DType.int32],  # [side * side]
    side: Int32,  # a power of two
):
    """The cell at each step. A thread owns a step.

    Two bits of a step say in which quarter of a square it is: 0 top left, 1 bottom left, 2 bottom right, 3 top right. The curve
    through the first and the last quarter is turned: of the first, row and column are exchanged; of the last, both are
    counted from the other end first.
    """
    var step = block_idx.x * THREADS + thread_idx.x
    var whole = Int(side)
    if step < whole * whole:
        var rest = step
        var row = 0
        var column = 0
        var size = 1
        while size < whole:
            # BLANK-START index: from quarter = rest & 3, turn the square of `size` so far, then move it to its quarter
            # FILL IN (about 10 lines)
            # BLANK-END index
            rest >>= 2
            size *= 2
        index[unsafe_offset=step] = Int32(row * whole + column)


# ANCHOR_END: hilbert_index_kernel


# ANCHOR: hilbert_inverse_kernel
def hilbert_inverse_kernel(
    inverse: MutPtr[DType.int32],  # [side * side]
    side: Int32,  # a power of two
):
    """The step at which each cell comes. A thread owns a cell, and goes from the whole square to the smallest.
    """
    var cell = block_idx.x * THREADS + thread_idx.x
    var whole = Int(side)
    if cell < whole * whole:
        var row = cell // whole
        var column = cell % whole
        var step = 0
        var size = whole // 2
        while size > 0:
            # BLANK-START inverse: the quarter's number, put after step's digits; then row and column inside it, turned back
            # FILL IN (about 11 lines)
            # BLANK-END inverse
            size //= 2
        inverse[unsafe_offset=cell] = Int32(step)


# ANCHOR_END: hilbert_inverse_kernel


# ---- Permutations -------------------------------------------------------------------------------------------


# ANCHOR: hilbert_gather_kernel
def hilbert_gather_kernel[
    dtype: DType
](
    gathered: MutPtr[dtype],  # [batches, L, d]
    input: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int32,
    length: Int32,
    head_dim: Int32,
):
    """Rows in the order of the steps: row order[i] becomes row i. Given. A thread owns one element of every batch.
    """
    var d = Int(head_dim)
    var count = Int(length) * d
    var element = block_idx.x * THREADS + thread_idx.x
    if element < count:
        var cell = Int(order[unsafe_offset=element // d])
        for batch in range(block_idx.y, Int(batches), grid_dim.y):
            var rows = input.unsafe_offset(batch * count)
            gathered[unsafe_offset=batch * count + element] = rows[unsafe_offset=cell * d + element % d]


# ANCHOR_END: hilbert_gather_kernel


# ANCHOR: hilbert_scatter_kernel
def hilbert_scatter_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [batches, L, d]
    grad_gathered: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int32,
    length: Int32,
    head_dim: Int32,
):
    """The gradient of the gathered tensor: each row goes back to its origin. A thread owns one element."""
    var d = Int(head_dim)
    var count = Int(length) * d
    var element = block_idx.x * THREADS + thread_idx.x
    if element < count:
        var cell = Int(order[unsafe_offset=element // d])
        for batch in range(block_idx.y, Int(batches), grid_dim.y):
            var from_steps = grad_gathered.unsafe_offset(batch * count)
            var to_cells = grad_input.unsafe_offset(batch * count)
            # BLANK-START dgather: one element, from the thread's place among the steps to its place among the cells
            # FILL IN (about 1 line)
            # BLANK-END dgather


# ANCHOR_END: hilbert_scatter_kernel


# ---- The tiles of a window ----------------------------------------------------------------------------------


# ANCHOR: window_tiles_kernel
def window_tiles_kernel(
    tiles: MutPtr[
        DType.int32
    ],  # [t, t], t = ceil(L / tile): 1 where a tile of queries needs a tile of keys, else 0
    order: ImmPtr[DType.int32],  # [L]
    length: Int32,
    width: Int32,
    radius: Int32,
    tile: Int32,
):
    """Mark the tiles with a pair of cells at most `radius` apart, along rows and along columns.

    A block owns a tile of queries and one of keys, tile * tile pairs of positions in the order; the last tile may hold fewer.
    """
    var L = Int(length)
    var T = Int(tile)
    var W = Int(width)
    var r = Int(radius)
    var count = ceildiv(L, T)
    var t0 = block_idx.x * T
    for query_tile in range(block_idx.y, count, grid_dim.y):
        var s0 = query_tile * T
        var near = Int32(0)
        for pair in range(thread_idx.x, T * T, THREADS):
            var s = s0 + pair // T
            var t = t0 + pair % T
            # BLANK-START tiles: near = 1 where s and t are positions whose cells are near each other on the grid
            # FILL IN (about 7 lines)
            # BLANK-END tiles
        # block.max holds barriers, so every thread calls it.
        var any = block.max[block_size=THREADS](near)
        if thread_idx.x == 0:
            tiles[unsafe_offset=query_tile * count + block_idx.x] = any


# ANCHOR_END: window_tiles_kernel
