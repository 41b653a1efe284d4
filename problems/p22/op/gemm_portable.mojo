"""Matrix products of the fast variant that run on every GPU, and on the virtual one.

c [m, n] = a b, plus a bias for every column where one is wanted, all row-major, in three forms of the operands:

    "nt"    a [m, k], b [n, k]    output = ln_out W^T
    "nn"    a [m, k], b [k, n]    dln = dY W
    "tn"    a [k, m], b [k, n]    dW = dY^T ln_out

A block owns one tile of c and walks along k through shared memory. No operand is transposed in memory first.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from max.gpu import barrier, block_idx, thread_idx
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .common import ImmPtr, MutPtr, accum_type

comptime GEMM_THREADS = 256
"""Threads of a block, whatever the tile."""
comptime SIDE = 16
"""Threads along each side of a tile in the kernel without tensor cores."""
comptime DEPTH = 16
"""How far one step goes along k."""


@always_inline
def tile_corner[tile: Int](m: Int, n: Int) -> Tuple[Int, Int]:
    """The first row and column of this block's tile.

    Blocks with neighbouring numbers take tiles that share rows and columns, so that what one of them has loaded is
    still in the L2 cache for the next: down GROUP tiles, then one to the right.
    """
    comptime GROUP = 8
    var down = ceildiv(m, tile)
    var across = ceildiv(n, tile)
    var band = block_idx.x // (GROUP * across)
    var height = min(GROUP, down - band * GROUP)
    var within = block_idx.x - band * GROUP * across
    return (band * GROUP + within % height) * tile, within // height * tile


def gemm_simt[
    dtype: DType, operands: StaticString, with_bias: Bool, tile: Int
](
    c: MutPtr[dtype],  # [m, n]
    a: ImmPtr[dtype],  # [m, k], or [k, m] for "tn"
    b: ImmPtr[dtype],  # [k, n], or [n, k] for "nt"
    bias: ImmPtr[dtype],  # [n], read only with_bias
    m: Int32,
    n: Int32,
    k: Int32,
):
    """The product without tensor cores. A thread owns 4 x 4 elements of every 64 x 64 square of the block's tile."""
    comptime accum = accum_type[dtype]
    comptime squares = tile // (4 * SIDE)
    var M = Int(m)
    var N = Int(n)
    var K = Int(k)
    var corner = tile_corner[tile](M, N)
    var first_row = corner[0]
    var first_column = corner[1]
    var tx = thread_idx.x % SIDE
    var ty = thread_idx.x // SIDE

    # Both tiles lie with k along their rows; the padding spreads a column of them over the banks.
    comptime pitch = tile + 4
    var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[DEPTH, pitch]())
    var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[DEPTH, pitch]())
    var sums = Array[SIMD[accum, 4], squares * squares * 4](fill=0)

    for start in range(0, K, DEPTH):
        comptime for i in range(tile * DEPTH // GEMM_THREADS):
            var index = i * GEMM_THREADS + thread_idx.x
            comptime if operands == "tn":
                var depth = index // tile
                var row = index % tile
                var inside = start + depth < K and first_row + row < M
                var place = (start + depth) * M + first_row + row
                a_tile[depth, row] = a[unsafe_offset=place].cast[accum]() if inside else 0
            else:
                var depth = index % DEPTH
                var row = index // DEPTH
                var inside = start + depth < K and first_row + row < M
                var place = (first_row + row) * K + start + depth
                a_tile[depth, row] = a[unsafe_offset=place].cast[accum]() if inside else 0
            comptime if operands == "nt":
                var depth = index % DEPTH
                var column = index // DEPTH
                var inside = start + depth < K and first_column + column < N
                var place = (first_column + column) * K + start + depth
                b_tile[depth, column] = b[unsafe_offset=place].cast[accum]() if inside else 0
            else:
                var depth = index // tile
                var column = index % tile
                var inside = start + depth < K and first_column + column < N
                var place = (start + depth) * N + first_column + column
                b_tile[depth, column] = b[unsafe_offset=place].cast[accum]() if inside else 0
        barrier()

        comptime for depth in range(DEPTH):
            comptime for si in range(squares):
                var rows = a_tile.ptr.unsafe_load[width=4, alignment=16](depth * pitch + si * 64 + ty * 4)
                comptime for sj in range(squares):
                    var columns = b_tile.ptr.unsafe_load[width=4, alignment=16](depth * pitch + sj * 64 + tx * 4)
                    comptime for i in range(4):
                        comptime place = (si * squares + sj) * 4 + i
                        sums[place] = columns.fma(rows[i], sums[place])
        # Nobody may load the next tiles while a neighbour still reads these.
        barrier()

    comptime for si in range(squares):
        comptime for i in range(4):
            var row = first_row + si * 64 + ty * 4 + i
            comptime for sj in range(squares):
                comptime for j in range(4):
                    var column = first_column + sj * 64 + tx * 4 + j
                    if row < M and column < N:
                        var total = sums[(si * squares + sj) * 4 + i][j]
                        comptime if with_bias:
                            total += bias[unsafe_offset=column].cast[accum]()
                        c[unsafe_offset=row * N + column] = total.cast[dtype]()
