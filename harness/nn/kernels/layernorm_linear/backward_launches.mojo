"""Launches of the backward row kernels: kernel selection and geometry."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu import block_dim, grid_dim
from max.gpu.host import Dim

from .backward import (
    BACKWARD_STAGES,
    BACKWARD_THREADS,
    ELEMENTS_IN_FLIGHT,
    ELEMENT_THREADS,
    WIDE_THREADS,
    backward_blocks,
    ln_backward_any,
    ln_backward_elements,
    ln_backward_rows,
    ln_backward_wide,
)
from .rows import (
    ANY_THREADS,
    DX,
    LN_OUT,
    NARROW_LANES,
    NARROW_VECTORS,
    SUMS,
    WIDE_VECTORS,
    lanes_per_row,
    starts_early,
    whole_warps,
    wide_row_elements,
    wide_slots,
)
from .sums import COLUMN_BLOCKS, MIN_SLICE_ROWS, PartialSums, launch_norm_partials
from shared.common import (
    ImmPtr,
    MutPtr,
    accum_type,
    lanes_per_warp,
    multiprocessors,
    shared_memory,
)
from shared.launcher import Launcher
from common.row_reductions import is_aligned, vector_width
from .tensors import Sizes

comptime MAX_BACKWARD_VECTORS = 2
"""Maximum vectors of a row per thread in `ln_backward_rows`."""
comptime MAX_ELEMENTS_PER_THREAD = 16
"""Maximum elements of a row per thread in the smaller groups of `ln_backward_elements`."""
comptime MAX_SEQUENTIAL_ROWS = 64
"""Maximum rows that a thread of `ln_backward_elements` adds sequentially; more rows take more blocks, since
long sums lose precision.
"""
comptime MIN_WIDE_ROWS = 4
"""Minimum rows of whole vectors per multiprocessor for `ln_backward_wide` to pay off: each multiprocessor
writes partial sums of all columns.
"""


@fieldwise_init
struct RowGeometry(Copyable, Movable):
    """The geometry of a backward row kernel."""

    var vectors: Int
    """Vectors of a row per thread."""
    var group: Int
    """Threads that share a row: block_dim.x."""
    var groups: Int
    """Rows that a block processes at a time: block_dim.y; 0 if there are no rows or a row is too long."""
    var blocks: Int
    """Blocks, as many as partial sums: grid_dim.x."""
    var shared_bytes: Int
    """Dynamic shared memory per block."""


def backward_geometry[dtype: DType, x_dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """Return the geometry for rows of aligned vectors.

    The grid fills the multiprocessors' threads and shared memory, but is not larger than needed to keep them
    busy until the end, since every block adds a partial sum.
    """
    comptime width = vector_width[dtype]
    var lanes = lanes_per_row[dtype](H)
    var max_threads = BACKWARD_THREADS if lanes == lanes_per_warp() else lanes
    var vectors = 1 if H <= max_threads * width else MAX_BACKWARD_VECTORS
    var group = ceildiv(H, width * vectors * lanes) * lanes
    var elements = vectors * group * width
    var constant_bytes = 2 * elements * size_of[Scalar[accum_type[dtype]]]()
    comptime bytes = size_of[Scalar[dtype]]() + size_of[Scalar[x_dtype]]()
    var row_bytes = BACKWARD_STAGES * elements * bytes
    var resident_blocks = backward_blocks(vectors)
    if shared_memory() // resident_blocks - constant_bytes < row_bytes:
        resident_blocks = 1
    var max_blocks = resident_blocks * multiprocessors()
    var groups = min(
        BACKWARD_THREADS // group, (shared_memory() // resident_blocks - constant_bytes) // row_bytes
    )
    groups -= groups % whole_warps(1, group)
    if groups < 1 or rows == 0:
        return RowGeometry(vectors, group, 0, 0, 0)
    var iterations = ceildiv(rows, max_blocks * groups)
    groups = whole_warps(ceildiv(rows, max_blocks * iterations), group)
    var blocks = min(ceildiv(rows, groups), max_blocks)
    return RowGeometry(vectors, group, groups, blocks, constant_bytes + groups * row_bytes)


def element_geometry[dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """Return the geometry of `ln_backward_elements`: one block per multiprocessor, more for very many rows.
    """
    var group = ELEMENT_THREADS
    if H <= 64 * MAX_ELEMENTS_PER_THREAD:
        group = 64
    elif H <= 128 * MAX_ELEMENTS_PER_THREAD:
        group = 128
    elif H <= BACKWARD_THREADS * ELEMENTS_IN_FLIGHT:
        group = BACKWARD_THREADS
    var sum_bytes = 2 * H * size_of[Scalar[accum_type[dtype]]]()
    if rows == 0 or sum_bytes > shared_memory():
        return RowGeometry(1, group, 0, 0, 0)
    var max_blocks = multiprocessors()
    var groups = min(ELEMENT_THREADS // group, shared_memory() // sum_bytes)
    if rows > MAX_SEQUENTIAL_ROWS * max_blocks * groups:
        max_blocks *= COLUMN_BLOCKS
    var iterations = ceildiv(rows, max_blocks * groups)
    groups = ceildiv(rows, max_blocks * iterations)
    return RowGeometry(1, group, groups, min(ceildiv(rows, groups), max_blocks), groups * sum_bytes)


def wide_geometry[dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """Return the geometry of `ln_backward_wide`: one block per multiprocessor, which lacks registers and
    shared memory for a second.
    """
    var group = lanes_per_warp()
    while group < WIDE_THREADS and WIDE_VECTORS * group * vector_width[dtype] < H:
        group *= 2
    # Gamma and beta take up shared memory too.
    var row_bytes = wide_row_elements[dtype](group) * size_of[Scalar[dtype]]()
    var slots = wide_slots(wide_shifted[dtype](H, group))
    var max_blocks = min(WIDE_THREADS // group, (shared_memory() // row_bytes - 2) // slots)
    if WIDE_VECTORS * group * vector_width[dtype] < H or max_blocks == 0 or rows == 0:
        return RowGeometry(WIDE_VECTORS, group, 0, 0, 0)
    var iterations = ceildiv(rows, multiprocessors() * max_blocks)
    var groups = ceildiv(rows, multiprocessors() * iterations)
    var blocks = min(ceildiv(rows, groups), multiprocessors())
    return RowGeometry(WIDE_VECTORS, group, groups, blocks, (slots * groups + 2) * row_bytes)


def wide_shifted[dtype: DType](H: Int, group: Int) -> Bool:
    """Return whether rows are unaligned. Rows of whole vectors count as unaligned only if rows of dln have
    padding.
    """
    return H % vector_width[dtype] != 0 or group < WIDE_THREADS


def launch_ln_backward_rows[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    grad_input: MutPtr[x_dtype],
    ln_out: MutPtr[dtype],
    partials: MutPtr[accum_type[dtype]],
    dln: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int = DX | LN_OUT | SUMS,
) raises:
    """Launch one kernel that computes what `parts` selects of dx, ln_out, and partial sums of dgamma and
    dbeta, [geometry.blocks, 2, H].
    """
    comptime for vectors in range(1, MAX_BACKWARD_VECTORS + 1):
        comptime for lanes in [0, NARROW_LANES[0], NARROW_LANES[1], NARROW_LANES[2]]:
            # Fewer threads than the minimum are better than one vector per thread.
            comptime needed = vectors == NARROW_VECTORS or lanes == NARROW_LANES[0]
            comptime if lanes == 0 or needed and dtype.is_half_float():
                var fits = geometry.group >= lanes_per_warp() if lanes == 0 else geometry.group == lanes
                if geometry.vectors == vectors and fits:
                    launcher.launch[ln_backward_rows[dtype, x_dtype, vectors, lanes, L.wgmma]](
                        "ln_backward_rows",
                        grad_input,
                        ln_out,
                        partials,
                        dln,
                        input,
                        mean,
                        rstd,
                        ln_weight,
                        ln_bias,
                        sizes.rows(),
                        sizes.hidden_dim,
                        Int32(parts),
                        grid_dim=Dim(geometry.blocks),
                        block_dim=Dim(geometry.group, geometry.groups),
                        shared_bytes=geometry.shared_bytes,
                        early=L.wgmma and starts_early(sizes),
                    )


def launch_ln_backward_wide[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int,
    stride: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one kernel that computes what `parts` selects of dx, ln_out, and the returned partial sums of
    dgamma and dbeta.
    """
    var H = Int(sizes.hidden_dim)
    var count = geometry.blocks * 2 * H if parts & SUMS != 0 else 0
    var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
    var shifted = wide_shifted[dtype](H, geometry.group)
    comptime for variant in range(6):
        comptime group = WIDE_THREADS >> max(0, variant - 1)
        if geometry.group == group and shifted == (variant > 0):
            launcher.launch[ln_backward_wide[dtype, group, variant > 0, L.wgmma]](
                "ln_backward_wide",
                grad_input,
                ln_out,
                partials,
                dln,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                sizes.rows(),
                sizes.hidden_dim,
                Int32(stride),
                Int32(parts),
                grid_dim=Dim(geometry.blocks),
                block_dim=Dim(group, geometry.groups),
                shared_bytes=geometry.shared_bytes,
                early=L.wgmma and starts_early(sizes),
            )
    return PartialSums(partials.as_imm(), geometry.blocks)


