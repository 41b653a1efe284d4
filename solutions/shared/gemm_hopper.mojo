"""Matrix products on Hopper's tensor cores (sm_90a): wgmma fed by the tensor memory accelerator (TMA).

One persistent kernel serves the three products of a Linear layer, because wgmma reads an operand along either of its
dimensions, so that nothing is ever transposed in memory:

    forward   Y   = ln_out W^T    "nt": both operands lie along k
    backward  dln = dY W          "nn": the second operand lies along n
    backward  dW  = dY^T ln_out   "tn": the operands lie along m and n

A block has three groups of four warps. The first is the producer: one thread of it asks the TMA for the next tiles of
both operands, as many steps ahead as shared memory has stages. The other two are consumers: each multiplies 64 rows of
the block's tile. The tile leaves through a small staging area, from which the TMA stores while the next tile is already
being multiplied; rows that the TMA cannot write, because they begin at any address, are stored by the consumers. The
other warps of the producer group have nothing to do with the product: they make sums that would
otherwise be kernels of their own.

Instructions and layouts: PTX ISA 8.5, "Asynchronous warpgroup level matrix instructions", "Tensor copies" and
"mbarrier".
"""

from std.ffi import _Global
from std.math import ceildiv
from std.memory import AddressSpace, bitcast
from std.sys import inlined_assembly, size_of
from std.utils import StaticTuple
from std.utils.index import IndexList
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, grid_dim, syncwarp, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    st_matrix,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceBuffer, DeviceContext, Dim
from max.gpu.host.nvidia.tma import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    TMADescriptor,
    create_tma_descriptor,
)
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
    mbarrier_arrive,
    mbarrier_arrive_expect_tx_shared,
    mbarrier_init,
    mbarrier_try_wait_parity_shared,
    named_barrier,
)

from .common import ImmPtr, MutPtr, multiprocessors, start_later_grids, wait_for_earlier_grids
from .launcher import Launcher

comptime BLOCK_M = 128
"""Rows of a block's tile: 64 for each of the two consumers."""
comptime BLOCK_K = 64
"""Depth of one step: 128 bytes of a 16-bit type, the width of the TMA's widest swizzle."""
comptime GROUP = 128
"""Threads of a warpgroup."""
comptime THREADS = 3 * GROUP
"""Threads of a block: the producer group and two consumers."""
comptime BOX = 64
"""Columns of an operand's box that lies across k: 128 bytes of a 16-bit type."""
comptime BOX_BYTES = BOX * BLOCK_K * 2
"""64 rows of 128 bytes: a box across k, or the rows of one consumer along k."""
comptime STORE = 64
"""Columns of one store: 128 bytes of a 16-bit type."""
comptime STORE_BYTES = 64 * STORE * 2
"""The rows of one consumer on their way out."""
comptime STORES = 2
"""Stores of one consumer that may be under way, or being filled, at a time."""
comptime SUM_WARPS = 2
"""Warps of the producer group that sum the columns of A: its warps 1 and 2."""
comptime ADD_WARPS = 3
"""Warps of the producer group that add slices: its warps 1 to 3."""
comptime SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on Hopper."""
comptime RASTER = UInt32(16)
"""Tiles along m that are visited before the next tile along n, so that running blocks share operands in L2."""
comptime TILE_COST = 650
"""What a tile costs beside its steps, in steps of one column: filling the pipeline, storing the tile."""
comptime NARROW = 9
"""What a step of one column costs in the narrowest tiles, in eighths; a tile's rows are loaded for fewer columns."""
comptime HANDING_COST = 1200
"""Likewise, what it costs to leave or to take over unfinished sums."""
comptime EARLY_ROUNDS = 3
"""The most tiles of a block with which a product starts before the launch in front of it is done."""
comptime WAIT_HINT = 10_000_000
"""How long one attempt to pass a barrier may sleep, in nanoseconds."""

comptime Shared[T: AnyType] = Pointer[T, MutAnyOrigin, address_space=AddressSpace.SHARED]
"""An address in the block's shared memory."""
comptime Descriptor = Pointer[NoneType, ImmutAnyOrigin]
"""The address of a tensor map, in the kernel's parameters."""


struct Pipeline[block_n: Int]:
    """What lies where in shared memory, by the columns of the tile; offsets in bytes."""

    comptime A_BYTES = BLOCK_M * BLOCK_K * 2
    comptime B_BYTES = Self.block_n * BLOCK_K * 2
    comptime STAGE_BYTES = Self.A_BYTES + Self.B_BYTES
    comptime STAGING_BYTES = 2 * STORES * STORE_BYTES
    comptime BIAS_BYTES = 2 * Self.block_n * 2
    comptime BARRIER_BYTES = 128
    comptime STAGES = (
        SHARED_BYTES - Self.STAGING_BYTES - Self.BIAS_BYTES - Self.BARRIER_BYTES
    ) // Self.STAGE_BYTES

    comptime STAGING = Self.STAGES * Self.STAGE_BYTES
    comptime BIAS = Self.STAGING + Self.STAGING_BYTES
    comptime FULL = Self.BIAS + Self.BIAS_BYTES
    comptime EMPTY = Self.FULL + Self.STAGES * 8
    comptime BYTES = Self.FULL + Self.BARRIER_BYTES


