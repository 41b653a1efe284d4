"""Attention within a window of a grid, forward and backward, provided: it reads rows by the order, and skips whole tiles.

Tensors have a row for each cell, in the order in which cells are stored; a block owns TILE consecutive positions of the order,
reads their rows at order[i], and writes results there. So nothing is gathered beforehand or scattered afterwards. Tiles of keys
that are 0 in `tiles` are skipped; in the others each pair is checked against the window.

The formulas are those of puzzle 23: an online softmax forward; backward recomputes P = exp(S - lse), dS = P * (dO V^T - delta).
"""

from std.math import ceildiv, exp, log
from std.memory import AddressSpace
from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.primitives import warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import ImmPtr, MutPtr, accum_type
from .window import MAX_HEAD, TILE, PackedSizes, WindowSizes

comptime LAYOUT = row_major[TILE, TILE + 1]()
"""A tile in shared memory. The column of padding puts the elements of a tile column in different banks."""
comptime CHUNKS = MAX_HEAD // TILE
"""Tiles across a row of MAX_HEAD elements."""


@always_inline
def cell_at(order: ImmPtr[DType.int32], position: Int, sizes: WindowSizes) -> Int:
    """Return the cell of a position, or -1 past the end."""
    return Int(order[unsafe_offset=position]) if position < Int(sizes.length) else -1


@always_inline
def row_element[dtype: DType](matrix: ImmPtr[dtype], cell: Int, column: Int, d: Int) -> Scalar[dtype]:
    """Return an element of a cell's row, or 0 if it is out of bounds."""
    return matrix[unsafe_offset=cell * d + column] if cell >= 0 and column < d else Scalar[dtype](0)


@always_inline
def rows_product[
    dtype: DType
](left: ImmPtr[dtype], right: ImmPtr[dtype], left_cell: Int, right_cell: Int, d: Int) -> Scalar[
    accum_type[dtype]
]:
    """Return the dot product of row y of one tile and row x of another, in thread (x, y). Every thread of the block must call it.

    `left_cell` and `right_cell` are the cells of each tile's row thread_idx.y, which this thread loads.
    """
    comptime accum = accum_type[dtype]
    var left_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var right_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var total = Scalar[accum](0)
    for d0 in range(0, d, TILE):
        left_tile[y, x] = row_element(left, left_cell, d0 + x, d)
        right_tile[y, x] = row_element(right, right_cell, d0 + x, d)
        barrier()
        var sum = Scalar[accum](0)
        comptime for i in range(TILE):
            sum += left_tile[y, i].cast[accum]() * right_tile[x, i].cast[accum]()
        total += sum
        barrier()
    return total


@always_inline
def is_tile_needed(tiles: ImmPtr[DType.int32], s0: Int, t0: Int, sizes: WindowSizes) -> Bool:
    """Return whether the tile of queries at position s0 needs the tile of keys at position t0."""
    var T = Int(sizes.tile)
    return tiles[unsafe_offset=s0 // T * sizes.tiles() + t0 // T] != 0


# ANCHOR: window_forward_kernel
def window_forward_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [batches, L, d]
    lse: MutPtr[accum_type[dtype]],  # [batches, L]
    query: ImmPtr[dtype],  # [batches, L, d]
    key: ImmPtr[dtype],  # [batches, L, d]
    value: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    tiles: ImmPtr[DType.int32],  # [t, t]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute output and lse. A block owns TILE queries; thread (x, y) computes elements x, x + TILE, ... of query y's row.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = WindowSizes(packed)
    var L = Int(sizes.length)
    var d = Int(sizes.head_dim)
    var weights = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](LAYOUT)
    var values = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var s0 = block_idx.x * TILE
    var query_cell = cell_at(order, s0 + y, sizes)
    for head in range(block_idx.y, Int(sizes.batches), grid_dim.y):
        var Q = query.unsafe_offset(head * L * d)
        var K = key.unsafe_offset(head * L * d)
        var V = value.unsafe_offset(head * L * d)
        var largest = Scalar[accum].MIN
        var total = Scalar[accum](0)
        var sums = SIMD[accum, CHUNKS](0)
        for t0 in range(0, L, TILE):
            if not is_tile_needed(tiles, s0, t0, sizes):
                continue
            var loaded_cell = cell_at(order, t0 + y, sizes)
            var key_cell = cell_at(order, t0 + x, sizes)
            var score = scale * rows_product[dtype](Q, K, query_cell, loaded_cell, d)
            if query_cell < 0 or key_cell < 0 or not sizes.in_window(query_cell, key_cell):
                score = Scalar[accum].MIN
            var new_largest = max(largest, warp.lane_group_max[num_lanes=TILE](score))
            # Before a row sees a key, subtracting -inf would give NaN; subtracting 0 makes the exponentials 0.
            var shift = new_largest if new_largest > Scalar[accum].MIN else Scalar[accum](0)
            var rescale = exp(largest - shift)
            var weight = exp(score - shift)
            total = total * rescale + warp.lane_group_sum[num_lanes=TILE](weight)
            largest = new_largest
            weights[y, x] = weight
            for chunk in range(ceildiv(d, TILE)):
                values[y, x] = row_element(V, loaded_cell, chunk * TILE + x, d)
                barrier()
                var sum = Scalar[accum](0)
                comptime for i in range(TILE):
                    sum += weights[y, i] * values[i, x].cast[accum]()
                sums[chunk] = sums[chunk] * rescale + sum
                barrier()
        if query_cell >= 0:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var index = (head * L + query_cell) * d + chunk * TILE + x
                    output[unsafe_offset=index] = (sums[chunk] / total).cast[dtype]()
            if x == 0:
                lse[unsafe_offset=head * L + query_cell] = largest + log(total)


