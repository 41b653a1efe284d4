"""Puzzle 22: LayerNorm + Linear, forward and backward: the kernels, and the ops that MAX and PyTorch see.

    x_hat  = (input - mean) * rstd                 rstd = 1 / sqrt(variance + eps), statistics over H
    ln_out = x_hat * ln_weight + ln_bias
    output = ln_out @ linear_weight^T + linear_bias

Shapes: input [B, S, H]; output and grad_output [B, S, O]; ln_weight and ln_bias [H]; linear_weight [O, H];
linear_bias [O]; mean and rstd [B, S]. A row is one sequence position: rows = B * S. Every size is a run-time
argument, so a kernel is compiled once per dtype. Sums are kept in `accum_type[dtype]`.

The file in reading order: the unfused forward kernels, the fused forward kernel, the row sums of the unfused
backward pass, the fused backward kernel, the kernel of the last gate, the public ops. Read
`unfused_backward.mojo`, the rest of the unfused backward pass, and `cpu_reference.mojo`, the same computation
in ordinary loops, after solving the blanks. `launches.mojo` launches the kernels, `passes.mojo` has the
internal ops, `rmsnorm_linear.mojo` the rest of the last gate.
"""

from std.memory import AddressSpace
from extensibility import InputTensor, OutputTensor
import extensibility
from max.gpu import (
    barrier,
    block_dim,
    block_idx,
    global_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .launches import validate_sizes
from .passes import run_backward, run_forward, run_row_statistics
from .rmsnorm_linear import rms_rstd
from .shared.checks import expect_shape
from .shared.common import (
    CompensatedSum,
    ImmPtr,
    MutPtr,
    accum_type,
    atomic_add,
    rounded_product,
    row_statistics,
)
from .shared.launcher import DeviceLauncher
from .tensors import BackwardTensors, ForwardTensors

comptime EPS = 1e-5
"""The eps of the public ops; the training ops take it as an argument."""
comptime TILE = 16
"""Side of the square tiles of the matmul and the transpose: 256 threads per block."""
comptime ROW_THREADS = 128
"""Threads that share one row in kernels with one block per row."""


# ---- Unfused forward: five launches -------------------------------------------------------------------------


def row_statistics_kernel[
    dtype: DType
](
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute mean and rstd of every row. One thread owns one row."""
    var row = global_idx.x
    if row >= Int(rows):
        return
    var statistics = row_statistics(input, row, Int(hidden_dim), eps)
    mean[unsafe_offset=row] = statistics.mean
    rstd[unsafe_offset=row] = statistics.rstd


# ANCHOR: layernorm_kernel
def layernorm_kernel[
    dtype: DType
](
    ln_out: MutPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
):
    """Compute LayerNorm from statistics: ln_out = (input - mean) * rstd * gamma + beta.

    One block owns one row; its threads share the columns, so that neighbouring threads access neighbouring
    elements.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var y = TileTensor(ln_out, row_major(Int(rows), H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))

    # BLANK-START ln: normalise, scale and shift the columns h = thread_idx.x, + block_dim.x, ... of this row
    # FILL IN (about 5 lines)
    # BLANK-END ln


# ANCHOR_END: layernorm_kernel


# ANCHOR: transpose_kernel
def transpose_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [columns, rows]
    input: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
):
    """Transpose a matrix through one shared tile per block, so that reads and writes are both coalesced."""
    # One column of padding puts the elements of a tile column in different banks.
    var tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[TILE, TILE + 1]())
    var source = TileTensor(input, row_major(Int(rows), Int(columns)))
    var target = TileTensor(output, row_major(Int(columns), Int(rows)))

    var row = block_idx.x * TILE + thread_idx.y
    var column = block_idx.y * TILE + thread_idx.x
    if row < Int(rows) and column < Int(columns):
        tile[thread_idx.y, thread_idx.x] = source[row, column]
    barrier()

    # Transpose the tile's position: a row of threads now writes a row of the output.
    row = block_idx.x * TILE + thread_idx.x
    column = block_idx.y * TILE + thread_idx.y
    if row < Int(rows) and column < Int(columns):
        target[column, row] = tile[thread_idx.x, thread_idx.y]


# ANCHOR_END: transpose_kernel


