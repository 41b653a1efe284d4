"""Copies with aligned rows for products on Hopper, whose TMA requires aligned rows.

Rows of 16-bit elements are unaligned if their length is not a multiple of 8. A copy with padded rows costs
one pass over the matrix; a product that loads single elements takes several times as long.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim

from shared.common import ImmPtr, MutPtr, launch_dependent_grids, wait_on_dependent_grids
from common.tensor_maps import ROW_ALIGNMENT, has_aligned_width, aligned_pitch
from shared.launcher import Launcher

comptime COPY_LANES = 32
"""Neighbouring threads that copy a row."""
comptime COPY_ROWS = 8
"""Rows that a block copies at a time."""
comptime COPY_LOADS = 8
"""Loads in flight per thread."""
comptime MAX_COPY_BLOCKS = 32768
"""Maximum blocks along the rows of a copy; each block continues with a stride of the grid's rows."""


@fieldwise_init
struct AlignedOperand[dtype: DType](Copyable, Movable):
    """An operand of a product with rows that the TMA can load."""

    @__allow_legacy_any_origin_fields
    var address: ImmPtr[Self.dtype]
    var pitch: Int
    """The row pitch in elements."""


@__name("copy_rows")
def copy_rows[
    dtype: DType, width: Int
](
    target: MutPtr[dtype],  # [rows, pitch]; the padding is not written
    source: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
    pitch: Int32,
):
    """Copy rows, `width` elements at a time; every access is aligned to `width` elements."""
    comptime alignment = width * size_of[Scalar[dtype]]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var first = (block_idx.x * COPY_LANES * COPY_LOADS + thread_idx.x) * width
    for row in range(block_idx.y * COPY_ROWS + thread_idx.y, Int(rows), grid_dim.y * COPY_ROWS):
        var from_row = source.unsafe_offset(row * Int(columns))
        var to_row = target.unsafe_offset(row * Int(pitch))
        var values = Array[SIMD[dtype, width], COPY_LOADS](fill=0)
        comptime for step in range(COPY_LOADS):
            var column = first + step * COPY_LANES * width
            if column < Int(columns):
                values[step] = from_row.unsafe_load[width=width, alignment=alignment](column)
        comptime for step in range(COPY_LOADS):
            var column = first + step * COPY_LANES * width
            if column < Int(columns):
                to_row.unsafe_store[alignment=alignment](column, values[step])


def has_aligned_rows[dtype: DType, //](matrix: ImmPtr[dtype], columns: Int) -> Bool:
    """Return whether the TMA can load a matrix with contiguous rows."""
    return has_aligned_width[dtype](columns) and Int(matrix) % ROW_ALIGNMENT == 0


def launch_aligned_copy[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    name: StaticString,
    source: ImmPtr[dtype],
    rows: Int,
    columns: Int,
    buffer: MutPtr[dtype],
) raises -> AlignedOperand[dtype]:
    """Return the matrix itself if its rows are aligned; otherwise launch a copy to `buffer`, [rows, pitch],
    and return that.
    """
    var pitch = aligned_pitch[dtype](columns)
    if has_aligned_rows(source, columns):
        return AlignedOperand(source, pitch)
    comptime for width in [2, 1]:
        if width == 1 or columns % 2 == 0 and Int(source) % (2 * size_of[Scalar[dtype]]()) == 0:
            launcher.launch[copy_rows[dtype, width]](
                name,
                buffer,
                source,
                Int32(rows),
                Int32(columns),
                Int32(pitch),
                grid_dim=Dim(
                    ceildiv(columns, COPY_LANES * COPY_LOADS * width),
                    min(ceildiv(rows, COPY_ROWS), MAX_COPY_BLOCKS),
                ),
                block_dim=Dim(COPY_LANES, COPY_ROWS),
                early=L.wgmma,
            )
            break
    return AlignedOperand(buffer.as_imm(), pitch)
