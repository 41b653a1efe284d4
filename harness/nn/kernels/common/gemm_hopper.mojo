"""Matrix products on Hopper's tensor cores (sm_90a): wgmma fed by the tensor memory accelerator (TMA).

One persistent kernel computes the three products of a Linear layer. wgmma reads an operand along either
dimension, so nothing is transposed in memory:

    forward   Y   = ln_out W^T    "nt": both operands are contiguous along k
    backward  dln = dY W          "nn": the second operand is contiguous along n
    backward  dW  = dY^T ln_out   "tn": the operands are contiguous along m and n

A block has three groups of four warps. The first is the producer: one of its threads loads the next tiles of
both operands by TMA, as many steps ahead as shared memory has stages. The other two are consumers: each
multiplies 64 rows of the block's tile. The tile is stored through a small staging buffer, which the TMA reads
while the next tile is being multiplied; rows that are not aligned to 16 bytes, which the TMA cannot write,
are stored by the consumers. The remaining warps of the producer group are not needed for the product: they
compute sums that would otherwise need separate kernels (`gemm_hopper_sums.mojo`).

Instructions and layouts: PTX ISA 8.5, "Asynchronous warpgroup level matrix instructions", "Tensor copies" and
"mbarrier".
"""

from std.math import ceildiv
from std.memory import AddressSpace, bitcast
from std.utils import StaticTuple
from std.utils.index import IndexList
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, syncwarp, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    st_matrix,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle, TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import (
    cp_async_bulk_tensor_global_shared_cta,
    cp_async_bulk_tensor_shared_cluster_global,
    external_memory,
    fence_async_view_proxy,
    fence_mbarrier_init,
)
from max.gpu.sync import (
    cp_async_bulk_commit_group,
    cp_async_bulk_wait_group,
    mbarrier_arrive_expect_tx_shared,
    mbarrier_init,
)

from shared.common import ImmPtr, MutPtr, launch_dependent_grids, wait_on_dependent_grids
from .gemm_hopper_pipeline import (
    BLOCK_K,
    BLOCK_M,
    BOX_COLUMNS,
    BOX_BYTES,
    GROUP_THREADS,
    STORE_COLUMNS,
    STORE_BUFFERS,
    STORE_BYTES,
    THREADS,
    Descriptor,
    Pipeline,
    Schedule,
    Shared,
    PipelineState,
    wait_for_flag,
    set_flag,
    release,
    wait,
    wait_for_group,
)
from .gemm_hopper_sums import SUM_WARPS, add_slices, sum_columns