# ANCHOR_END: window_forward_kernel


# ANCHOR: window_query_kernel
def window_query_kernel[
    dtype: DType
](
    grad_query: MutPtr[dtype],  # [batches, L, d]
    delta: MutPtr[accum_type[dtype]],  # [batches, L]
    grad_output: ImmPtr[dtype],  # [batches, L, d]
    query: ImmPtr[dtype],  # [batches, L, d]
    key: ImmPtr[dtype],  # [batches, L, d]
    value: ImmPtr[dtype],  # [batches, L, d]
    output: ImmPtr[dtype],  # [batches, L, d]
    lse: ImmPtr[accum_type[dtype]],  # [batches, L]
    order: ImmPtr[DType.int32],  # [L]
    tiles: ImmPtr[DType.int32],  # [t, t]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute the gradient of the query, and delta for the next kernel. A block owns TILE queries, as in the forward pass.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = WindowSizes(packed)
    var L = Int(sizes.length)
    var d = Int(sizes.head_dim)
    var slopes = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](LAYOUT)
    var keys = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var s0 = block_idx.x * TILE
    var query_cell = cell_at(order, s0 + y, sizes)
    for head in range(block_idx.y, Int(sizes.batches), grid_dim.y):
        var Q = query.unsafe_offset(head * L * d)
        var K = key.unsafe_offset(head * L * d)
        var V = value.unsafe_offset(head * L * d)
        var O = output.unsafe_offset(head * L * d)
        var dO = grad_output.unsafe_offset(head * L * d)
        var partial = Scalar[accum](0)
        for i in range(x, d, TILE):
            partial += (
                row_element(dO, query_cell, i, d).cast[accum]()
                * row_element(O, query_cell, i, d).cast[accum]()
            )
        var row_delta = warp.lane_group_sum[num_lanes=TILE](partial)
        if x == 0 and query_cell >= 0:
            delta[unsafe_offset=head * L + query_cell] = row_delta
        var row_lse = lse[unsafe_offset=head * L + query_cell] if query_cell >= 0 else Scalar[accum](0)
        var sums = SIMD[accum, CHUNKS](0)
        for t0 in range(0, L, TILE):
            if not is_tile_needed(tiles, s0, t0, sizes):
                continue
            var loaded_cell = cell_at(order, t0 + y, sizes)
            var key_cell = cell_at(order, t0 + x, sizes)
            var score = scale * rows_product[dtype](Q, K, query_cell, loaded_cell, d)
            var dP = rows_product[dtype](dO, V, query_cell, loaded_cell, d)
            var slope = scale * exp(score - row_lse) * (dP - row_delta)
            if query_cell < 0 or key_cell < 0 or not sizes.in_window(query_cell, key_cell):
                slope = 0
            slopes[y, x] = slope
            for chunk in range(ceildiv(d, TILE)):
                keys[y, x] = row_element(K, loaded_cell, chunk * TILE + x, d)
                barrier()
                var sum = Scalar[accum](0)
                comptime for i in range(TILE):
                    sum += slopes[y, i] * keys[i, x].cast[accum]()
                sums[chunk] += sum
                barrier()
        if query_cell >= 0:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var index = (head * L + query_cell) * d + chunk * TILE + x
                    grad_query[unsafe_offset=index] = sums[chunk].cast[dtype]()


