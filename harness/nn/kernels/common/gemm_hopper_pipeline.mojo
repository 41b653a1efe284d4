"""The pipeline of `gemm_hopper.mojo`: layout of shared memory, tile scheduler, barriers."""

from std.math import ceildiv
from std.memory import AddressSpace
from std.sys import inlined_assembly
from max.gpu import block_idx, grid_dim
from max.gpu.sync import mbarrier_arrive, mbarrier_try_wait_parity_shared, named_barrier

from shared.common import MutPtr

comptime BLOCK_M = 128
"""Rows of a block's tile: 64 for each of the two consumers."""
comptime BLOCK_K = 64
"""Elements along k per step: 128 bytes of a 16-bit type, the width of the TMA's widest swizzle."""
comptime GROUP_THREADS = 128
"""Threads of a warpgroup."""
comptime THREADS = 3 * GROUP_THREADS
"""Threads per block: the producer group and two consumer groups."""
comptime BOX_COLUMNS = 64
"""Columns per TMA box of an operand that is not contiguous along k: 128 bytes of a 16-bit type."""
comptime BOX_BYTES = BOX_COLUMNS * BLOCK_K * 2
"""Bytes of 64 rows of 128 bytes: such a box, or one consumer's rows of an operand contiguous along k."""
comptime STORE_COLUMNS = 64
"""Columns per store: 128 bytes of a 16-bit type."""
comptime STORE_BYTES = 64 * STORE_COLUMNS * 2
"""Bytes of one consumer's rows in a staging buffer."""
comptime STORE_BUFFERS = 2
"""Staging buffers per consumer, each being filled or read by a store in flight."""
comptime SHARED_BYTES = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""
comptime RASTER_TILES = UInt32(16)
"""Consecutive tiles along m before the next tile along n, so that concurrent blocks share operands in L2."""
comptime WAIT_HINT_NS = 10_000_000
"""Maximum nanoseconds that one attempt to wait may suspend the thread."""
comptime Shared[T: AnyType] = Pointer[T, MutAnyOrigin, address_space=AddressSpace.SHARED]
"""An address in the block's shared memory."""
comptime Descriptor = Pointer[NoneType, ImmutAnyOrigin]
"""The address of a tensor map among the kernel's parameters."""


struct Pipeline[block_n: Int]:
    """The layout of shared memory for tiles of `block_n` columns; offsets in bytes."""

    comptime A_BYTES = BLOCK_M * BLOCK_K * 2
    comptime B_BYTES = Self.block_n * BLOCK_K * 2
    comptime STAGE_BYTES = Self.A_BYTES + Self.B_BYTES
    comptime STAGING_BYTES = 2 * STORE_BUFFERS * STORE_BYTES
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
struct PipelineState[stages: Int](Copyable, Movable):
    """The current stage of a ring, and the parity of its barrier's current phase."""

    var stage: Int
    var parity: Int32

    @always_inline
    def advance(mut self):
        """Advance to the next stage, flipping the parity on wrap-around."""
        self.stage += 1
        if self.stage == Self.stages:
            self.stage = 0
            self.parity ^= 1


# ---- Scheduling --------------------------------------------------------------------------------------------


@fieldwise_init
struct Tile(Copyable, Movable):
    """The origin of a tile of C."""

    var row: Int
    var column: Int


@fieldwise_init
struct WorkItem(Copyable, Movable):
    """Steps `first` to `last - 1` of one tile. The block that computes the last steps stores the tile."""

    var tile: Tile
    var number: Int
    """The tile's index."""
    var first: Int
    var last: Int
    var helpers: Int
    """Number of blocks that compute the preceding steps; they have the indices before this block's."""


