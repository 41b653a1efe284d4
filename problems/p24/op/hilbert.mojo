"""Puzzle 24: a Hilbert curve computed from bits, rows gathered by an order and scattered back, and the tiles that a window needs.

A grid of H x W cells is stored row by row: cell = row * W + column, L = H * W cells. An order, [L], holds the cell of each step.
For a tensor [batches, L, d] with a row for each cell, `hilbert_gather_kernel` gathers the rows by step, and
`hilbert_scatter_kernel` scatters them back: each is the other's backward pass. Every size is a run-time argument.

`attention.mojo`, provided, has attention within a window: it reads rows by the order and computes only the tiles that
`window_tiles_kernel` marks. `launches.mojo` launches all of them.
"""

from std.math import ceildiv
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.primitives import block

from .shared.common import ImmPtr, MutPtr

comptime THREADS = 128
"""Threads per block."""


# ---- The curve ----------------------------------------------------------------------------------------------


# ANCHOR: hilbert_index_kernel
def hilbert_index_kernel(
    index: MutPtr[DType.int32],  # [side * side]
    side: Int32,  # a power of two
):
    """Compute the cell of each step. A thread owns a step.

    Two bits of a step select a quarter of a square: 0 top left, 1 bottom left, 2 bottom right, 3 top right.
    The curve is transformed in two quarters: in the first, row and column are exchanged; in the last, both
    are also counted from the other end.
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
    """Compute the step of each cell. A thread owns a cell, and goes from the whole square down to the smallest.
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
    """Gather rows by step: row order[i] becomes row i. (Provided.) A thread owns one element in each of the batches.
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
    """Compute the gather's gradient: scatter rows back to their origin. A thread owns one element."""
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
    ],  # [t, t], t = ceil(L / tile): 1 if a tile of queries needs a tile of keys, else 0
    order: ImmPtr[DType.int32],  # [L]
    length: Int32,
    width: Int32,
    radius: Int32,
    tile: Int32,
):
    """Mark the tiles that contain a pair of cells at most `radius` apart, along both rows and columns.

    A block owns a tile of queries and a tile of keys, tile * tile pairs of positions in the order; the last tile may be shorter.
    """
    var L = Int(length)
    var T = Int(tile)
    var W = Int(width)
    var r = Int(radius)
    var count = ceildiv(L, T)
    var t0 = block_idx.x * T
    for query_tile in range(block_idx.y, count, grid_dim.y):
        var s0 = query_tile * T
        var in_window = Int32(0)
        for pair in range(thread_idx.x, T * T, THREADS):
            var s = s0 + pair // T
            var t = t0 + pair % T
            # BLANK-START tiles: in_window = 1 where s and t are positions whose cells are near each other on the grid
            # FILL IN (about 7 lines)
            # BLANK-END tiles
        # block.max contains barriers, so every thread calls it.
        var any = block.max[block_size=THREADS](in_window)
        if thread_idx.x == 0:
            tiles[unsafe_offset=query_tile * count + block_idx.x] = any


# ANCHOR_END: window_tiles_kernel
