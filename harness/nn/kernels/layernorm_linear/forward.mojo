"""LayerNorm forward: kernels for short rows, for unaligned rows, and for any row; kernel selection and
launch.

`layernorm_rows` keeps a row in registers; `layernorm_shared` passes unaligned rows through shared memory;
`layernorm_any` handles all other rows, and reads a row again for every sum. All but the first can pad the
rows that they write, so that a product reads aligned rows.
"""

from std.math import ceildiv, sqrt
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim
from max.gpu.memory import external_memory

from .rows import (
    ANY_THREADS,
    NARROW_LANES,
    NARROW_VECTORS,
    fetch_row,
    fill_row,
    zero_tail,
    lanes_per_row,
    load_columns,
    load_elements,
    normalize,
    starts_early,
    store_elements,
    wait_for_row,
    whole_warps,
)
from shared.common import (
    ImmPtr,
    MutPtr,
    accum_type,
    lanes_per_warp,
    multiprocessors,
    rounded_product,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from shared.launcher import Launcher
from common.row_reductions import (
    VECTOR_BYTES,
    load_shifted,
    commit_copies,
    is_aligned,
    row_sum,
    vector_width,
    wait_for_copies,
)
from .tensors import Sizes

comptime FORWARD_VECTORS = 4
"""Maximum vectors of a row per thread in `layernorm_rows`."""
comptime FORWARD_RESIDENT = 1024
"""Threads of `layernorm_rows` per multiprocessor, which bounds their registers."""
comptime NARROW_THREADS = 128
"""Threads per block of `layernorm_rows` if less than a warp shares a row."""
comptime SHARED_THREADS = 128
"""Minimum threads per block of `layernorm_shared`."""
comptime SHARED_GROUPS = [32, 32, 32, 128, 256, 512]
"""Threads that share a row in `layernorm_shared`, in ascending order."""
comptime SHARED_VECTORS = [1, 2, 4, 4, 4, 4]
"""Maximum vectors of a row per thread, for each of SHARED_GROUPS."""


def forward_resident[dtype: DType, x_dtype: DType, width: Int]() -> Int:
    """Return the threads of `layernorm_rows` per multiprocessor.

    With width 1 a thread holds single elements of x, gamma and beta, which take more registers: half as many
    threads, or a quarter if they are float32 and `dtype` is 16-bit.
    """
    comptime if width > 1:
        return FORWARD_RESIDENT
    return FORWARD_RESIDENT // (2 if x_dtype == dtype else 4)


@__name("layernorm_rows")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(threads)),
    `nvvm.minctasm`=SIMDLength(max(1, forward_resident[dtype, x_dtype, width]() // threads)),
)
def layernorm_rows[
    dtype: DType, x_dtype: DType, threads: Int, width: Int, lanes: Int, early: Bool
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from column H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[x_dtype],  # [rows, H]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """Compute statistics and LayerNorm of rows, reading each once. block_dim.x threads share a row; a block
    processes block_dim.y rows at a time. If less than a warp shares a row, a block continues with a stride of
    grid_dim.x * block_dim.y rows; otherwise the grid covers all rows.

    Thread t owns the vectors t, t + block_dim.x, ...: at most FORWARD_VECTORS, or the same number of
    elements. The variance is the mean of squared deviations; the mean of the deviations themselves corrects
    the rounding of the first mean.

    Parameters:
        dtype: The dtype of ln_out.
        x_dtype: The dtype of the input, gamma and beta.
        threads: Maximum threads per block.
        width: Elements read and written at a time: a vector, or 1 if rows are unaligned.
        lanes: block_dim.x if less than the warp size, else 0.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime vectors = NARROW_VECTORS if lanes > 0 else FORWARD_VECTORS * vector_width[dtype] // width
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var H = Int(hidden_dim)
    var scale = 1 / Scalar[accum](H)
    var column = thread_idx.x * width
    var next_column = block_dim.x * width
    # For many narrow rows, gamma and beta are loaded once; otherwise a block has one row or a few.
    var gamma = Array[SIMD[x_dtype, width], vectors](fill=0)
    var beta = Array[SIMD[x_dtype, width], vectors](fill=0)
    comptime if lanes > 0:
        comptime for v in range(vectors):
            if column + v * next_column < H:
                gamma[v] = load_elements[width, x_dtype](ln_weight, column + v * next_column)
                beta[v] = load_elements[width, x_dtype](ln_bias, column + v * next_column)

    for first_row in range(block_idx.x * block_dim.y, Int(rows), grid_dim.x * block_dim.y):
        var row = first_row + thread_idx.y
        # A group past the last row takes part in the barriers with a row of 0 columns.
        var columns = H if row < Int(rows) else 0
        var x_row = input.unsafe_offset(row * H)
        var y_row = ln_out.unsafe_offset(row * Int(ln_out_stride))

        var x = Array[SIMD[accum, width], vectors](fill=0)
        var total = SIMD[accum, width](0)
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                x[v] = load_elements[width, accum](x_row, column + v * next_column)
        comptime for v in range(vectors):
            total += x[v]
        # Round the product separately. If the compiler fused it into the subtraction below but not into the
        # later addition, the means would be biased by a hundredth of their last digit, which accumulates over
        # a million rows.
        var first_mean = rounded_product(row_sum[lanes](total.reduce_add(), 0), scale)

        var deviations = SIMD[accum, width](0)
        var squares = SIMD[accum, width](0)
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                var deviation = x[v] - first_mean
                deviations += deviation
                squares = deviation.fma(deviation, squares)
        var sums = row_sum[lanes](SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add()), 1)
        sums = rounded_product(sums, SIMD[accum, 2](scale))
        var row_mean = first_mean + sums[0]
        var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
        if thread_idx.x == 0 and columns > 0:
            mean[unsafe_offset=row] = row_mean
            rstd[unsafe_offset=row] = row_rstd

        comptime for v in range(vectors):
            var h = column + v * next_column
            if h < columns:
                comptime if lanes == 0:
                    gamma[v] = load_elements[width, x_dtype](ln_weight, h)
                    beta[v] = load_elements[width, x_dtype](ln_bias, h)
                var x_hat = normalize[x_dtype](x[v], row_mean, row_rstd)
                var y = x_hat.fma(gamma[v].cast[accum](), beta[v].cast[accum]())
                store_elements(y_row, h, y.cast[dtype]())
        comptime if width == 1:
            if columns > 0:
                for h in range(H + thread_idx.x, Int(ln_out_stride), block_dim.x):
                    y_row[unsafe_offset=h] = 0
        # Break at compile time: otherwise the compiler hoists the loads of gamma and beta out of the loop,
        # and without vectors they do not fit in the registers next to x.
        comptime if lanes == 0:
            break


@__name("layernorm_shared")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(max(SHARED_THREADS, group))),
    `nvvm.minctasm`=SIMDLength(FORWARD_RESIDENT // max(SHARED_THREADS, group)),
)
def layernorm_shared[
    dtype: DType, group: Int, vectors: Int, early: Bool
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from column H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """Compute the same as `layernorm_rows`, for unaligned rows of an aligned tensor; rows of ln_out are
    aligned. A row passes through shared memory. `group` threads share it, with up to `vectors` vectors each;
    a group larger than a warp is a whole block.

    Parameters:
        dtype: The dtype of the rows.
        group: block_dim.x, known at compile time so that address offsets are constants.
        vectors: Maximum vectors of a row per thread.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    comptime step = group * width
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var H = Int(hidden_dim)
    var pitch = Int(ln_out_stride)
    var scale = 1 / Scalar[accum](H)
    var row = block_idx.x * block_dim.y + thread_idx.y
    var column = thread_idx.x * width
    if row >= Int(rows):
        return
    var memory = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var slot = memory.unsafe_offset(thread_idx.y * (vectors * step + width))
    fetch_row[step](slot, input, row, H, Int(rows))
    commit_copies()
    wait_for_copies[0]()
    wait_for_row[group]()

    var remaining = Int32(H - column)
    var shift = Int32(row * H) & Int32(width - 1)
    # Keep them in their own dtype: in the accumulation type they would take twice the registers.
    var x = Array[SIMD[dtype, width], vectors](fill=0)
    var total = SIMD[accum, width](0)
    comptime for v in range(vectors):
        if Int32(v * step) < remaining:
            x[v] = zero_tail(load_shifted(slot, column + v * step, shift), remaining - Int32(v * step))
            total += x[v].cast[accum]()
    var first_mean = rounded_product(row_sum(total.reduce_add(), 0), scale)
    var deviations = SIMD[accum, width](0)
    var squares = SIMD[accum, width](0)
    comptime for v in range(vectors):
        if Int32(v * step) < remaining:
            var deviation = zero_tail(x[v].cast[accum]() - first_mean, remaining - Int32(v * step))
            deviations += deviation
            squares = deviation.fma(deviation, squares)
    var sums = row_sum(SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add()), 1)
    sums = rounded_product(sums, SIMD[accum, 2](scale))
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd
    comptime for v in range(vectors):
        var h = column + v * step
        var rest_columns = remaining - Int32(v * step)
        if rest_columns > 0:
            # Past the last column gamma and beta are 0, so the stored values are 0 too.
            var y = normalize[dtype](x[v].cast[accum](), row_mean, row_rstd).fma(
                load_columns[accum](ln_weight, h, rest_columns), load_columns[accum](ln_bias, h, rest_columns)
            )
            ln_out.unsafe_store[alignment=VECTOR_BYTES](row * pitch + h, y.cast[dtype]())
    fill_row[step](ln_out, row, H, pitch)


@__name("layernorm_any")
def layernorm_any[
    dtype: DType, x_dtype: DType, width: Int
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from column H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[x_dtype],  # [rows, H]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """Compute statistics and LayerNorm of rows of any length at any address. A block owns one row and reads
    it three times, `width` elements at a time.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = input.unsafe_offset(row * H)
    var y = ln_out.unsafe_offset(row * Int(ln_out_stride))
    var count = Scalar[accum](H)
    var first = thread_idx.x * width
    var step = block_dim.x * width
    var totals = SIMD[accum, width](0)
    for h in range(first, H, step):
        totals += load_elements[width, accum](x, h)
    var first_mean = row_sum(totals.reduce_add(), 0) / count

    var deviations = SIMD[accum, width](0)
    var squares = SIMD[accum, width](0)
    for h in range(first, H, step):
        var deviation = load_elements[width, accum](x, h) - first_mean
        deviations += deviation
        squares += deviation * deviation
    var sums = row_sum(SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add()), 1) / count
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    for h in range(first, H, step):
        var x_hat = (load_elements[width, accum](x, h) - row_mean) * row_rstd
        var gamma = load_elements[width, accum](ln_weight, h)
        var beta = load_elements[width, accum](ln_bias, h)
        store_elements(y, h, (x_hat * gamma + beta).cast[dtype]())
    for h in range(H + thread_idx.x, Int(ln_out_stride), block_dim.x):
        y[unsafe_offset=h] = 0