struct Schedule[split: Bool](Copyable, Movable):
    """The tiles that this block computes, the same in all of its warps.

    A block computes tiles block_idx.x, block_idx.x + grid_dim.x, ..., numbered down the columns of panels of
    RASTER_TILES tile rows. With `split` the grid size is a multiple of the number of tiles, and the steps of
    a tile are divided evenly among consecutive blocks. A block waits only for blocks with lower indices,
    which started no later, so there is no deadlock.
    """

    # Unsigned 32-bit, because a 64-bit division takes about a hundred instructions.
    var block_n: UInt32
    var tile_rows: UInt32
    var tile_columns: UInt32
    var steps: Int
    """Steps per tile."""

    @always_inline
    def __init__(out self, m: Int32, n: Int32, k: Int32, block_n: Int):
        self.block_n = UInt32(block_n)
        self.tile_rows = ceildiv(UInt32(m), UInt32(BLOCK_M))
        self.tile_columns = ceildiv(UInt32(n), self.block_n)
        self.steps = Int(ceildiv(UInt32(k), UInt32(BLOCK_K)))

    @always_inline
    def tiles(self) -> Int:
        """Return the number of tiles for all blocks."""
        return Int(self.tile_rows * self.tile_columns)

    @always_inline
    def tile(self, index: Int) -> Tile:
        """Return the origin of tile `index`."""
        var panel = UInt32(index) // (RASTER_TILES * self.tile_columns) * RASTER_TILES
        var height = min(RASTER_TILES, self.tile_rows - panel)
        var within = UInt32(index) - panel * self.tile_columns
        return Tile(Int((panel + within % height) * UInt32(BLOCK_M)), Int(within // height * self.block_n))

    @always_inline
    def count(self) -> Int:
        """Return the number of tiles, or parts of tiles, of this block."""
        comptime if Self.split:
            return 1
        else:
            return Int(ceildiv(UInt32(max(0, self.tiles() - block_idx.x)), UInt32(grid_dim.x)))

    @always_inline
    def piece(self, index: Int) -> WorkItem:
        """Return the block's work item number `index`: a tile or part of a tile."""
        comptime if Self.split:
            var parts = UInt32(grid_dim.x) // UInt32(self.tiles())
            var number = UInt32(block_idx.x) // parts
            var part = UInt32(block_idx.x) - number * parts
            var first = Int(UInt32(self.steps) * part // parts)
            var last = Int(UInt32(self.steps) * (part + 1) // parts)
            return WorkItem(self.tile(Int(number)), Int(number), first, last, Int(part))
        else:
            var number = block_idx.x + index * grid_dim.x
            return WorkItem(self.tile(number), number, 0, self.steps, 0)


# ---- Synchronization ---------------------------------------------------------------------------------------


@always_inline
def wait(at: Shared[Int64], parity: Int32):
    """Wait until a barrier's phase with this parity completes."""
    mbarrier_try_wait_parity_shared(at, parity, WAIT_HINT_NS)


@always_inline
def wait_for_group(consumer: Int):
    """Synchronize the 128 threads of one consumer; barrier 0 is reserved for the whole block."""
    named_barrier[Int32(GROUP_THREADS)](Int32(consumer + 1))


@always_inline
def release(empty: Shared[Int64], stage: Int, thread: Int):
    """Signal the producer that this warpgroup has read a stage."""
    if thread == 0:
        _ = mbarrier_arrive(empty.unsafe_offset(stage))


@always_inline
def set_flag(flag: MutPtr[DType.int32]):
    """Set a flag with release semantics: a block that reads it also sees this warpgroup's earlier writes."""
    inlined_assembly[
        "fence.acq_rel.gpu; st.release.gpu.global.s32 [$0], $1;", NoneType, constraints="l,r,~{memory}"
    ](Int64(Int(flag)), Int32(1))


@always_inline
def wait_for_flag(flag: MutPtr[DType.int32]):
    """Spin until a flag is set."""
    var value = Int32(0)
    while value == 0:
        value = inlined_assembly["ld.acquire.gpu.global.s32 $0, [$1];", Int32, constraints="=r,l,~{memory}"](
            Int64(Int(flag))
        )
