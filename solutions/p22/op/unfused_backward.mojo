"""The provided kernels of the backward pass: for the unfused pass dx from the row sums, db, dgamma and dbeta;
for the fused pass the kernels that clear the sums before it and round them after it.

They are not in `layernorm_linear.mojo`, because they compute what its blanks ask for: read them after solving
the blanks. Shapes and names are the same as in that file.
"""

from std.memory import AddressSpace
from max.gpu import barrier, block_dim, block_idx, global_idx, thread_idx
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type, rounded_product

comptime COLUMN_TILE = 32
"""Columns per block of a column sum, and threads per column."""


def ln_backward_input[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, H]
    row_sums: ImmPtr[accum_type[dtype]],  # [rows, 2]: c1, c2
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    rows: Int32,
    hidden_dim: Int32,
):
    """Compute the input gradient from row sums: dx = rstd * (g - c2 - x_hat * c1). One block owns one row."""
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var dx = TileTensor(grad_input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var c1 = row_sums[unsafe_offset=2 * row]
    var c2 = row_sums[unsafe_offset=2 * row + 1]
    for h in range(thread_idx.x, H, block_dim.x):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var g = rounded_product(dy_ln[row, h].cast[accum](), ln_weight[unsafe_offset=h].cast[accum]())
        dx[row, h] = (rstd[unsafe_offset=row] * (g - c2 - x_hat * c1)).cast[dtype]()


@always_inline
def sum_over_row_lanes[accum: DType](partial: Scalar[accum]) -> Scalar[accum]:
    """Add the partial sums of a column's COLUMN_TILE threads; only threads with thread_idx.y == 0 get the total.

    The order is fixed, so every run gives the same result. Every thread of the block must call it.
    """
    var partials = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[COLUMN_TILE, COLUMN_TILE]()
    )
    partials[thread_idx.y, thread_idx.x] = partial
    barrier()
    var total = Scalar[accum](0)
    if thread_idx.y == 0:
        for lane in range(COLUMN_TILE):
            total += partials[lane, thread_idx.x]
    return total


def column_sums_kernel[
    dtype: DType
](sums: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32):  # [columns] from [rows, columns]
    """Sum every column, as in db = sum over rows of grad_output. Thread (x, y) adds rows y, y + COLUMN_TILE, ...
    """
    comptime accum = accum_type[dtype]
    var dy = TileTensor(input, row_major(Int(rows), Int(columns)))
    var column = block_idx.x * COLUMN_TILE + thread_idx.x
    var partial = CompensatedSum[accum]()
    if column < Int(columns):
        for row in range(thread_idx.y, Int(rows), COLUMN_TILE):
            partial += dy[row, column].cast[accum]()
    var total = sum_over_row_lanes(partial.total)
    if thread_idx.y == 0 and column < Int(columns):
        sums[unsafe_offset=column] = total.cast[dtype]()


def ln_backward_parameters[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[dtype],  # [H], dbeta
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    hidden_dim: Int32,
):
    """Compute the parameter gradients of LayerNorm: dgamma = sum over rows of dln * x_hat, dbeta = sum over rows of dln.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var x = TileTensor(input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var h = block_idx.x * COLUMN_TILE + thread_idx.x
    var dgamma = CompensatedSum[accum]()
    var dbeta = CompensatedSum[accum]()
    if h < H:
        for row in range(thread_idx.y, Int(rows), COLUMN_TILE):
            var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
            var x_hat = deviation * rstd[unsafe_offset=row]
            dgamma += dy_ln[row, h].cast[accum]() * x_hat
            dbeta += dy_ln[row, h].cast[accum]()
    var dgamma_total = sum_over_row_lanes(dgamma.total)
    var dbeta_total = sum_over_row_lanes(dbeta.total)
    if thread_idx.y == 0 and h < H:
        grad_ln_weight[unsafe_offset=h] = dgamma_total.cast[dtype]()
        grad_ln_bias[unsafe_offset=h] = dbeta_total.cast[dtype]()


# ---- Before and after the fused backward kernel ------------------------------------------------------


def clear_gradients_kernel[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Zero the sums of the fused backward kernel. One thread owns one element of grad_weight.

    This is a separate launch because blocks of one launch do not wait for each other: a block that clears in
    the same launch could erase what others have already added.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = 0
        grad_ln_bias[unsafe_offset=index] = 0
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = 0
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = 0


def convert_gradients_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    sums_ln_weight: ImmPtr[sum_dtype],  # [H]
    sums_ln_bias: ImmPtr[sum_dtype],  # [H]
    sums_weight: ImmPtr[sum_dtype],  # [O, H]
    sums_bias: ImmPtr[sum_dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Round the sums of the fused backward pass to the dtype of the gradients. One thread owns one element of dW.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = sums_ln_weight[unsafe_offset=index].cast[dtype]()
        grad_ln_bias[unsafe_offset=index] = sums_ln_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = sums_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = sums_weight[unsafe_offset=index].cast[dtype]()