@__name("gemm_hopper_kernel")
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(c_map, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def gemm_hopper_kernel[
    dtype: DType,
    block_n: Int,
    operands: StaticString,
    with_bias: Bool,
    split: Bool,
    side_work: StaticString,
    row_dtype: DType = dtype,
](
    a_map: TMADescriptor,
    b_map: TMADescriptor,
    c_map: TMADescriptor,
    bias: ImmPtr[dtype],  # [n], read if with_bias
    m: Int32,
    n: Int32,
    k: Int32,
    partial_tiles: MutPtr[DType.float32],  # [blocks - tiles, 128, block_n], used if split
    flags: MutPtr[DType.int32],  # [blocks, 2], zero on entry if split; "sum columns" clears flag_count
    flag_count: Int32,
    column_partials: MutPtr[DType.float32],  # [slices, k] for "sum columns", [slices, m] for "add slices"
    column_slices: Int32,
    column_sums: MutPtr[dtype],  # [m], written by "add slices"
    row_partials: ImmPtr[DType.float32],  # [row_slices, 2 n], read by "add slices"
    row_slices: Int32,
    row_sums: MutPtr[row_dtype],  # [n], written by "add slices": the first n columns of row_partials
    second_row_sums: MutPtr[row_dtype],  # [n], written by "add slices": the last n columns
    c: MutPtr[dtype],  # [m, n], written instead of c_map's matrix if loose
    unaligned: Int32,  # whether rows of C may start at any address
):
    """Compute C [m, n] = A B plus the bias of each column. Grid: at most one block per multiprocessor.

    Parameters:
        dtype: bfloat16 or float16; sums are float32.
        block_n: Columns per tile: 128, 192 or 256.
        operands: "nt", "nn" or "tn"; see the top of the file.
        with_bias: Whether `bias` is added.
        split: Whether several blocks share a tile; the grid size must then be a multiple of the number of
            tiles.
        side_work: What the producer group's spare warps compute: "none"; "sum columns", for "nn": the column
            sums of A over every 64 rows, from the tiles of A that are loaded anyway; "add slices", for "tn":
            the second stage of two such sums.
    """
    comptime assert operands == "nt" or operands == "nn" or operands == "tn", "operands must be nt, nn or tn"
    comptime assert block_n % 64 == 0 and 128 <= block_n <= 256, "a tile has 128, 192 or 256 columns"
    comptime assert (
        side_work != "sum columns" or operands == "nn" and not split
    ), '"sum columns" needs "nn" operands and whole tiles'
    comptime assert side_work != "add slices" or not with_bias, "both use the same part of shared memory"
    comptime pipeline = Pipeline[block_n]
    comptime readers = 2 + (SUM_WARPS if side_work == "sum columns" else 0)
    # The swizzle depends on addresses: tiles must start at multiples of 1024 bytes.
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var full = memory.unsafe_offset(pipeline.FULL).unsafe_bitcast[Int64]()
    var empty = memory.unsafe_offset(pipeline.EMPTY).unsafe_bitcast[Int64]()

    if thread_idx.x == 0:
        comptime for stage in range(pipeline.STAGES):
            mbarrier_init(full.unsafe_offset(stage), 1)
            mbarrier_init(empty.unsafe_offset(stage), Int32(readers))
        fence_mbarrier_init()
    barrier()
    # Earlier grids may still be running up to here; their results are only read below.
    wait_on_dependent_grids()
    launch_dependent_grids()

    var schedule = Schedule[split](m, n, k, block_n)
    if thread_idx.x < GROUP_THREADS:
        # Give the registers that these warps do not need to the consumers.
        warpgroup_reg_dealloc[56]()
        var warp = thread_idx.x // 32
        if thread_idx.x == 0:
            produce[block_n, operands](
                schedule,
                memory,
                full,
                empty,
                Pointer(to=a_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
                Pointer(to=b_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
            )
        comptime if side_work == "sum columns":
            if warp == 3 and block_idx.x == 0:
                for i in range(thread_idx.x % 32, Int(flag_count), 32):
                    flags[unsafe_offset=i] = 0
            if 1 <= warp <= SUM_WARPS:
                sum_columns[dtype, block_n](schedule, memory, full, empty, column_partials, warp - 1, Int(k))
        comptime if side_work == "add slices":
            if warp > 0:
                # Without a bias, its part of shared memory is free.
                var shared_partials = memory.unsafe_offset(pipeline.BIAS).unsafe_bitcast[Float32]()
                var columns = Int(m)
                add_slices(
                    column_sums,
                    column_sums,
                    column_partials.as_imm(),
                    Int(column_slices),
                    columns,
                    columns,
                    shared_partials,
                )
                columns = Int(n)
                add_slices(
                    row_sums,
                    second_row_sums,
                    row_partials,
                    Int(row_slices),
                    2 * columns,
                    columns,
                    shared_partials,
                )
    else:
        warpgroup_reg_alloc[224]()
        consume[dtype, block_n, operands, with_bias](
            schedule,
            memory,
            full,
            empty,
            Pointer(to=c_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
            bias,
            Int(m),
            Int(n),
            partial_tiles,
            flags,
            c,
            unaligned != 0,
        )


# ---- The producer -------------------------------------------------------------------------------------------


@always_inline
def produce[
    block_n: Int, operands: StaticString, split: Bool
](
    schedule: Schedule[split],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    a_map: Descriptor,
    b_map: Descriptor,
):
    """Keep the pipeline full: wait until a stage is free, then load the next step's tiles."""
    comptime pipeline = Pipeline[block_n]
    # Waiting for the opposite parity of a new barrier returns at once: every stage starts free.
    var state = PipelineState[pipeline.STAGES](0, 1)
    for index in range(schedule.count()):
        var item = schedule.piece(index)
        for step in range(item.first, item.last):
            wait(empty.unsafe_offset(state.stage), state.parity)
            var full_barrier = full.unsafe_offset(state.stage)
            mbarrier_arrive_expect_tx_shared(full_barrier, Int32(pipeline.STAGE_BYTES))
            var a_tile = memory.unsafe_offset(state.stage * pipeline.STAGE_BYTES)
            var b_tile = a_tile.unsafe_offset(pipeline.A_BYTES)
            load[operands != "tn", BLOCK_M](a_tile, a_map, full_barrier, item.tile.row, step * BLOCK_K)
            load[operands == "nt", block_n](b_tile, b_map, full_barrier, item.tile.column, step * BLOCK_K)
            state.advance()


@always_inline
def load[
    along_k: Bool, extent: Int
](target: Shared[UInt8], map: Descriptor, full_barrier: Shared[Int64], first: Int, k: Int):
    """Load `extent` rows or columns of an operand, starting at `first`, BLOCK_K deep.

    An operand contiguous along k takes one TMA box of `extent` rows, another operand one box per 64 columns.
    """
    comptime if along_k:
        cp_async_bulk_tensor_shared_cluster_global(target, map, full_barrier, IndexList[2](k, first))
    else:
        comptime for box in range(extent // BOX_COLUMNS):
            cp_async_bulk_tensor_shared_cluster_global(
                target.unsafe_offset(box * BOX_BYTES),
                map,
                full_barrier,
                IndexList[2](first + box * BOX_COLUMNS, k),
            )


# ---- The consumers ------------------------------------------------------------------------------------------


@always_inline
def consume[
    dtype: DType, block_n: Int, operands: StaticString, with_bias: Bool, split: Bool
](
    schedule: Schedule[split],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    c_map: Descriptor,
    bias: ImmPtr[dtype],
    m: Int,
    n: Int,
    partial_tiles: MutPtr[DType.float32],
    flags: MutPtr[DType.int32],
    c: MutPtr[dtype],
    unaligned: Bool,
):
    """Compute and store 64 rows of every tile."""
    comptime pipeline = Pipeline[block_n]
    comptime biases_per_thread = ceildiv(block_n, GROUP_THREADS)
    var consumer = thread_idx.x // GROUP_THREADS - 1
    var thread = thread_idx.x % GROUP_THREADS
    var staging = memory.unsafe_offset(pipeline.STAGING + consumer * STORE_BUFFERS * STORE_BYTES)
    var tile_bias = memory.unsafe_offset(pipeline.BIAS + consumer * block_n * 2).unsafe_bitcast[
        Scalar[dtype]
    ]()
    # This consumer's 64 rows of A are 64 rows of 128 bytes or, if A is not contiguous along k, one box of the
    # same size.
    var a_first = memory.unsafe_offset(consumer * BOX_BYTES)
    var b_first = memory.unsafe_offset(pipeline.A_BYTES)
    var state = PipelineState[pipeline.STAGES](0, 0)

    for index in range(schedule.count()):
        var item = schedule.piece(index)
        var tile = item.tile.copy()
        # Load the bias early; it is added when the tile is done.
        var biases = StaticTuple[Scalar[dtype], biases_per_thread]()
        comptime if with_bias:
            comptime for i in range(biases_per_thread):
                var o = tile.column + thread + i * GROUP_THREADS
                biases[i] = bias[unsafe_offset=o] if o < n else Scalar[dtype](0)

        var sums = StaticTuple[Float32, block_n // 2]()
        wait(full.unsafe_offset(state.stage), state.parity)
        sums = multiply[dtype, block_n, operands, True](
            a_first.unsafe_offset(state.stage * pipeline.STAGE_BYTES),
            b_first.unsafe_offset(state.stage * pipeline.STAGE_BYTES),
            sums,
        )
        var reading_stage = state.stage
        state.advance()
        for _ in range(item.first + 1, item.last):
            wait(full.unsafe_offset(state.stage), state.parity)
            sums = multiply[dtype, block_n, operands, False](
                a_first.unsafe_offset(state.stage * pipeline.STAGE_BYTES),
                b_first.unsafe_offset(state.stage * pipeline.STAGE_BYTES),
                sums,
            )
            # All steps but the one just issued are done: their tiles may be overwritten.
            wgmma_wait_group_sync[1]()
            release(empty, reading_stage, thread)
            reading_stage = state.stage
            state.advance()
        wgmma_wait_group_sync[0]()
        release(empty, reading_stage, thread)

        comptime if split:
            if item.last < schedule.steps:
                write_partial_sums[block_n](sums, partial_tiles, flags, item.number, consumer, thread)
                continue
            for helper in range(item.helpers):
                sums = add_partial_sums[block_n](
                    sums, partial_tiles, flags, item.number, block_idx.x - 1 - helper, consumer, thread
                )
        comptime if with_bias:
            comptime for i in range(biases_per_thread):
                if thread + i * GROUP_THREADS < block_n:
                    tile_bias[unsafe_offset=thread + i * GROUP_THREADS] = biases[i]
        store[dtype, block_n, with_bias](
            sums,
            staging,
            tile_bias,
            c_map,
            consumer,
            thread,
            tile.row + consumer * 64,
            tile.column,
            m,
            n,
            c,
            unaligned,
        )
    # Shared memory must outlive the stores that read it.
    if thread == 0:
        cp_async_bulk_wait_group[0, read=True]()


@always_inline
def multiply[
    dtype: DType, block_n: Int, operands: StaticString, first: Bool
](
    a_tile: Shared[UInt8],
    b_tile: Shared[UInt8],
    sums: StaticTuple[Float32, block_n // 2],
) -> StaticTuple[
    Float32, block_n // 2
]:
    """Issue one step, 64 x block_n x BLOCK_K, as four wgmma of depth 16; if `first`, the sums start at zero.
    """
    comptime a_along_k = operands != "tn"
    comptime b_along_k = operands == "nt"
    # The next 16 elements along k are 32 bytes further, or, if the operand is not contiguous along k, 16 rows
    # of 128 bytes.
    comptime a_stride = 32 if a_along_k else 16 * 128
    comptime b_stride = 32 if b_along_k else 16 * 128
    var a = operand[dtype, a_along_k](a_tile)
    var b = operand[dtype, b_along_k](b_tile)
    var result = sums
    wgmma_fence_aligned()
    comptime for slice in range(BLOCK_K // 16):
        result = wgmma_async[
            64,
            block_n,
            16,
            a_type=dtype,
            b_type=dtype,
            layout_a="row" if a_along_k else "col",
            layout_b="col" if b_along_k else "row",
            scale_d=0 if first and slice == 0 else 1,
        ](a + slice * a_stride, b + slice * b_stride, result)
    wgmma_commit_group_sync()
    return result


@always_inline
def operand[dtype: DType, along_k: Bool](tile: Shared[UInt8]) -> WGMMADescriptor[dtype]:
    """Return the wgmma descriptor of an operand that the TMA wrote to shared memory with the 128-byte
    swizzle.
    """
    # Strides in units of 16 bytes: between groups of 8 rows of 128 bytes, and between boxes.
    comptime stride = 8 * 128 // 16
    comptime leading = 1 if along_k else BOX_BYTES // 16
    return WGMMADescriptor[dtype].create[stride, leading, TensorMapSwizzle.SWIZZLE_128B](
        tile.unsafe_bitcast[Scalar[dtype]]()
    )


@always_inline
def store[
    dtype: DType, block_n: Int, with_bias: Bool
](
    sums: StaticTuple[Float32, block_n // 2],
    staging: Shared[UInt8],
    bias: Shared[Scalar[dtype]],
    c_map: Descriptor,
    consumer: Int,
    thread: Int,
    row: Int,
    column: Int,
    m: Int,
    n: Int,
    c: MutPtr[dtype],
    unaligned: Bool,
):
    """Round one consumer's sums and store them, STORE_COLUMNS columns at a time, alternating between
    STORE_BUFFERS staging buffers.

    Thread t holds row r = 16 (t / 32) + t % 32 / 4 and row r + 8; in every 8 columns, columns 2 (t % 4) and 2
    (t % 4) + 1.
    """
    var lane = thread % 32
    # stmatrix stores 8 x 8 blocks; lane l provides the address of row l % 8 of block l / 8. The blocks of 16
    # x 16 elements are in the order upper left, lower left, upper right, lower right.
    var store_row = thread // 32 * 16 + lane // 8 % 2 * 8 + lane % 8
    comptime for number in range(block_n // STORE_COLUMNS):
        var target = staging.unsafe_offset(number % STORE_BUFFERS * STORE_BYTES)
        # Wait until the last store from this buffer has read it. That store was issued STORE_BUFFERS rounds
        # ago, or in the last round if a tile has an odd number of stores and this is its first.
        comptime newer = (
            0 if number == 0 and block_n // STORE_COLUMNS % STORE_BUFFERS != 0 else STORE_BUFFERS - 1
        )
        if thread == 0:
            cp_async_bulk_wait_group[Int32(newer), read=True]()
        wait_for_group(consumer)
        comptime for pair in range(STORE_COLUMNS // 16):
            comptime offset = number * STORE_COLUMNS + pair * 16
            var packed = SIMD[DType.float32, 4]()
            comptime for quarter in range(4):
                comptime at = offset // 2 + quarter // 2 * 4 + quarter % 2 * 2
                var two = SIMD[DType.float32, 2](sums[at], sums[at + 1])
                comptime if with_bias:
                    comptime first = offset + quarter // 2 * 8
                    two += bias.unsafe_load[width=2, alignment=4](first + lane % 4 * 2).cast[DType.float32]()
                packed[quarter] = bitcast[DType.float32, 1](two.cast[dtype]())
            # The swizzle: the index of a 16-byte unit is XORed with the row's index.
            var chunk = (pair * 2 + lane // 16) ^ (store_row % 8)
            st_matrix[4](
                target.unsafe_offset(store_row * 128 + chunk * 16).unsafe_bitcast[Scalar[dtype]](), packed
            )
        if unaligned:
            # Each warp stores only rows that its own lanes staged.
            syncwarp()
            store_unaligned(c, target, row + thread // 32 * 16, column + number * STORE_COLUMNS, m, n)
        else:
            # Make the threads' writes visible to the TMA, which reads through the async proxy.
            fence_async_view_proxy()
            wait_for_group(consumer)
            if thread == 0:
                if row < m and column + number * STORE_COLUMNS < n:
                    cp_async_bulk_tensor_global_shared_cta(
                        target, c_map, IndexList[2](column + number * STORE_COLUMNS, row)
                    )
                cp_async_bulk_commit_group()


@always_inline
def store_unaligned[
    dtype: DType
](c: MutPtr[dtype], staging: Shared[UInt8], first: Int, column: Int, m: Int, n: Int):
    """Store a warp's 16 rows of one staging buffer to rows of C from `first` on, at any address; lane l
    stores columns 2 l and 2 l + 1.
    """
    comptime unroll = 8
    var lane = thread_idx.x % 32
    var rows = staging.unsafe_offset(thread_idx.x % GROUP_THREADS // 32 * 16 * 128 + lane % 4 * 4)
    var at = column + 2 * lane
    var aligned_pairs = n % 2 == 0 and Int(c) % 4 == 0
    comptime for half in range(16 // unroll):
        var pairs = Array[SIMD[dtype, 2], unroll](fill=0)
        comptime for i in range(unroll):
            # Undo the swizzle with which the rows were staged.
            var chunk = (lane // 4) ^ (i % 8)
            var address = rows.unsafe_offset((half * unroll + i) * 128 + chunk * 16)
            pairs[i] = address.unsafe_bitcast[Scalar[dtype]]().unsafe_load[width=2, alignment=4]()
        comptime for i in range(unroll):
            var row = first + half * unroll + i
            var target = c.unsafe_offset(row * n + at)
            if row < m and at < n:
                if aligned_pairs:
                    target.unsafe_store[alignment=4](0, pairs[i])
                else:
                    target[unsafe_offset=0] = pairs[i][0]
                    if at + 1 < n:
                        target[unsafe_offset=1] = pairs[i][1]


# ---- Tiles that several blocks share -----------------------------------------------------------------------


@always_inline
def partial_tile[
    block_n: Int
](partial_tiles: MutPtr[DType.float32], tile: Int, block: Int, consumer: Int, thread: Int) -> MutPtr[
    DType.float32
]:
    """Return the address of a thread's partial sums of a tile, stored four at a time next to its neighbours'
    so that accesses coalesce. The last block of each tile has none.
    """
    return partial_tiles.unsafe_offset(((block - tile) * 2 + consumer) * 64 * block_n + 4 * thread)


@always_inline
def write_partial_sums[
    block_n: Int
](
    sums: StaticTuple[Float32, block_n // 2],
    partial_tiles: MutPtr[DType.float32],
    flags: MutPtr[DType.int32],
    tile: Int,
    consumer: Int,
    thread: Int,
):
    """Write partial sums for the block that stores the tile."""
    var address = partial_tile[block_n](partial_tiles, tile, block_idx.x, consumer, thread)
    comptime for i in range(0, block_n // 2, 4):
        var four = SIMD[DType.float32, 4](sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
        address.unsafe_store[alignment=16](i * GROUP_THREADS, four)
    wait_for_group(consumer)
    if thread == 0:
        set_flag(flags.unsafe_offset(block_idx.x * 2 + consumer))


@always_inline
def add_partial_sums[
    block_n: Int
](
    sums: StaticTuple[Float32, block_n // 2],
    partial_tiles: MutPtr[DType.float32],
    flags: MutPtr[DType.int32],
    tile: Int,
    block: Int,
    consumer: Int,
    thread: Int,
) -> StaticTuple[Float32, block_n // 2]:
    """Add another block's partial sums. The order of additions is the same in every run."""
    if thread == 0:
        wait_for_flag(flags.unsafe_offset(block * 2 + consumer))
    wait_for_group(consumer)
    var address = partial_tile[block_n](partial_tiles, tile, block, consumer, thread)
    var result = sums
    comptime for i in range(0, block_n // 2, 4):
        var four = address.unsafe_load[width=4, alignment=16](i * GROUP_THREADS)
        comptime for j in range(4):
            result[i + j] = result[i + j] + four[j]
    return result
