"""Matrix products of the fast variant that run on every GPU, and on the virtual one.

c [m, n] = a b, plus a bias for every column where one is wanted, all row-major, in three forms of the operands:

    "nt"    a [m, k], b [n, k]    output = ln_out W^T
    "nn"    a [m, k], b [k, n]    dln = dY W
    "tn"    a [k, m], b [k, n]    dW = dY^T ln_out

A block owns one square tile of c and walks along k through shared memory; no operand is transposed in memory first.
NVIDIA's tensor cores multiply 16-bit types, and float32 rounded to tf32; every other case is computed without them.
"""

from std.math import ceildiv
from std.memory import AddressSpace, bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, WARP_SIZE, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from shared.common import ImmPtr, MutPtr, accum_type

comptime GEMM_THREADS = 256
"""Threads of a block, whatever the tile."""
comptime CHUNK_BYTES = 16
"""What a thread copies at once: one row of the 8 x 8 matrices of 16-bit elements that tensor cores are fed with."""
comptime DEPTH_CHUNKS = 4
"""Chunks along k in the tile of an operand."""
comptime STAGES = 3
"""Pairs of operand tiles in shared memory or on their way to it: 48 KiB for the larger tile of c."""
comptime WARPS_DOWN = 2
"""The 8 warps of a block lie over its tile of c 2 down,"""
comptime WARPS_ACROSS = 4
"""and 4 across."""
comptime SIDE = 16
"""Threads along each side of a tile in the kernel without tensor cores."""
comptime DEPTH = 16
"""How far one step goes along k in the kernel without tensor cores."""
comptime RUN = 128
"""Terms of a sum before it is added to the total, in the kernel without tensor cores; whole steps."""


def uses_tensor_cores[dtype: DType, tf32: Bool]() -> Bool:
    """Whether NVIDIA's tensor cores multiply these types."""
    return dtype.is_half_float() or (tf32 and dtype == DType.float32)


def blocks_of[dtype: DType, tf32: Bool]() -> Int:
    """Blocks that share a multiprocessor: a bound on the registers of a thread."""
    return 2 if uses_tensor_cores[dtype, tf32]() else 1


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(GEMM_THREADS)),
    `nvvm.minctasm`=SIMDLength(blocks_of[dtype, tf32]()),
)
def gemm_kernel[
    dtype: DType, operands: StaticString, with_bias: Bool, tf32: Bool, tile: Int
](
    c: MutPtr[dtype],  # [m, n]
    a: ImmPtr[dtype],  # [m, k], or [k, m] for "tn"
    b: ImmPtr[dtype],  # [k, n], or [n, k] for "nt"
    bias: ImmPtr[dtype],  # [n], read only with_bias
    m: Int32,
    n: Int32,
    k: Int32,
):
    """One tile of c, by what the GPU has that this is compiled for."""
    comptime if is_nvidia_gpu() and uses_tensor_cores[dtype, tf32]():
        gemm_tensor_cores[dtype, operands, with_bias, tile](c, a, b, bias, Int(m), Int(n), Int(k))
    else:
        gemm_simt[dtype, operands, with_bias, tile](c, a, b, bias, Int(m), Int(n), Int(k))


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


# ---- With tensor cores --------------------------------------------------------------------------------------


comptime SharedPtr[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED]
"""The address of an operand's tile."""


