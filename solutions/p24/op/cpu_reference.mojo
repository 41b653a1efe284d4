"""Puzzle 24 on the CPU, given complete: plain loops over cells, to read after the blanks. Sums are kept in float64."""

from std.math import log

from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.exponential import exponential
from .window import WindowBackward, WindowForward, WindowSizes

comptime accum = DType.float64
"""The type of every sum on the CPU."""


def curve_cpu(index: MutPtr[DType.int32], inverse: MutPtr[DType.int32], side: Int):
    """The index by doubling: a curve through a square four times makes that of the next. Then the inverse from it.
    """
    index[unsafe_offset=0] = 0
    var size = 1
    while size < side:
        var count = size * size
        # From the last quarter to the first, which overwrites the curve that all four are made of.
        for i in range(4 * count):
            var step = 4 * count - 1 - i
            var cell = Int(index[unsafe_offset=step % count])
            var row = cell // side
            var column = cell % side
            var quarter = step // count
            if quarter == 3:
                index[unsafe_offset=step] = Int32((size - 1 - column) * side + 2 * size - 1 - row)
            elif quarter == 0:
                index[unsafe_offset=step] = Int32(column * side + row)
            else:
                index[unsafe_offset=step] = Int32((row + size) * side + column + (quarter - 1) * size)
        size *= 2
    for step in range(side * side):
        inverse[unsafe_offset=Int(index[unsafe_offset=step])] = Int32(step)


def gather_cpu[
    dtype: DType
](
    gathered: MutPtr[dtype],  # [batches, L, d]
    input: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int,
    L: Int,
    d: Int,
):
    """Rows in the order of the steps."""
    for row in range(batches * L):
        var cell = row // L * L + Int(order[unsafe_offset=row % L])
        for i in range(d):
            gathered[unsafe_offset=row * d + i] = input[unsafe_offset=cell * d + i]


def scatter_cpu[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [batches, L, d]
    grad_gathered: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int,
    L: Int,
    d: Int,
):
    """Rows in the order of the steps, back where they came from."""
    for row in range(batches * L):
        var cell = row // L * L + Int(order[unsafe_offset=row % L])
        for i in range(d):
            grad_input[unsafe_offset=cell * d + i] = grad_gathered[unsafe_offset=row * d + i]


def tiles_cpu(tiles: MutPtr[DType.int32], order: ImmPtr[DType.int32], sizes: WindowSizes):
    """A 1 for each pair of tiles that holds a pair of near cells."""
    var count = sizes.tiles()
    var T = Int(sizes.tile)
    for i in range(count * count):
        tiles[unsafe_offset=i] = 0
    for s in range(Int(sizes.length)):
        for t in range(Int(sizes.length)):
            if sizes.in_window(Int(order[unsafe_offset=s]), Int(order[unsafe_offset=t])):
                tiles[unsafe_offset=s // T * count + t // T] = 1


def dot_cpu[dtype: DType](a: ImmPtr[dtype], b: ImmPtr[dtype], count: Int) -> Scalar[accum]:
    """The dot product of two rows."""
    var total = Scalar[accum](0)
    for i in range(count):
        total += a[unsafe_offset=i].cast[accum]() * b[unsafe_offset=i].cast[accum]()
    return total


def sees(order: ImmPtr[DType.int32], tiles: ImmPtr[DType.int32], s: Int, t: Int, sizes: WindowSizes) -> Bool:
    """Whether position s sees position t: their tiles are computed, and their cells are near."""
    var T = Int(sizes.tile)
    return tiles[unsafe_offset=s // T * sizes.tiles() + t // T] != 0 and sizes.in_window(
        Int(order[unsafe_offset=s]), Int(order[unsafe_offset=t])
    )


def window_forward_cpu[dtype: DType, //](p: WindowForward[dtype], sums: MutPtr[accum]):  # [d], scratch
    """Output and lse: of each row the largest score, then the exponentials and what they weigh."""
    var L = Int(p.sizes.length)
    var d = Int(p.sizes.head_dim)
    var scale = p.sizes.scale()
    for head in range(Int(p.sizes.batches)):
        for s in range(L):
            var row = head * L + Int(p.order[unsafe_offset=s])
            var q = p.query.unsafe_offset(row * d)
            var largest = Scalar[accum].MIN
            for t in range(L):
                if sees(p.order, p.tiles, s, t, p.sizes):
                    var k = p.key.unsafe_offset((head * L + Int(p.order[unsafe_offset=t])) * d)
                    largest = max(largest, scale * dot_cpu(q, k, d))
            var total = Scalar[accum](0)
            for i in range(d):
                sums[unsafe_offset=i] = 0
            for t in range(L):
                if sees(p.order, p.tiles, s, t, p.sizes):
                    var at = (head * L + Int(p.order[unsafe_offset=t])) * d
                    var weight = exponential(scale * dot_cpu(q, p.key.unsafe_offset(at), d) - largest)
                    total += weight
                    for i in range(d):
                        sums[unsafe_offset=i] += weight * p.value[unsafe_offset=at + i].cast[accum]()
            for i in range(d):
                p.output[unsafe_offset=row * d + i] = (sums[unsafe_offset=i] / total).cast[dtype]()
            p.lse[unsafe_offset=row] = (largest + log(total)).cast[accum_type[dtype]]()


def window_backward_cpu[
    dtype: DType, //
](p: WindowBackward[dtype], sums: MutPtr[accum]):  # [(2 * L + 1) * d], scratch
    """Delta and all three gradients, a head at a time, from probabilities that are computed again."""
    var L = Int(p.sizes.length)
    var d = Int(p.sizes.head_dim)
    var scale = p.sizes.scale()
    var dV = sums.unsafe_offset(L * d)
    var dQ = dV.unsafe_offset(L * d)
    for head in range(Int(p.sizes.batches)):
        for i in range(2 * L * d):
            sums[unsafe_offset=i] = 0
        for s in range(L):
            var row = head * L + Int(p.order[unsafe_offset=s])
            var q = p.query.unsafe_offset(row * d)
            var dO = p.grad_output.unsafe_offset(row * d)
            var delta = dot_cpu(dO, p.output.unsafe_offset(row * d), d)
            p.delta[unsafe_offset=row] = delta.cast[accum_type[dtype]]()
            for i in range(d):
                dQ[unsafe_offset=i] = 0
            for t in range(L):
                if sees(p.order, p.tiles, s, t, p.sizes):
                    var cell = Int(p.order[unsafe_offset=t])
                    var k = p.key.unsafe_offset((head * L + cell) * d)
                    var score = scale * dot_cpu(q, k, d)
                    var weight = exponential(score - p.lse[unsafe_offset=row].cast[accum]())
                    var dP = dot_cpu(dO, p.value.unsafe_offset((head * L + cell) * d), d)
                    var slope = weight * (dP - delta)
                    for i in range(d):
                        dQ[unsafe_offset=i] += slope * k[unsafe_offset=i].cast[accum]()
                        sums[unsafe_offset=cell * d + i] += slope * q[unsafe_offset=i].cast[accum]()
                        dV[unsafe_offset=cell * d + i] += weight * dO[unsafe_offset=i].cast[accum]()
            for i in range(d):
                p.grad_query[unsafe_offset=row * d + i] = (scale * dQ[unsafe_offset=i]).cast[dtype]()
        for i in range(L * d):
            p.grad_key[unsafe_offset=head * L * d + i] = (scale * sums[unsafe_offset=i]).cast[dtype]()
            p.grad_value[unsafe_offset=head * L * d + i] = dV[unsafe_offset=i].cast[dtype]()