# ANCHOR: matmul_idiomatic_tiled
def matmul_idiomatic_tiled[
    dtype: DType
](
    output: MutPtr[dtype],  # [M, N]
    a: ImmPtr[dtype],  # [M, K]
    b: ImmPtr[dtype],  # [K, N]
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Compute the matrix product output = a @ b. A block owns one TILE x TILE tile of the output and loops over K tile by tile.
    """
    comptime accum = accum_type[dtype]
    var M = Int(m)
    var N = Int(n)
    var K = Int(k)
    var A = TileTensor(a, row_major(M, K))
    var B = TileTensor(b, row_major(K, N))
    var C = TileTensor(output, row_major(M, N))
    comptime tile_layout = row_major[TILE, TILE]()
    var a_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](tile_layout)
    var b_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](tile_layout)

    var local_row = thread_idx.y
    var local_column = thread_idx.x
    # Rows are along grid x, which has no practical limit; grid y is limited to 65535 blocks.
    var row = block_idx.x * TILE + local_row
    var column = block_idx.y * TILE + local_column

    var total = CompensatedSum[accum]()
    for tile_start in range(0, K, TILE):
        # Load one tile of each factor; outside the matrices the tile is 0, which adds nothing.
        var a_column = tile_start + local_column
        var b_row = tile_start + local_row
        a_tile[local_row, local_column] = A[row, a_column] if row < M and a_column < K else Scalar[dtype](0)
        b_tile[local_row, local_column] = B[b_row, column] if b_row < K and column < N else Scalar[dtype](0)
        barrier()

        # An ordinary sum within the tile, a compensated sum over the tiles: the error does not grow with K.
        var tile_sum = Scalar[accum](0)
        comptime for i in range(TILE):
            tile_sum += a_tile[local_row, i].cast[accum]() * b_tile[i, local_column].cast[accum]()
        total += tile_sum
        # No thread may load the next tile while another is still reading this one.
        barrier()

    if row < M and column < N:
        C[row, column] = total.total.cast[dtype]()


# ANCHOR_END: matmul_idiomatic_tiled


# ANCHOR: add_bias_kernel
def add_bias_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [rows, O], read and written
    bias: ImmPtr[dtype],  # [O]
    rows: Int32,
    output_dim: Int32,
):
    """Add the bias to every row, in place. One block owns one row; its threads share the columns."""
    comptime accum = accum_type[dtype]
    var y = TileTensor(output, row_major(Int(rows), Int(output_dim)))
    for o in range(thread_idx.x, Int(output_dim), block_dim.x):
        var total = y[block_idx.x, o].cast[accum]() + bias[unsafe_offset=o].cast[accum]()
        y[block_idx.x, o] = total.cast[dtype]()


# ANCHOR_END: add_bias_kernel


# ---- Fused forward: one launch ------------------------------------------------------------------------------


# ANCHOR: minimal_fused_forward_kernel
def minimal_fused_forward_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [B, S, O]
    mean: MutPtr[accum_type[dtype]],  # [B, S]
    rstd: MutPtr[accum_type[dtype]],  # [B, S]
    input: ImmPtr[dtype],  # [B, S, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    linear_bias: ImmPtr[dtype],  # [O]
    batch_size: Int32,
    seq_len: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute LayerNorm and Linear in one launch: the normalised row never reaches global memory.

    One block of one thread owns one sequence position: block (batch, seq). If the sequence is longer than the
    grid, a block continues with a stride of grid_dim.y positions.
    """
    comptime accum = accum_type[dtype]
    var B = Int(batch_size)
    var S = Int(seq_len)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x = TileTensor(input, row_major(B * S, H))
    var y = TileTensor(output, row_major(B * S, O))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))
    var W = TileTensor(linear_weight, row_major(O, H))
    var bias = TileTensor(linear_bias, row_major(O))

    for seq in range(block_idx.y, S, grid_dim.y):
        var row = block_idx.x * S + seq

        # Phase 1: the statistics of this row, saved for the backward pass.
        var statistics = row_statistics(input, row, H, eps)
        mean[unsafe_offset=row] = statistics.mean
        rstd[unsafe_offset=row] = statistics.rstd

        # Phase 2: normalise, scale, shift and multiply, element by element.
        # BLANK-START forward: this row of y, [O]: the LayerNorm output times W, and the bias; nothing in between is stored
        # FILL IN (about 9 lines)
        # BLANK-END forward


# ANCHOR_END: minimal_fused_forward_kernel


# ---- Unfused backward: one launch for each quantity ---------------------------------------------------------