@always_inline
def gemm_tensor_cores[
    dtype: DType, operands: StaticString, with_bias: Bool, tile: Int
](c: MutPtr[dtype], a: ImmPtr[dtype], b: ImmPtr[dtype], bias: ImmPtr[dtype], m: Int, n: Int, k: Int):
    """The product by `mma`. A warp owns tile / 2 x tile / 4 elements of c, in fragments of 16 x 8.

    While the block multiplies one pair of operand tiles, the next are on their way.
    """
    comptime chunk = CHUNK_BYTES // size_of[Scalar[dtype]]()
    comptime depth = DEPTH_CHUNKS * chunk
    comptime down = tile // WARPS_DOWN // 16
    comptime across = tile // WARPS_ACROSS // 8
    var corner = tile_corner[tile](m, n)
    var shared = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED, alignment=CHUNK_BYTES](
        row_major[STAGES * 2 * tile * depth]()
    ).ptr.as_unsafe_any_origin()
    var warp_row = thread_idx.x // WARP_SIZE // WARPS_ACROSS * (tile // WARPS_DOWN)
    var warp_column = thread_idx.x // WARP_SIZE % WARPS_ACROSS * (tile // WARPS_ACROSS)
    var sums = Array[SIMD[DType.float32, 4], down * across](fill=0)

    @__parameter
    @always_inline
    def fetch(step: Int):
        var a_tile = shared.unsafe_offset(step % STAGES * 2 * tile * depth)
        load_tile[tile, operands != "tn"](a_tile, a, corner[0], step * depth, m, k)
        load_tile[tile, operands == "nt"](
            a_tile.unsafe_offset(tile * depth), b, corner[1], step * depth, n, k
        )
        async_copy_commit_group()

    # The first turns only send for tiles.
    for step in range(1 - STAGES, ceildiv(k, depth)):
        if step >= 0:
            async_copy_wait_group(Int32(STAGES - 2))
            # Now everybody's share of this step's tiles is here, and nobody still reads those of the step before.
            barrier()
        fetch(step + STAGES - 1)
        if step < 0:
            continue
        var a_tile = shared.unsafe_offset(step % STAGES * 2 * tile * depth)
        var b_tile = a_tile.unsafe_offset(tile * depth)
        comptime for first in range(0, DEPTH_CHUNKS, 2):
            var a_fragments = Array[SIMD[dtype, chunk], down](fill=0)
            comptime for i in range(down):
                a_fragments[i] = load_rows[tile, operands != "tn"](a_tile, warp_row + i * 16, first)
            comptime for j in range(0, across, 2):
                # Two fragments of b at once: columns j * 8 to j * 8 + 15.
                var pair = load_columns[tile, operands == "nt"](b_tile, warp_column + j * 8, first)
                comptime for i in range(down):
                    comptime for side in range(2):
                        comptime place = i * across + j + side
                        var product = sums[place]
                        mma(
                            product,
                            a_fragments[i],
                            pair.slice[chunk // 2, offset=side * chunk // 2](),
                            sums[place],
                        )
                        sums[place] = product

    # Lane l holds the elements (l / 4, 2 (l % 4)) and its right neighbour of a fragment, and those 8 rows below.
    comptime for i in range(down):
        comptime for below in range(2):
            var row = corner[0] + warp_row + i * 16 + below * 8 + lane_id() // 4
            comptime for j in range(across):
                comptime for right in range(2):
                    var column = corner[1] + warp_column + j * 8 + lane_id() % 4 * 2 + right
                    if row < m and column < n:
                        var total = sums[i * across + j][2 * below + right]
                        comptime if with_bias:
                            total += bias[unsafe_offset=column].cast[DType.float32]()
                        c[unsafe_offset=row * n + column] = total.cast[dtype]()


@always_inline
def place_of[tile: Int, along_k: Bool, chunk: Int](row: Int, chunk_index: Int) -> Int:
    """Where a chunk of an operand's tile lies in shared memory, in elements.

    A tile whose operand runs along k has `tile` rows of DEPTH_CHUNKS chunks, otherwise a row for each k of
    tile / chunk chunks. Within a row the chunks change places from row to row, so that the 8 rows of a matrix that
    is loaded at once lie in different banks.
    """
    comptime if along_k:
        return (row * DEPTH_CHUNKS + (chunk_index ^ (row // 2 % DEPTH_CHUNKS))) * chunk
    elif chunk == 8:
        return (row * (tile // chunk) + (chunk_index ^ (row % 8))) * chunk
    else:
        return (row * (tile // chunk) + (chunk_index ^ (row % 4 * 2))) * chunk


@always_inline
def load_tile[
    dtype: DType, //, tile: Int, along_k: Bool
](target: SharedPtr[dtype], source: ImmPtr[dtype], first: Int, first_k: Int, count: Int, k: Int):
    """Copies a tile of an operand to shared memory: `tile` of its `count` rows (or columns) from `first`, and k from
    `first_k`. What lies outside the operand becomes 0.

    The operand is [count, k] where it runs along_k, else [k, count].
    """
    comptime chunk = CHUNK_BYTES // size_of[Scalar[dtype]]()
    comptime chunks_of_a_row = DEPTH_CHUNKS if along_k else tile // chunk
    var rows = count if along_k else k
    var columns = k if along_k else count
    var first_row = first if along_k else first_k
    var first_column = first_k if along_k else first
    var aligned = Int(source) % CHUNK_BYTES == 0 and columns % chunk == 0
    comptime for i in range(tile * DEPTH_CHUNKS // GEMM_THREADS):
        var index = i * GEMM_THREADS + thread_idx.x
        var row = index // chunks_of_a_row
        var chunk_index = index % chunks_of_a_row
        var place = target.unsafe_offset(place_of[tile, along_k, chunk](row, chunk_index))
        var column = first_column + chunk_index * chunk
        var inside = first_row + row < rows and column < columns
        var start = (first_row + row) * columns + column
        if aligned:
            async_copy[CHUNK_BYTES, fill=Scalar[dtype](0)](
                source.unsafe_offset(start if inside else 0).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                place,
                Int32(CHUNK_BYTES) if inside else 0,
            )
        else:
            for e in range(chunk):
                var exists = inside and column + e < columns
                place[unsafe_offset=e] = source[unsafe_offset=start + e] if exists else 0


@always_inline
def load_rows[
    dtype: DType, //, tile: Int, along_k: Bool, chunk: Int = CHUNK_BYTES // size_of[Scalar[dtype]]()
](shared: SharedPtr[dtype], first: Int, first_chunk: Int) -> SIMD[dtype, chunk]:
    """This lane's share of 16 rows of a, two chunks deep, as `mma` wants it.

    The share is of four matrices: rows 0 to 7 and 8 to 15 of the first chunk, then of the second.
    """
    var matrix = lane_id() // 8
    var r = lane_id() % 8
    comptime if along_k:
        return load_matrices[chunk](
            shared, place_of[tile, True, chunk](first + matrix % 2 * 8 + r, first_chunk + matrix // 2)
        )
    elif chunk == 8:
        var depth = first_chunk * chunk + matrix // 2 * 8 + r
        return ld_matrix[chunk, transpose=True](
            shared.unsafe_offset(place_of[tile, False, chunk](depth, first // chunk + matrix % 2))
        )
    else:
        var share = SIMD[dtype, chunk](0)
        comptime for part in range(4):
            share[part] = load_element[tile](
                shared,
                first + part % 2 * 8 + lane_id() // 4,
                first_chunk * chunk + part // 2 * 4 + lane_id() % 4,
            )
        return to_tf32(share)


@always_inline
def load_columns[
    dtype: DType, //, tile: Int, along_k: Bool, chunk: Int = CHUNK_BYTES // size_of[Scalar[dtype]]()
](shared: SharedPtr[dtype], first: Int, first_chunk: Int) -> SIMD[dtype, chunk]:
    """This lane's share of 16 columns of b, two chunks deep: half of it for the first 8 columns, half for the others.

    The share is of four matrices: the first and the second chunk of columns 0 to 7, then of columns 8 to 15.
    """
    var matrix = lane_id() // 8
    var r = lane_id() % 8
    comptime if along_k:
        return load_matrices[chunk](
            shared, place_of[tile, True, chunk](first + matrix // 2 * 8 + r, first_chunk + matrix % 2)
        )
    elif chunk == 8:
        var depth = first_chunk * chunk + matrix % 2 * 8 + r
        return ld_matrix[chunk, transpose=True](
            shared.unsafe_offset(place_of[tile, False, chunk](depth, first // chunk + matrix // 2))
        )
    else:
        var share = SIMD[dtype, chunk](0)
        comptime for part in range(4):
            share[part] = load_element[tile](
                shared,
                first + part // 2 * 8 + lane_id() // 4,
                first_chunk * chunk + part % 2 * 4 + lane_id() % 4,
            )
        return to_tf32(share)


@always_inline
def load_matrices[dtype: DType, //, chunk: Int](shared: SharedPtr[dtype], place: Int) -> SIMD[dtype, chunk]:
    """Four matrices of 8 rows, a chunk each; lane l gives the address of row l % 8 of matrix l / 8.

    A chunk of float32 holds 4 elements where `ldmatrix` sees 8 of 16 bits: its lanes get what tf32 fragments want.
    """
    comptime if chunk == 8:
        return ld_matrix[chunk](shared.unsafe_offset(place))
    else:
        var halves = ld_matrix[8](shared.unsafe_offset(place).unsafe_bitcast[BFloat16]())
        return to_tf32(bitcast[dtype, chunk](halves))


@always_inline
def load_element[
    dtype: DType, //, tile: Int
](shared: SharedPtr[dtype], column: Int, depth: Int) -> Scalar[dtype]:
    """One float32 of a tile that has a row for each k; `ldmatrix` cannot transpose elements of 32 bits."""
    return shared[unsafe_offset=place_of[tile, False, 4](depth, column // 4) + column % 4]


@always_inline
def to_tf32[dtype: DType, width: SIMDLength](values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Rounds float32 to the 10 bits of tf32, to nearest. Unrounded, the tensor cores would cut the rest off.
    """
    var rounded = values
    comptime for i in range(Int(width)):
        rounded[i] = inlined_assembly[
            "cvt.rna.tf32.f32 $0, $1;", Scalar[dtype], constraints="=f,f", has_side_effect=False
        ](values[i])
    return rounded


# ---- Without tensor cores -----------------------------------------------------------------------------------


@always_inline
def gemm_simt[
    dtype: DType, operands: StaticString, with_bias: Bool, tile: Int
](c: MutPtr[dtype], a: ImmPtr[dtype], b: ImmPtr[dtype], bias: ImmPtr[dtype], m: Int, n: Int, k: Int):
    """The product without tensor cores. A thread owns 4 x 4 elements of every 64 x 64 square of the block's tile.

    Sums of RUN terms are added to the total: a sum of short sums is rounded less often than one long sum.
    """
    comptime accum = accum_type[dtype]
    comptime squares = tile // (4 * SIDE)
    comptime Sums = Array[SIMD[accum, 4], squares * squares * 4]
    var corner = tile_corner[tile](m, n)
    var tx = thread_idx.x % SIDE * 4
    var ty = thread_idx.x // SIDE * 4
    # Both tiles have a row for each k; the padding spreads their columns over the banks.
    comptime pitch = tile + 4
    comptime layout = row_major[DEPTH * pitch]()
    var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED, alignment=CHUNK_BYTES](
        layout
    ).ptr
    var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED, alignment=CHUNK_BYTES](
        layout
    ).ptr
    var totals = Sums(fill=0)

    for run in range(0, k, RUN):
        var sums = Sums(fill=0)
        for start in range(run, min(run + RUN, k), DEPTH):
            load_converted[tile, operands != "tn"](a_tile, a, corner[0], start, m, k)
            load_converted[tile, operands == "nt"](b_tile, b, corner[1], start, n, k)
            barrier()
            for depth in range(DEPTH):
                comptime for si in range(squares):
                    var rows = a_tile.unsafe_load[width=4, alignment=CHUNK_BYTES](
                        depth * pitch + si * 64 + ty
                    )
                    comptime for sj in range(squares):
                        var columns = b_tile.unsafe_load[width=4, alignment=CHUNK_BYTES](
                            depth * pitch + sj * 64 + tx
                        )
                        comptime for i in range(4):
                            comptime place = (si * squares + sj) * 4 + i
                            sums[place] = columns.fma(rows[i], sums[place])
            # Nobody may load the next tiles while a neighbour still reads these.
            barrier()
        comptime for place in range(squares * squares * 4):
            totals[place] += sums[place]

    comptime for si in range(squares):
        comptime for i in range(4):
            var row = corner[0] + si * 64 + ty + i
            comptime for sj in range(squares):
                comptime for j in range(4):
                    var column = corner[1] + sj * 64 + tx + j
                    if row < m and column < n:
                        var total = totals[(si * squares + sj) * 4 + i][j]
                        comptime if with_bias:
                            total += bias[unsafe_offset=column].cast[accum]()
                        c[unsafe_offset=row * n + column] = total.cast[dtype]()


@always_inline
def load_converted[
    dtype: DType, accum: DType, //, tile: Int, along_k: Bool
](
    target: Pointer[mut=True, Scalar[accum], _, address_space=AddressSpace.SHARED],
    source: ImmPtr[dtype],
    first: Int,
    first_k: Int,
    count: Int,
    k: Int,
):
    """Copies a tile of an operand to shared memory as `load_tile` does, in the type of sums, with a row for each k.
    """
    comptime for i in range(tile * DEPTH // GEMM_THREADS):
        var index = i * GEMM_THREADS + thread_idx.x
        var depth = index % DEPTH if along_k else index // tile
        var element = index // DEPTH if along_k else index % tile
        var inside = first_k + depth < k and first + element < count
        var place = (
            (first + element) * k
            + first_k
            + depth if along_k else (first_k + depth) * count
            + first
            + element
        )
        target[unsafe_offset=depth * (tile + 4) + element] = source[unsafe_offset=place].cast[
            accum
        ]() if inside else 0