# ANCHOR_END: window_query_kernel


# ANCHOR: window_key_value_kernel
def window_key_value_kernel[
    dtype: DType
](
    grad_key: MutPtr[dtype],  # [batches, L, d]
    grad_value: MutPtr[dtype],  # [batches, L, d]
    grad_output: ImmPtr[dtype],  # [batches, L, d]
    query: ImmPtr[dtype],  # [batches, L, d]
    key: ImmPtr[dtype],  # [batches, L, d]
    value: ImmPtr[dtype],  # [batches, L, d]
    lse: ImmPtr[accum_type[dtype]],  # [batches, L]
    delta: ImmPtr[accum_type[dtype]],  # [batches, L]
    order: ImmPtr[DType.int32],  # [L]
    tiles: ImmPtr[DType.int32],  # [t, t]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute the gradients of key and value. A block owns TILE keys; thread (x, y) has query s0 + x and key t0 + y.

    `tiles` is read at [query's tile, key's tile], as in the other two kernels: they loop over a row of it, this
    kernel over a column.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = WindowSizes(packed)
    var L = Int(sizes.length)
    var d = Int(sizes.head_dim)
    var weights = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](LAYOUT)
    var slopes = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](LAYOUT)
    var queries = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var grads = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var t0 = block_idx.x * TILE
    var key_cell = cell_at(order, t0 + y, sizes)
    for head in range(block_idx.y, Int(sizes.batches), grid_dim.y):
        var Q = query.unsafe_offset(head * L * d)
        var K = key.unsafe_offset(head * L * d)
        var V = value.unsafe_offset(head * L * d)
        var dO = grad_output.unsafe_offset(head * L * d)
        var key_sums = SIMD[accum, CHUNKS](0)
        var value_sums = SIMD[accum, CHUNKS](0)
        for s0 in range(0, L, TILE):
            if not is_tile_needed(tiles, s0, t0, sizes):
                continue
            var loaded_cell = cell_at(order, s0 + y, sizes)
            var query_cell = cell_at(order, s0 + x, sizes)
            var score = scale * rows_product[dtype](K, Q, key_cell, loaded_cell, d)
            var dP = rows_product[dtype](V, dO, key_cell, loaded_cell, d)
            var weight = Scalar[accum](0)
            var row_delta = Scalar[accum](0)
            if query_cell >= 0 and key_cell >= 0 and sizes.in_window(query_cell, key_cell):
                weight = exp(score - lse[unsafe_offset=head * L + query_cell])
                row_delta = delta[unsafe_offset=head * L + query_cell]
            weights[y, x] = weight
            slopes[y, x] = scale * weight * (dP - row_delta)
            for chunk in range(ceildiv(d, TILE)):
                queries[y, x] = row_element(Q, loaded_cell, chunk * TILE + x, d)
                grads[y, x] = row_element(dO, loaded_cell, chunk * TILE + x, d)
                barrier()
                var key_sum = Scalar[accum](0)
                var value_sum = Scalar[accum](0)
                comptime for i in range(TILE):
                    key_sum += slopes[y, i] * queries[i, x].cast[accum]()
                    value_sum += weights[y, i] * grads[i, x].cast[accum]()
                key_sums[chunk] += key_sum
                value_sums[chunk] += value_sum
                barrier()
        if key_cell >= 0:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var index = (head * L + key_cell) * d + chunk * TILE + x
                    grad_key[unsafe_offset=index] = key_sums[chunk].cast[dtype]()
                    grad_value[unsafe_offset=index] = value_sums[chunk].cast[dtype]()


# ANCHOR_END: window_key_value_kernel