def ln_backward_row_sums[
    dtype: DType
](
    row_sums: MutPtr[accum_type[dtype]],  # [rows, 2]: c1, c2
    dln: ImmPtr[dtype],  # [rows, H], the gradient of the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    rows: Int32,
    hidden_dim: Int32,
):
    """Compute the two means per row that dx needs: c1, the component of g along x_hat, and c2, that along ones.

    One block of ROW_THREADS threads owns one row.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var c = TileTensor(row_sums, row_major(Int(rows), 2))

    # BLANK-START row_sums: c1 and c2 of this row, by the whole block; one thread writes them
    # FILL IN (about 13 lines)
    # BLANK-END row_sums


# ---- Fused backward: one launch for all five gradients ------------------------------------------------------


@always_inline
def dln_element[
    dtype: DType
](
    grad_output: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    row: Int,
    h: Int,
    hidden_dim: Int,
    output_dim: Int,
) -> Scalar[accum_type[dtype]]:
    """Return one element of the LayerNorm output's gradient: dln[row, h] = sum over o of dy[row, o] * W[o, h].
    """
    comptime accum = accum_type[dtype]
    var total = CompensatedSum[accum]()
    for o in range(output_dim):
        var dy = grad_output[unsafe_offset=row * output_dim + o].cast[accum]()
        total += dy * linear_weight[unsafe_offset=o * hidden_dim + h].cast[accum]()
    return total.total


# ANCHOR: minimal_fused_backward_kernel
def minimal_fused_backward_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_input: MutPtr[dtype],  # [B, S, H]
    grad_ln_weight: MutPtr[sum_dtype],  # [H], zero before the launch
    grad_ln_bias: MutPtr[sum_dtype],  # [H], zero before the launch
    grad_weight: MutPtr[sum_dtype],  # [O, H], zero before the launch
    grad_bias: MutPtr[sum_dtype],  # [O], zero before the launch
    grad_output: ImmPtr[dtype],  # [B, S, O], dy
    input: ImmPtr[dtype],  # [B, S, H]
    mean: ImmPtr[accum_type[dtype]],  # [B, S]
    rstd: ImmPtr[accum_type[dtype]],  # [B, S]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    batch_size: Int32,
    seq_len: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Compute all five gradients in one launch from nothing but the inputs and the statistics.

    One block of one thread owns one sequence position. Only this block writes that row of grad_input. All blocks
    add to the same sums of the parameter gradients, so these additions are atomic, and their order changes from run
    to run. A kernel launched before this one zeroes the sums, and one after it rounds them to the gradients' dtype.
    """
    comptime accum = accum_type[dtype]
    var B = Int(batch_size)
    var S = Int(seq_len)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x = TileTensor(input, row_major(B * S, H))
    var dy = TileTensor(grad_output, row_major(B * S, O))
    var dx = TileTensor(grad_input, row_major(B * S, H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))

    for seq in range(block_idx.y, S, grid_dim.y):
        # Phase 1: the statistics that the forward pass saved for this row.
        var row = block_idx.x * S + seq
        var row_mean = mean[unsafe_offset=row]
        var row_rstd = rstd[unsafe_offset=row]

        # Phase 2: the gradient of the linear bias.
        # BLANK-START db: add dy[row, o] to grad_bias[o], for every o
        # FILL IN (about 2 lines)
        # BLANK-END db

        # Phase 3: the gradient of the linear weight, from the LayerNorm output, which is recomputed here.
        # BLANK-START dW: add this row's share to grad_weight, [O, H]: what did Linear multiply W by?
        # FILL IN (about 5 lines)
        # BLANK-END dW

        # Phase 4: the gradients of the LayerNorm weight and bias.
        # BLANK-START dgamma: add this row's share to grad_ln_weight and grad_ln_bias, [H] each; see dln_element
        # FILL IN (about 5 lines)
        # BLANK-END dgamma

        # Phase 5: the gradient of the input. Every element affects its row's mean and variance, so c1 and c2,
        # two means over the whole row, are needed before any element can be finished.
        # BLANK-START dx: this row of dx, [H]: two means over the row first, then every element
        # FILL IN (about 15 lines)
        # BLANK-END dx


# ANCHOR_END: minimal_fused_backward_kernel


# ---- Transfer: RMSNorm + Linear, backward -------------------------------------------------------------------