def launch_layernorm[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    ln_out: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[x_dtype],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
    stride: Int = 0,
) raises:
    """Launch one kernel that computes mean, rstd and the LayerNorm output, with a row pitch of `stride`
    elements, H if `stride` is 0. No-op if there are no rows.
    """
    var rows = Int(sizes.rows())
    if rows == 0:
        return
    var ln_out_stride = stride if stride > 0 else Int(sizes.hidden_dim)
    comptime elements = FORWARD_VECTORS * vector_width[dtype]
    var group = ceildiv(Int(sizes.hidden_dim), elements * lanes_per_warp()) * lanes_per_warp()
    var tensors_aligned = is_aligned[x_dtype](input, ln_weight, ln_bias) and is_aligned(ln_out.as_imm())
    var whole_vectors = Int(sizes.hidden_dim) % vector_width[dtype] == 0 and ln_out_stride == Int(
        sizes.hidden_dim
    )
    var aligned = tensors_aligned and whole_vectors
    comptime if L.wgmma and x_dtype.is_half_float():
        var shifted = Int(sizes.hidden_dim) % vector_width[dtype] != 0
        if tensors_aligned and shifted and ln_out_stride % vector_width[dtype] == 0:
            var row_vectors = ceildiv(Int(sizes.hidden_dim), vector_width[dtype])
            comptime for variant in range(len(SHARED_GROUPS)):
                comptime threads = SHARED_GROUPS[variant]
                comptime vectors = SHARED_VECTORS[variant]
                if row_vectors <= vectors * threads:
                    var groups = min(rows, max(1, SHARED_THREADS // threads))
                    launcher.launch[layernorm_shared[dtype, threads, vectors, L.wgmma]](
                        "layernorm_shared",
                        ln_out,
                        mean,
                        rstd,
                        rebind[ImmPtr[dtype]](input),
                        rebind[ImmPtr[dtype]](ln_weight),
                        rebind[ImmPtr[dtype]](ln_bias),
                        sizes.rows(),
                        sizes.hidden_dim,
                        eps,
                        Int32(ln_out_stride),
                        grid_dim=Dim(ceildiv(rows, groups)),
                        block_dim=Dim(threads, groups),
                        shared_bytes=groups * (vectors * threads + 1) * VECTOR_BYTES,
                        early=starts_early(sizes),
                    )
                    return
    var lanes = lanes_per_row[dtype](Int(sizes.hidden_dim))
    comptime if dtype.is_half_float():
        comptime for narrow in NARROW_LANES:
            if aligned and lanes == narrow:
                var groups = min(whole_warps(rows, lanes), NARROW_THREADS // lanes)
                launcher.launch[
                    layernorm_rows[dtype, x_dtype, NARROW_THREADS, vector_width[dtype], narrow, L.wgmma]
                ](
                    "layernorm_rows",
                    ln_out,
                    mean,
                    rstd,
                    input,
                    ln_weight,
                    ln_bias,
                    sizes.rows(),
                    sizes.hidden_dim,
                    eps,
                    Int32(ln_out_stride),
                    grid_dim=Dim(
                        min(ceildiv(rows, groups), multiprocessors() * FORWARD_RESIDENT // NARROW_THREADS)
                    ),
                    block_dim=Dim(lanes, groups),
                    early=L.wgmma and starts_early(sizes),
                )
                return
    # Use the smallest block that holds a row. 512 threads lack the registers to hold as many single float32
    # elements as 16-bit ones.
    comptime for width in [vector_width[dtype], 1]:
        comptime for threads in [128, 512 if width > 1 or x_dtype == dtype else 256]:
            if (aligned or width == 1) and group <= threads:
                var groups = min(rows, threads // group)
                launcher.launch[layernorm_rows[dtype, x_dtype, threads, width, 0, L.wgmma]](
                    "layernorm_rows",
                    ln_out,
                    mean,
                    rstd,
                    input,
                    ln_weight,
                    ln_bias,
                    sizes.rows(),
                    sizes.hidden_dim,
                    eps,
                    Int32(ln_out_stride),
                    grid_dim=Dim(ceildiv(rows, groups)),
                    block_dim=Dim(group, groups),
                    early=L.wgmma and starts_early(sizes),
                )
                return
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            launcher.launch[layernorm_any[dtype, x_dtype, width]](
                "layernorm_any",
                ln_out,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                sizes.rows(),
                sizes.hidden_dim,
                eps,
                Int32(ln_out_stride),
                grid_dim=Dim(rows),
                block_dim=Dim(ANY_THREADS),
            )
            return
