"""Launches of `gemm_hopper.mojo`: which operands it supports, tile selection, geometry."""

from std.math import ceildiv
from max.gpu.host import Dim

from shared.common import ImmPtr, MutPtr, multiprocessors
from .gemm_hopper import gemm_hopper_kernel
from .gemm_hopper_pipeline import BLOCK_K, BLOCK_M, THREADS, Pipeline
from shared.launcher import Launcher
from .tensor_maps import ROW_ALIGNMENT, has_aligned_width, tensor_map

comptime TILE_COST = 650
"""The overhead per tile, for filling the pipeline and storing the tile, in units of one step of one column.
"""
comptime NARROW_STEP_EIGHTHS = 9
"""The cost of a step of one column in the narrowest tiles, in eighths of the usual: the tile's rows are
loaded for fewer columns.
"""
comptime PARTIAL_TILE_COST = 1200
"""The cost of writing or adding a tile's partial sums, in units of one step of one column."""
comptime MAX_EARLY_ROUNDS = 3
"""Maximum tiles per block for a product to start before the previous launch is done."""


@fieldwise_init
struct Pitches(Copyable, Movable):
    """The row pitch of each matrix in elements; 0 if its rows are contiguous."""

    var a: Int
    var b: Int
    var c: Int


def suits_hopper[
    dtype: DType, operands: StaticString
](c: MutPtr[dtype], a: ImmPtr[dtype], b: ImmPtr[dtype], m: Int, n: Int, k: Int) -> Bool:
    """Return whether all three matrices suit the TMA: each row must start at a multiple of 16 bytes."""
    comptime vector = 16 // 2
    var aligned = (Int(c) | Int(a) | Int(b)) % 16 == 0
    var a_width = m if operands == "tn" else k
    var b_width = k if operands == "nt" else n
    return aligned and a_width % vector == 0 and b_width % vector == 0 and n % vector == 0


def count_column_slices(rows: Int) -> Int:
    """Return the number of slices of column sums that an "nn" product with `rows` rows writes."""
    return 2 * ceildiv(rows, BLOCK_M)


@fieldwise_init
struct SideSums[dtype: DType, row_dtype: DType = dtype](Copyable, Movable):
    """The buffers for a product's side work and for shared tiles; see the kernel's arguments."""

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
    var row_sums: MutPtr[Self.row_dtype]

    @__allow_legacy_any_origin_fields
    var second_row_sums: MutPtr[Self.row_dtype]

    def __init__(out self, placeholder: MutPtr[Self.dtype]):
        """Set every buffer to a placeholder address that no kernel reads or writes."""
        var address = Int(placeholder)
        self = Self(
            MutPtr[DType.int32](unsafe_from_address=address),
            MutPtr[DType.float32](unsafe_from_address=address),
            placeholder,
        )

    def __init__(
        out self,
        flags: MutPtr[DType.int32],
        column_partials: MutPtr[DType.float32],
        placeholder: MutPtr[Self.dtype],
    ):
        """Set the buffers for "sum columns"; the others get a placeholder address."""
        var rows = MutPtr[Self.row_dtype](unsafe_from_address=Int(placeholder))
        self = Self(flags, column_partials, 0, placeholder, column_partials.as_imm(), 0, rows, rows)


def flag_count() -> Int:
    """Return the maximum number of flags that a product with shared tiles uses."""
    return 2 * multiprocessors()