@fieldwise_init
struct Turn[stages: Int](Copyable, Movable):
    """Whose turn it is in a ring of stages: the stage, and the parity of its barrier's current phase."""

    var stage: Int
    var parity: Int32

    @always_inline
    def advance(mut self):
        """Goes on to the next stage."""
        self.stage += 1
        if self.stage == Self.stages:
            self.stage = 0
            self.parity ^= 1


# ---- Which block does what ----------------------------------------------------------------------------------


@fieldwise_init
struct Tile(Copyable, Movable):
    """Where a tile of C begins."""

    var row: Int
    var column: Int


@fieldwise_init
struct Work(Copyable, Movable):
    """A piece of work: steps first to last - 1 of the sums of one tile. The block with the last steps stores it.
    """

    var tile: Tile
    var number: Int
    """The tile's."""
    var first: Int
    var last: Int
    var helpers: Int
    """How many other blocks have the steps before these: those with the numbers before this block's."""


struct Schedule[split: Bool](Copyable, Movable):
    """What is this block's, in all of its warps.

    Tiles block_idx.x, + grid_dim.x, ..., numbered down the columns of panels of RASTER tile rows. With `split` the grid
    is a multiple of the tiles, and the steps of a tile are spread evenly over neighbouring blocks. A block waits only for
    blocks with lower numbers, which have started no later, so nobody waits for one that cannot start.
    """

    # Unsigned and 32 bits wide, because a division of 64 bits costs a hundred instructions.
    var block_n: UInt32
    var tile_rows: UInt32
    var tile_columns: UInt32
    var steps: Int
    """Of one tile."""

    @always_inline
    def __init__(out self, m: Int32, n: Int32, k: Int32, block_n: Int):
        self.block_n = UInt32(block_n)
        self.tile_rows = ceildiv(UInt32(m), UInt32(BLOCK_M))
        self.tile_columns = ceildiv(UInt32(n), self.block_n)
        self.steps = Int(ceildiv(UInt32(k), UInt32(BLOCK_K)))

    @always_inline
    def tiles(self) -> Int:
        """How many there are for all blocks."""
        return Int(self.tile_rows * self.tile_columns)

    @always_inline
    def tile(self, index: Int) -> Tile:
        """The tile with a number."""
        var panel = UInt32(index) // (RASTER * self.tile_columns) * RASTER
        var height = min(RASTER, self.tile_rows - panel)
        var within = UInt32(index) - panel * self.tile_columns
        return Tile(Int((panel + within % height) * UInt32(BLOCK_M)), Int(within // height * self.block_n))

    @always_inline
    def count(self) -> Int:
        """How many pieces of work this block has."""
        comptime if Self.split:
            return 1
        else:
            return Int(ceildiv(UInt32(max(0, self.tiles() - block_idx.x)), UInt32(grid_dim.x)))

    @always_inline
    def piece(self, index: Int) -> Work:
        """The index-th piece."""
        comptime if Self.split:
            var shares = UInt32(grid_dim.x) // UInt32(self.tiles())
            var number = UInt32(block_idx.x) // shares
            var share = UInt32(block_idx.x) - number * shares
            var first = Int(UInt32(self.steps) * share // shares)
            var last = Int(UInt32(self.steps) * (share + 1) // shares)
            return Work(self.tile(Int(number)), Int(number), first, last, Int(share))
        else:
            var number = block_idx.x + index * grid_dim.x
            return Work(self.tile(number), number, 0, self.steps, 0)


# ---- The kernel ---------------------------------------------------------------------------------------------


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
](
    a_map: TMADescriptor,
    b_map: TMADescriptor,
    c_map: TMADescriptor,
    bias: ImmPtr[dtype],  # [n], read with_bias
    m: Int32,
    n: Int32,
    k: Int32,
    partial_tiles: MutPtr[DType.float32],  # [blocks - tiles, 128, block_n], written and read where split
    flags: MutPtr[DType.int32],  # [blocks, 2], zero where split; "sum columns" clears flag_count of them
    flag_count: Int32,
    column_partials: MutPtr[DType.float32],  # [slices, k] for "sum columns", [slices, m] for "add slices"
    column_slices: Int32,
    column_sums: MutPtr[dtype],  # [m], written by "add slices"
    row_partials: ImmPtr[DType.float32],  # [row_slices, 2 n], read by "add slices"
    row_slices: Int32,
    row_sums: MutPtr[dtype],  # [n], written by "add slices": the first n columns of row_partials
    more_row_sums: MutPtr[dtype],  # [n], likewise, the other n
    c: MutPtr[dtype],  # [m, n], written instead of c_map's matrix where loose
    loose: Int32,  # whether rows of C begin at any address
):
    """C [m, n] = A B, plus the bias of each column, tile by tile. Grid: the GPU's multiprocessors, or fewer.

    Parameters:
        dtype: bfloat16 or float16; sums are float32.
        block_n: Columns of a tile: 128, 192 or 256.
        operands: "nt", "nn" or "tn"; see the top of the file.
        with_bias: Whether `bias` is added.
        split: Whether several blocks work on a tile; the grid must be a multiple of the tiles.
        side_work: What the idle warps do. "none"; "sum columns": those of A over every 64 rows, while A passes
            through, for "nn"; "add slices": the second stage of two such sums, for "tn".
    """
    comptime assert operands == "nt" or operands == "nn" or operands == "tn", "operands must be nt, nn or tn"
    comptime assert block_n % 64 == 0 and 128 <= block_n <= 256, "a tile has 128, 192 or 256 columns"
    comptime assert (
        side_work != "sum columns" or operands == "nn" and not split
    ), "rows of A along k, each once"
    comptime assert side_work != "add slices" or not with_bias, "there is one place for both"
    comptime pipeline = Pipeline[block_n]
    comptime readers = 2 + (SUM_WARPS if side_work == "sum columns" else 0)
    # The swizzle works on addresses: tiles must start at multiples of 1024 bytes.
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
    # The grids before this one may run until here; what they wrote is read only below.
    wait_for_earlier_grids()
    start_later_grids()

    var schedule = Schedule[split](m, n, k, block_n)
    if thread_idx.x < GROUP:
        # Registers that these warps do not need go to the consumers.
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
                # A product without a bias leaves the bias's place free.
                var shares = memory.unsafe_offset(pipeline.BIAS).unsafe_bitcast[Float32]()
                var columns = Int(m)
                add_slices(
                    column_sums,
                    column_sums,
                    column_partials.as_imm(),
                    Int(column_slices),
                    columns,
                    columns,
                    shares,
                )
                columns = Int(n)
                add_slices(
                    row_sums, more_row_sums, row_partials, Int(row_slices), 2 * columns, columns, shares
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
            loose != 0,
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
    """Keeps the pipeline full: waits until a stage is empty, then asks the TMA for the next step's tiles."""
    comptime pipeline = Pipeline[block_n]
    # A barrier that nobody has arrived at yet counts as passed with the other parity: every stage starts empty.
    var turn = Turn[pipeline.STAGES](0, 1)
    for index in range(schedule.count()):
        var work = schedule.piece(index)
        for step in range(work.first, work.last):
            wait(empty.unsafe_offset(turn.stage), turn.parity)
            var arrived = full.unsafe_offset(turn.stage)
            mbarrier_arrive_expect_tx_shared(arrived, Int32(pipeline.STAGE_BYTES))
            var a_tile = memory.unsafe_offset(turn.stage * pipeline.STAGE_BYTES)
            var b_tile = a_tile.unsafe_offset(pipeline.A_BYTES)
            load[operands != "tn", BLOCK_M](a_tile, a_map, arrived, work.tile.row, step * BLOCK_K)
            load[operands == "nt", block_n](b_tile, b_map, arrived, work.tile.column, step * BLOCK_K)
            turn.advance()


@always_inline
def load[
    along_k: Bool, extent: Int
](target: Shared[UInt8], map: Descriptor, arrived: Shared[Int64], first: Int, k: Int):
    """Asks the TMA for `extent` rows or columns of an operand from `first` on, BLOCK_K deep.

    Along k that is one box of `extent` rows. Across k it is a box for every 64 columns, one behind the other.
    """
    comptime if along_k:
        cp_async_bulk_tensor_shared_cluster_global(target, map, arrived, IndexList[2](k, first))
    else:
        comptime for box in range(extent // BOX):
            cp_async_bulk_tensor_shared_cluster_global(
                target.unsafe_offset(box * BOX_BYTES), map, arrived, IndexList[2](first + box * BOX, k)
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
    loose: Bool,
):
    """Multiplies and stores 64 rows of every tile."""
    comptime pipeline = Pipeline[block_n]
    comptime biases_of_a_thread = ceildiv(block_n, GROUP)
    var consumer = thread_idx.x // GROUP - 1
    var thread = thread_idx.x % GROUP
    var staging = memory.unsafe_offset(pipeline.STAGING + consumer * STORES * STORE_BYTES)
    var tile_bias = memory.unsafe_offset(pipeline.BIAS + consumer * block_n * 2).unsafe_bitcast[
        Scalar[dtype]
    ]()
    # This consumer's 64 rows of A: along k 64 rows of 128 bytes, across k one box. Equally many bytes.
    var a_first = memory.unsafe_offset(consumer * BOX_BYTES)
    var b_first = memory.unsafe_offset(pipeline.A_BYTES)
    var turn = Turn[pipeline.STAGES](0, 0)

    for index in range(schedule.count()):
        var work = schedule.piece(index)
        var tile = work.tile.copy()
        # Asked for now, needed when the tile is done.
        var biases = StaticTuple[Scalar[dtype], biases_of_a_thread]()
        comptime if with_bias:
            comptime for i in range(biases_of_a_thread):
                var o = tile.column + thread + i * GROUP
                biases[i] = bias[unsafe_offset=o] if o < n else Scalar[dtype](0)

        var sums = StaticTuple[Float32, block_n // 2]()
        wait(full.unsafe_offset(turn.stage), turn.parity)
        sums = multiply[dtype, block_n, operands, True](
            a_first.unsafe_offset(turn.stage * pipeline.STAGE_BYTES),
            b_first.unsafe_offset(turn.stage * pipeline.STAGE_BYTES),
            sums,
        )
        var multiplying = turn.stage
        turn.advance()
        for _ in range(work.first + 1, work.last):
            wait(full.unsafe_offset(turn.stage), turn.parity)
            sums = multiply[dtype, block_n, operands, False](
                a_first.unsafe_offset(turn.stage * pipeline.STAGE_BYTES),
                b_first.unsafe_offset(turn.stage * pipeline.STAGE_BYTES),
                sums,
            )
            # All but the step just enqueued is done: its tiles may be overwritten.
            wgmma_wait_group_sync[1]()
            release(empty, multiplying, thread)
            multiplying = turn.stage
            turn.advance()
        wgmma_wait_group_sync[0]()
        release(empty, multiplying, thread)

        comptime if split:
            if work.last < schedule.steps:
                hand_over[block_n](sums, partial_tiles, flags, work.number, consumer, thread)
                continue
            for helper in range(work.helpers):
                sums = take_over[block_n](
                    sums, partial_tiles, flags, work.number, block_idx.x - 1 - helper, consumer, thread
                )
        comptime if with_bias:
            comptime for i in range(biases_of_a_thread):
                if thread + i * GROUP < block_n:
                    tile_bias[unsafe_offset=thread + i * GROUP] = biases[i]
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
            loose,
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
    """Enqueues one step, 64 x block_n x BLOCK_K, as four wgmma of depth 16; `first` starts from zero."""
    comptime a_along_k = operands != "tn"
    comptime b_along_k = operands == "nt"
    # Along k, 16 elements are 32 bytes further; across k, 16 rows of 128 bytes.
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
    """How wgmma finds an operand in shared memory that the TMA wrote with the 128-byte swizzle."""
    # Distances in units of 16 bytes: between groups of 8 rows of 128 bytes, and, across k, between boxes.
    comptime stride = 8 * 128 // 16
    comptime leading = 1 if along_k else BOX_BYTES // 16
    return WGMMADescriptor[dtype].create[stride, leading, TensorMapSwizzle.SWIZZLE_128B](
        tile.unsafe_bitcast[Scalar[dtype]]()
    )


@always_inline
def release(empty: Shared[Int64], stage: Int, thread: Int):
    """Tells the producer that this group of threads has read a stage."""
    if thread == 0:
        _ = mbarrier_arrive(empty.unsafe_offset(stage))


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
    loose: Bool,
):
    """Rounds one consumer's sums and stores them, STORE columns at a time, through STORES stagings in turn.

    Thread t holds rows 16 (t / 32) + t % 32 / 4 and that + 8, and of every 8 columns the two from 2 (t % 4) on.
    """
    var lane = thread % 32
    # stmatrix takes 8 x 8 blocks; lane l gives the address of row l % 8 of block l / 8, in the order
    # upper left, lower left, upper right, lower right of 16 x 16 elements.
    var store_row = thread // 32 * 16 + lane // 8 % 2 * 8 + lane % 8
    comptime for number in range(block_n // STORE):
        var target = staging.unsafe_offset(number % STORES * STORE_BYTES)
        # The last store from this staging must have been read: it was started STORES rounds ago, or, where a tile has an
        # odd number of stores and this is its first one, in the last round.
        comptime newer = 0 if number == 0 and block_n // STORE % STORES != 0 else STORES - 1
        if thread == 0:
            cp_async_bulk_wait_group[Int32(newer), read=True]()
        wait_for_group(consumer)
        comptime for pair in range(STORE // 16):
            comptime offset = number * STORE + pair * 16
            var packed = SIMD[DType.float32, 4]()
            comptime for quarter in range(4):
                comptime at = offset // 2 + quarter // 2 * 4 + quarter % 2 * 2
                var two = SIMD[DType.float32, 2](sums[at], sums[at + 1])
                comptime if with_bias:
                    comptime first = offset + quarter // 2 * 8
                    two += bias.unsafe_load[width=2, alignment=4](first + lane % 4 * 2).cast[DType.float32]()
                packed[quarter] = bitcast[DType.float32, 1](two.cast[dtype]())
            # The swizzle: the number of the 16 bytes within a row is exclusive-ored with the row's.
            var chunk = (pair * 2 + lane // 16) ^ (store_row % 8)
            st_matrix[4](
                target.unsafe_offset(store_row * 128 + chunk * 16).unsafe_bitcast[Scalar[dtype]](), packed
            )
        if loose:
            # A warp stores the rows that it has rounded itself.
            syncwarp()
            store_loose(c, target, row + thread // 32 * 16, column + number * STORE, m, n)
        else:
            # The TMA reads by another way than the threads wrote.
            fence_async_view_proxy()
            wait_for_group(consumer)
            if thread == 0:
                if row < m and column + number * STORE < n:
                    cp_async_bulk_tensor_global_shared_cta(
                        target, c_map, IndexList[2](column + number * STORE, row)
                    )
                cp_async_bulk_commit_group()


@always_inline
def store_loose[
    dtype: DType
](c: MutPtr[dtype], staging: Shared[UInt8], first: Int, column: Int, m: Int, n: Int):
    """Stores a warp's 16 rows of one staging, of which row `first` of C is the first; lane l has columns 2 l and 2 l + 1.
    """
    comptime abreast = 8
    var lane = thread_idx.x % 32
    var rows = staging.unsafe_offset(thread_idx.x % GROUP // 32 * 16 * 128 + lane % 4 * 4)
    var at = column + 2 * lane
    var in_pairs = n % 2 == 0 and Int(c) % 4 == 0
    comptime for half in range(16 // abreast):
        var held = Array[SIMD[dtype, 2], abreast](fill=0)
        comptime for i in range(abreast):
            # As the rows were staged: the number of the 16 bytes within a row is exclusive-ored with the row's.
            var chunk = (lane // 4) ^ (i % 8)
            var place = rows.unsafe_offset((half * abreast + i) * 128 + chunk * 16)
            held[i] = place.unsafe_bitcast[Scalar[dtype]]().unsafe_load[width=2, alignment=4]()
        comptime for i in range(abreast):
            var row = first + half * abreast + i
            var target = c.unsafe_offset(row * n + at)
            if row < m and at < n:
                if in_pairs:
                    target.unsafe_store[alignment=4](0, held[i])
                else:
                    target[unsafe_offset=0] = held[i][0]
                    if at + 1 < n:
                        target[unsafe_offset=1] = held[i][1]


# ---- Tiles that several blocks work on ----------------------------------------------------------------------


@always_inline
def partial_tile[
    block_n: Int
](partial_tiles: MutPtr[DType.float32], tile: Int, block: Int, consumer: Int, thread: Int) -> MutPtr[
    DType.float32
]:
    """Where a thread's unfinished sums of the tile-th tile lie: four at a time, side by side with its neighbours'. The last
    block of each tile has none."""
    return partial_tiles.unsafe_offset(((block - tile) * 2 + consumer) * 64 * block_n + 4 * thread)


@always_inline
def hand_over[
    block_n: Int
](
    sums: StaticTuple[Float32, block_n // 2],
    partial_tiles: MutPtr[DType.float32],
    flags: MutPtr[DType.int32],
    tile: Int,
    consumer: Int,
    thread: Int,
):
    """Leaves unfinished sums to the block that stores the tile."""
    var place = partial_tile[block_n](partial_tiles, tile, block_idx.x, consumer, thread)
    comptime for i in range(0, block_n // 2, 4):
        var four = SIMD[DType.float32, 4](sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
        place.unsafe_store[alignment=16](i * GROUP, four)
    wait_for_group(consumer)
    if thread == 0:
        publish(flags.unsafe_offset(block_idx.x * 2 + consumer))


@always_inline
def take_over[
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
    """Adds what another block has left. The order of additions is the same in every run."""
    if thread == 0:
        await_published(flags.unsafe_offset(block * 2 + consumer))
    wait_for_group(consumer)
    var place = partial_tile[block_n](partial_tiles, tile, block, consumer, thread)
    var result = sums
    comptime for i in range(0, block_n // 2, 4):
        var four = place.unsafe_load[width=4, alignment=16](i * GROUP)
        comptime for j in range(4):
            result[i + j] = result[i + j] + four[j]
    return result


# ---- Sums on the side ---------------------------------------------------------------------------------------


@always_inline
def sum_columns[
    dtype: DType, block_n: Int, split: Bool
](
    schedule: Schedule[split],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    partials: MutPtr[DType.float32],  # [2 * tile rows, k]
    half: Int,
    k: Int,
):
    """Sums the columns of A over 64 rows, the half-th half of a tile's, while A passes through. One warp.

    Every tile column passes the same tiles of A, and takes each so many-th step. Lane l owns columns 2 l and 2 l + 1
    of the 64 of a step, whose rows are 128 bytes. Rows behind the last are zeros.
    """
    comptime pipeline = Pipeline[block_n]
    var lane = thread_idx.x % 32
    var turn = Turn[pipeline.STAGES](0, 0)
    for index in range(schedule.count()):
        var tile = schedule.piece(index).tile.copy()
        var row_of_partials = partials.unsafe_offset((tile.row // 64 + half) * k)
        var next = tile.column // block_n
        for step in range(schedule.steps):
            wait(full.unsafe_offset(turn.stage), turn.parity)
            if step == next:
                next += Int(schedule.tile_columns)
                var rows = memory.unsafe_offset(turn.stage * pipeline.STAGE_BYTES + half * BOX_BYTES)
                var sums = SIMD[DType.float32, 2](0)
                for first in range(0, 64, 16):
                    comptime for i in range(16):
                        # The swizzle exclusive-ors the number of the 16 bytes within a row with the row's.
                        var chunk = (lane // 4) ^ (i % 8)
                        var place = rows.unsafe_offset((first + i) * 128 + chunk * 16 + lane % 4 * 4)
                        var two = place.unsafe_bitcast[Scalar[dtype]]().unsafe_load[width=2, alignment=4]()
                        sums += two.cast[DType.float32]()
                var column = step * BLOCK_K + 2 * lane
                comptime for i in range(2):
                    if column + i < k:
                        row_of_partials[unsafe_offset=column + i] = sums[i]
            syncwarp()
            release(empty, turn.stage, lane)
            turn.advance()


@always_inline
def add_slices[
    dtype: DType
](
    sums: MutPtr[dtype],
    more_sums: MutPtr[dtype],
    partials: ImmPtr[DType.float32],  # [slices, columns]
    slices: Int,
    columns: Int,
    first_columns: Int,
    shares: Shared[Float32],  # [ADD_WARPS, 32]
):
    """Adds the slices of every column: of the first columns into `sums`, of the others into `more_sums`.

    A block takes 32 neighbouring columns at a time, of which each of three warps adds every third slice.
    """
    comptime abreast = 8
    var warp = thread_idx.x // 32 - 1
    var lane = thread_idx.x % 32
    for first in range(block_idx.x * 32, columns, grid_dim.x * 32):
        var column = first + lane
        var totals = SIMD[DType.float32, abreast](0)
        if column < columns:
            var place = partials.unsafe_offset(warp * columns + column)
            var left = (slices - warp + ADD_WARPS - 1) // ADD_WARPS
            while left >= abreast:
                comptime for i in range(abreast):
                    totals[i] += place[]
                    place = place.unsafe_offset(ADD_WARPS * columns)
                left -= abreast
            while left > 0:
                totals[0] += place[]
                place = place.unsafe_offset(ADD_WARPS * columns)
                left -= 1
        shares[unsafe_offset=warp * 32 + lane] = totals.reduce_add()
        named_barrier[Int32(32 * ADD_WARPS)](3)
        if warp == 0 and column < columns:
            var total = Float32(0)
            comptime for i in range(ADD_WARPS):
                total += shares[unsafe_offset=i * 32 + lane]
            if column < first_columns:
                sums[unsafe_offset=column] = total.cast[dtype]()
            else:
                more_sums[unsafe_offset=column - first_columns] = total.cast[dtype]()
        named_barrier[Int32(32 * ADD_WARPS)](3)


# ---- Waiting and telling ------------------------------------------------------------------------------------


@always_inline
def wait(at: Shared[Int64], parity: Int32):
    """Waits until the phase of this parity of a barrier is complete."""
    mbarrier_try_wait_parity_shared(at, parity, WAIT_HINT)


@always_inline
def wait_for_group(consumer: Int):
    """A barrier for the 128 threads of one consumer; barrier 0 is the whole block's."""
    named_barrier[Int32(GROUP)](Int32(consumer + 1))


@always_inline
def publish(flag: MutPtr[DType.int32]):
    """Sets a flag; whoever sees it also sees what this group of threads wrote before its last barrier."""
    inlined_assembly[
        "fence.acq_rel.gpu; st.release.gpu.global.s32 [$0], $1;", NoneType, constraints="l,r,~{memory}"
    ](Int64(Int(flag)), Int32(1))


@always_inline
def await_published(flag: MutPtr[DType.int32]):
    """Waits until a flag is set."""
    var seen = Int32(0)
    while seen == 0:
        seen = inlined_assembly["ld.acquire.gpu.global.s32 $0, [$1];", Int32, constraints="=r,l,~{memory}"](
            Int64(Int(flag))
        )


# ---- How it is launched -------------------------------------------------------------------------------------


comptime ROW_BYTES = 16
"""The TMA reaches rows that begin at multiples of so many bytes."""


comptime LINE_BYTES = 128
"""What the TMA fetches at a time: rows that begin elsewhere cost it nearly twice as much."""


def lies_in_rows[dtype: DType](width: Int) -> Bool:
    """Whether the TMA reaches rows of `width` elements that lie one behind the other."""
    return width * size_of[Scalar[dtype]]() % ROW_BYTES == 0


def pitch_of[dtype: DType](width: Int) -> Int:
    """The elements from one row to the next where rows of `width` elements are laid out for the TMA, if need be anew.
    """
    comptime line = LINE_BYTES // size_of[Scalar[dtype]]()
    return width if lies_in_rows[dtype](width) else ceildiv(width, line) * line


@fieldwise_init
struct Pitches(Copyable, Movable):
    """Elements from one row of each matrix to the next; 0: the rows lie one behind the other."""

    var a: Int
    var b: Int
    var c: Int


def suits_hopper[
    dtype: DType, operands: StaticString
](c: MutPtr[dtype], a: ImmPtr[dtype], b: ImmPtr[dtype], m: Int, n: Int, k: Int) -> Bool:
    """Whether the TMA can reach all three matrices: each of their rows must start at a multiple of 16 bytes.
    """
    comptime vector = 16 // 2
    var aligned = (Int(c) | Int(a) | Int(b)) % 16 == 0
    var a_width = m if operands == "tn" else k
    var b_width = k if operands == "nt" else n
    return aligned and a_width % vector == 0 and b_width % vector == 0 and n % vector == 0


def column_slices_of(rows: Int) -> Int:
    """How many slices of column sums the side work of an "nn" product with so many rows writes."""
    return 2 * ceildiv(rows, BLOCK_M)


@fieldwise_init
struct SideSums[dtype: DType](Copyable, Movable):
    """What the side work of a product, and the blocks that share tiles, read and write; see the kernel's arguments.
    """

    @__allow_legacy_any_origin_fields
    var flags: MutPtr[DType.int32]

    @__allow_legacy_any_origin_fields
    var column_partials: MutPtr[DType.float32]
    var column_slices: Int

    @__allow_legacy_any_origin_fields
    var column_sums: MutPtr[Self.dtype]

    @__allow_legacy_any_origin_fields
    var row_partials: ImmPtr[DType.float32]
    var row_slices: Int

    @__allow_legacy_any_origin_fields
    var row_sums: MutPtr[Self.dtype]

    @__allow_legacy_any_origin_fields
    var more_row_sums: MutPtr[Self.dtype]

    def __init__(out self, anything: MutPtr[Self.dtype]):
        """Nothing; the addresses are never used."""
        var address = Int(anything)
        self = Self(
            MutPtr[DType.int32](unsafe_from_address=address),
            MutPtr[DType.float32](unsafe_from_address=address),
            anything,
        )

    def __init__(
        out self,
        flags: MutPtr[DType.int32],
        column_partials: MutPtr[DType.float32],
        anything: MutPtr[Self.dtype],
    ):
        """For "sum columns"; the other addresses are never used."""
        self = Self(flags, column_partials, 0, anything, column_partials.as_imm(), 0, anything, anything)


def flag_count() -> Int:
    """How many flags a product with shared tiles may use."""
    return 2 * multiprocessors()


@fieldwise_init
struct TilePlan(Copyable, Movable):
    """How a product is cut up."""

    var block_n: Int
    var split: Bool
    var blocks: Int
    var rounds: Int
    """Tiles, or shares of a tile, of one block."""
    var cost: Int
    """The longest a block has to work, in steps of one column: 0.0023 us on an H200."""

    @staticmethod
    def whole(m: Int, n: Int, k: Int, block_n: Int) -> Self:
        """Every tile is one block's."""
        var tiles = ceildiv(m, BLOCK_M) * ceildiv(n, block_n)
        var blocks = min(multiprocessors(), tiles)
        var steps = ceildiv(k, BLOCK_K)
        var rounds = ceildiv(tiles, blocks)
        return Self(block_n, False, blocks, rounds, rounds * (steps * step_cost(block_n) + TILE_COST))

    @staticmethod
    def shared(m: Int, n: Int, k: Int, block_n: Int) -> Optional[Self]:
        """Several blocks work on a tile, where the GPU has blocks enough and there are steps enough to share.
        """
        var tiles = ceildiv(m, BLOCK_M) * ceildiv(n, block_n)
        var steps = ceildiv(k, BLOCK_K)
        var shares = min(multiprocessors() // tiles, steps // 8)
        if shares < 2:
            return None
        var cost = ceildiv(steps, shares) * step_cost(block_n) + TILE_COST + (shares - 1) * HANDING_COST
        return Self(block_n, True, shares * tiles, 1, cost)


def step_cost(block_n: Int) -> Int:
    """What a step of a tile costs, in steps of one column."""
    return block_n * NARROW // 8 if block_n == 128 else block_n


def plan_tiles(m: Int, n: Int, k: Int, may_share: Bool) -> TilePlan:
    """The cheapest way to cut up a product."""
    var best = TilePlan.whole(m, n, k, 256)
    comptime for i in range(3):
        var whole = TilePlan.whole(m, n, k, 256 - 64 * i)
        if whole.cost < best.cost:
            best = whole^
        if may_share:
            var shared = TilePlan.shared(m, n, k, 256 - 64 * i)
            if shared and shared.value().cost < best.cost:
                best = shared.value().copy()
    return best^


def launch_gemm_hopper[
    L: Launcher,
    //,
    dtype: DType,
    operands: StaticString,
    with_bias: Bool,
    side_work: StaticString,
](
    mut launcher: L,
    name: StaticString,
    c: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
    side: Optional[SideSums[dtype]] = None,
    pitches: Pitches = Pitches(0, 0, 0),
) raises:
    """One launch: c = a b, plus the bias of each column with_bias; see `launch_gemm`.

    Where not `suits_hopper`, `pitches` says how a and b lie, so that the TMA can reach them; c may lie anyhow. With the
    side work "add slices" blocks may share tiles; the flags in `side` must be zero then, and an earlier "sum columns" with
    the same flags makes them so.
    """
    comptime may_share = side_work == "add slices"
    var sums = side.value().copy() if side else SideSums[dtype](c)
    var plan = plan_tiles(Int(m), Int(n), Int(k), may_share)
    comptime for i in range(3):
        comptime block_n = 256 - 64 * i
        if block_n == plan.block_n:
            comptime if may_share:
                if plan.split:
                    launch_tiles[dtype, block_n, operands, with_bias, True, side_work](
                        launcher, name, c, a, b, bias, m, n, k, sums, plan, pitches
                    )
                    return
            launch_tiles[dtype, block_n, operands, with_bias, False, side_work](
                launcher, name, c, a, b, bias, m, n, k, sums, plan, pitches
            )


def launch_tiles[
    L: Launcher,
    //,
    dtype: DType,
    block_n: Int,
    operands: StaticString,
    with_bias: Bool,
    split: Bool,
    side_work: StaticString,
](
    mut launcher: L,
    name: StaticString,
    c: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
    sums: SideSums[dtype],
    plan: TilePlan,
    pitches: Pitches,
) raises:
    """One launch with tiles of block_n columns."""
    var partial_tiles = sums.column_partials
    comptime if split:
        var helpers = plan.blocks - ceildiv(Int(m), BLOCK_M) * ceildiv(Int(n), block_n)
        partial_tiles = launcher.workspace[DType.float32]("partial_tiles", helpers * BLOCK_M * block_n)
    var ctx = launcher.context()
    if not ctx:
        return
    comptime a_along_k = operands != "tn"
    comptime b_along_k = operands == "nt"
    var a_height, a_width = (m, k) if a_along_k else (k, m)
    var b_height, b_width = (n, k) if b_along_k else (k, n)
    var a_map = tensor_map[dtype, BLOCK_M if a_along_k else BLOCK_K](
        ctx.value(), a, Int(a_height), Int(a_width), pitches.a
    )
    var b_map = tensor_map[dtype, block_n if b_along_k else BLOCK_K](
        ctx.value(), b, Int(b_height), Int(b_width), pitches.b
    )
    var c_pitch = pitches.c if pitches.c > 0 else Int(n)
    var loose = not lies_in_rows[dtype](c_pitch) or Int(c) % ROW_BYTES != 0
    launcher.launch[gemm_hopper_kernel[dtype, block_n, operands, with_bias, split, side_work]](
        name,
        a_map,
        b_map,
        # Some map that is valid, where none can be.
        a_map if loose else tensor_map[dtype, 64](ctx.value(), c.as_imm(), Int(m), Int(n), pitches.c),
        bias,
        m,
        n,
        k,
        partial_tiles,
        sums.flags,
        Int32(flag_count()),
        sums.column_partials,
        Int32(sums.column_slices),
        sums.column_sums,
        sums.row_partials,
        Int32(sums.row_slices),
        sums.row_sums,
        sums.more_row_sums,
        c,
        Int32(1 if loose else 0),
        grid_dim=Dim(plan.blocks),
        block_dim=Dim(THREADS),
        shared_bytes=Pipeline[block_n].BYTES,
        # Blocks that start early lie on multiprocessors in the order in which these became free. Over many rounds that
        # costs more than the early start wins: 1 to 2 % of a large product, measured.
        early=plan.rounds <= EARLY_ROUNDS,
    )


comptime MapKey = SIMD[DType.int64, 8]
"""All that a tensor map follows from: address, height, width, row, rows of the box and whether it is bfloat16."""
comptime KEPT_MAPS = 1024
"""Places for maps, 192 bytes each."""


@fieldwise_init
struct KeptMap(ImplicitlyCopyable, Movable):
    """A tensor map, and what it was made of."""

    var key: MapKey
    var map: TMADescriptor


def no_maps() -> List[KeptMap]:
    """Places without a map."""
    return List[KeptMap](length=KEPT_MAPS, fill=KeptMap(MapKey(-1), TMADescriptor()))


comptime MAPS = _Global["workbook_tensor_maps", no_maps]
"""The last maps, each in the one place that its key has. A loop gets the same memory from call to call, and the driver takes as long
to encode a map as a third of a launch. Extension modules are called with Python's lock held, and nothing else makes maps."""


def tensor_map[
    dtype: DType, box_rows: Int
](ctx: DeviceContext, matrix: ImmPtr[dtype], height: Int, width: Int, pitch: Int = 0) raises -> TMADescriptor:
    """How the TMA finds boxes in a row-major matrix [height, width], whose rows are `pitch` elements apart, `width` where
    that is 0. Raises where it cannot.

    Outside the matrix, and between its rows, it reads zeros and writes nothing. The matrix must start at a multiple of 16
    bytes, and so must each of its rows. Every box is 128 bytes wide.
    """
    comptime assert dtype.is_half_float(), "a key tells two dtypes apart"
    var row = pitch if pitch > 0 else width
    comptime kind = Int64(1 if dtype == DType.bfloat16 else 0)
    var key = MapKey(Int64(Int(matrix)), Int64(height), Int64(width), Int64(row), Int64(box_rows), kind, 0, 0)
    # Odd factors, so that no part of the key is lost; the upper bits are the mixed ones.
    var mixed = (
        key * MapKey(0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0x7FEB352D, 1, 1)
    ).reduce_add()
    ref kept = MAPS.get_or_create_ptr()[][Int((mixed >> 20) & (KEPT_MAPS - 1))]
    if kept.key != key:
        kept.map = create_tma_descriptor[
            dtype, 2, TensorMapSwizzle.SWIZZLE_128B, TensorMapL2Promotion.L2_256B
        ](
            DeviceBuffer[dtype](
                ctx, matrix.unsafe_mut_cast[True]().as_unsafe_any_origin(), height * row, owning=False
            ),
            IndexList[2](height, width),
            IndexList[2](row, 1),
            IndexList[2](box_rows, BOX),
        )
        kept.key = key
    return kept.map