# ANCHOR: rmsnorm_linear_backward_kernel
def rmsnorm_linear_backward_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_input: MutPtr[dtype],  # [B, S, H]
    grad_rms_weight: MutPtr[sum_dtype],  # [H], zero before the launch
    grad_weight: MutPtr[sum_dtype],  # [O, H], zero before the launch
    grad_output: ImmPtr[dtype],  # [B, S, O], dy
    input: ImmPtr[dtype],  # [B, S, H]
    rms_weight: ImmPtr[dtype],  # [H], gamma
    linear_weight: ImmPtr[dtype],  # [O, H]
    batch_size: Int32,
    seq_len: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute all three gradients of RMSNorm + Linear: output = (x_hat * gamma) @ linear_weight^T, x_hat = input * rstd.

    Many language models use this pair in place of LayerNorm + Linear: it has no mean and no biases. The geometry is the
    same as above: one block of one thread owns one sequence position, and all blocks add to the same sums.
    """
    comptime accum = accum_type[dtype]
    var B = Int(batch_size)
    var S = Int(seq_len)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x = TileTensor(input, row_major(B * S, H))
    var dy = TileTensor(grad_output, row_major(B * S, O))
    var dx = TileTensor(grad_input, row_major(B * S, H))
    var gamma = TileTensor(rms_weight, row_major(H))

    for seq in range(block_idx.y, S, grid_dim.y):
        var row = block_idx.x * S + seq
        var row_rstd = rms_rstd(input, row, H, eps)

        # BLANK-START transfer: add this row's part to grad_weight and grad_rms_weight, and write its row of dx
        # FILL IN (about 15 lines)
        # BLANK-END transfer


# ANCHOR_END: rmsnorm_linear_backward_kernel


# ---- Public ops for MAX and PyTorch -------------------------------------------------------------------


# ANCHOR: layernorm_linear_custom_op
@extensibility.register("layernorm_linear")
struct LayerNormLinear:
    """The public forward op: eps is EPS; the sizes are parameters and are checked against the tensors."""

    @staticmethod
    def execute[
        target: StaticString,
        algorithm: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
        dtype: DType,
    ](
        output: OutputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        linear_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, batch_size, seq_len, output_dim)
        expect_shape("input", input, batch_size, seq_len, hidden_dim)
        expect_shape("ln_weight", ln_weight, hidden_dim)
        expect_shape("ln_bias", ln_bias, hidden_dim)
        expect_shape("linear_weight", linear_weight, output_dim, hidden_dim)
        expect_shape("linear_bias", linear_bias, output_dim)
        var sizes = validate_sizes(batch_size, seq_len, hidden_dim, output_dim)
        var launcher = DeviceLauncher(ctx)
        # Only a backward pass needs the statistics, so this op discards them.
        comptime accum = accum_type[dtype]
        var tensors = ForwardTensors[dtype](
            output=output.unsafe_ptr(),
            mean=launcher.workspace[accum]("mean", Int(sizes.rows())),
            rstd=launcher.workspace[accum]("rstd", Int(sizes.rows())),
            input=input.unsafe_ptr().as_imm(),
            ln_weight=ln_weight.unsafe_ptr().as_imm(),
            ln_bias=ln_bias.unsafe_ptr().as_imm(),
            linear_weight=linear_weight.unsafe_ptr().as_imm(),
            linear_bias=linear_bias.unsafe_ptr().as_imm(),
            sizes=sizes^,
            eps=Scalar[accum](EPS),
        )
        run_forward[target, algorithm](tensors, launcher)


# ANCHOR_END: layernorm_linear_custom_op


# ANCHOR: layernorm_linear_backward_custom_op
@extensibility.register("layernorm_linear_backward")
struct LayerNormLinearBackward:
    """The public backward op: all five gradients, from recomputed statistics."""

    @staticmethod
    def execute[
        target: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
        dtype: DType,
        algorithm: StaticString = "fused",
    ](
        grad_input: OutputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        grad_ln_weight: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_ln_bias: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_weight: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        grad_bias: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, batch_size, seq_len, hidden_dim)
        expect_shape("grad_ln_weight", grad_ln_weight, hidden_dim)
        expect_shape("grad_ln_bias", grad_ln_bias, hidden_dim)
        expect_shape("grad_weight", grad_weight, output_dim, hidden_dim)
        expect_shape("grad_bias", grad_bias, output_dim)
        expect_shape("grad_output", grad_output, batch_size, seq_len, output_dim)
        expect_shape("input", input, batch_size, seq_len, hidden_dim)
        expect_shape("ln_weight", ln_weight, hidden_dim)
        expect_shape("ln_bias", ln_bias, hidden_dim)
        expect_shape("linear_weight", linear_weight, output_dim, hidden_dim)
        var sizes = validate_sizes(batch_size, seq_len, hidden_dim, output_dim)
        var launcher = DeviceLauncher(ctx)
        comptime accum = accum_type[dtype]
        var mean = launcher.workspace[accum]("mean", Int(sizes.rows()))
        var rstd = launcher.workspace[accum]("rstd", Int(sizes.rows()))
        run_row_statistics[dtype, target](mean, rstd, input.unsafe_ptr().as_imm(), sizes, EPS, launcher)
        var tensors = BackwardTensors[dtype](
            grad_input=grad_input.unsafe_ptr(),
            grad_ln_weight=grad_ln_weight.unsafe_ptr(),
            grad_ln_bias=grad_ln_bias.unsafe_ptr(),
            grad_weight=grad_weight.unsafe_ptr(),
            grad_bias=grad_bias.unsafe_ptr(),
            grad_output=grad_output.unsafe_ptr().as_imm(),
            input=input.unsafe_ptr().as_imm(),
            mean=mean.as_imm(),
            rstd=rstd.as_imm(),
            ln_weight=ln_weight.unsafe_ptr().as_imm(),
            ln_bias=ln_bias.unsafe_ptr().as_imm(),
            linear_weight=linear_weight.unsafe_ptr().as_imm(),
            sizes=sizes^,
        )
        run_backward[target, algorithm](tensors, launcher)


# ANCHOR_END: layernorm_linear_backward_custom_op
