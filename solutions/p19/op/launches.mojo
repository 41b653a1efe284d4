"""Launches of the ramp's kernels: grids, blocks, and preparatory launches."""

from std.math import ceildiv
from max.gpu.host import Dim

from .ramp import (
    ROW_THREADS,
    BLOCK_SIDE,
    THREADS,
    atomic_kernel,
    cast_kernel,
    clear_kernel,
    index_kernel,
    map_kernel,
    reduce_kernel,
    rmsnorm_kernel,
    stages_kernel,
    tile_kernel,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import Launcher

comptime SLAB_ROWS = 4
"""Minimum rows that a thread of the first stage adds."""
comptime MAX_SLABS = 65535
"""Maximum blocks along y of a grid."""


def launch_map[
    L: Launcher, //, dtype: DType
](mut launcher: L, mapped: MutPtr[dtype], vector: ImmPtr[dtype], n: Int) raises:
    """Launch one kernel: a thread for each element."""
    launcher.launch[map_kernel[dtype]](
        "map", mapped, vector, Int32(n), grid_dim=Dim(ceildiv(n, THREADS)), block_dim=Dim(THREADS)
    )


def launch_index[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    shifted: MutPtr[dtype],
    matrix: ImmPtr[dtype],
    offset: ImmPtr[dtype],
    rows: Int,
    columns: Int,
) raises:
    """Launch one kernel: a thread for each element, in square blocks."""
    launcher.launch[index_kernel[dtype]](
        "index",
        shifted,
        matrix,
        offset,
        Int32(rows),
        Int32(columns),
        grid_dim=Dim(ceildiv(columns, BLOCK_SIDE), ceildiv(rows, BLOCK_SIDE)),
        block_dim=Dim(BLOCK_SIDE, BLOCK_SIDE),
    )


def launch_cast[
    L: Launcher, //
](
    mut launcher: L,
    products: MutPtr[DType.float32],
    half_matrix: ImmPtr[DType.bfloat16],
    half_vector: ImmPtr[DType.bfloat16],
    rows: Int,
    columns: Int,
) raises:
    """Launch one kernel: a thread for each row."""
    launcher.launch[cast_kernel](
        "cast",
        products,
        half_matrix,
        half_vector,
        Int32(rows),
        Int32(columns),
        grid_dim=Dim(ceildiv(rows, THREADS)),
        block_dim=Dim(THREADS),
    )


def launch_reduce[
    L: Launcher, //, dtype: DType
](
    mut launcher: L, row_sums: MutPtr[accum_type[dtype]], matrix: ImmPtr[dtype], rows: Int, columns: Int
) raises:
    """Launch one kernel: a block for each row."""
    launcher.launch[reduce_kernel[dtype]](
        "reduce",
        row_sums,
        matrix,
        Int32(rows),
        Int32(columns),
        grid_dim=Dim(rows),
        block_dim=Dim(ROW_THREADS),
    )


def launch_tile[
    L: Launcher, //, dtype: DType
](mut launcher: L, mirrored: MutPtr[dtype], vector: ImmPtr[dtype], n: Int) raises:
    """Launch one kernel: a block for each tile."""
    launcher.launch[tile_kernel[dtype]](
        "tile", mirrored, vector, Int32(n), grid_dim=Dim(ceildiv(n, THREADS)), block_dim=Dim(THREADS)
    )


def launch_atomic[
    L: Launcher, //, dtype: DType
](
    mut launcher: L, column_sums: MutPtr[accum_type[dtype]], matrix: ImmPtr[dtype], rows: Int, columns: Int
) raises:
    """Launch two kernels: one that zeroes the sums, then one with a block for each row."""
    launcher.launch[clear_kernel[accum_type[dtype]]](
        "clear",
        column_sums,
        Int32(columns),
        grid_dim=Dim(ceildiv(columns, THREADS)),
        block_dim=Dim(THREADS),
    )
    launcher.launch[atomic_kernel[dtype]](
        "atomic",
        column_sums,
        matrix,
        Int32(rows),
        Int32(columns),
        grid_dim=Dim(rows),
        block_dim=Dim(ROW_THREADS),
    )


def launch_stages[
    L: Launcher, //, dtype: DType
](
    mut launcher: L, staged_sums: MutPtr[accum_type[dtype]], matrix: ImmPtr[dtype], rows: Int, columns: Int
) raises:
    """Launch one kernel twice: over slabs of rows, then over the slabs' sums as a single slab."""
    comptime accum = accum_type[dtype]
    var slab_rows = max(SLAB_ROWS, ceildiv(rows, MAX_SLABS))
    var slabs = ceildiv(rows, slab_rows)
    var partial_sums = launcher.workspace[accum]("partial_sums", slabs * columns)
    var blocks = ceildiv(columns, THREADS)
    launcher.launch[stages_kernel[dtype]](
        "stage_1",
        partial_sums,
        matrix,
        Int32(rows),
        Int32(columns),
        Int32(slab_rows),
        grid_dim=Dim(blocks, slabs),
        block_dim=Dim(THREADS),
    )
    launcher.launch[stages_kernel[accum]](
        "stage_2",
        rebind[MutPtr[accum_type[accum]]](staged_sums),
        partial_sums.as_imm(),
        Int32(slabs),
        Int32(columns),
        Int32(slabs),
        grid_dim=Dim(blocks, 1),
        block_dim=Dim(THREADS),
    )


def launch_rmsnorm[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    normalised: MutPtr[dtype],
    matrix: ImmPtr[dtype],
    weight: ImmPtr[dtype],
    rows: Int,
    columns: Int,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Launch one kernel: a block for each row."""
    launcher.launch[rmsnorm_kernel[dtype]](
        "rmsnorm",
        normalised,
        matrix,
        weight,
        Int32(rows),
        Int32(columns),
        eps,
        grid_dim=Dim(rows),
        block_dim=Dim(ROW_THREADS),
    )