def launch_ln_backward_elements[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    grad_input: MutPtr[x_dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int,
    stride: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one kernel that computes what `parts` selects of dx, ln_out, and the returned partial sums of
    dgamma and dbeta.
    """
    var count = geometry.blocks * 2 * Int(sizes.hidden_dim) if parts & SUMS != 0 else 0
    var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
    comptime for group in [64, 128, BACKWARD_THREADS, ELEMENT_THREADS]:
        if geometry.group == group:
            launcher.launch[ln_backward_elements[dtype, x_dtype, group, L.wgmma]](
                "ln_backward_elements",
                grad_input,
                ln_out,
                partials,
                dln,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                sizes.rows(),
                sizes.hidden_dim,
                Int32(stride),
                Int32(parts),
                grid_dim=Dim(geometry.blocks),
                block_dim=Dim(group, geometry.groups),
                shared_bytes=geometry.shared_bytes,
                early=L.wgmma and starts_early(sizes),
            )
    return PartialSums(partials.as_imm(), geometry.blocks)


def launch_ln_backward[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    grad_input: MutPtr[x_dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    sizes: Sizes,
    parts: Int,
    stride: Int = 0,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one or two kernels that compute what `parts` selects of dx, ln_out, and partial sums of dgamma
    and dbeta. No-op if there are no rows.

    The row pitch of dln and ln_out is `stride` elements, H if `stride` is 0.
    """
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var dln_stride = stride if stride > 0 else H
    var tensors_aligned = is_aligned[x_dtype](input, ln_weight, ln_bias, grad_input.as_imm())
    tensors_aligned = tensors_aligned and is_aligned[dtype](dln, ln_out.as_imm())
    var aligned = tensors_aligned and H % vector_width[dtype] == 0 and dln_stride == H
    var vector_geometry = backward_geometry[dtype, x_dtype](rows, H)
    if aligned and vector_geometry.groups > 0:
        var count = vector_geometry.blocks * 2 * H if parts & SUMS != 0 else 0
        var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
        launch_ln_backward_rows(
            launcher,
            grad_input,
            ln_out,
            partials,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
            vector_geometry,
            parts,
        )
        return PartialSums(partials.as_imm(), vector_geometry.blocks)
    var sums = PartialSums(mean, 0)
    comptime if L.wgmma and x_dtype.is_half_float():
        var wide = wide_geometry[dtype](rows, H)
        var worthwhile = H % vector_width[dtype] != 0 or rows > MIN_WIDE_ROWS * multiprocessors()
        if tensors_aligned and worthwhile and dln_stride % vector_width[dtype] == 0 and wide.groups > 0:
            return launch_ln_backward_wide[dtype](
                launcher,
                rebind[MutPtr[dtype]](grad_input),
                ln_out,
                dln,
                rebind[ImmPtr[dtype]](input),
                mean,
                rstd,
                rebind[ImmPtr[dtype]](ln_weight),
                rebind[ImmPtr[dtype]](ln_bias),
                sizes,
                wide,
                parts,
                dln_stride,
            )
    var geometry = element_geometry[dtype](rows, H)
    if not aligned and geometry.groups > 0:
        return launch_ln_backward_elements(
            launcher,
            grad_input,
            ln_out,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
            geometry,
            parts,
            dln_stride,
        )
    if parts & SUMS != 0:
        # This launch comes first, because dx may overwrite dln.
        sums = launch_norm_partials(launcher, dln, input, mean, rstd, sizes, dln_stride, MIN_SLICE_ROWS)
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            if rows > 0 and parts & (DX | LN_OUT) != 0:
                launcher.launch[ln_backward_any[dtype, x_dtype, width]](
                    "ln_backward_any",
                    grad_input,
                    ln_out,
                    dln,
                    input,
                    mean,
                    rstd,
                    ln_weight,
                    ln_bias,
                    sizes.hidden_dim,
                    Int32(dln_stride),
                    Int32(parts),
                    grid_dim=Dim(rows),
                    block_dim=Dim(ANY_THREADS),
                )
            return sums^
    return sums^