@fieldwise_init
struct TilePlan(Copyable, Movable):
    """A division of a product into tiles."""

    var block_n: Int
    var split: Bool
    var blocks: Int
    var rounds: Int
    """Tiles, or parts of a tile, per block."""
    var cost: Int
    """Cost of the busiest block, in steps of one column; a step takes 0.0023 us on an H200."""
    var work: Int
    """Total cost of all blocks."""

    @staticmethod
    def whole(m: Int, n: Int, k: Int, block_n: Int) -> Self:
        """Return a plan in which one block computes each tile."""
        var tiles = ceildiv(m, BLOCK_M) * ceildiv(n, block_n)
        var blocks = min(multiprocessors(), tiles)
        var steps = ceildiv(k, BLOCK_K)
        var rounds = ceildiv(tiles, blocks)
        var cost = steps * step_cost(block_n) + TILE_COST
        return Self(block_n, False, blocks, rounds, rounds * cost, tiles * cost)

    @staticmethod
    def shared(m: Int, n: Int, k: Int, block_n: Int) -> Optional[Self]:
        """Return a plan in which several blocks share a tile, or None without enough blocks and steps."""
        var tiles = ceildiv(m, BLOCK_M) * ceildiv(n, block_n)
        var steps = ceildiv(k, BLOCK_K)
        var parts = min(multiprocessors() // tiles, steps // 8)
        if parts < 2:
            return None
        var cost = ceildiv(steps, parts) * step_cost(block_n) + TILE_COST + (parts - 1) * PARTIAL_TILE_COST
        return Self(block_n, True, parts * tiles, 1, cost, parts * tiles * cost)


def step_cost(block_n: Int) -> Int:
    """Return the cost of one step of a tile, in steps of one column."""
    return block_n * NARROW_STEP_EIGHTHS // 8 if block_n == 128 else block_n


def plan_tiles(m: Int, n: Int, k: Int, may_split: Bool) -> TilePlan:
    """Return the cheapest plan."""
    var best = TilePlan.whole(m, n, k, 256)
    comptime for i in range(3):
        var whole = TilePlan.whole(m, n, k, 256 - 64 * i)
        if whole.cost < best.cost:
            best = whole^
        if may_split:
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
    row_dtype: DType = dtype,
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
    side: Optional[SideSums[dtype, row_dtype]] = None,
    pitches: Pitches = Pitches(0, 0, 0),
) raises:
    """Launch c = a b, plus the bias of each column if with_bias; see `launch_gemm`.

    If `suits_hopper` is false, `pitches` are row pitches with which the TMA can load a and b; c may start
    rows at any address. With the side work "add slices" blocks may share tiles; the flags in `side` must then
    be zero, which an earlier "sum columns" with the same flags ensures.
    """
    comptime may_split = side_work == "add slices"
    var sums = side.value().copy() if side else SideSums[dtype, row_dtype](c)
    var plan = plan_tiles(Int(m), Int(n), Int(k), may_split)
    comptime for i in range(3):
        comptime block_n = 256 - 64 * i
        if block_n == plan.block_n:
            comptime if may_split:
                if plan.split:
                    launch_tiles[dtype, block_n, operands, with_bias, True, side_work, row_dtype](
                        launcher, name, c, a, b, bias, m, n, k, sums, plan, pitches
                    )
                    return
            launch_tiles[dtype, block_n, operands, with_bias, False, side_work, row_dtype](
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
    row_dtype: DType = dtype,
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
    sums: SideSums[dtype, row_dtype],
    plan: TilePlan,
    pitches: Pitches,
) raises:
    """Launch the kernel with tiles of block_n columns."""
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
    var unaligned = not has_aligned_width[dtype](c_pitch) or Int(c) % ROW_ALIGNMENT != 0
    launcher.launch[gemm_hopper_kernel[dtype, block_n, operands, with_bias, split, side_work, row_dtype]](
        name,
        a_map,
        b_map,
        # The kernel needs a valid map even if C cannot have one.
        a_map if unaligned else tensor_map[dtype, 64](ctx.value(), c.as_imm(), Int(m), Int(n), pitches.c),
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
        sums.second_row_sums,
        c,
        Int32(1 if unaligned else 0),
        grid_dim=Dim(plan.blocks),
        block_dim=Dim(THREADS),
        shared_bytes=Pipeline[block_n].BYTES,
        # Blocks that start early are placed in the order in which multiprocessors become free. Over many
        # rounds that costs more than the early start gains: a measured 1 to 2 % of a large product.
        early=plan.rounds <= MAX_EARLY_ROUNDS,
    )
